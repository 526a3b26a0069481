// The network's row kernels for processors with AVX2, FMA and F16C.
#include "cpu/network_rows.h"

namespace geoflow {

const NetworkKernels& network_kernels_avx2() { return kNetworkKernels; }

}  // namespace geoflow
