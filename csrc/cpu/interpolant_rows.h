// The row loops of the masked interpolant, compiled once per instruction set.
//
// Per generated row: one pass over noise a and data b for four sums, a handful of scalar functions, and one pass (from
// L1) that writes x = alpha a + beta b and v = gamma a + delta b. Memory traffic is the inputs and outputs once each;
// outputs bypass the cache where the instruction set allows it, which saves reading them before they are overwritten.
//
// Everything has internal linkage: an AVX2 copy of an inline function must never be the one a baseline file links to.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/sinc.h"
#include "interpolant.h"

namespace {

using geoflow::InterpolantParams;
using geoflow::InterpolantStream;

struct RowSums {
    double aa, bb, difference, sum;  // |a|^2, |b|^2, |a-b|^2, |a+b|^2
};

struct Combination {
    double alpha, beta, gamma, delta;  // point = alpha a + beta b, velocity = gamma a + delta b
};

template <typename T>
RowSums row_sums(const T* __restrict a, const T* __restrict b, std::int64_t width) {
    // Sums over short stretches in T, across stretches in double: as accurate as pairwise summation.
    constexpr std::int64_t kStretch = 256;
    RowSums total{0, 0, 0, 0};
    for (std::int64_t begin = 0; begin < width; begin += kStretch) {
        const std::int64_t end = begin + kStretch < width ? begin + kStretch : width;
        T aa = 0, bb = 0, difference = 0, sum = 0;
#pragma omp simd reduction(+ : aa, bb, difference, sum)
        for (std::int64_t k = begin; k < end; ++k) {
            const T minus = a[k] - b[k], plus = a[k] + b[k];
            aa += a[k] * a[k];
            bb += b[k] * b[k];
            difference += minus * minus;
            sum += plus * plus;
        }
        total.aa += aa;
        total.bb += bb;
        total.difference += difference;
        total.sum += sum;
    }
    return total;
}

template <typename T>
double squared_norm(const T* __restrict a, std::int64_t width) {
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (std::int64_t k = 0; k < width; ++k) total += double(a[k]) * double(a[k]);
    return total;
}

bool on_sphere(double squared, double tolerance) {
    return squared >= (1 - tolerance) * (1 - tolerance) && squared <= (1 + tolerance) * (1 + tolerance);
}

// Coefficients for rows whose angle w is well below pi; p = b - (<a,b>/<a,a>) a is the tangent part of b.
Combination combination(const RowSums& sums, double w, double t) {
    const double ratio = (sums.sum - sums.difference) / 4 / sums.aa;
    const double departure = 1 / sinc(w);  // w u = departure * p
    const double cos_tw = std::cos(t * w), sinc_tw = sinc(t * w);
    const double beta = t * sinc_tw * departure, delta = cos_tw * departure;
    return {cos_tw - beta * ratio, beta, -t * w * w * sinc_tw - delta * ratio, delta};
}

#if defined(__AVX2__)
inline void store_past_cache(float* to, __m256 value) { _mm256_stream_ps(to, value); }
inline void store_past_cache(double* to, __m256d value) { _mm256_stream_pd(to, value); }
inline __m256 load(const float* from) { return _mm256_loadu_ps(from); }
inline __m256d load(const double* from) { return _mm256_loadu_pd(from); }
inline __m256 broadcast(float x) { return _mm256_set1_ps(x); }
inline __m256d broadcast(double x) { return _mm256_set1_pd(x); }
#endif

// out = p a + q b, past the cache where `out` is aligned for it.
template <typename T>
void write_combination(const T* __restrict a, const T* __restrict b, T p, T q, T* __restrict out, std::int64_t width) {
    std::int64_t k = 0;
#if defined(__AVX2__)
    constexpr std::int64_t kLanes = 32 / sizeof(T);
    if (reinterpret_cast<std::uintptr_t>(out) % 32 == 0) {
        const auto vp = broadcast(p), vq = broadcast(q);
        for (; k + kLanes <= width; k += kLanes) store_past_cache(out + k, vp * load(a + k) + vq * load(b + k));
    }
#endif
    for (; k < width; ++k) out[k] = p * a[k] + q * b[k];
}

template <typename T>
void write_copy(const T* __restrict from, T* __restrict out, std::int64_t width) {
    std::int64_t k = 0;
#if defined(__AVX2__)
    constexpr std::int64_t kLanes = 32 / sizeof(T);
    if (reinterpret_cast<std::uintptr_t>(out) % 32 == 0)
        for (; k + kLanes <= width; k += kLanes) store_past_cache(out + k, load(from + k));
#endif
    for (; k < width; ++k) out[k] = from[k];
}

template <typename T>
void write_zeros(T* out, std::int64_t width) {
    std::int64_t k = 0;
#if defined(__AVX2__)
    constexpr std::int64_t kLanes = 32 / sizeof(T);
    if (reinterpret_cast<std::uintptr_t>(out) % 32 == 0)
        for (; k + kLanes <= width; k += kLanes) store_past_cache(out + k, broadcast(T(0)));
#endif
    for (; k < width; ++k) out[k] = T(0);
}

// Rows close to antipodal, where alpha a + beta b would cancel: the tangent part of b is formed entry by entry in
// double and made orthogonal to a twice. At the antipode itself the path leaves along the axis a leans on least.
template <typename T>
void near_antipode_row(const T* a, const T* b, std::int64_t width, double w, double t, double lost_below, T* point,
                       T* velocity) {
    double aa = 0, ab = 0;
    std::int64_t axis = 0;
    for (std::int64_t k = 0; k < width; ++k) {
        aa += double(a[k]) * a[k];
        ab += double(a[k]) * b[k];
        if (std::fabs(double(a[k])) < std::fabs(double(a[axis]))) axis = k;
    }
    const double first = ab / aa;
    double left = 0;
    for (std::int64_t k = 0; k < width; ++k) left += (b[k] - first * a[k]) * a[k];
    const double second = left / aa;
    const auto tangent = [&](std::int64_t k) { return (b[k] - first * a[k]) - second * a[k]; };
    double pp = 0;
    for (std::int64_t k = 0; k < width; ++k) pp += tangent(k) * tangent(k);
    const bool lost = std::sqrt(pp) < lost_below;
    const double along = a[axis] / aa, length = lost ? std::sqrt(1 - a[axis] * along) : std::sqrt(pp);
    const double cos_tw = std::cos(t * w), sin_tw = std::sin(t * w);
    for (std::int64_t k = 0; k < width; ++k) {
        const double p = lost ? (k == axis ? 1.0 : 0.0) - along * a[k] : tangent(k);
        point[k] = T(cos_tw * a[k] + sin_tw / length * p);
        velocity[k] = T(w * (cos_tw / length * p - sin_tw * a[k]));
    }
}

template <typename T>
double lost_below();
template <>
double lost_below<float>() {
    return 16 * 1.1920929e-07;  // geometry.EPS
}
template <>
double lost_below<double>() {
    return 16 * 2.220446049250313e-16;
}

// One stream of one row; false when a point that is read is not on the sphere.
template <typename T>
bool interpolate_row(const InterpolantStream<T>& stream, std::int64_t row, double t, bool given, bool dropped,
                     double tolerance) {
    const std::int64_t width = stream.width, offset = row * width;
    const T *a = stream.noise + offset, *b = stream.data + offset;
    T *point = stream.point + offset, *velocity = stream.velocity + offset;
    if (given) {
        const T* shown = dropped ? a : b;
        if (!on_sphere(squared_norm(shown, width), tolerance)) return false;
        write_copy(shown, point, width);
        write_zeros(velocity, width);
        return true;
    }
    const RowSums sums = row_sums(a, b, width);
    if (!on_sphere(sums.aa, tolerance) || !on_sphere(sums.bb, tolerance)) return false;
    const double w = 2 * std::atan2(std::sqrt(sums.difference), std::sqrt(sums.sum));
    constexpr double kNearAntipode = 3.0;  // sin(w) < 0.15: seven times the rounding error of the fast path
    if (w > kNearAntipode) {
        near_antipode_row(a, b, width, w, t, lost_below<T>(), point, velocity);
        return true;
    }
    const Combination c = combination(sums, w, t);
    write_combination(a, b, T(c.alpha), T(c.beta), point, width);
    write_combination(a, b, T(c.gamma), T(c.delta), velocity, width);
    return true;
}

template <typename T>
std::int64_t interpolate_rows(const InterpolantParams<T>& params) {
    std::int64_t first_bad = params.rows;
#pragma omp parallel num_threads(params.threads) reduction(min : first_bad)
    {
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < params.rows; ++row) {
            const bool dropped = params.drop != nullptr && params.drop[row];
            for (const auto& stream : params.stream) {
                const bool given = params.direction[row] == stream.given_under;
                if (!interpolate_row(stream, row, double(params.t[row]), given, dropped, params.tolerance))
                    first_bad = row < first_bad ? row : first_bad;
            }
        }
#if defined(__AVX2__)
        _mm_sfence();  // each thread orders its own streaming stores before anybody reads them
#endif
    }
    return first_bad == params.rows ? -1 : first_bad;
}

const geoflow::InterpolantKernels kInterpolantKernels = {interpolate_rows<float>, interpolate_rows<double>};

}  // namespace
