// Sinkhorn in the log domain, one read of the matrix per iteration, all iterations in one launch. See sinkhorn.h for
// the iteration.
//
// sinkhorn_kernel (up to 8192 columns): a cooperative grid of one block of 512 threads per place on the GPU. A thread
// owns the same 4 kVectors columns throughout. Rows come through a ring of two in shared memory, each thread fetching
// just what it will read itself, so the ring needs no barrier; a place is filled again as soon as its row is in
// registers, and the fetching runs on across iterations. Of a row in registers, the block-wide maximum and sum give
// f_i, and the same exponentials, divided by the sum, join the thread's column sums. The blocks' column sums then meet
// in memory (grid barrier), are added in a fixed order, g is updated, and the L1 error decides on the device whether to
// go on (grid barrier). With 98 KB for 8192 columns it fits the 99 KB that a block may have on desktop GPUs.
//   Per iteration at B = 8192: 268 MB read, or 134 MB in float16, 0.7 GFLOP, 67 M exponentials (one per entry). At 85 %
//   of the bandwidth and about 6 us for two barriers and the column update: 0.21 ms on A100-40, 0.10 ms on H100; in
//   float16 half of that.
//
// sinkhorn_wide_kernel (more columns): a row no longer fits the registers of a block, so an iteration reads the matrix
// twice, once for the rows and once for the columns: at B = 16384, 2.1 GB: 1.6 ms on A100-40, 0.76 ms on H100. It also
// serves devices whose blocks may have less shared memory than the other needs.
//
// sinkhorn_result_kernel: argmax, both potentials and each row's mass in one more read: 0.20 and 0.09 ms.
//
// Numbers that stay finite. Exponents are base 2: x_ij = scale * S_ij + g_j, with g_j in units of eps
// ln 2. g_j is kept as reference + delta with |delta| <= 8: the reference changes only while g_j still moves far, so
// near convergence the first part rounds the same way in every iteration and the small updates land in delta, added
// after the row maximum is gone. So float32 converges even where |x| is 1e6. Where eps is far below the range of the
// costs, starting at a larger one (`halvings`) and carrying g along saves most of the iterations. A column whose sum
// underflows is lifted until its largest exponent meets that of its row.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device.cuh"
#include "sinkhorn.h"

