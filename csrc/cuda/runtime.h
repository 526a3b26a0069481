// Whether the CUDA part of the extension can run here.
#pragma once
#include <string>

namespace geoflow {

// Empty when a CUDA device answers; otherwise the reason why none does.
std::string cuda_status();

}  // namespace geoflow
