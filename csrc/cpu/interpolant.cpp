// The masked interpolant, compiled once for every target.
#include "cpu/interpolant_rows.h"

namespace geoflow {

const InterpolantKernels& GEOFLOW_KERNELS(interpolant_kernels)() { return kInterpolantKernels; }

}  // namespace geoflow