namespace geoflow::cuda {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 2;
template <int kVectors, typename Entry>
constexpr int kSinkhornSharedBytes = kVectors * kThreads * 4 * (kStages * static_cast<int>(sizeof(Entry)) + 4);
constexpr int kSinkhornStaticBytes = (3 * kWarps + kThreads) * 4;  // what the solvers declare beside
constexpr float kRebase = 8.0f;       // |delta| beyond this moves into the reference
constexpr float kUnderflow = 1e-30f;  // column sums below may have lost terms that a float32 cannot hold
constexpr unsigned kAllLanes = 0xffffffffu;

// Kernels are templates over the matrix's Entry: float, or Half, which halves what an iteration reads.
struct SinkhornProblem {
    const void* matrix;   // [rows, stride], 16-byte aligned: scores S
    std::int64_t stride;  // a multiple of 4; what lies beyond cols may be anything
    int rows;
    int cols;
    float scale;      // log2(e) / eps
    float share;      // rows / cols: what the column sums of the row-normalised plan shall be
    float log_share;  // its log2
    float tol;
    int max_iter;
    int halvings;          // start at eps 2^halvings and halve it whenever the iteration has settled, or after ...
    int stage_iterations;  // ... so many iterations
};

struct SinkhornWorkspace {
    float* reference;    // [padded_cols] g in units of eps ln 2 is reference + delta; both zero at the start
    float* delta;        // [padded_cols]
    float* row_max;      // [rows] log2 of the row sum of 2^x is row_max + row_log
    float* row_log;      // [rows]
    float* partial_sum;  // [blocks, padded_cols] column sums of each block's rows
    float* partial_max;  // [blocks, padded_cols] the columns' largest exponents below those of the rows, before delta
    float* group_error;  // [ceil(cols / 32)] L1 error of 32 columns, times rows
    SinkhornStatus* status;
    std::int64_t padded_cols;  // cols rounded up to a multiple of 4
};

struct SinkhornResult {
    std::int64_t* index;  // [rows] argmax_j (g_j - C_ij), the first of equals
    double* f;            // [rows]
    double* g;            // [cols]
    float* row_mass;      // [rows] sum_j P_ij, times rows
    float eps;
    float offset;  // C = offset - S
};

// The kernels' view of a problem. Host code.
inline SinkhornProblem sinkhorn_problem(const SinkhornParams& params, const void* matrix, std::int64_t stride,
                                        int halvings = 0) {
    const float scale = 1.44269504f / params.eps;
    const double share = static_cast<double>(params.rows) / static_cast<double>(params.cols);
    SinkhornProblem p{};
    p.matrix = matrix;
    p.stride = stride;
    p.rows = static_cast<int>(params.rows);
    p.cols = static_cast<int>(params.cols);
    p.scale = scale;
    p.share = static_cast<float>(share);
    p.log_share = static_cast<float>(std::log2(share));
    p.tol = params.tol;
    p.max_iter = params.max_iter;
    p.stage_iterations = params.max_iter / 16;
    p.halvings = p.stage_iterations > 0 ? halvings : 0;
    return p;
}

// kVectors of the kernel for a number of columns; 0 for the wide kernel.
inline int sinkhorn_vectors(std::int64_t cols) {
    for (int vectors = 1; vectors <= 4; vectors *= 2) {
        if (cols <= 4 * kThreads * vectors) return vectors;
    }
    return 0;
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

template <int kLanes = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    return x;
}

template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

// Block-wide maximum and sum, the same bits in every thread. One barrier each: the caller must pass a barrier between
// two uses of the same `scratch` [kWarps].
__device__ __forceinline__ float block_max(float x, float* scratch) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max<kWarps>(scratch[threadIdx.x % kWarps]);
}

__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum<kWarps>(scratch[threadIdx.x % kWarps]);
}

// Four neighbouring columns, moved as 128 bits.
struct alignas(16) Four {
    float at[4];
};

__device__ __forceinline__ Four all_four(float x) { return {{x, x, x, x}}; }

// Past L1, for what other blocks have written.
__device__ __forceinline__ Four load_fresh(const float* source) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(source));
    return {{four.x, four.y, four.z, four.w}};
}

template <typename Entry>
__device__ __forceinline__ const Entry* row_of(const SinkhornProblem& p, int row) {
    return static_cast<const Entry*>(p.matrix) + row * p.stride;
}

// Four matrix entries as memory holds them, in words that are loaded together.
template <typename Entry>
struct FourEntries;

template <>
struct FourEntries<float> {
    float4 words;
};

template <>
struct FourEntries<Half> {
    uint2 words;
};

__device__ __forceinline__ Four unpack(FourEntries<float> packed) {
    return {{packed.words.x, packed.words.y, packed.words.z, packed.words.w}};
}

__device__ __forceinline__ Four unpack(FourEntries<Half> packed) {
    const auto lower = [](std::uint32_t word) { return to_float(Half{static_cast<std::uint16_t>(word)}); };
    const auto upper = [](std::uint32_t word) { return to_float(Half{static_cast<std::uint16_t>(word >> 16)}); };
    return {{lower(packed.words.x), upper(packed.words.x), lower(packed.words.y), upper(packed.words.y)}};
}

// Four matrix entries from `col` < cols on, zeros past the end.
template <typename Entry>
__device__ __forceinline__ Four load_values(const Entry* row, int col, int cols) {
    Four value = unpack(*reinterpret_cast<const FourEntries<Entry>*>(row + col));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (col + c >= cols) value.at[c] = 0.0f;
    }
    return value;
}

