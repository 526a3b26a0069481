// The gallery posterior, compiled once for every target.
#include "cpu/gallery_tiles.h"

namespace geoflow {

const GalleryKernels& GEOFLOW_KERNELS(gallery_kernels)() { return kGalleryKernels; }

}  // namespace geoflow
