// The gallery posterior for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/gallery_tiles.h"

namespace {

const geoflow::GalleryKernels kGalleryKernels = {stream_posterior<SingleProducts>, store_scores};

}  // namespace

namespace geoflow {

const GalleryKernels& gallery_kernels() { return fastest(kGalleryKernels, gallery_kernels_avx2()); }

bool gallery_posterior(const GalleryParams& params, const GalleryStatistics& result) {
    return (params.bfloat16 ? gallery_posterior_bfloat16 : gallery_kernels().posterior)(params, result);
}

bool gallery_scores(const GalleryParams& params, float* scores) { return gallery_kernels().scores(params, scores); }

}  // namespace geoflow
