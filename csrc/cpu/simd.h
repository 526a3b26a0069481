// Vectors of floats, from one source for every processor: GCC and Clang vector extensions. A vector has 16 lanes in the files compiled
// for AVX-512 and eight elsewhere, which are one AVX2 instruction, or two of 128 bits with SSE2 and NEON.
//
// Everything has internal linkage: a copy for one instruction set must never be the one that a file for another links to.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "rows.h"

#define GEOFLOW_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr std::int64_t kLanes = 16;
#else
constexpr std::int64_t kLanes = 8;
#endif

typedef float floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t ints __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t uints __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t halves __attribute__((vector_size(2 * kLanes)));

// Rows of galleries are stored as float, as IEEE half (std::uint16_t) or as bfloat16.
using Half = std::uint16_t;
struct BFloat16 {
    std::uint16_t bits;
};

GEOFLOW_INLINE floats broadcast(float x) { return x - floats{}; }  // not a sum: that would turn -0 into 0

GEOFLOW_INLINE ints lane_numbers() {
    ints number{};
    for (int lane = 0; lane < kLanes; ++lane) number[lane] = lane;
    return number;
}

GEOFLOW_INLINE floats load(const float* from) {
    floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

GEOFLOW_INLINE void store(float* to, floats x) { std::memcpy(to, &x, sizeof x); }

// The first `count` lanes, at most a vector: for rows whose width is not known to be a multiple of kLanes, so that what follows them
// stays as it is.
GEOFLOW_INLINE void store_first(float* to, floats x, std::int64_t count) {
    if (count >= kLanes) return store(to, x);
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)x);
#else
    std::memcpy(to, &x, static_cast<std::size_t>(count) * sizeof(float));
#endif
}

// Past the cache where the processor can: `to` must be aligned to a vector.
GEOFLOW_INLINE void store_streaming(float* to, floats x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)x);
#else
    store(to, x);
#endif
}

GEOFLOW_INLINE floats select(ints mask, floats yes, floats no) {
#if defined(__AVX512F__)
    return mask ? yes : no;
#elif defined(__AVX2__)
    return (floats)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
#endif
}

