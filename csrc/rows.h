// Matrices of rows: those of float32 that the kernels of the network and of the solvers take, and galleries as they are stored.
#pragma once
#include <cstdint>

namespace geoflow {

// How the rows of a gallery are stored: float, IEEE half or bfloat16.
enum class Storage : std::int32_t { single = 0, half = 1, bfloat16 = 2 };

// Rows of a tensor [R, H] with unit stride along H; `data` may be null where a part is optional.
struct RowsView {
    float* data;
    std::int64_t stride;
};

// Parts shared by groups of consecutive rows (shift, scale, layer scale) have rows / rows_per_group rows.
struct RowShape {
    std::int64_t rows, width, rows_per_group;
    int threads;
};

}  // namespace geoflow

namespace {

// Internal linkage: an AVX2 copy must never be the one a baseline file links to.
inline float* row(geoflow::RowsView view, std::int64_t index) { return view.data + index * view.stride; }

}  // namespace
