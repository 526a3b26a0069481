// The gallery posterior for processors with AVX2 and FMA.
#if defined(__AVX2__)
#include "cpu/gallery_tiles.h"

namespace geoflow {

bool gallery_posterior_avx2(const GalleryParams& params);
bool gallery_posterior_avx2(const GalleryParams& params) { return GallerySolver(params).run(); }

}  // namespace geoflow
#endif
