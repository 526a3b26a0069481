// Stands in for csrc/cuda/device.cuh: the same names, served by the CPU emulation. See emulation.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation.h"

// A function of its own under its own name, so that the linker can put compiled PTX in its place (tests/gpu_emulated/ptx).
#define __global__ __attribute__((noipa))
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define GEOFLOW_SHARED(type, name, count) \
    static char name##_site;              \
    type* const name = static_cast<type*>(emulation::shared_array(&name##_site, sizeof(type) * (count)))
#define GEOFLOW_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(emulation::dynamic_shared())

using std::log2;
using std::max;
using std::min;

// Where the calling thread is; only the first dimension is in use.
template <unsigned emulation::Position::* kWhich>
struct EmulatedIndex {
    struct {
        operator unsigned() const { return emulation::here().*kWhich; }
    } x;
};
inline constexpr EmulatedIndex<&emulation::Position::thread> threadIdx{};
inline constexpr EmulatedIndex<&emulation::Position::block> blockIdx{};
inline constexpr EmulatedIndex<&emulation::Position::blocks> gridDim{};

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline void __syncthreads() { emulation::block_barrier(); }

inline int emulated_lane() { return static_cast<int>(threadIdx.x % 32); }

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
    return emulation::exchange(value, source);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulation::exchange(value, emulated_lane() ^ mask);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
    return emulation::exchange(value, emulated_lane() < step ? emulated_lane() : emulated_lane() - step);
}

inline unsigned __reduce_min_sync(unsigned lanes, unsigned value) {
    for (int mask = 16; mask > 0; mask /= 2) value = std::min(value, __shfl_xor_sync(lanes, value, mask));
    return value;
}

inline unsigned __reduce_max_sync(unsigned lanes, unsigned value) {
    for (int mask = 16; mask > 0; mask /= 2) value = std::max(value, __shfl_xor_sync(lanes, value, mask));
    return value;
}

template <typename T>
T __ldcg(const T* source) {
    return *source;
}

inline std::uint32_t __float_as_uint(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float __uint_as_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace geoflow::cuda {

inline void grid_sync() { emulation::grid_barrier(); }

// Like the hardware's: what would be denormal is zero.
inline float fast_exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }

struct Half {
    std::uint16_t bits;
};
inline float to_float(Half x) { return emulation::half_to_float(x.bits); }
inline Half to_half(float x) { return {emulation::float_to_half(x)}; }

template <int kBytes>
void copy_async(void* shared, const void* source, int valid) {
    static_assert(kBytes == 8 || kBytes == 16);
    emulation::require(reinterpret_cast<std::uintptr_t>(shared) % kBytes == 0,
                       "asynchronous copy to a misaligned address");
    emulation::require(valid == 0 || reinterpret_cast<std::uintptr_t>(source) % kBytes == 0,
                       "asynchronous copy from a misaligned address");
    emulation::require(valid >= 0 && valid <= kBytes, "asynchronous copy of too many bytes");
    emulation::copy_later({shared, source, kBytes, valid});
}

inline void copy_commit() { emulation::copy_commit(); }

template <int kPending>
void copy_wait() {
    emulation::copy_wait(kPending);
}

inline void mma_half(float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    emulation::warp_multiply({sum, a, b, emulation::Number::float16});
}

}  // namespace geoflow::cuda