GEOFLOW_INLINE floats max(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

GEOFLOW_INLINE floats min(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select(a < b, a, b);
#endif
}

GEOFLOW_INLINE floats square_root(floats x) {
#if defined(__AVX512F__)
    return (floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (floats)_mm256_sqrt_ps((__m256)x);
#else
    floats r;
    for (int lane = 0; lane < kLanes; ++lane) r[lane] = __builtin_sqrtf(x[lane]);
    return r;
#endif
}

// Sums and extremes over the lanes, always in the same order.
GEOFLOW_INLINE float sum(floats x) {
    float part[8];
    for (int lane = 0; lane < 8; ++lane) part[lane] = kLanes == 8 ? x[lane] : x[lane] + x[(lane + 8) % kLanes];
    return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

GEOFLOW_INLINE float largest(floats x) {
    float best = x[0];
    for (int lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
    return best;
}

GEOFLOW_INLINE float smallest(floats x) { return -largest(-x); }

// exp for |x| <= 87, relative error below 2e-7; beyond, the value at the nearer end: never infinite, never zero.
GEOFLOW_INLINE floats exponential(floats x) {
    x = min(max(x, broadcast(-87.0f)), broadcast(87.0f));
    const floats rounding = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const floats shifted = x * 1.44269504088896341f + rounding;
    const floats whole = shifted - rounding;
    floats r = x - whole * 0.693145751953125f;  // log 2 in two parts: the product with the first is exact
    r = r - whole * 1.42860682030941723e-6f;
    // exp(r) on |r| <= log(2)/2: 1 + r + r^2 q(r), q a minimax fit
    floats q = broadcast(1.381461309e-3f);
    q = q * r + 8.368709832e-3f;
    q = q * r + 4.166838736e-2f;
    q = q * r + 1.666652069e-1f;
    q = q * r + 4.999999345e-1f;
    const floats y = q * (r * r) + r + 1.0f;
    const ints exponent = ((ints)shifted - (ints)rounding) << 23;
    return (floats)((ints)y + exponent);
}

// log of positive normal numbers, absolute error below 1e-7 plus a rounding of the result.
GEOFLOW_INLINE floats logarithm(floats x) {
    // x = 2^e m with m in [sqrt(1/2), sqrt(2))
    const ints bits = (ints)x - 0x3f3504f3;
    const ints e = bits >> 23;
    const floats m = (floats)((bits & 0x007fffff) + 0x3f3504f3);
    const floats t = m - 1.0f;
    // log(1 + t) = t - t^2/2 + t^3 q(t), q a minimax fit
    floats q = broadcast(-7.634496539e-2f);
    q = q * t + 1.276157705e-1f;
    q = q * t - 1.316018239e-1f;
    q = q * t + 1.420175800e-1f;
    q = q * t - 1.662335734e-1f;
    q = q * t + 2.000122688e-1f;
    q = q * t - 2.500082103e-1f;
    q = q * t + 3.333333171e-1f;
    const floats scale = __builtin_convertvector(e, floats);
    const floats square = t * t;
    return (q * t * square - 0.5f * square + scale * 1.42860682030941723e-6f) + t + scale * 0.693145751953125f;
}

// asin for |x| clamped to 1, error below 3e-7 relative to the result near zero. acos(x) = pi/2 - asin(x).
GEOFLOW_INLINE floats arcsine(floats x) {
    const ints sign = (ints)x & (std::int32_t)0x80000000;
    const floats a = min((floats)((ints)x & 0x7fffffff), broadcast(1.0f));
    const ints far = a > 0.5f;
    // asin(a) = pi/2 - 2 asin(sqrt((1 - a) / 2)) brings the argument below 1/2
    const floats z = select(far, 0.5f - 0.5f * a, a * a);
    const floats w = select(far, square_root(z), a);
    floats p = broadcast(4.216630783e-2f);
    p = p * z + 2.417951504e-2f;
    p = p * z + 4.547037589e-2f;
    p = p * z + 7.495297643e-2f;
    p = p * z + 1.666675248e-1f;
    const floats near_value = w + w * z * p;
    const floats value = select(far, 1.57079632679489662f - 2.0f * near_value, near_value);
    return (floats)((ints)value | sign);
}

// IEEE half precision as raw bits; magnitudes above 65504 are clamped, so no infinity is ever stored.
GEOFLOW_INLINE floats from_half(halves h) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps((__m128i)h);
#else
    const uints wide = __builtin_convertvector(h, uints);
    const floats magnitude = (floats)((wide & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112 moves the exponent's bias
    return (floats)((uints)magnitude | ((wide & 0x8000u) << 16));
#endif
}

GEOFLOW_INLINE halves to_half(floats x) {
    x = min(max(x, broadcast(-65504.0f)), broadcast(65504.0f));
#if defined(__AVX512F__)
    return (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const uints sign = ((uints)x & 0x80000000u) >> 16;
    const uints bits = (uints)((floats)((uints)x & 0x7fffffffu) * 1.925929944387236e-34f);  // 2^-112
    const uints rounded = (bits + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    return __builtin_convertvector(rounded | sign, halves);
#endif
}

GEOFLOW_INLINE floats load(const Half* from) {
    halves h;
    std::memcpy(&h, from, sizeof h);
    return from_half(h);
}

GEOFLOW_INLINE floats load(const BFloat16* from) {
    halves h;
    std::memcpy(&h, from, sizeof h);
    return (floats)(__builtin_convertvector(h, uints) << 16);
}

// One number, as a vector would have it.
GEOFLOW_INLINE float widen(float x) { return x; }
GEOFLOW_INLINE float widen(Half x) {
    halves h{};
    h[0] = x;
    return from_half(h)[0];
}
GEOFLOW_INLINE float widen(BFloat16 x) {
    const std::uint32_t bits = std::uint32_t{x.bits} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

GEOFLOW_INLINE void store(Half* to, floats x) {
    const halves h = to_half(x);
    std::memcpy(to, &h, sizeof h);
}

// Calls run(element) with an element of the type in which rows are stored.
template <class Run>
auto by_storage(geoflow::Storage storage, const Run& run) {
    switch (storage) {
        case geoflow::Storage::half: return run(Half{});
        case geoflow::Storage::bfloat16: return run(BFloat16{});
        default: return run(float{});
    }
}

}  // namespace
