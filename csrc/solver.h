// The steps of the solvers on unit rows, float32: guidance, tangent projection and the move in one pass.
#pragma once
#include "cpu/cpu_features.h"
#include "rows.h"

namespace geoflow {

// g = v + guidance (v - v_free), or v where v_free is null, is a velocity; P_a g is its part tangent at the unit row a.
struct SolverKernels {
    // y: where the geodesic that leaves x with velocity P_x g is after the time h; or, if `renormalise`, x + h P_x g
    // scaled to unit norm.
    void (*tangent_step)(RowShape, double h, double guidance, bool renormalise, RowsView x, RowsView v, RowsView v_free,
                         RowsView y);
    // y: x + h P_at g scaled to unit norm, and new_total = total + weight P_at g; the totals may both be null.
    void (*tangent_stage)(RowShape, double h, double guidance, double weight, RowsView x, RowsView at, RowsView v,
                          RowsView v_free, RowsView total, RowsView y, RowsView new_total);
    // With u = P_x g and carried, tangent at x or null: y ends the geodesic that leaves x with velocity
    // u + share (u - carried), after the time h, and new_carried is u transported along it.
    void (*tangent_ab2)(RowShape, double h, double guidance, double share, RowsView x, RowsView v, RowsView v_free,
                        RowsView carried, RowsView y, RowsView new_carried);
};

// The kernels for this processor.
GEOFLOW_DECLARE_KERNELS(SolverKernels, solver_kernels)

}  // namespace geoflow
