// Only to be called where has_avx2_fma() is true.
#pragma once
#include "network.h"

namespace geoflow {

const NetworkKernels& network_kernels_avx2();

}  // namespace geoflow
