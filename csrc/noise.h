// Rows of normal numbers as a function of seed, step and row number: parameters and entry point.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"

namespace geoflow {

struct NoiseParams {
    const std::int64_t* numbers;  // [rows], below 2^32
    float* out;                   // [rows, width]
    std::int64_t rows, width;
    std::uint64_t seed;
    std::uint32_t step, stream;
    bool unit;  // rows are scaled to unit norm
    int threads;
};

// The loops, compiled once per instruction set.
struct NoiseKernels {
    void (*counter_noise)(const NoiseParams& params);
};

// The kernels for this processor.
GEOFLOW_DECLARE_KERNELS(NoiseKernels, noise_kernels)

}  // namespace geoflow
