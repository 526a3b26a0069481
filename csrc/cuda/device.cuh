// The GPU's own vocabulary, each word behind one small name, so that the kernels read alike under nvcc and under the
// CPU emulation of tests/gpu_emulated/cuda_emulation, which brings its own file of this name.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

// Static shared memory of a block, and the one dynamic array whose size the launch gives.
#define GEOFLOW_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define GEOFLOW_DYNAMIC_SHARED(type, name)                         \
    extern __shared__ __align__(16) unsigned char geoflow_arena[]; \
    type* const name = reinterpret_cast<type*>(geoflow_arena)

namespace geoflow::cuda {

// All blocks of a cooperative launch meet; what they wrote before is visible to all after.
__device__ __forceinline__ void grid_sync() { cooperative_groups::this_grid().sync(); }

// 2^x, log2 x and 1/x in one instruction each; results below 2^-126 are zero.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A float16 as its bits: memory holds it, arithmetic is in float32.
struct Half {
    std::uint16_t bits;
};

__device__ __forceinline__ float to_float(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ Half to_half(float x) {
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Starts copying 8 or 16 bytes from global to shared memory: the first `valid` from `source`, zeros after them.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* source, int valid) {
    const auto target = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid) : "memory");
    } else {
        static_assert(kBytes == 8);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(valid) : "memory");
    }
}

// Closes the calling thread's current group of copies.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of the calling thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One warp: sum (16 x 8) += a (16 x 16) b (16 x 8), float16 inputs in pairs of neighbours along the sum, float32 sums.
// With group = lane / 4 and member = lane % 4, and the pairs numbered from 0 to 7, a thread holds
//   of a: (group, member), (group + 8, member), (group, member + 4), (group + 8, member + 4);
//   of b: (member, group), (member + 4, group);
//   of sum: (group, 2 member), (group, 2 member + 1), (group + 8, 2 member), (group + 8, 2 member + 1).
__device__ __forceinline__ void mma_half(float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace geoflow::cuda
