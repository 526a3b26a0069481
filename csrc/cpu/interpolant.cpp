// The masked interpolant for any processor, and the choice of the variant.
#include "interpolant.h"

#include "cpu/cpu_features.h"
#include "cpu/interpolant_rows.h"
#if defined(__x86_64__)
#include "cpu/interpolant_avx2.h"
#endif

namespace geoflow {

template <typename T>
std::int64_t masked_interpolant(const InterpolantParams<T>& params) {
#if defined(__x86_64__)
    if (has_avx2_fma()) return masked_interpolant_avx2(params);
#endif
    return interpolate_rows(params);
}

template std::int64_t masked_interpolant(const InterpolantParams<float>&);
template std::int64_t masked_interpolant(const InterpolantParams<double>&);

}  // namespace geoflow
