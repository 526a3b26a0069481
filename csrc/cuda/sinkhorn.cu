// Launchers of the transport kernels: choose the instantiation, carve the workspace, launch.
#include "cuda/sinkhorn.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/score.cuh"
#include "cuda/sinkhorn_cuda.h"

namespace geoflow {
namespace {

using namespace cuda;

using SolveKernel = void (*)(SinkhornProblem, SinkhornWorkspace);

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

cudaStream_t enter(CudaTarget target) {
    check(cudaSetDevice(target.device), "cudaSetDevice");
    return reinterpret_cast<cudaStream_t>(target.stream);
}

struct Shape {
    std::int64_t blocks;
    int threads;
    int shared_bytes;
    bool cooperative;  // all blocks at once, with barriers between them
};

template <typename... Parameters>
void launch(const char* what, const Shape& shape, cudaStream_t stream, void (*kernel)(Parameters...),
            Parameters... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = shape.cooperative ? 1 : 0;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

int multiprocessors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    return count;
}

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

void check_matrix(const SinkhornParams& params, const CudaMatrix& matrix) {
    constexpr std::int64_t kLargest = std::int64_t{1} << 29;
    if (params.rows < 1 || params.cols < 1 || params.rows > kLargest || params.cols > kLargest) {
        throw std::invalid_argument("rows and cols must be between 1 and 2^29");
    }
    if (matrix.stride % 4 != 0 || matrix.stride < params.cols || !aligned(matrix.data)) {
        throw std::invalid_argument("the matrix must be 16-byte aligned, its stride a multiple of 4 and at least cols");
    }
}

// Which kernel solves a problem, with what shared memory and how many blocks.
struct SolvePlan {
    SolveKernel kernel;
    int shared_bytes;
    int blocks;
};

SolvePlan kernel_for(std::int64_t cols) {
    switch (sinkhorn_vectors(cols)) {
        case 1: return {sinkhorn_kernel<1>, kSinkhornSharedBytes<1>, 0};
        case 2: return {sinkhorn_kernel<2>, kSinkhornSharedBytes<2>, 0};
        case 4: return {sinkhorn_kernel<4>, kSinkhornSharedBytes<4>, 0};
        default: return {sinkhorn_wide_kernel, 0, 0};
    }
}

// As many blocks as the device holds at once, which a grid-wide barrier needs, but no block without a row.
SolvePlan plan_solve(const SinkhornParams& params, const CudaMatrix& matrix, int device) {
    check_matrix(params, matrix);
    SolvePlan plan = kernel_for(params.cols);
    check(cudaFuncSetAttribute(plan.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes),
          "sinkhorn: shared memory");
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, plan.kernel, kThreads, plan.shared_bytes),
          "sinkhorn: occupancy");
    const std::int64_t places = std::int64_t{per_multiprocessor} * multiprocessors(device);
    if (places == 0) throw std::runtime_error("sinkhorn: the device cannot hold a block of the kernel");
    plan.blocks = static_cast<int>(std::min(places, params.rows));
    return plan;
}

// The workspace's arrays in one block of memory, each 16-byte aligned.
struct Carving {
    SinkhornWorkspace arrays;
    std::int64_t bytes;
};

Carving carve(void* memory, const SinkhornParams& params, int blocks) {
    const auto start = reinterpret_cast<std::uintptr_t>(memory);
    std::uintptr_t next = start;
    const auto take = [&](std::int64_t count) {
        float* const array = reinterpret_cast<float*>(next);
        next += static_cast<std::uintptr_t>((count + 3) / 4 * 16);
        return array;
    };
    SinkhornWorkspace w{};
    w.padded_cols = (params.cols + 3) / 4 * 4;
    w.reference = take(w.padded_cols);
    w.delta = take(w.padded_cols);
    w.row_max = take(params.rows);
    w.row_log = take(params.rows);
    w.partial_sum = take(blocks * w.padded_cols);
    w.partial_max = take(blocks * w.padded_cols);
    w.group_error = take((params.cols + 31) / 32);
    return {w, static_cast<std::int64_t>(next - start)};
}

// Where the arrays that later kernels read lie does not depend on the number of blocks.
SinkhornWorkspace solved_arrays(void* memory, const SinkhornParams& params) { return carve(memory, params, 0).arrays; }

