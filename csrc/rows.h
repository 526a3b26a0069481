// Matrices of float32 rows, as the row kernels of the network and of the solvers take them.
#pragma once
#include <cstdint>

namespace geoflow {

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
