// Centred scores of all pairs on tensor cores: S_ij = sum over two factors of weight * asin<x_i, y_j> (arc lengths) or
// of weight * 2 <x_i, y_j> (squared chords). See sinkhorn.h for the costs and the centring.
//
// One block of 256 threads makes a 128 x 128 tile. Both factors are one sequence of 32-wide steps through a ring of
// three stages in shared memory, filled by 16-byte cp.async; at the end of a factor its dot products leave the
// accumulators through the arc sine and join the running score in registers, so that S is written once and never read.
//
// A stage holds, per operand, two groups of 16 coordinates as [group][128 rows][16]: a warp's 128-bit fragment loads
// then cover 512 consecutive bytes (no bank conflict, no padding). A thread's four consecutive coordinates serve two
// mma steps of 8: the sum over coordinates does not mind the order as long as both operands use the same one.
//
// kPasses = 1: inputs rounded to TF32, error of a dot product of unit rows about 1e-5 at d = 1024. kPasses = 3: each
// input split into two TF32 parts, three products, float32 accuracy. One pass is enough for the coupling of unrelated
// points (of 2048 rows at d = 1024 the argmax of none moves at eps = 0.05, of one at 0.005); nearly equal points need
// three: an angle of 0 comes out as 0.005 with one.
//
// Work at 8192 x 8192, d = 1024 + 1024: 275 GFLOP per pass; 8.6 GB of tiles from L2 (268 MB of S written, about 0.6 GB
// from memory thanks to the grouping of tiles by eight rows). At 60 % of the TF32 peak of mma.sync (A100 156 TFLOP/s;
// H100 takes about 62 % of its 495 through mma.sync) and 4 / 5.5 TB/s of L2: one pass 2.9 ms on A100, 1.6 ms on H100;
// three passes 8.8 ms and 4.5 ms.
#pragma once

#include <cstdint>

#include "cuda/device.cuh"

namespace geoflow::cuda {

constexpr int kScoreTile = 128;  // rows and columns of a block's tile
constexpr int kScoreDepth = 32;  // coordinates per stage
constexpr int kScoreStages = 3;
constexpr int kScoreThreads = 256;  // eight warps as 2 x 4, each 64 x 32 of the tile
constexpr int kScoreGroup = 8;      // tile rows that share the columns they read while these are in L2
constexpr int kOperandFloats = kScoreTile * kScoreDepth;
constexpr int kScoreSharedBytes = kScoreStages * 2 * kOperandFloats * static_cast<int>(sizeof(float));

struct ScoreFactor {
    const float* x;  // [rows, dim], 16-byte aligned
    const float* y;  // [cols, dim], 16-byte aligned
    int dim;         // a multiple of 4
    float weight;
};

struct ScoreProblem {
    ScoreFactor factor[2];
    float* score;  // [rows, stride], stride a multiple of 4, 16-byte aligned; the padding is written too
    int rows;
    int cols;
    std::int64_t stride;
    bool arc;  // else chord
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

// Starts the copy of coordinates [start, start + 32) of rows [first, first + 128) of `points` into one operand of a
// stage: four threads a row, each four coordinates of either group. Nothing is read outside the cloud, where zeros take
// its place.
__device__ __forceinline__ void fetch_operand(float* stage, const float* points, int first, int count, int dim,
                                              int start) {
    const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 4;
    const float* source = points + static_cast<std::int64_t>(first + row) * dim + start + column;
#pragma unroll
    for (int skip = 0; skip < kScoreTile; skip += kScoreThreads / 4) {
#pragma unroll
        for (int group = 0; group < kScoreDepth / 16; ++group) {
            const bool inside = first + row + skip < count && start + column + 16 * group < dim;
            copy_async(stage + (group * kScoreTile + row + skip) * 16 + column, source + skip * dim + 16 * group,
                       inside ? 16 : 0);
        }
    }
}

constexpr std::uint32_t kTf32Bits = 0xffffe000u;  // sign, exponent and the 10 bits of fraction that TF32 keeps

// The two TF32 parts of a float32: what the first cuts off is the second, but for two more bits.
__device__ __forceinline__ void split_tf32(float x, std::uint32_t& high, std::uint32_t& low) {
    high = __float_as_uint(x) & kTf32Bits;
    low = __float_as_uint(x - __uint_as_float(high)) & kTf32Bits;
}

__device__ __forceinline__ std::uint32_t round_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & kTf32Bits; }

// sum += x y over 8 coordinates, to TF32 or to float32 accuracy.
template <int kPasses>
__device__ __forceinline__ void multiply(float (&sum)[4], const float (&x)[4], const float (&y)[2]) {
    std::uint32_t x_high[4], y_high[2];
    if constexpr (kPasses == 1) {
        for (int k = 0; k < 4; ++k) x_high[k] = round_tf32(x[k]);
        for (int k = 0; k < 2; ++k) y_high[k] = round_tf32(y[k]);
    } else {
        std::uint32_t x_low[4], y_low[2];
        for (int k = 0; k < 4; ++k) split_tf32(x[k], x_high[k], x_low[k]);
        for (int k = 0; k < 2; ++k) split_tf32(y[k], y_high[k], y_low[k]);
        mma_tf32(sum, x_low, y_high);
        mma_tf32(sum, x_high, y_low);
    }
    mma_tf32(sum, x_high, y_high);
}

// Adds one stage to the warp's 64 x 32 dot products.
template <int kPasses>
__device__ __forceinline__ void multiply_stage(float (&dot)[4][4][4], const float* x_stage, const float* y_stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int x_row = warp / 4 * 64 + lane / 4, y_row = warp % 4 * 32 + lane / 4;
#pragma unroll
    for (int group = 0; group < kScoreDepth / 16; ++group) {
        const float4* x = reinterpret_cast<const float4*>(x_stage + group * 16 * kScoreTile) + lane % 4;
        const float4* y = reinterpret_cast<const float4*>(y_stage + group * 16 * kScoreTile) + lane % 4;
        float4 columns[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) columns[n] = y[(y_row + 8 * n) * 4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float4 upper = x[(x_row + 16 * m) * 4], lower = x[(x_row + 16 * m + 8) * 4];
            const float first[4] = {upper.x, lower.x, upper.y, lower.y},
                        second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                multiply<kPasses>(dot[m][n], first, {columns[n].x, columns[n].y});
                multiply<kPasses>(dot[m][n], second, {columns[n].z, columns[n].w});
            }
        }
    }
}

