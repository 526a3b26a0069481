// Centred scores of all pairs on tensor cores: S_ij = sum over two factors of asin<x_i, y_j>. See sinkhorn.h for
// the costs and the centring.
//
// One block makes a 128 x 128 tile. Both factors are one sequence of steps of 128 bytes a row through a
// ring of three stages in shared memory, filled by 16-byte cp.async; at the end of a factor its dot products leave the
// accumulators through the arc sine. The first factor's scores wait in registers for the second's, so
// that S is written once and never read.
//
// A stage holds, per operand, two groups of 64 bytes as [group][128 rows][64]: a warp's 128-bit fragment loads then
// cover 512 consecutive bytes (no bank conflict, no padding). A thread's 16 bytes serve two mma steps: the sum over
// coordinates does not mind the order as long as both operands use the same one.
//
// Points are in float16. The error of a dot product of unrelated unit rows is about 1e-5 at d = 1024, which the coupling
// does not feel: of 2048 rows the argmax of none moves at eps = 0.05, of one at 0.005.
//
// Work at 8192 x 8192, d = 1024 + 1024: 275 GFLOP; 4.3 GB of tiles from L2 (268 or 134 MB of S written, about 0.6 GB from
// memory thanks to the grouping of tiles by eight rows). At 60 % of the peak of mma.sync (A100 312 TFLOP/s; H100 takes about
// 62 % of its 989 through mma.sync) and 4 / 5.5 TB/s of L2: 1.5 ms on A100, 0.8 ms on H100.
#pragma once

#include <cstdint>

#include "cuda/device.cuh"

namespace geoflow::cuda {

constexpr int kScoreTile = 128;       // rows and columns of a block's tile
constexpr int kScoreGroupBytes = 64;  // of a row in one group of a stage, which has two
constexpr int kScoreStages = 3;
constexpr int kScoreThreads = 256;    // eight warps as 2 x 4, each 64 x 32 of the tile
constexpr int kScoreGroup = 8;        // tile rows that share the columns they read while these are in L2
constexpr int kOperandBytes = kScoreTile * 2 * kScoreGroupBytes;
constexpr int kScoreSharedBytes = kScoreStages * 2 * kOperandBytes;
constexpr int kScoreDepth = 2 * kScoreGroupBytes / 2;  // coordinates per stage

struct ScoreFactor {
    const void* x;  // [rows, dim], 16-byte aligned
    const void* y;  // [cols, dim], 16-byte aligned
    int dim;        // rows are multiples of 16 bytes
};

struct ScoreProblem {
    ScoreFactor factor[2];
    void* score;  // [rows, stride], stride a multiple of 4, 16-byte aligned; the padding is written too
    int rows;
    int cols;
    std::int64_t stride;
};

// asin on [-1, 1] within 2e-7; values outside by rounding are clamped.
__device__ __forceinline__ float arc_sine(float x) {
    const float size = fminf(fabsf(x), 1.0f);
    const bool steep = size > 0.5f;  // asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2))
    const float square = steep ? 0.5f - 0.5f * size : size * size;
    const float root = steep ? square * rsqrtf(fmaxf(square, 1e-30f)) : size;
    float series = 0.042690229f;
    series = fmaf(series, square, 0.023823984f);
    series = fmaf(series, square, 0.045557681f);
    series = fmaf(series, square, 0.074943677f);
    series = fmaf(series, square, 0.166667923f);
    const float angle = fmaf(series * square, root, root);
    return copysignf(steep ? fmaf(-2.0f, angle, 1.57079633f) : angle, x);
}

// Where block `index` works: tiles go down kScoreGroup rows before the next column, group after group.
__device__ __forceinline__ void tile_of_block(int index, int tile_rows, int tile_cols, int& tile_row, int& tile_col) {
    const int group_size = kScoreGroup * tile_cols;
    const int first = index / group_size * kScoreGroup;
    const int height = min(kScoreGroup, tile_rows - first);
    const int inside = index % group_size;
    tile_row = first + inside % height;
    tile_col = inside / height;
}

// Starts the copy of coordinates [start, start + kScoreDepth) of rows [first, first + 128) of `points` into one operand
// of a stage: four threads a row, each 16 bytes of either group. Nothing is read outside the cloud, where zeros take its
// place.
__device__ __forceinline__ void fetch_operand(char* stage, const void* points, int first, int count, int dim,
                                              int start) {
    constexpr int kSixteen = 8, kGroup = 4 * kSixteen;  // coordinates
    const int row = threadIdx.x / 4, part = threadIdx.x % 4;
    const Half* source =
        static_cast<const Half*>(points) + static_cast<std::int64_t>(first + row) * dim + start + part * kSixteen;
#pragma unroll
    for (int skip = 0; skip < kScoreTile; skip += kScoreThreads / 4) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const bool inside = first + row + skip < count && start + part * kSixteen + kGroup * group < dim;
            copy_async<16>(stage + (group * kScoreTile + row + skip) * kScoreGroupBytes + 16 * part,
                           source + skip * dim + kGroup * group, inside ? 16 : 0);
        }
    }
}

