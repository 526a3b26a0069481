// The gallery posterior for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/gallery_tiles.h"

namespace geoflow {

#if defined(__x86_64__)
bool gallery_posterior_avx2(const GalleryParams& params, const GalleryStatistics& result);
bool gallery_scores_avx2(const GalleryParams& params, float* scores);
#endif

bool gallery_posterior(const GalleryParams& params, const GalleryStatistics& result) {
#if defined(__x86_64__)
    if (has_avx2_fma()) return gallery_posterior_avx2(params, result);
#endif
    return GallerySolver(params, result).run();
}

bool gallery_scores(const GalleryParams& params, float* scores) {
#if defined(__x86_64__)
    if (has_avx2_fma()) return gallery_scores_avx2(params, scores);
#endif
    return store_scores(params, scores);
}

}  // namespace geoflow
