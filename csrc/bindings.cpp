// The only pybind11 file: addresses and sizes in, small values out. The caller has checked every tensor (_native.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/cpu_features.h"
#include "cpu/sinkhorn_cpu.h"
#include "gallery.h"
#include "interpolant.h"
#include "network.h"
#if defined(GEOFLOW_WITH_CUDA)
#include "cuda/runtime.h"
#include "cuda/sinkhorn_cuda.h"
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

// Asked between pieces of a long call by the Python thread that made it; false when the user pressed Ctrl-C. The exception that the
// signal raised is then pending, and `raise_if_interrupted` hands it over.
bool keep_going() {
    py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() == 0;
}

void raise_if_interrupted(bool interrupted) {
    if (interrupted) throw py::error_already_set();
}

// Runs what returns false when interrupted.
template <class Run>
void without_gil(const Run& run) {
    bool done;
    {
        py::gil_scoped_release release;
        done = run();
    }
    raise_if_interrupted(!done);
}

// addresses: noise, data, signs, scale; 0 for what the factor does not have.
geoflow::Factor factor(const std::array<Address, 4>& addresses, std::int64_t dim, std::int64_t order, float weight) {
    return {at<const float>(addresses[0]), at<const float>(addresses[1]), dim, weight, at<const float>(addresses[2]),
            at<const float>(addresses[3]), order};
}

void bind_transport(py::module_& m) {
    using geoflow::OtMatrix;
    py::class_<OtMatrix>(m, "OtMatrix")
        .def(py::init([](Address data, std::int64_t rows, std::int64_t cols, bool half) {
            return OtMatrix{at<void>(data), rows, cols, half, geoflow::Domain::score, 0.0, 1.0};
        }))
        .def_property(
            "kernel", [](const OtMatrix& self) { return self.domain == geoflow::Domain::kernel; },
            [](OtMatrix& self, bool kernel) { self.domain = kernel ? geoflow::Domain::kernel : geoflow::Domain::score; })
        .def_readwrite("centre", &OtMatrix::centre)
        .def_readwrite("eps", &OtMatrix::eps);
    py::class_<geoflow::Factor>(m, "OtFactor").def(py::init(&factor));
    m.attr("OT_LEADING") = geoflow::kLeading;
    m.def("ot_build", [](const OtMatrix& matrix, const geoflow::Factor& image, const geoflow::Factor& text, bool arc, int threads) {
        geoflow::Range range{};
        const geoflow::Cost cost = arc ? geoflow::Cost::arc : geoflow::Cost::chord;
        without_gil([&] { return geoflow::cpu_solver().build(matrix, image, text, cost, threads, keep_going, &range); });
        return std::array<float, 2>{range.low, range.high};
    });
    m.def("ot_import", [](const OtMatrix& matrix, Address cost, float offset, int threads) {
        py::gil_scoped_release release;
        const geoflow::Range range = geoflow::cpu_solver().import_cost(matrix, at<const float>(cost), offset, threads);
        return std::array<float, 2>{range.low, range.high};
    });
    m.def("ot_change_domain", [](const OtMatrix& matrix, int threads) {
        py::gil_scoped_release release;
        const auto& solver = geoflow::cpu_solver();
        (matrix.domain == geoflow::Domain::kernel ? solver.leave_kernel : solver.enter_kernel)(matrix, threads);
    });
    m.def("ot_iterate", [](const OtMatrix& matrix, double eps, double tol, std::int64_t max_iter, Address f, Address g, int threads) {
        geoflow::IterationReport report{};
        {
            py::gil_scoped_release release;
            report = geoflow::cpu_solver().iterate(matrix, eps, tol, max_iter, at<double>(f), at<double>(g), threads, keep_going);
        }
        raise_if_interrupted(report.outcome == geoflow::Outcome::interrupted);
        return py::make_tuple(static_cast<int>(report.outcome), report.iterations, report.error);
    });
    m.def("ot_panel_pass", [](const OtMatrix& matrix, double eps, std::int64_t total_rows, Address f, Address g, Address s, int threads) {
        py::gil_scoped_release release;
        return geoflow::cpu_solver().panel_pass(matrix, eps, total_rows, at<double>(f), at<const double>(g), at<double>(s), threads);
    });
    m.def("ot_read_out", [](const OtMatrix& matrix, double eps, Address f, Address g, Address uniform, Address index, int threads) {
        py::gil_scoped_release release;
        return geoflow::cpu_solver().read_out(matrix, eps, at<const double>(f), at<const double>(g), at<const double>(uniform),
                                              at<std::int64_t>(index), threads);
    });
}