// A thread's 16 bytes of a row: four pairs of float16.
struct alignas(16) Words {
    std::uint32_t at[4];
};

// Adds one stage to the warp's dot products.
__device__ __forceinline__ void multiply_stage(float (&dot)[4][4][4], const char* x_stage, const char* y_stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int x_row = warp / 4 * 64 + lane / 4, y_row = warp % 4 * 32 + lane / 4;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
        const int skip = group * kScoreTile * kScoreGroupBytes;
        const Words* x = reinterpret_cast<const Words*>(x_stage + skip) + lane % 4;
        const Words* y = reinterpret_cast<const Words*>(y_stage + skip) + lane % 4;
        Words columns[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) columns[n] = y[(y_row + 8 * n) * 4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const Words upper = x[(x_row + 16 * m) * 4], lower = x[(x_row + 16 * m + 8) * 4];
            const std::uint32_t first[4] = {upper.at[0], lower.at[0], upper.at[1], lower.at[1]},
                                second[4] = {upper.at[2], lower.at[2], upper.at[3], lower.at[3]};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                mma_half(dot[m][n], first, {columns[n].at[0], columns[n].at[1]});
                mma_half(dot[m][n], second, {columns[n].at[2], columns[n].at[3]});
            }
        }
    }
}

__device__ __forceinline__ void store_two(float* target, const float* total) {
    *reinterpret_cast<float2*>(target) = {total[0], total[1]};
}

__device__ __forceinline__ void store_two(Half* target, const float* total) {
    const std::uint32_t low = to_half(total[0]).bits, high = to_half(total[1]).bits;
    *reinterpret_cast<std::uint32_t*>(target) = low | high << 16;
}

// Entry: how S is stored.
template <typename Entry>
__global__ void __launch_bounds__(kScoreThreads, 1) score_kernel(ScoreProblem p) {
    GEOFLOW_DYNAMIC_SHARED(char, ring);  // [stage][x, y][kOperandBytes]
    constexpr int kDepth = kScoreDepth;
    int tile_row, tile_col;
    tile_of_block(blockIdx.x, (p.rows + kScoreTile - 1) / kScoreTile, (p.cols + kScoreTile - 1) / kScoreTile, tile_row,
                  tile_col);
    const int first_row = tile_row * kScoreTile, first_col = tile_col * kScoreTile;
    const int steps0 = (p.factor[0].dim + kDepth - 1) / kDepth;
    const int steps = steps0 + (p.factor[1].dim + kDepth - 1) / kDepth;

    const auto fetch = [&](int step) {
        if (step < steps) {
            const ScoreFactor factor = step < steps0 ? p.factor[0] : p.factor[1];
            const int start = (step >= steps0 ? step - steps0 : step) * kDepth;
            char* stage = ring + step % kScoreStages * 2 * kOperandBytes;
            fetch_operand(stage, factor.x, first_row, p.rows, factor.dim, start);
            fetch_operand(stage + kOperandBytes, factor.y, first_col, p.cols, factor.dim, start);
        }
        copy_commit();  // an empty group keeps the count right at the end
    };

    float dot[4][4][4] = {}, score[4][4][4] = {};
    for (int step = 0; step < kScoreStages - 1; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        copy_wait<kScoreStages - 2>();
        __syncthreads();  // this stage has arrived for all, and all are done with the one fetched next
        fetch(step + kScoreStages - 1);
        const char* stage = ring + step % kScoreStages * 2 * kOperandBytes;
        multiply_stage(dot, stage, stage + kOperandBytes);
        if (step + 1 == steps0) {
#pragma unroll
            for (int k = 0; k < 64; ++k) {
                float& value = dot[k / 16][k / 4 % 4][k % 4];
                score[k / 16][k / 4 % 4][k % 4] = arc_sine(value);
                value = 0.0f;
            }
        }
    }

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int row = first_row + warp / 4 * 64 + 16 * m + lane / 4;
            const int col = first_col + warp % 4 * 32 + 8 * n + lane % 4 * 2;
            if (col >= p.stride) continue;
            Entry* target = static_cast<Entry*>(p.score) + row * p.stride + col;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* total = score[m][n] + 2 * half;
                if (row + 8 * half >= p.rows) continue;
                for (int k = 0; k < 2; ++k) total[k] += arc_sine(dot[m][n][2 * half + k]);
                store_two(target + 8 * half * p.stride, total);
            }
        }
    }
}

}  // namespace geoflow::cuda
