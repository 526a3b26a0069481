// The CPU transport solver for processors with AVX2, FMA and F16C.
#if defined(__AVX2__)
#include "cpu/sinkhorn_passes.h"

namespace geoflow {

const CpuSolver& cpu_solver_avx2() { return kSolver; }

}  // namespace geoflow
#endif
