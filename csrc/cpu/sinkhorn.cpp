// The CPU transport solver for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/sinkhorn_passes.h"

namespace geoflow {

const CpuSolver& cpu_solver() {
#if defined(__x86_64__)
    if (has_avx2_fma()) return cpu_solver_avx2();
#endif
    return kSolver;
}

}  // namespace geoflow
