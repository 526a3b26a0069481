// The row kernels of the network, compiled once for every target.
#include "cpu/network_rows.h"

namespace geoflow {

const NetworkKernels& GEOFLOW_KERNELS(network_kernels)() { return kNetworkKernels; }

}  // namespace geoflow
