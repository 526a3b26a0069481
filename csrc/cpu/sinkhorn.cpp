// The transport solver, compiled once for every target.
#include "cpu/sinkhorn_passes.h"

namespace geoflow {

const CpuSolver& GEOFLOW_KERNELS(cpu_solver)() { return kCpuSolver; }

}  // namespace geoflow
