// The gallery posterior for processors with AVX2 and FMA.
#if defined(__AVX2__)
#include "cpu/gallery_tiles.h"

namespace geoflow {

bool gallery_posterior_avx2(const GalleryParams& params, const GalleryStatistics& result);
bool gallery_posterior_avx2(const GalleryParams& params, const GalleryStatistics& result) {
    return GallerySolver(params, result).run();
}

bool gallery_scores_avx2(const GalleryParams& params, float* scores);
bool gallery_scores_avx2(const GalleryParams& params, float* scores) { return store_scores(params, scores); }

}  // namespace geoflow
#endif