// Keeps delta small. Whole numbers move, and what the sum with the reference rounds away stays in delta.
__device__ __forceinline__ void rebase(float& reference, float& delta) {
    if (fabsf(delta) > kRebase) {
        const float moved = reference + rintf(delta);
        delta -= moved - reference;
        reference = moved;
    }
}

// g of four columns, of which the first `left` exist; the others get weight zero in every sum. `growth` is a power of
// two: the exponents of the same g in the units of a smaller eps.
__device__ __forceinline__ void load_columns(Four& reference, Four& delta, const float* references, const float* deltas,
                                             int left, float growth = 1.0f) {
    reference = left > 0 ? load_fresh(references) : all_four(0.0f);
    delta = left > 0 ? load_fresh(deltas) : all_four(0.0f);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        reference.at[c] *= growth;
        delta.at[c] *= growth;
        rebase(reference.at[c], delta.at[c]);
        if (c >= left) reference.at[c] = minus_infinity();
    }
}

__device__ __forceinline__ void store_partials(const SinkhornWorkspace& w, int col, const Four& sum, const Four& top) {
    *reinterpret_cast<Four*>(w.partial_sum + blockIdx.x * w.padded_cols + col) = sum;
    *reinterpret_cast<Four*>(w.partial_max + blockIdx.x * w.padded_cols + col) = top;
}

// The largest exponent of a column below those of its rows, before delta.
__device__ __forceinline__ float column_top(const SinkhornWorkspace& w, int col, int blocks) {
    float top = minus_infinity();
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) top = fmaxf(top, __ldcg(w.partial_max + block * w.padded_cols + col));
    return top;
}

// After all blocks have written their partial column sums: the column update, 32 columns at a time, and their share of
// the error.
__device__ __forceinline__ void update_columns(const SinkhornProblem& p, const SinkhornWorkspace& w, float growth,
                                               float* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = gridDim.x;
    for (int group = blockIdx.x; group * 32 < p.cols; group += blocks) {
        const int col = group * 32 + lane;
        float sum = 0.0f;
        if (col < p.cols) {
#pragma unroll 4
            for (int block = warp; block < blocks; block += kWarps)
                sum += __ldcg(w.partial_sum + block * w.padded_cols + col);
        }
        scratch[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0) {
            float error = 0.0f;
            if (col < p.cols) {
                for (int k = 1; k < kWarps; ++k) sum += scratch[32 * k + lane];
                float reference = w.reference[col] * growth, delta = w.delta[col] * growth;
                rebase(reference, delta);  // as load_columns did
                if (sum >= kUnderflow) {
                    error = fabsf(sum - p.share);
                    delta += p.log_share - fast_log2(sum);
                } else {
                    error = 2.0f * p.rows;  // the most there can be: not converged while a column is out of range
                    delta = p.log_share - column_top(w, col, blocks);
                }
                rebase(reference, delta);
                w.reference[col] = reference;
                w.delta[col] = delta;
            }
            error = warp_sum(error);
            if (lane == 0) w.group_error[group] = error;
        }
        __syncthreads();
    }
}

// The L1 error of the column marginal: every block adds the groups in the same order and so takes the same decision.
__device__ __forceinline__ float total_error(const SinkhornProblem& p, const SinkhornWorkspace& w, float* scratch) {
    float error = 0.0f;
    for (int group = threadIdx.x; group * 32 < p.cols; group += kThreads) error += __ldcg(w.group_error + group);
    return block_sum(error, scratch);
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<std::uint32_t>(127 + exponent) << 23);
}

// Where the iteration stands; the same in every thread of the grid.
struct Progress {
    int iteration = 0;
    int in_stage = 0;
    int halvings;
    float scale;
    float growth = 1.0f;  // of the scale since the previous iteration

    __device__ explicit Progress(const SinkhornProblem& p)
        : halvings(p.halvings), scale(p.scale * power_of_two(-p.halvings)) {}

