// The steps of the solvers, compiled once for every target.
#include "cpu/solver_rows.h"

namespace geoflow {

const SolverKernels& GEOFLOW_KERNELS(solver_kernels)() { return kSolverKernels; }

}  // namespace geoflow
