// The masked interpolant for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/interpolant_rows.h"

namespace geoflow {

const InterpolantKernels& interpolant_kernels() { return fastest(kInterpolantKernels, interpolant_kernels_avx2()); }

template <>
std::int64_t masked_interpolant(const InterpolantParams<float>& params) {
    return interpolant_kernels().single_precision(params);
}

template <>
std::int64_t masked_interpolant(const InterpolantParams<double>& params) {
    return interpolant_kernels().double_precision(params);
}

}  // namespace geoflow