template <int kPasses>
__global__ void __launch_bounds__(kScoreThreads, 1) score_kernel(ScoreProblem p) {
    GEOFLOW_DYNAMIC_SHARED(float, ring);  // [stage][x, y][kOperandFloats]
    int tile_row, tile_col;
    tile_of_block(blockIdx.x, (p.rows + kScoreTile - 1) / kScoreTile, (p.cols + kScoreTile - 1) / kScoreTile, tile_row,
                  tile_col);
    const int first_row = tile_row * kScoreTile, first_col = tile_col * kScoreTile;
    const int steps0 = (p.factor[0].dim + kScoreDepth - 1) / kScoreDepth;
    const int steps = steps0 + (p.factor[1].dim + kScoreDepth - 1) / kScoreDepth;

    const auto fetch = [&](int step) {
        if (step < steps) {
            const ScoreFactor factor = step < steps0 ? p.factor[0] : p.factor[1];
            const int start = (step >= steps0 ? step - steps0 : step) * kScoreDepth;
            float* stage = ring + step % kScoreStages * 2 * kOperandFloats;
            fetch_operand(stage, factor.x, first_row, p.rows, factor.dim, start);
            fetch_operand(stage + kOperandFloats, factor.y, first_col, p.cols, factor.dim, start);
        }
        copy_commit();  // an empty group keeps the count right at the end
    };

    float dot[4][4][4] = {}, score[4][4][4] = {};
    for (int step = 0; step < kScoreStages - 1; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        copy_wait<kScoreStages - 2>();
        __syncthreads();  // this stage has arrived for all, and all are done with the one fetched next
        fetch(step + kScoreStages - 1);
        const float* stage = ring + step % kScoreStages * 2 * kOperandFloats;
        multiply_stage<kPasses>(dot, stage, stage + kOperandFloats);
        if (step + 1 == steps0 || step + 1 == steps) {
            const float weight = step < steps0 ? p.factor[0].weight : p.factor[1].weight;
#pragma unroll
            for (int k = 0; k < 64; ++k) {
                float& value = dot[k / 16][k / 4 % 4][k % 4];
                score[k / 16][k / 4 % 4][k % 4] += weight * (p.arc ? arc_sine(value) : 2.0f * value);
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
            float* target = p.score + row * p.stride + col;
            if (row < p.rows) *reinterpret_cast<float2*>(target) = {score[m][n][0], score[m][n][1]};
            if (row + 8 < p.rows) *reinterpret_cast<float2*>(target + 8 * p.stride) = {score[m][n][2], score[m][n][3]};
        }
    }
}

}  // namespace geoflow::cuda