    __device__ __forceinline__ void halve_eps(int times) {
        growth = power_of_two(times);
        scale *= growth;
        halvings -= times;
        in_stage = 0;
    }
};

// Closes an iteration: column update between two grid barriers. Returns whether to stop, and then leaves the status.
__device__ __forceinline__ bool finish_iteration(Progress& now, const SinkhornProblem& p, const SinkhornWorkspace& w,
                                                 float* update_scratch, float* error_scratch) {
    grid_sync();
    update_columns(p, w, now.growth, update_scratch);
    grid_sync();
    const float error = total_error(p, w, error_scratch) / p.rows;
    const bool settled = error <= p.tol;
    ++now.iteration;
    now.growth = 1.0f;
    if (now.halvings > 0) {
        ++now.in_stage;
        if (now.iteration == p.max_iter - 1) {
            now.halve_eps(now.halvings);  // the last iteration is for the eps asked for
        } else if (settled || now.in_stage == p.stage_iterations) {
            now.halve_eps(1);
        }
        return false;
    }
    const bool stop = settled || now.iteration == p.max_iter;
    if (stop && blockIdx.x == 0 && threadIdx.x == 0) *w.status = {double(now.iteration), error, settled ? 1.0 : 0.0};
    return stop;
}

// Starts the copy of the calling thread's columns of one row into its own places of a ring stage.
template <int kVectors, typename Entry>
__device__ __forceinline__ void fetch_row(FourEntries<Entry>* stage, const SinkhornProblem& p, int row) {
    constexpr int kBytes = sizeof(Entry);
    const Entry* source = row_of<Entry>(p, row) + 4 * threadIdx.x;
    const int left = p.cols - 4 * static_cast<int>(threadIdx.x);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int skip = 4 * kThreads * v;
        copy_async<4 * kBytes>(&stage[v * kThreads], source + skip, kBytes * min(max(left - skip, 0), 4));
    }
    copy_commit();
}

// What a thread keeps of its columns in registers; delta lies in its own places of shared memory.
template <int kVectors>
struct OwnColumns {
    Four reference[kVectors];
    Four sum[kVectors];  // over this block's rows of the row-normalised plan
    Four top[kVectors];  // largest exponent below the row's largest, before delta
};

// One row, from the ring: f_i to memory, the row-normalised plan into the column sums. `refill` is called once the row
// has left its place in the ring.
template <int kVectors, typename Entry, typename Refill>
__device__ __forceinline__ void absorb_row(OwnColumns<kVectors>& own, const Four* delta,
                                           const FourEntries<Entry>* value, const Refill& refill, float scale,
                                           const SinkhornWorkspace& w, int row, float* max_scratch,
                                           float* sum_scratch) {
    Four weight[kVectors];
    float largest = minus_infinity();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const Four entry = unpack(value[v * kThreads]);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            weight[v].at[c] = fmaf(scale, entry.at[c], own.reference[v].at[c]);
            largest = fmaxf(largest, weight[v].at[c]);
        }
    }
    largest = block_max(largest, max_scratch);
    refill();
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const Four shift = delta[v * kThreads];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float exponent = weight[v].at[c] - largest;
            own.top[v].at[c] = fmaxf(own.top[v].at[c], exponent);
            weight[v].at[c] = fast_exp2(exponent + shift.at[c]);
            total += weight[v].at[c];
        }
    }
    total = block_sum(total, sum_scratch);
    const float inverse = fast_reciprocal(total);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int c = 0; c < 4; ++c) own.sum[v].at[c] = fmaf(weight[v].at[c], inverse, own.sum[v].at[c]);
    }
    if (threadIdx.x == 0) {
        w.row_max[row] = largest;
        w.row_log[row] = fast_log2(total);
    }
}

