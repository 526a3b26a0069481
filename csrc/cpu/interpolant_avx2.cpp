// The masked interpolant for processors with AVX2 and FMA.
#if defined(__AVX2__)
#include "cpu/interpolant_avx2.h"
#include "cpu/interpolant_rows.h"

namespace geoflow {

std::int64_t masked_interpolant_avx2(const InterpolantParams<float>& params) { return interpolate_rows(params); }
std::int64_t masked_interpolant_avx2(const InterpolantParams<double>& params) { return interpolate_rows(params); }

}  // namespace geoflow
#endif
