#include "cuda/runtime.h"

#include <cuda_runtime_api.h>

namespace geoflow {

std::string cuda_status() {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaErrorInsufficientDriver) return "no CUDA driver, or one older than this build needs";
    if (error != cudaSuccess) return std::string("CUDA: ") + cudaGetErrorString(error);
    return devices > 0 ? "" : "no CUDA device";
}

}  // namespace geoflow
