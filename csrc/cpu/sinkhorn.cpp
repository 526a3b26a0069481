// The CPU transport solver for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/sinkhorn_passes.h"

namespace geoflow {

const CpuSolver& cpu_solver() { return fastest(kCpuSolver, cpu_solver_avx2()); }

}  // namespace geoflow
