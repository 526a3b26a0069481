// Stands in for the CUDA runtime so that the launchers (csrc/cuda/*.cu) compile as C++ and launch into the emulation: a
// device with a few multiprocessors whose memory is the CPU's. What the launchers must not get wrong is checked: sizes,
// shared memory, residency.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <vector>

#include "emulation.h"

enum cudaError_t { cudaSuccess, cudaErrorInsufficientDriver, cudaErrorInvalidValue };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative };
using cudaStream_t = struct EmulatedStream*;

struct dim3 {
    dim3(unsigned size = 1) : x(size) {}
    unsigned x;
};

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int cooperative;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

namespace emulated_runtime {

constexpr int kMultiprocessors = 3;
constexpr int kDevices = 2;
constexpr int kSharedWithoutAsking = 48 << 10;

inline int current_device = 0;
inline int driver_version = 13000, runtime_version = 13000;  // thousands are the major release; 0: no driver
inline std::vector<int> launched_on;  // the devices of all launches
inline const void* last_cooperative = nullptr;
inline std::map<const void*, int> shared_limit;

template <typename Kernel>
int allowed_shared(Kernel* kernel) {
    const auto entry = shared_limit.find(reinterpret_cast<const void*>(kernel));
    return entry == shared_limit.end() ? kSharedWithoutAsking : entry->second;
}

}  // namespace emulated_runtime

inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }

inline cudaError_t cudaGetDeviceCount(int* count) {
    // Within a major release drivers serve newer runtimes.
    if (emulated_runtime::driver_version / 1000 < emulated_runtime::runtime_version / 1000)
        return cudaErrorInsufficientDriver;
    *count = emulated_runtime::kDevices;
    return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= emulated_runtime::kDevices) return cudaErrorInvalidValue;
    emulated_runtime::current_device = device;
    return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
    *device = emulated_runtime::current_device;
    return cudaSuccess;
}

inline cudaError_t cudaDriverGetVersion(int* version) {
    *version = emulated_runtime::driver_version;
    return cudaSuccess;
}

inline cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = emulated_runtime::runtime_version;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount      ? emulated_runtime::kMultiprocessors
             : attribute == cudaDevAttrComputeCapabilityMajor ? 8
                                                              : static_cast<int>(emulation::largest_shared);
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
    if (bytes > static_cast<int>(emulation::largest_shared)) return cudaErrorInvalidValue;
    emulated_runtime::shared_limit[reinterpret_cast<const void*>(kernel)] = bytes;
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, std::size_t) {
    *blocks = 1;
    return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* target, int value, std::size_t bytes, cudaStream_t) {
    std::memset(target, value, bytes);
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    const bool cooperative = config->numAttrs > 0 && config->attrs[0].val.cooperative != 0;
    const int blocks = static_cast<int>(config->gridDim.x);
    if (blocks < 1 || config->blockDim.x > 1024 ||
        static_cast<int>(config->dynamicSmemBytes) > emulated_runtime::allowed_shared(kernel) ||
        (cooperative && blocks > emulated_runtime::kMultiprocessors)) {
        return cudaErrorInvalidValue;
    }
    emulated_runtime::launched_on.push_back(emulated_runtime::current_device);
    if (cooperative) emulated_runtime::last_cooperative = reinterpret_cast<const void*>(kernel);
    const emulation::Launch launch = {blocks, static_cast<int>(config->blockDim.x), config->dynamicSmemBytes,
                                      cooperative};
    emulation::run(launch, [&] { kernel(arguments...); });
    return cudaSuccess;
}