// addresses: samples, gallery, pick (or 0), bias (or 0); sizes: queries, draws, items, dim.
geoflow::GalleryParams gallery_params(const std::array<Address, 4>& addresses, const std::array<std::int64_t, 4>& sizes, float kappa,
                                      int threads) {
    geoflow::GalleryParams params{};
    params.samples = at<const float>(addresses[0]);
    params.gallery = at<const float>(addresses[1]);
    params.pick = at<const std::int64_t>(addresses[2]);
    params.bias = at<const float>(addresses[3]);
    params.queries = sizes[0];
    params.draws = sizes[1];
    params.items = sizes[2];
    params.dim = sizes[3];
    params.kappa = kappa;
    params.threads = threads;
    params.keep_going = keep_going;
    return params;
}

// outputs: peak, weight, moment, top_score, top_index.
void gallery_posterior(const std::array<Address, 4>& inputs, const std::array<std::int64_t, 4>& sizes, float kappa, std::int64_t top_k,
                       const std::array<Address, 5>& outputs, int threads) {
    const geoflow::GalleryParams params = gallery_params(inputs, sizes, kappa, threads);
    const geoflow::GalleryStatistics result{top_k,
                                            at<double>(outputs[0]),
                                            at<double>(outputs[1]),
                                            at<double>(outputs[2]),
                                            at<double>(outputs[3]),
                                            at<std::int64_t>(outputs[4])};
    without_gil([&] { return geoflow::gallery_posterior(params, result); });
}

void gallery_scores(const std::array<Address, 4>& inputs, const std::array<std::int64_t, 4>& sizes, float kappa, Address scores,
                    int threads) {
    const geoflow::GalleryParams params = gallery_params(inputs, sizes, kappa, threads);
    without_gil([&] { return geoflow::gallery_scores(params, at<float>(scores)); });
}

#if defined(GEOFLOW_WITH_CUDA)

// A transport problem whose matrix lies on a device.
struct CudaTransport {
    geoflow::SinkhornParams params;
    geoflow::CudaMatrix matrix;
    int halvings;
};

