// The network's row kernels for any processor, and the choice of the variant.
#include "cpu/cpu_features.h"
#include "cpu/network_rows.h"

namespace geoflow {

const NetworkKernels& network_kernels() { return fastest(kNetworkKernels, network_kernels_avx2()); }

}  // namespace geoflow
