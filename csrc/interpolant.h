// Masked interpolant: parameters and entry point, free of any framework.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"

namespace geoflow {

// geometry.UNIT_TOLERANCE
constexpr double kUnitTolerance = 1e-3;

enum Direction : std::int8_t { kJoint = 0, kImageToText = 1, kTextToImage = 2 };

// One sphere factor: inputs and outputs are row-major [rows, width] without gaps.
template <typename T>
struct InterpolantStream {
    const T* noise;
    const T* data;
    T* point;
    T* velocity;
    std::int64_t width;
    std::int8_t given_under;  // the direction in which this stream is given, not generated
};

template <typename T>
struct InterpolantParams {
    InterpolantStream<T> stream[2];  // image, text
    const T* t;                      // [rows]
    const std::int8_t* direction;    // [rows]
    const bool* drop;                // [rows] or null: a given stream shows its noise
    std::int64_t rows;
    double tolerance;  // largest |norm - 1| of a row that is read
    int threads;
};

// The loops, compiled once per instruction set.
struct InterpolantKernels {
    std::int64_t (*single_precision)(const InterpolantParams<float>& params);
    std::int64_t (*double_precision)(const InterpolantParams<double>& params);
};

// The kernels for this processor.
GEOFLOW_DECLARE_KERNELS(InterpolantKernels, interpolant_kernels)

// Returns the first row that is not on the sphere (its outputs are unspecified), or -1.
template <typename T>
std::int64_t masked_interpolant(const InterpolantParams<T>& params);
template <>
std::int64_t masked_interpolant(const InterpolantParams<float>& params);
template <>
std::int64_t masked_interpolant(const InterpolantParams<double>& params);

}  // namespace geoflow
