// The memory-bound parts of the velocity network on float32 rows: each pass reads and writes its tensors once.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"
#include "rows.h"

namespace geoflow {

// Rows whose contributions to a layer-scale gradient are summed together before the blocks are added in order: the
// result does not depend on the number of threads.
constexpr std::int64_t kReductionRows = 64;

struct NetworkKernels {
    // y = (1 + scale) LayerNorm(x) + shift
    void (*adaln)(RowShape, float eps, RowsView x, RowsView shift, RowsView scale, RowsView y);
    // d_x, and per row d_scale; d_shift is grad itself.
    void (*adaln_backward)(RowShape, float eps, RowsView grad, RowsView x, RowsView scale, RowsView d_x, RowsView d_scale);
    // y, and its derivatives d_y along the tangents d_x, both [tangents * R, H]. In the passes with tangents, what enters
    // or leaves a product may be stored as bfloat16, as `half` says: here y and d_y.
    void (*adaln_jvp)(RowShape, float eps, std::int64_t tangents, RowsView x, RowsView d_x, RowsView shift, RowsView scale,
                      RowsView y, RowsView d_y, bool half);
    // y = silu(gate) value
    void (*swiglu)(RowShape, RowsView gate, RowsView value, RowsView y);
    void (*swiglu_backward)(RowShape, RowsView grad, RowsView gate, RowsView value, RowsView d_gate, RowsView d_value);
    // half: all of them.
    void (*swiglu_jvp)(RowShape, std::int64_t tangents, RowsView gate, RowsView d_gate, RowsView value, RowsView d_value,
                       RowsView y, RowsView d_y, bool half);
    // y = residual + layer_scale sigmoid(gate) value keep factor; gate and keep may be null.
    void (*gate_residual)(RowShape, float factor, RowsView residual, RowsView gate, RowsView value, RowsView layer_scale,
                          const std::uint8_t* keep, RowsView y);
    // d_gate (null without gate), d_value, and partial sums of d_layer_scale: per group ceil(rows_per_group / 64) rows.
    void (*gate_residual_backward)(RowShape, float factor, RowsView grad, RowsView gate, RowsView value,
                                   RowsView layer_scale, const std::uint8_t* keep, RowsView d_gate, RowsView d_value,
                                   RowsView partial);
    // half: gate, value and their tangents.
    void (*gate_residual_jvp)(RowShape, std::int64_t tangents, RowsView residual, RowsView d_residual, RowsView gate,
                              RowsView d_gate, RowsView value, RowsView d_value, RowsView layer_scale, RowsView y,
                              RowsView d_y, bool half);
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
