// The network's row kernels for processors with AVX2 and FMA.
#if defined(__AVX2__)
#include "cpu/network_avx2.h"
#include "cpu/network_rows.h"

namespace geoflow {

const NetworkKernels& network_kernels_avx2() { return kNetworkKernels; }

}  // namespace geoflow
#endif