void bind_cuda_transport(py::module_& m) {
    using Self = CudaTransport;
    const auto release = py::call_guard<py::gil_scoped_release>();
    py::class_<Self>(m, "CudaTransport")
        .def(py::init([](std::int64_t rows, std::int64_t cols, Address matrix, std::int64_t stride) {
            Self self{};
            self.params.rows = rows;
            self.params.cols = cols;
            self.matrix = {at<float>(matrix), stride, 0.0f};
            return self;
        }))
        .def("use_given_costs",
             [](Self& self, float middle) {
                 self.params.cost = geoflow::Cost::given;
                 self.matrix.offset = middle;
             })
        .def("set_limits",
             [](Self& self, float eps, float tol, std::int32_t max_iter, int halvings) {
                 self.params.eps = eps;
                 self.params.tol = tol;
                 self.params.max_iter = max_iter;
                 self.halvings = halvings;
             })
        .def(
            "build",  // clouds: image0, text0, image1, text1; returns the offset
            [](Self& self, const std::array<Address, 4>& clouds, const std::array<std::int64_t, 2>& widths,
               const std::array<float, 2>& weights, bool arc, bool precise, int device, Address stream) {
                self.params.cost = arc ? geoflow::Cost::arc : geoflow::Cost::chord;
                self.params.image_dim = widths[0];
                self.params.text_dim = widths[1];
                self.params.image_weight = weights[0];
                self.params.text_weight = weights[1];
                self.matrix.offset = geoflow::cost_offset(self.params);
                geoflow::sinkhorn_cuda_scores(self.params,
                                              {at<const float>(clouds[0]), at<const float>(clouds[1]), at<const float>(clouds[2]),
                                               at<const float>(clouds[3])},
                                              self.matrix, precise, {device, stream});
                return self.matrix.offset;
            },
            release)
        .def(
            "workspace_bytes",
            [](const Self& self, int device) { return geoflow::sinkhorn_cuda_workspace(self.params, self.matrix, device); }, release)
        .def(
            "solve",
            [](const Self& self, Address workspace, Address status, int device, Address stream) {
                geoflow::sinkhorn_cuda_solve(self.params, self.matrix, self.halvings, at<void>(workspace),
                                             at<geoflow::SinkhornStatus>(status), {device, stream});
            },
            release)
        .def(
            "result",  // outputs: index, f, g, row_mass, row_cost
            [](const Self& self, Address workspace, const std::array<Address, 5>& outputs, int device, Address stream) {
                geoflow::sinkhorn_cuda_result(self.params, self.matrix, at<void>(workspace),
                                              {at<std::int64_t>(outputs[0]), at<double>(outputs[1]), at<double>(outputs[2]),
                                               at<float>(outputs[3]), at<float>(outputs[4])},
                                              {device, stream});
            },
            release)
        .def(
            "sample",
            [](const Self& self, Address workspace, Address row_mass, Address uniform, Address index, int device, Address stream) {
                geoflow::sinkhorn_cuda_sample(self.params, self.matrix, at<void>(workspace), at<const float>(row_mass),
                                              at<const double>(uniform), at<std::int64_t>(index), {device, stream});
            },
            release);
}

#endif

// (address, stride) of rows; a null address stands for a part that is left out.
using View = std::array<std::int64_t, 2>;

geoflow::RowsView rows_of(const View& view) { return {at<float>(static_cast<Address>(view[0])), view[1]}; }

// (rows, width, rows per group, threads)
geoflow::RowShape shape_of(const std::array<std::int64_t, 4>& shape) {
    return {shape[0], shape[1], shape[2], static_cast<int>(shape[3])};
}

