#include "cuda/runtime.h"

#include <cuda_runtime_api.h>

namespace geoflow {

namespace {

std::string release(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

// The runtime in this build needs a driver of its own major release.
std::string driver_status() {
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver";
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) return "the CUDA driver is older than this build needs; update it";
    return "the driver serves CUDA " + release(driver) + ", and this build needs " + release(runtime) +
           "; update the driver, or reinstall geoflow_fast with the nvcc of a toolkit that the driver serves";
}

}  // namespace

std::string cuda_status() {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaErrorInsufficientDriver) return driver_status();
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
