// Exact search, compiled once for every target.
#include "cpu/search_rows.h"

namespace geoflow {

const SearchKernels& GEOFLOW_KERNELS(search_kernels)() { return kSearchKernels; }

}  // namespace geoflow