// kVectors: 1, 2, 4 for up to 2048, 4096, 8192 columns. Needs gridDim.x <= rows.
template <int kVectors, typename Entry>
__global__ void __launch_bounds__(kThreads, kVectors == 1 ? 2 : 1)
    sinkhorn_kernel(SinkhornProblem p, SinkhornWorkspace w) {
    GEOFLOW_DYNAMIC_SHARED(Four, deltas);  // [kVectors * kThreads], then the ring [kStages][kVectors * kThreads]
    GEOFLOW_SHARED(float, max_scratch, kWarps);
    GEOFLOW_SHARED(float, sum_scratch, kWarps);
    GEOFLOW_SHARED(float, error_scratch, kWarps);
    GEOFLOW_SHARED(float, update_scratch, kThreads);
    constexpr int kStageSize = kVectors * kThreads;
    Four* const delta = deltas + threadIdx.x;
    auto* const mine = reinterpret_cast<FourEntries<Entry>*>(deltas + kStageSize) + threadIdx.x;
    const int first = 4 * static_cast<int>(threadIdx.x);  // four columns from here, and every 4 kThreads further on

    int fetch = blockIdx.x;  // the row to fetch next
    const auto fetch_next = [&](int stage) {
        fetch_row<kVectors, Entry>(mine + stage * kStageSize, p, fetch);
        fetch += gridDim.x;
        if (fetch >= p.rows) fetch = blockIdx.x;  // on to the next iteration: the matrix stays the same
    };
    for (int stage = 0; stage < kStages; ++stage) fetch_next(stage);
    int stage = 0;
    Progress now(p);
    do {
        OwnColumns<kVectors> own;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int skip = 4 * kThreads * v;
            load_columns(own.reference[v], delta[v * kThreads], w.reference + first + skip, w.delta + first + skip,
                         p.cols - first - skip, now.growth);
            own.sum[v] = all_four(0.0f);
            own.top[v] = all_four(minus_infinity());
        }
#pragma unroll 1
        for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
            copy_wait<kStages - 1>();
            absorb_row(
                own, delta, mine + stage * kStageSize, [&] { fetch_next(stage); }, now.scale, w, row,
                max_scratch, sum_scratch);
            stage = (stage + 1) % kStages;
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int col = first + 4 * kThreads * v;
            if (col < p.cols) store_partials(w, col, own.sum[v], own.top[v]);
        }
    } while (!finish_iteration(now, p, w, update_scratch, error_scratch));
    copy_wait<0>();
}

constexpr int kWideRows = 4;  // rows a block takes through the columns together, so that g is read once for all of them

// Row sums of the block's rows [first, first + kWideRows) in its own numbering; past the end the last row is done
// again.
template <typename Entry>
__device__ __forceinline__ void wide_rows(const Progress& now, const SinkhornProblem& p, const SinkhornWorkspace& w,
                                          int first, int mine, float* max_scratch, float* sum_scratch) {
    int row[kWideRows];
    float largest[kWideRows], total[kWideRows];
#pragma unroll
    for (int k = 0; k < kWideRows; ++k) {
        row[k] = blockIdx.x + min(first + k, mine - 1) * gridDim.x;
        largest[k] = minus_infinity();
        total[k] = 0.0f;
    }
    for (int col = 4 * threadIdx.x; col < p.cols; col += 4 * kThreads) {
        Four reference, delta;
        load_columns(reference, delta, w.reference + col, w.delta + col, p.cols - col, now.growth);
#pragma unroll
        for (int k = 0; k < kWideRows; ++k) {
            Four exponent = load_values(row_of<Entry>(p, row[k]), col, p.cols);
            float above = largest[k];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                exponent.at[c] = fmaf(now.scale, exponent.at[c], reference.at[c]);
                above = fmaxf(above, exponent.at[c]);
            }
            total[k] *= fast_exp2(largest[k] - above);
            largest[k] = above;
#pragma unroll
            for (int c = 0; c < 4; ++c) total[k] += fast_exp2((exponent.at[c] - above) + delta.at[c]);
        }
    }
