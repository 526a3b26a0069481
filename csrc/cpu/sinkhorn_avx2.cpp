// The CPU transport solver for processors with AVX2, FMA and F16C.
#include "cpu/sinkhorn_passes.h"

namespace geoflow {

const CpuSolver& cpu_solver_avx2() { return kCpuSolver; }

}  // namespace geoflow
