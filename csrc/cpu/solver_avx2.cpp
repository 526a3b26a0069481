// The steps of the solvers for processors with AVX2, FMA and F16C.
#include "cpu/solver_rows.h"

namespace geoflow {

const SolverKernels& solver_kernels_avx2() { return kSolverKernels; }

}  // namespace geoflow