#pragma unroll
    for (int k = 0; k < kWideRows; ++k) {
        const float above = block_max(largest[k], max_scratch);
        const float sum = block_sum(total[k] * fast_exp2(largest[k] - above), sum_scratch);
        if (threadIdx.x == 0) {
            w.row_max[row[k]] = above;
            w.row_log[row[k]] = fast_log2(sum);
        }
    }
}

// Column sums over the block's rows, whose row sums are known.
template <typename Entry>
__device__ __forceinline__ void wide_columns(const Progress& now, const SinkhornProblem& p,
                                             const SinkhornWorkspace& w) {
    for (int col = 4 * threadIdx.x; col < p.cols; col += 4 * kThreads) {
        Four reference, delta, sum = all_four(0.0f), top = all_four(minus_infinity());
        load_columns(reference, delta, w.reference + col, w.delta + col, p.cols - col, now.growth);
#pragma unroll 4
        for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
            const Four value = load_values(row_of<Entry>(p, row), col, p.cols);
            const float row_max = w.row_max[row], row_log = w.row_log[row];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float exponent = fmaf(now.scale, value.at[c], reference.at[c]) - row_max;
                sum.at[c] += fast_exp2((exponent + delta.at[c]) - row_log);
                top.at[c] = fmaxf(top.at[c], exponent);
            }
        }
        store_partials(w, col, sum, top);
    }
}

