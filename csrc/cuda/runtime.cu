#include "cuda/runtime.h"

#include <cuda_runtime_api.h>

namespace geoflow {

std::string cuda_status() {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaErrorInsufficientDriver) return "no CUDA driver, or one older than this build needs";
    if (error != cudaSuccess) return std::string("CUDA: ") + cudaGetErrorString(error);
    if (devices == 0) return "no CUDA device";
    for (int device = 0; device < devices; ++device) {
        int major = 0;
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8)
            return "";
    }
    return "no CUDA device of compute capability 8.0 or newer";
}

}  // namespace geoflow