std::int64_t result_blocks(std::int64_t rows, int rows_per_warp, int device) {
    const std::int64_t rows_per_block = kResultThreads / 32 * rows_per_warp;
    return std::min<std::int64_t>((rows + rows_per_block - 1) / rows_per_block, 16 * multiprocessors(device));
}

}  // namespace

void sinkhorn_cuda_scores(const SinkhornParams& params, const CudaClouds& clouds, const CudaMatrix& scores,
                          bool precise, CudaTarget target) {
    check_matrix(params, scores);
    if (params.cost == Cost::given) throw std::invalid_argument("given costs need no scores");
    const auto width = [](std::int64_t dim) { return static_cast<int>(dim); };
    const ScoreProblem problem = {{{clouds.image0, clouds.image1, width(params.image_dim), params.image_weight},
                                   {clouds.text0, clouds.text1, width(params.text_dim), params.text_weight}},
                                  scores.data,
                                  static_cast<int>(params.rows),
                                  static_cast<int>(params.cols),
                                  scores.stride,
                                  params.cost == Cost::arc};
    for (const ScoreFactor& factor : problem.factor) {
        if (factor.dim % 4 != 0 || !aligned(factor.x) || !aligned(factor.y)) {
            throw std::invalid_argument("clouds must be 16-byte aligned and their widths multiples of 4");
        }
    }
    const auto kernel = precise ? score_kernel<3> : score_kernel<1>;
    const std::int64_t tiles =
        ((params.rows + kScoreTile - 1) / kScoreTile) * ((params.cols + kScoreTile - 1) / kScoreTile);
    const cudaStream_t stream = enter(target);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kScoreSharedBytes),
          "scores: shared memory");
    launch("scores", {tiles, kScoreThreads, kScoreSharedBytes, false}, stream, kernel, problem);
}

std::int64_t sinkhorn_cuda_workspace(const SinkhornParams& params, const CudaMatrix& matrix, int device) {
    enter({device, 0});
    return carve(nullptr, params, plan_solve(params, matrix, device).blocks).bytes;
}

void sinkhorn_cuda_solve(const SinkhornParams& params, const CudaMatrix& matrix, int halvings, void* workspace,
                         SinkhornStatus* status, CudaTarget target) {
    if (halvings < 0 || halvings > 60) throw std::invalid_argument("halvings must be between 0 and 60");
    const cudaStream_t stream = enter(target);
    const SolvePlan plan = plan_solve(params, matrix, target.device);
    SinkhornWorkspace arrays = carve(workspace, params, plan.blocks).arrays;
    arrays.status = status;
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, matrix.stride, matrix.offset, halvings);
    check(
        cudaMemsetAsync(arrays.reference, 0, 2 * sizeof(float) * static_cast<std::size_t>(arrays.padded_cols), stream),
        "sinkhorn: memset");
    launch("sinkhorn", {plan.blocks, kThreads, plan.shared_bytes, true}, stream, plan.kernel, problem, arrays);
}

void sinkhorn_cuda_result(const SinkhornParams& params, const CudaMatrix& matrix, void* workspace,
                          const CudaOutputs& outputs, CudaTarget target) {
    const cudaStream_t stream = enter(target);
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, matrix.stride, matrix.offset);
    const SinkhornResult result = {outputs.index,    outputs.f,  outputs.g,    outputs.row_mass,
                                   outputs.row_cost, params.eps, matrix.offset};
    launch("sinkhorn result", {result_blocks(params.rows, kResultRows, target.device), kResultThreads, 0, false}, stream,
           sinkhorn_result_kernel, problem, solved_arrays(workspace, params), result);
}

void sinkhorn_cuda_sample(const SinkhornParams& params, const CudaMatrix& matrix, void* workspace,
                          const float* row_mass, const double* uniform, std::int64_t* index, CudaTarget target) {
    const cudaStream_t stream = enter(target);
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, matrix.stride, matrix.offset);
    launch("sinkhorn sample", {result_blocks(params.rows, 1, target.device), kResultThreads, 0, false}, stream,
           sinkhorn_sample_kernel, problem, solved_arrays(workspace, params), row_mass, uniform, index);
}

}  // namespace geoflow
