// The network's row kernels for any processor, and the choice of the variant.
#include "network.h"

#include "cpu/cpu_features.h"
#include "cpu/network_rows.h"
#if defined(__x86_64__)
#include "cpu/network_avx2.h"
#endif

namespace geoflow {

const NetworkKernels& network_kernels() {
#if defined(__x86_64__)
    if (has_avx2_fma()) return network_kernels_avx2();
#endif
    return kNetworkKernels;
}

}  // namespace geoflow