void bind_network(py::module_& m) {
    using Shape = std::array<std::int64_t, 4>;
    const geoflow::NetworkKernels& run = geoflow::network_kernels();
    const auto free = py::call_guard<py::gil_scoped_release>();
    m.def(
        "adaln",
        [run](const Shape& shape, float eps, const View& x, const View& shift, const View& scale, const View& y) {
            run.adaln(shape_of(shape), eps, rows_of(x), rows_of(shift), rows_of(scale), rows_of(y));
        },
        free);
    m.def(
        "adaln_backward",
        [run](const Shape& shape, float eps, const View& grad, const View& x, const View& scale, const View& d_x,
              const View& d_scale) {
            run.adaln_backward(shape_of(shape), eps, rows_of(grad), rows_of(x), rows_of(scale), rows_of(d_x),
                               rows_of(d_scale));
        },
        free);
    m.def(
        "adaln_jvp",
        [run](const Shape& shape, float eps, std::int64_t tangents, const View& x, const View& d_x, const View& shift,
              const View& scale, const View& y, const View& d_y) {
            run.adaln_jvp(shape_of(shape), eps, tangents, rows_of(x), rows_of(d_x), rows_of(shift), rows_of(scale),
                          rows_of(y), rows_of(d_y));
        },
        free);
    m.def(
        "swiglu",
        [run](const Shape& shape, const View& gate, const View& value, const View& y) {
            run.swiglu(shape_of(shape), rows_of(gate), rows_of(value), rows_of(y));
        },
        free);
    m.def(
        "swiglu_backward",
        [run](const Shape& shape, const View& grad, const View& gate, const View& value, const View& d_gate,
              const View& d_value) {
            run.swiglu_backward(shape_of(shape), rows_of(grad), rows_of(gate), rows_of(value), rows_of(d_gate),
                                rows_of(d_value));
        },
        free);
    m.def(
        "swiglu_jvp",
        [run](const Shape& shape, std::int64_t tangents, const View& gate, const View& d_gate, const View& value,
              const View& d_value, const View& y, const View& d_y) {
            run.swiglu_jvp(shape_of(shape), tangents, rows_of(gate), rows_of(d_gate), rows_of(value), rows_of(d_value),
                           rows_of(y), rows_of(d_y));
        },
        free);
    m.def(
        "flow_loss",
        [run](const Shape& shape, Address generated, const View& v, const View& target, const View& x, const View& loss) {
            run.flow_loss(shape_of(shape), at<const std::uint8_t>(generated), rows_of(v), rows_of(target), rows_of(x),
                          rows_of(loss));
        },
        free);
    m.def(
        "flow_loss_backward",
        [run](const Shape& shape, Address generated, const View& grad, const View& v, const View& target, const View& x,
              const View& d_v) {
            run.flow_loss_backward(shape_of(shape), at<const std::uint8_t>(generated), rows_of(grad), rows_of(v),
                                   rows_of(target), rows_of(x), rows_of(d_v));
        },
        free);
    m.def(
        "gate_residual",
        [run](const Shape& shape, float factor, const View& residual, const View& gate, const View& value,
              const View& layer_scale, Address keep, const View& y) {
            run.gate_residual(shape_of(shape), factor, rows_of(residual), rows_of(gate), rows_of(value),
                              rows_of(layer_scale), at<const std::uint8_t>(keep), rows_of(y));
        },
        free);
    m.def(
        "gate_residual_backward",
        [run](const Shape& shape, float factor, const View& grad, const View& gate, const View& value,
              const View& layer_scale, Address keep, const View& d_gate, const View& d_value, const View& partial) {
            run.gate_residual_backward(shape_of(shape), factor, rows_of(grad), rows_of(gate), rows_of(value),
                                       rows_of(layer_scale), at<const std::uint8_t>(keep), rows_of(d_gate),
                                       rows_of(d_value), rows_of(partial));
        },
        free);
    m.def(
        "gate_residual_jvp",
        [run](const Shape& shape, std::int64_t tangents, const View& residual, const View& d_residual, const View& gate,
              const View& d_gate, const View& value, const View& d_value, const View& layer_scale, const View& y,
              const View& d_y) {
            run.gate_residual_jvp(shape_of(shape), tangents, rows_of(residual), rows_of(d_residual), rows_of(gate),
                                  rows_of(d_gate), rows_of(value), rows_of(d_value), rows_of(layer_scale), rows_of(y),
                                  rows_of(d_y));
        },
        free);
    m.def(
        "keep_mask",
        [run](std::int64_t count, double share, std::uint32_t seed, Address keep, int threads) {
            run.keep_mask(count, share, seed, at<std::uint8_t>(keep), threads);
        },
        free);
    m.attr("reduction_rows") = geoflow::kReductionRows;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of geoflow_fast; use geoflow_fast.ops, which checks what it passes here.";
    m.def("cuda_status", &cuda_status);
    m.def("cpu_features", &cpu_features);
    bind_network(m);
    m.def(
        "masked_interpolant",
        [](bool is_double, const std::array<Address, 8>& addresses, const std::array<std::int64_t, 2>& widths,
           std::int64_t rows, Address t, Address direction, Address drop, double tolerance, int threads) {
            py::gil_scoped_release release;
            const auto run = is_double ? masked_interpolant<double> : masked_interpolant<float>;
            return run(addresses, widths, rows, t, direction, drop, tolerance, threads);
        });
    bind_transport(m);
    m.def("gallery_posterior", &gallery_posterior);
    m.def("gallery_scores", &gallery_scores);
#if defined(GEOFLOW_WITH_CUDA)
    bind_cuda_transport(m);
#endif
}
