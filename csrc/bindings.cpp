// The only pybind11 file: addresses and sizes in, small values out. The caller has checked every tensor (_native.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/cpu_features.h"
#include "interpolant.h"
#if defined(GEOFLOW_WITH_CUDA)
#include "cuda/runtime.h"
#endif

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

std::string cuda_status() {
#if defined(GEOFLOW_WITH_CUDA)
    return geoflow::cuda_status();
#else
    return "this build has no CUDA code; reinstall with nvcc on PATH";
#endif
}

std::vector<std::string> cpu_features() {
    if (!geoflow::has_avx2_fma()) return {};
    return {"avx2", "fma", "f16c"};
}

// addresses: noise, data, point, velocity of the image stream, then of the text stream.
template <typename T>
std::int64_t masked_interpolant(const std::array<Address, 8>& addresses, const std::array<std::int64_t, 2>& widths,
                                std::int64_t rows, Address t, Address direction, Address drop, double tolerance,
                                int threads) {
    geoflow::InterpolantParams<T> params{};
    for (int k = 0; k < 2; ++k) {
        const Address* base = addresses.data() + 4 * k;
        params.stream[k] = {at<const T>(base[0]), at<const T>(base[1]), at<T>(base[2]), at<T>(base[3]), widths[k],
                            k == 0 ? geoflow::kImageToText : geoflow::kTextToImage};
    }
    params.t = at<const T>(t);
    params.direction = at<const std::int8_t>(direction);
    params.drop = at<const bool>(drop);
    params.rows = rows;
    params.tolerance = tolerance;
    params.threads = threads;
    return geoflow::masked_interpolant(params);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of geoflow_fast; use geoflow_fast.ops, which checks what it passes here.";
    m.def("cuda_status", &cuda_status);
    m.def("cpu_features", &cpu_features);
    m.def(
        "masked_interpolant",
        [](bool is_double, const std::array<Address, 8>& addresses, const std::array<std::int64_t, 2>& widths,
           std::int64_t rows, Address t, Address direction, Address drop, double tolerance, int threads) {
            py::gil_scoped_release release;
            const auto run = is_double ? masked_interpolant<double> : masked_interpolant<float>;
            return run(addresses, widths, rows, t, direction, drop, tolerance, threads);
        });
}
