// Eight floats at a time, from one source for every processor: GCC and Clang vector extensions, which become AVX2 instructions in
// the files compiled for AVX2 and pairs of 128-bit instructions elsewhere.
//
// Everything has internal linkage: an AVX2 copy of an inline function must never be the one a baseline file links to.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define GEOFLOW_INLINE inline __attribute__((always_inline))

namespace {

typedef float float8 __attribute__((vector_size(32)));
typedef std::int32_t int8x __attribute__((vector_size(32)));  // eight 32-bit integers
typedef std::uint32_t uint8x __attribute__((vector_size(32)));
typedef std::uint16_t ushort8 __attribute__((vector_size(16)));

constexpr std::int64_t kLanes = 8;

GEOFLOW_INLINE float8 broadcast(float x) { return float8{x, x, x, x, x, x, x, x}; }

GEOFLOW_INLINE float8 load(const float* from) {
    float8 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

GEOFLOW_INLINE void store(float* to, float8 x) { std::memcpy(to, &x, sizeof x); }

// Past the cache where the processor can: `to` must be 32-byte aligned.
GEOFLOW_INLINE void store_streaming(float* to, float8 x) {
#if defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)x);
#else
    store(to, x);
#endif
}

GEOFLOW_INLINE float8 select(int8x mask, float8 yes, float8 no) {
#if defined(__AVX2__)
    return (float8)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (float8)(((int8x)yes & mask) | ((int8x)no & ~mask));
#endif
}

GEOFLOW_INLINE float8 max(float8 a, float8 b) {
#if defined(__AVX2__)
    return (float8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

GEOFLOW_INLINE float8 min(float8 a, float8 b) {
#if defined(__AVX2__)
    return (float8)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select(a < b, a, b);
#endif
}

GEOFLOW_INLINE float8 square_root(float8 x) {
#if defined(__AVX2__)
    return (float8)_mm256_sqrt_ps((__m256)x);
#else
    float8 r;
    for (int lane = 0; lane < kLanes; ++lane) r[lane] = __builtin_sqrtf(x[lane]);
    return r;
#endif
}

// Sums and extremes over the lanes, always in the same order.
GEOFLOW_INLINE float sum(float8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

GEOFLOW_INLINE float largest(float8 x) {
    float best = x[0];
    for (int lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
    return best;
}

GEOFLOW_INLINE float smallest(float8 x) { return -largest(-x); }

// exp for |x| <= 87, relative error below 2e-7; beyond, the value at the nearer end: never infinite, never zero.
GEOFLOW_INLINE float8 exponential(float8 x) {
    x = min(max(x, broadcast(-87.0f)), broadcast(87.0f));
    const float8 rounding = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const float8 shifted = x * 1.44269504088896341f + rounding;
    const float8 whole = shifted - rounding;
    float8 r = x - whole * 0.693145751953125f;  // log 2 in two parts: the product with the first is exact
    r = r - whole * 1.42860682030941723e-6f;
    // exp(r) on |r| <= log(2)/2: 1 + r + r^2 q(r), q a minimax fit
    float8 q = broadcast(1.381461309e-3f);
    q = q * r + 8.368709832e-3f;
    q = q * r + 4.166838736e-2f;
    q = q * r + 1.666652069e-1f;
    q = q * r + 4.999999345e-1f;
    const float8 y = q * (r * r) + r + 1.0f;
    const int8x exponent = ((int8x)shifted - (int8x)rounding) << 23;
    return (float8)((int8x)y + exponent);
}

// log of positive normal numbers, absolute error below 1e-7 plus a rounding of the result.
GEOFLOW_INLINE float8 logarithm(float8 x) {
    // x = 2^e m with m in [sqrt(1/2), sqrt(2))
    const int8x bits = (int8x)x - 0x3f3504f3;
    const int8x e = bits >> 23;
    const float8 m = (float8)((bits & 0x007fffff) + 0x3f3504f3);
    const float8 t = m - 1.0f;
    // log(1 + t) = t - t^2/2 + t^3 q(t), q a minimax fit
    float8 q = broadcast(-7.634496539e-2f);
    q = q * t + 1.276157705e-1f;
    q = q * t - 1.316018239e-1f;
    q = q * t + 1.420175800e-1f;
    q = q * t - 1.662335734e-1f;
    q = q * t + 2.000122688e-1f;
    q = q * t - 2.500082103e-1f;
    q = q * t + 3.333333171e-1f;
    const float8 scale = __builtin_convertvector(e, float8);
    const float8 square = t * t;
    return (q * t * square - 0.5f * square + scale * 1.42860682030941723e-6f) + t + scale * 0.693145751953125f;
}

// asin for |x| clamped to 1, error below 3e-7 relative to the result near zero. acos(x) = pi/2 - asin(x).
GEOFLOW_INLINE float8 arcsine(float8 x) {
    const int8x sign = (int8x)x & (std::int32_t)0x80000000;
    const float8 a = min((float8)((int8x)x & 0x7fffffff), broadcast(1.0f));
    const int8x far = a > 0.5f;
    // asin(a) = pi/2 - 2 asin(sqrt((1 - a) / 2)) brings the argument below 1/2
    const float8 z = select(far, 0.5f - 0.5f * a, a * a);
    const float8 w = select(far, square_root(z), a);
    float8 p = broadcast(4.216630783e-2f);
    p = p * z + 2.417951504e-2f;
    p = p * z + 4.547037589e-2f;
    p = p * z + 7.495297643e-2f;
    p = p * z + 1.666675248e-1f;
    const float8 near_value = w + w * z * p;
    const float8 value = select(far, 1.57079632679489662f - 2.0f * near_value, near_value);
    return (float8)((int8x)value | sign);
}

// IEEE half precision as raw bits; magnitudes above 65504 are clamped, so no infinity is ever stored.
GEOFLOW_INLINE float8 from_half(ushort8 h) {
#if defined(__F16C__)
    return (float8)_mm256_cvtph_ps((__m128i)h);
#else
    const uint8x wide = __builtin_convertvector(h, uint8x);
    const float8 magnitude = (float8)((wide & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112 moves the exponent's bias
    return (float8)((uint8x)magnitude | ((wide & 0x8000u) << 16));
#endif
}

GEOFLOW_INLINE ushort8 to_half(float8 x) {
    x = min(max(x, broadcast(-65504.0f)), broadcast(65504.0f));
#if defined(__F16C__)
    return (ushort8)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const uint8x sign = ((uint8x)x & 0x80000000u) >> 16;
    const uint8x bits = (uint8x)((float8)((uint8x)x & 0x7fffffffu) * 1.925929944387236e-34f);  // 2^-112
    const uint8x rounded = (bits + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    return __builtin_convertvector(rounded | sign, ushort8);
#endif
}

GEOFLOW_INLINE float8 load(const std::uint16_t* from) {
    ushort8 h;
    std::memcpy(&h, from, sizeof h);
    return from_half(h);
}

GEOFLOW_INLINE void store(std::uint16_t* to, float8 x) {
    const ushort8 h = to_half(x);
    std::memcpy(to, &h, sizeof h);
}

}  // namespace
