// The masked interpolant for processors with AVX2, FMA and F16C.
#include "cpu/interpolant_rows.h"

namespace geoflow {

const InterpolantKernels& interpolant_kernels_avx2() { return kInterpolantKernels; }

}  // namespace geoflow