template <typename Entry>
__global__ void __launch_bounds__(kThreads) sinkhorn_wide_kernel(SinkhornProblem p, SinkhornWorkspace w) {
    GEOFLOW_SHARED(float, max_scratch, kWarps);
    GEOFLOW_SHARED(float, sum_scratch, kWarps);
    GEOFLOW_SHARED(float, error_scratch, kWarps);
    GEOFLOW_SHARED(float, update_scratch, kThreads);
    const int mine =
        (p.rows - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    Progress now(p);
    do {
        for (int first = 0; first < mine; first += kWideRows)
            wide_rows<Entry>(now, p, w, first, mine, max_scratch, sum_scratch);
        __syncthreads();  // the row sums are written by one thread and read by all
        wide_columns<Entry>(now, p, w);
    } while (!finish_iteration(now, p, w, update_scratch, error_scratch));
}

constexpr int kResultThreads = 256;
constexpr int kResultRows = 4;  // rows of one warp, which share the reads of g

// The better of two (exponent, column) pairs: the larger exponent, the first column among equals.
__device__ __forceinline__ void keep_better(float& best, int& index, float exponent, int col) {
    if (exponent > best || (exponent == best && col < index)) {
        best = exponent;
        index = col;
    }
}

// One warp per kResultRows rows; the same threads also write out g. Any grid.
template <typename Entry>
__global__ void __launch_bounds__(kResultThreads)
    sinkhorn_result_kernel(SinkhornProblem p, SinkhornWorkspace w, SinkhornResult out) {
    const int lane = threadIdx.x % 32;
    const int thread = blockIdx.x * kResultThreads + threadIdx.x, threads = gridDim.x * kResultThreads;
    const double unit = static_cast<double>(out.eps) * 0.69314718055994531;  // of the exponents, in units of the cost
    for (int col = thread; col < p.cols; col += threads) {
        out.g[col] = unit * (static_cast<double>(w.reference[col]) + static_cast<double>(w.delta[col]));
    }
    for (int first = thread / 32 * kResultRows; first < p.rows; first += threads / 32 * kResultRows) {
        float best[kResultRows], mass[kResultRows], row_max[kResultRows], row_log[kResultRows];
        int index[kResultRows];
#pragma unroll
        for (int k = 0; k < kResultRows; ++k) {
            const int row = min(first + k, p.rows - 1);
            best[k] = minus_infinity();
            index[k] = p.cols;
            mass[k] = 0.0f;
            row_max[k] = w.row_max[row];
            row_log[k] = w.row_log[row];
        }
        for (int col = 4 * lane; col < p.cols; col += 128) {
            Four reference, delta;
            load_columns(reference, delta, w.reference + col, w.delta + col, p.cols - col);
#pragma unroll
            for (int k = 0; k < kResultRows; ++k) {
                const Four value = load_values(row_of<Entry>(p, min(first + k, p.rows - 1)), col, p.cols);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float exponent = (fmaf(p.scale, value.at[c], reference.at[c]) - row_max[k]) + delta.at[c];
                    mass[k] += fast_exp2(exponent - row_log[k]);
                    keep_better(best[k], index[k], exponent, col + c);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kResultRows; ++k) {
            for (int step = 16; step > 0; step /= 2) {
                const float other = __shfl_xor_sync(kAllLanes, best[k], step);
                keep_better(best[k], index[k], other, __shfl_xor_sync(kAllLanes, index[k], step));
            }
            mass[k] = warp_sum(mass[k]);
            if (lane == 0 && first + k < p.rows) {
                const double log_sum = static_cast<double>(row_max[k]) + static_cast<double>(row_log[k]);
                out.index[first + k] = index[k];
                out.f[first + k] =
                    static_cast<double>(out.offset) - unit * (log_sum + log2(static_cast<double>(p.rows)));
                out.row_mass[first + k] = mass[k];
            }
        }
    }
}

// Draws a column for each row: the first whose cumulative share of the row's mass exceeds uniform[row] in [0, 1). One
// warp per row, 128 columns a step until the draw is found: on average half a read of the matrix, 0.10 ms on A100-40,
// 0.05 ms on H100 at B = 8192.
template <typename Entry>
__global__ void __launch_bounds__(kResultThreads)
    sinkhorn_sample_kernel(SinkhornProblem p, SinkhornWorkspace w, const float* row_mass, const double* uniform,
                           std::int64_t* index) {
    const int lane = threadIdx.x % 32;
    const int thread = blockIdx.x * kResultThreads + threadIdx.x, threads = gridDim.x * kResultThreads;
    for (int row = thread / 32; row < p.rows; row += threads / 32) {
        const float row_max = w.row_max[row], row_log = w.row_log[row];
        const float target = static_cast<float>(uniform[row]) * row_mass[row];
        float before = 0.0f;  // mass of the columns of earlier steps
        int last = 0;         // the last column seen with any mass: where rounding leaves the draw beyond the end
        int drawn = p.cols;
        for (int start = 0; start < p.cols && drawn == p.cols; start += 128) {
            const int col = start + 4 * lane;
            Four mass = all_four(0.0f);
            if (col < p.cols) {
                Four reference, delta;
                load_columns(reference, delta, w.reference + col, w.delta + col, p.cols - col);
                const Four value = load_values(row_of<Entry>(p, row), col, p.cols);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float exponent =
                        (fmaf(p.scale, value.at[c], reference.at[c]) - row_max) + delta.at[c];
                    mass.at[c] = fast_exp2(exponent - row_log);
                }
            }
            float upto = (mass.at[0] + mass.at[1]) + (mass.at[2] + mass.at[3]);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(kAllLanes, upto, step);
                if (lane >= step) upto += other;
            }
            float running = before + __shfl_up_sync(kAllLanes, upto, 1);
            if (lane == 0) running = before;
            int hit = p.cols, latest = last;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                running += mass.at[c];
                if (running > target && mass.at[c] > 0.0f) hit = min(hit, col + c);
                if (mass.at[c] > 0.0f) latest = col + c;
            }
            drawn = static_cast<int>(__reduce_min_sync(kAllLanes, static_cast<unsigned>(hit)));
            last = static_cast<int>(__reduce_max_sync(kAllLanes, static_cast<unsigned>(latest)));
            before += __shfl_sync(kAllLanes, upto, 31);
        }
        if (lane == 0) index[row] = drawn < p.cols ? drawn : last;
    }
}

}  // namespace geoflow::cuda
