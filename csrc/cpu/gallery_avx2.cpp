// The gallery posterior for processors with AVX2, FMA and F16C.
#include "cpu/gallery_tiles.h"

namespace {

const geoflow::GalleryKernels kGalleryKernels = {stream_posterior<SingleProducts>, store_scores};

}  // namespace

namespace geoflow {

const GalleryKernels& gallery_kernels_avx2() { return kGalleryKernels; }

}  // namespace geoflow
