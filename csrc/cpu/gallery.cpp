// The gallery posterior for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/gallery_tiles.h"

namespace geoflow {

#if defined(__x86_64__)
bool gallery_posterior_avx2(const GalleryParams& params);
#endif

bool gallery_posterior(const GalleryParams& params) {
#if defined(__x86_64__)
    if (has_avx2_fma()) return gallery_posterior_avx2(params);
#endif
    return GallerySolver(params).run();
}

}  // namespace geoflow
