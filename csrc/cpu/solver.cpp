// The steps of the solvers for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/solver_rows.h"

namespace geoflow {

const SolverKernels& solver_kernels() { return fastest(kSolverKernels, solver_kernels_avx2()); }

}  // namespace geoflow
