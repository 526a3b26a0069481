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

// Makes a device the current one for as long as it lives: what its caller launches next must not go elsewhere.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice");
        if (previous_ == device) return;
        check(cudaSetDevice(device), "cudaSetDevice");
        moved_ = true;
    }
    ~OnDevice() {
        if (moved_) cudaSetDevice(previous_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int previous_ = 0;
    bool moved_ = false;
};

cudaStream_t stream_of(CudaTarget target) { return reinterpret_cast<cudaStream_t>(target.stream); }

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

int attribute(cudaDeviceAttr name, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, device), "device attribute");
    return value;
}

int multiprocessors(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

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

template <int kVectors, typename Entry>
bool serves(std::int64_t cols, int shared_limit) {
    return cols <= 4 * kThreads * kVectors &&
           kSinkhornSharedBytes<kVectors, Entry> + kSinkhornStaticBytes <= shared_limit;
}

// The kernel that holds a row in registers, if there is one for so many columns and the device has the shared memory.
template <typename Entry>
SolvePlan kernel_for(std::int64_t cols, int shared_limit) {
    if (serves<1, Entry>(cols, shared_limit)) return {sinkhorn_kernel<1, Entry>, kSinkhornSharedBytes<1, Entry>, 0};
    if (serves<2, Entry>(cols, shared_limit)) return {sinkhorn_kernel<2, Entry>, kSinkhornSharedBytes<2, Entry>, 0};
    if (serves<4, Entry>(cols, shared_limit)) return {sinkhorn_kernel<4, Entry>, kSinkhornSharedBytes<4, Entry>, 0};
    return {sinkhorn_wide_kernel<Entry>, 0, 0};
}

// As many blocks as the device holds at once, which a grid-wide barrier needs, but no block without a row.
SolvePlan plan_solve(const SinkhornParams& params, const CudaMatrix& matrix, int device) {
    check_matrix(params, matrix);
    const int shared_limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    SolvePlan plan =
        matrix.half ? kernel_for<Half>(params.cols, shared_limit) : kernel_for<float>(params.cols, shared_limit);
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
                          CudaTarget target) {
    check_matrix(params, scores);
    const auto width = [](std::int64_t dim) { return static_cast<int>(dim); };
    const ScoreProblem problem = {{{clouds.image0, clouds.image1, width(params.image_dim)},
                                   {clouds.text0, clouds.text1, width(params.text_dim)}},
                                  scores.data,
                                  static_cast<int>(params.rows),
                                  static_cast<int>(params.cols),
                                  scores.stride};
    for (const ScoreFactor& factor : problem.factor) {
        if (factor.dim % 8 != 0 || !aligned(factor.x) || !aligned(factor.y)) {
            throw std::invalid_argument("the rows of clouds must be 16-byte aligned");
        }
    }
    const auto kernel = scores.half ? score_kernel<Half> : score_kernel<float>;
    const std::int64_t tiles =
        ((params.rows + kScoreTile - 1) / kScoreTile) * ((params.cols + kScoreTile - 1) / kScoreTile);
    const OnDevice current(target.device);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kScoreSharedBytes),
          "scores: shared memory");
    launch("scores", {tiles, kScoreThreads, kScoreSharedBytes, false}, stream_of(target), kernel, problem);
}

std::int64_t sinkhorn_cuda_workspace(const SinkhornParams& params, const CudaMatrix& matrix, int device) {
    const OnDevice current(device);
    return carve(nullptr, params, plan_solve(params, matrix, device).blocks).bytes;
}

void sinkhorn_cuda_solve(const SinkhornParams& params, const CudaMatrix& matrix, int halvings, void* workspace,
                         SinkhornStatus* status, CudaTarget target) {
    if (halvings < 0 || halvings > 60) throw std::invalid_argument("halvings must be between 0 and 60");
    const OnDevice current(target.device);
    const cudaStream_t stream = stream_of(target);
    const SolvePlan plan = plan_solve(params, matrix, target.device);
    SinkhornWorkspace arrays = carve(workspace, params, plan.blocks).arrays;
    arrays.status = status;
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, matrix.stride, halvings);
    check(
        cudaMemsetAsync(arrays.reference, 0, 2 * sizeof(float) * static_cast<std::size_t>(arrays.padded_cols), stream),
        "sinkhorn: memset");
    launch("sinkhorn", {plan.blocks, kThreads, plan.shared_bytes, true}, stream, plan.kernel, problem, arrays);
}

void sinkhorn_cuda_result(const SinkhornParams& params, const CudaMatrix& matrix, void* workspace,
                          const CudaOutputs& outputs, CudaTarget target) {
    const OnDevice current(target.device);
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, matrix.stride);
    const SinkhornResult result = {outputs.index, outputs.f, outputs.g, outputs.row_mass, params.eps, outputs.offset};
    const auto kernel = matrix.half ? sinkhorn_result_kernel<Half> : sinkhorn_result_kernel<float>;
    launch("sinkhorn result", {result_blocks(params.rows, kResultRows, target.device), kResultThreads, 0, false},
           stream_of(target), kernel, problem, solved_arrays(workspace, params), result);
}

void sinkhorn_cuda_sample(const SinkhornParams& params, const CudaMatrix& matrix, void* workspace,
                          const float* row_mass, const double* uniform, std::int64_t* index, CudaTarget target) {
    const OnDevice current(target.device);
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, matrix.stride);
    const auto kernel = matrix.half ? sinkhorn_sample_kernel<Half> : sinkhorn_sample_kernel<float>;
    launch("sinkhorn sample", {result_blocks(params.rows, 1, target.device), kResultThreads, 0, false},
           stream_of(target), kernel, problem, solved_arrays(workspace, params), row_mass, uniform, index);
}

}  // namespace geoflow
