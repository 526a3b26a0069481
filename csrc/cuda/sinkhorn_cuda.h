// Host entry points of the CUDA transport solver; no CUDA header needed here. All work goes to the given stream of the
// given device, in memory that the caller provides, and nothing waits: every call may be captured in a CUDA graph. The
// calling thread's current device is the same afterwards. A failed launch throws std::runtime_error, impossible
// arguments std::invalid_argument.
#pragma once

#include <cstdint>

#include "sinkhorn.h"

namespace geoflow {

// Where a launcher enqueues its work.
struct CudaTarget {
    int device;
    std::uintptr_t stream;  // a cudaStream_t
};

// The matrix a solve reads: scores made by `sinkhorn_cuda_scores`, or given.
struct CudaMatrix {
    void* data;           // [rows, stride], 16-byte aligned, float32 or float16
    std::int64_t stride;  // >= cols, a multiple of 4; what lies beyond cols may be anything
    bool half;            // entries are float16
};

// 16-byte aligned rows in float16: zero coordinates change no dot product.
struct CudaClouds {
    const void* image0;  // [rows, image_dim]
    const void* text0;   // [rows, text_dim]
    const void* image1;  // [cols, image_dim]
    const void* text1;   // [cols, text_dim]
};

struct CudaOutputs {
    std::int64_t* index;  // [rows] argmax of the plan's rows
    double* f;            // [rows]
    double* g;            // [cols]
    float* row_mass;      // [rows] row sums of the plan, times rows
    float offset;         // C = offset - S
};

// S = pi - C for all pairs.
void sinkhorn_cuda_scores(const SinkhornParams& params, const CudaClouds& clouds, const CudaMatrix& scores,
                          CudaTarget target);

// Bytes of workspace that a solve needs on this device; 16-byte aligned.
std::int64_t sinkhorn_cuda_workspace(const SinkhornParams& params, const CudaMatrix& matrix, int device);

// Iterates to the end; `status` is on the device. Starts from eps 2^halvings, which saves iterations where eps is far
// below the range of the costs.
void sinkhorn_cuda_solve(const SinkhornParams& params, const CudaMatrix& matrix, int halvings, void* workspace,
                         SinkhornStatus* status, CudaTarget target);

// After a solve, from the same workspace.
void sinkhorn_cuda_result(const SinkhornParams& params, const CudaMatrix& matrix, void* workspace,
                          const CudaOutputs& outputs, CudaTarget target);
void sinkhorn_cuda_sample(const SinkhornParams& params, const CudaMatrix& matrix, void* workspace,
                          const float* row_mass, const double* uniform, std::int64_t* index, CudaTarget target);

}  // namespace geoflow
