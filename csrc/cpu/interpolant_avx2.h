// Only to be called where has_avx2_fma() is true.
#pragma once
#include "interpolant.h"

namespace geoflow {

std::int64_t masked_interpolant_avx2(const InterpolantParams<float>& params);
std::int64_t masked_interpolant_avx2(const InterpolantParams<double>& params);

}  // namespace geoflow
