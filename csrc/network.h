// The memory-bound parts of the velocity network on float32 rows: each pass reads and writes its tensors once.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"
#include "rows.h"

namespace geoflow {

// Rows whose contributions to the gradient of what a group shares are summed together before the blocks are added in order: the
// result does not depend on the number of threads.
constexpr std::int64_t kReductionRows = 64;

// Blocks of rows of each group.
inline std::int64_t blocks_of(const RowShape& shape) { return (shape.rows_per_group + kReductionRows - 1) / kReductionRows; }

// The points of a solve in one stream and their tangents: a line of the table that `ops/segments.py` makes, whose fields are
// explained there.
struct Segment {
    std::int32_t pairs, tangents, point, tangent, other_point, other_tangent, to_point, to_tangent, group, stream;
};

struct Segments {
    const Segment* lines;
    std::int64_t count;
    const Segment* begin() const { return lines; }
    const Segment* end() const { return lines + count; }
};

// Contiguous rows of `width`, eps of the norm, and whether shift and scale have a row for each stream or for each group.
struct SegmentShape {
    Segments segments;
    std::int64_t width;
    float eps;
    bool by_stream;
    int threads;
};

// A cross-gate on B rows of each stream, with heads of `part` columns.
struct CrossShape {
    std::int64_t rows, heads, part;
    int threads;
};

struct NetworkKernels {
    // y = (1 + scale) LayerNorm(x) + shift
    void (*adaln)(RowShape, float eps, RowsView x, RowsView shift, RowsView scale, RowsView y);
    // d_x, and partial sums of d_shift, which may be null, and of d_scale: per group ceil(rows_per_group / 64) rows.
    void (*adaln_backward)(RowShape, float eps, RowsView grad, RowsView x, RowsView scale, RowsView d_x, RowsView d_shift,
                           RowsView d_scale);
    // y = silu(gate) value
    void (*swiglu)(RowShape, RowsView gate, RowsView value, RowsView y);
    void (*swiglu_backward)(RowShape, RowsView grad, RowsView gate, RowsView value, RowsView d_gate, RowsView d_value);
    // Of segments: (1 + scale) LayerNorm(x + bias) + shift; bias may be null. In these passes, what enters or leaves a product
    // may be stored as bfloat16, as the flags say.
    void (*adaln_segments)(const SegmentShape&, const void* x, bool x_half, const float* bias, const float* shift, const float* scale,
                           void* y, bool y_half);
    // out = h + layer_scale branch, and y = adaln(out). With heads, the branch of a row is sigmoid(gate) value: the gates stand in its
    // own row of the products [R, 2 H], by head and before its values, and the values in the row of the other stream.
    void (*gate_adaln_segments)(const SegmentShape&, std::int64_t heads, const float* h, const void* branch, const float* layer_scale,
                                const float* shift, const float* scale, float* out, void* y, bool half);
    // inner = silu(gate) value, of the two halves of wide.
    void (*swiglu_segments)(const SegmentShape&, const void* wide, void* inner, bool half);
    // y = residual + layer_scale sigmoid(gate) value keep factor; gate and keep may be null.
    void (*gate_residual)(RowShape, float factor, RowsView residual, RowsView gate, RowsView value, RowsView layer_scale,
                          const std::uint8_t* keep, RowsView y);
    // d_gate (null without gate), d_value, and partial sums of d_layer_scale: per group ceil(rows_per_group / 64) rows.
    void (*gate_residual_backward)(RowShape, float factor, RowsView grad, RowsView gate, RowsView value,
                                   RowsView layer_scale, const std::uint8_t* keep, RowsView d_gate, RowsView d_value,
                                   RowsView partial);
    // residual + layer_scale sigmoid(own gates) (values of the other stream), of both streams, [2 B, H]; products are
    // [2 heads, B, 2 part], those of the image's heads first, and of each head the gates first. keep may be null.
    void (*cross_residual)(const CrossShape&, float factor, RowsView residual, const float* products, const float* layer_scale,
                           const std::uint8_t* keep, RowsView y);
    // Gradients of the products, and partial sums of d_layer_scale: per stream ceil(B / 64) rows.
    void (*cross_residual_backward)(const CrossShape&, float factor, RowsView grad, const float* products,
                                    const float* layer_scale, const std::uint8_t* keep, float* d_products, RowsView partial);
    // Per row in which the stream is generated: loss [R, 1] += |e|^2, e the part of v - target tangent at x.
    void (*flow_loss)(RowShape, const std::uint8_t* generated, RowsView v, RowsView target, RowsView x, RowsView loss);
    // d_v = 2 grad e; zero in the other rows, which are not read. grad is [R, 1].
    void (*flow_loss_backward)(RowShape, const std::uint8_t* generated, RowsView grad, RowsView v, RowsView target,
                               RowsView x, RowsView d_v);
    // keep[k] = 1 with probability 1 - share, a function of seed and k alone.
    void (*keep_mask)(std::int64_t count, double share, std::uint32_t seed, std::uint8_t* keep, int threads);
};

// The kernels for this processor.
GEOFLOW_DECLARE_KERNELS(NetworkKernels, network_kernels)

}  // namespace geoflow
