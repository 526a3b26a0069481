// What Python calls. Functions of tensors check them (tensor.h) and return new ones; those that take addresses rely on their caller,
// geoflow_fast/ops/native.py, and an address of 0 stands for a part that is left out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/cpu_features.h"
#include "cpu/sinkhorn_cpu.h"
#include "gallery.h"
#include "interpolant.h"
#include "network.h"
#include "noise.h"
#include "search.h"
#include "solver.h"
#include "tensor.h"
#if defined(GEOFLOW_WITH_CUDA)
#include "cuda/runtime.h"
#include "cuda/sinkhorn_cuda.h"
#endif

namespace py = pybind11;
using namespace pybind11::literals;  // "name"_a names an argument

namespace pybind11::detail {

// Rows cross as (address, row stride), or as None where they are left out.
template <>
struct type_caster<geoflow::RowsView> {
    PYBIND11_TYPE_CASTER(geoflow::RowsView, const_name("tuple[int, int] | None"));

    bool load(handle from, bool) {
        value = {nullptr, 0};
        if (from.is_none()) return true;
        if (!PyTuple_Check(from.ptr()) || PyTuple_GET_SIZE(from.ptr()) != 2) return false;
        value.data = static_cast<float*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(from.ptr(), 0)));
        value.stride = PyLong_AsLongLong(PyTuple_GET_ITEM(from.ptr(), 1));
        if (PyErr_Occurred() == nullptr) return true;
        PyErr_Clear();  // pybind11 raises the TypeError
        return false;
    }
};

// A shape crosses as (rows, width, rows per group, threads).
template <>
struct type_caster<geoflow::RowShape> {
    PYBIND11_TYPE_CASTER(geoflow::RowShape, const_name("tuple[int, int, int, int]"));

    bool load(handle from, bool) {
        if (!PyTuple_Check(from.ptr()) || PyTuple_GET_SIZE(from.ptr()) != 4) return false;
        std::int64_t sizes[4];
        for (int k = 0; k < 4; ++k) sizes[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(from.ptr(), k));
        value = {sizes[0], sizes[1], sizes[2], static_cast<int>(sizes[3])};
        if (PyErr_Occurred() == nullptr) return true;
        PyErr_Clear();
        return false;
    }
};

}  // namespace pybind11::detail

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

using geoflow::check_shape;
using geoflow::compute;
using geoflow::Result;
using geoflow::result_like;
using geoflow::Rows;
using geoflow::rows;
using geoflow::RowShape;
using geoflow::Tensor;
using geoflow::threads_for;

// The shape of work on the rows `x`, for which each row of `group` serves as many consecutive ones.
RowShape shape_of(const Rows<const float>& x, const Rows<const float>& group, const char* name) {
    const std::string width = std::to_string(x.width), groups = std::to_string(group.count), count = std::to_string(x.count);
    if (group.width != x.width)
        throw py::value_error(std::string(name) + " has width " + std::to_string(group.width) + ", but the rows have width " + width);
    if (group.count ? x.count % group.count : x.count)
        throw py::value_error(std::string(name) + " has " + groups + " rows, which do not divide the " + count + " they apply to");
    return {x.count, x.width, group.count ? x.count / group.count : 1, threads_for(x.count * x.width)};
}

std::string cuda_status() {
#if defined(GEOFLOW_WITH_CUDA)
    return geoflow::cuda_status();
#else
    return "this build has no CUDA code, since " GEOFLOW_WITHOUT_CUDA "; reinstall with GEOFLOW_CUDA=1 and nvcc 12.8 or newer on PATH";
#endif
}

// The OpenMP standard that the kernels were built for, such as 201511; 0 for kernels of one thread.
int openmp() {
#if defined(_OPENMP)
    return _OPENMP;
#else
    return 0;
#endif
}

struct StreamAddresses {
    Address noise, data, point, velocity;
    std::int64_t width;
};

template <typename T>
std::int64_t masked_interpolant(const StreamAddresses (&streams)[2], std::int64_t rows, Address t, Address direction, Address drop,
                                double tolerance, int threads) {
    geoflow::InterpolantParams<T> params{};
    for (int k = 0; k < 2; ++k) {
        const StreamAddresses& from = streams[k];
        params.stream[k] = {at<const T>(from.noise), at<const T>(from.data), at<T>(from.point), at<T>(from.velocity), from.width,
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

void bind_interpolant(py::module_& m) {
    m.def(
        "masked_interpolant",
        [](bool is_double, Address image0, Address image1, Address image_t, Address v_image, std::int64_t image_width, Address text0,
           Address text1, Address text_t, Address v_text, std::int64_t text_width, std::int64_t rows, Address t, Address direction,
           Address drop, double tolerance, int threads) {
            const StreamAddresses streams[2] = {{image0, image1, image_t, v_image, image_width},
                                                {text0, text1, text_t, v_text, text_width}};
            const auto run = is_double ? masked_interpolant<double> : masked_interpolant<float>;
            return run(streams, rows, t, direction, drop, tolerance, threads);
        },
        py::call_guard<py::gil_scoped_release>(), py::kw_only(), "is_double"_a, "image0"_a, "image1"_a, "image_t"_a, "v_image"_a,
        "image_width"_a, "text0"_a, "text1"_a, "text_t"_a, "v_text"_a, "text_width"_a, "rows"_a, "t"_a, "direction"_a, "drop"_a,
        "tolerance"_a, "threads"_a);
}

void bind_noise(py::module_& m) {
    m.def(
        "counter_noise",
        [](Address numbers, std::int64_t rows, std::int64_t width, std::uint64_t seed, std::uint32_t step, std::uint32_t stream, bool unit,
           Address out, int threads) {
            geoflow::noise_kernels().counter_noise(
                {at<const std::int64_t>(numbers), at<float>(out), rows, width, seed, step, stream, unit, threads});
        },
        py::call_guard<py::gil_scoped_release>(), "numbers"_a, "rows"_a, "width"_a, "seed"_a, "step"_a, "stream"_a, "unit"_a, "out"_a,
        "threads"_a);
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
    py::class_<geoflow::Factor>(m, "OtFactor")
        .def(py::init([](Address noise, Address data, std::int64_t dim, float weight) {
                 return geoflow::Factor{at<const float>(noise), at<const float>(data), dim, weight};
             }),
             py::kw_only(), "noise"_a, "data"_a, "dim"_a, "weight"_a);
    m.attr("OT_LEADING") = geoflow::kLeading;
    m.def("ot_build", [](const OtMatrix& matrix, const geoflow::Factor& image, const geoflow::Factor& text, bool arc, bool bfloat16,
                         int threads) {
        geoflow::Range range{};
        const geoflow::Cost cost = arc ? geoflow::Cost::arc : geoflow::Cost::chord;
        auto build = geoflow::cpu_solver().build;
#if defined(__x86_64__)
        if (bfloat16 && !geoflow::has_avx512_bf16()) throw py::value_error("this processor has no bfloat16 unit");
        if (bfloat16) build = geoflow::build_bfloat16;
#endif
        without_gil([&] { return build(matrix, image, text, cost, threads, keep_going, &range); });
        return std::array<float, 2>{range.low, range.high};
    }, "matrix"_a, "image"_a, "text"_a, "arc"_a, "bfloat16"_a, "threads"_a);
#if defined(__x86_64__)
    m.def("ot_resolve", [](const OtMatrix& matrix, const geoflow::Factor& image, const geoflow::Factor& text, bool arc, double eps, Address g,
                           double margin, Address index, int threads) {
        if (!geoflow::has_avx512_bf16()) throw py::value_error("this processor has no bfloat16 unit");
        py::gil_scoped_release release;
        const geoflow::Cost cost = arc ? geoflow::Cost::arc : geoflow::Cost::chord;
        geoflow::resolve_near_ties(matrix, image, text, cost, eps, at<const double>(g), margin, at<std::int64_t>(index), threads);
    }, "matrix"_a, "image"_a, "text"_a, "arc"_a, "eps"_a, "g"_a, "margin"_a, "index"_a, "threads"_a);
#endif
    m.def("ot_import", [](const OtMatrix& matrix, Address cost, float offset, int threads) {
        py::gil_scoped_release release;
        const geoflow::Range range = geoflow::cpu_solver().import_cost(matrix, at<const float>(cost), offset, threads);
        return std::array<float, 2>{range.low, range.high};
    }, "matrix"_a, "cost"_a, "offset"_a, "threads"_a);
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
    }, "matrix"_a, "eps"_a, "tol"_a, "max_iter"_a, "f"_a, "g"_a, "threads"_a);
    m.def("ot_panel_pass", [](const OtMatrix& matrix, double eps, std::int64_t total_rows, Address f, Address g, Address s, int threads) {
        py::gil_scoped_release release;
        return geoflow::cpu_solver().panel_pass(matrix, eps, total_rows, at<double>(f), at<const double>(g), at<double>(s), threads);
    }, "matrix"_a, "eps"_a, "total_rows"_a, "f"_a, "g"_a, "s"_a, "threads"_a);
    m.def("ot_read_out", [](const OtMatrix& matrix, double eps, Address f, Address g, Address uniform, Address index, int threads) {
        py::gil_scoped_release release;
        return geoflow::cpu_solver().read_out(matrix, eps, at<const double>(f), at<const double>(g), at<const double>(uniform),
                                              at<std::int64_t>(index), threads);
    }, "matrix"_a, "eps"_a, "f"_a, "g"_a, "uniform"_a, "index"_a, "threads"_a);
}

// Samples [queries, draws, dim] and items [items, dim]; sample_bias and bias may be left out.
struct GalleryInputs {
    Address samples, sample_bias, gallery, bias;
    std::int64_t queries, draws, items, dim;
    float kappa;
    int threads, storage;
    bool bfloat16;

    geoflow::GalleryParams params() const {
        return {at<const float>(samples), at<const float>(sample_bias), at<const void>(gallery), at<const float>(bias), queries, draws,
                items, dim, kappa, threads, keep_going, static_cast<geoflow::Storage>(storage), bfloat16};
    }
};

void bind_gallery(py::module_& m) {
    py::class_<GalleryInputs>(m, "GalleryInputs")
        .def(py::init([](Address samples, Address sample_bias, Address gallery, Address bias, std::int64_t queries, std::int64_t draws,
                         std::int64_t items, std::int64_t dim, float kappa, int threads, int storage, bool bfloat16) {
                 if (bfloat16 && !geoflow::has_avx512_bf16()) throw py::value_error("this processor has no bfloat16 unit");
                 return GalleryInputs{samples, sample_bias, gallery, bias, queries, draws, items, dim, kappa, threads, storage, bfloat16};
             }),
             py::kw_only(), "samples"_a, "sample_bias"_a, "gallery"_a, "bias"_a, "queries"_a, "draws"_a, "items"_a, "dim"_a, "kappa"_a,
             "threads"_a, "storage"_a, "bfloat16"_a);
    m.def(
        "gallery_posterior",
        [](const GalleryInputs& inputs, std::int64_t top_k, Address peak, Address weight, Address moment, Address top_score,
           Address top_index) {
            const geoflow::GalleryStatistics result{top_k,
                                                    at<double>(peak),
                                                    at<double>(weight),
                                                    at<double>(moment),
                                                    at<double>(top_score),
                                                    at<std::int64_t>(top_index)};
            without_gil([&] { return geoflow::gallery_posterior(inputs.params(), result); });
        },
        "inputs"_a, py::kw_only(), "top_k"_a, "peak"_a, "weight"_a, "moment"_a, "top_score"_a, "top_index"_a);
    m.def(
        "gallery_scores",
        [](const GalleryInputs& inputs, Address scores) {
            without_gil([&] { return geoflow::gallery_scores(inputs.params(), at<float>(scores)); });
        },
        "inputs"_a, py::kw_only(), "scores"_a);
}

// Queries [count, dim] and the rows of a gallery [items, dim].
struct SearchInputs {
    Address queries, gallery;
    int storage;
    std::int64_t count, items, dim, top_k;
    int threads;

    geoflow::SearchParams params() const {
        return {at<const float>(queries), at<const void>(gallery), static_cast<geoflow::Storage>(storage), count, items, dim, top_k, threads,
                keep_going};
    }
};

// Codes of the gallery's rows, and where the number of items that were scored goes.
struct CodeInputs {
    Address code, scale, error, kept;
    float largest_norm;
    std::int64_t most_kept;

    geoflow::RowCodes rows() const { return {at<std::uint8_t>(code), at<float>(scale), at<float>(error)}; }
    geoflow::CodeParams params() const {
        if (!geoflow::has_avx512_vnni()) throw py::value_error("this processor has no int8 unit");
        return {rows(), largest_norm, most_kept, at<std::int64_t>(kept)};
    }
};

void bind_search(py::module_& m) {
    py::class_<SearchInputs>(m, "SearchInputs")
        .def(py::init([](Address queries, Address gallery, int storage, std::int64_t count, std::int64_t items, std::int64_t dim,
                         std::int64_t top_k, int threads) {
                 return SearchInputs{queries, gallery, storage, count, items, dim, top_k, threads};
             }),
             py::kw_only(), "queries"_a, "gallery"_a, "storage"_a, "count"_a, "items"_a, "dim"_a, "top_k"_a, "threads"_a);
    py::class_<CodeInputs>(m, "CodeInputs")
        .def(py::init([](Address code, Address scale, Address error, Address kept, float largest_norm, std::int64_t most_kept) {
                 return CodeInputs{code, scale, error, kept, largest_norm, most_kept};
             }),
             py::kw_only(), "code"_a, "scale"_a, "error"_a, "kept"_a, "largest_norm"_a, "most_kept"_a);
    m.def("code_stride", &geoflow::code_stride);
    m.def("gallery_search", [](const SearchInputs& inputs, Address score, Address index) {
        const geoflow::SearchResult result{at<float>(score), at<std::int64_t>(index)};
        without_gil([&] { return geoflow::search_kernels().search(inputs.params(), result); });
    }, "inputs"_a, py::kw_only(), "score"_a, "index"_a);
    m.def("encode_rows", [](const SearchInputs& inputs, const CodeInputs& codes) {
        py::gil_scoped_release release;
        return geoflow::search_kernels().encode(inputs.params(), codes.rows());
    });
#if defined(__x86_64__)
    m.def("search_codes", [](const SearchInputs& inputs, const CodeInputs& codes, Address score, Address index) {
        const geoflow::SearchResult result{at<float>(score), at<std::int64_t>(index)};
        const geoflow::CodeParams params = codes.params();
        without_gil([&] { return geoflow::search_codes(inputs.params(), params, result); });
    }, "inputs"_a, "codes"_a, py::kw_only(), "score"_a, "index"_a);
#endif
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
        .def(py::init([](std::int64_t rows, std::int64_t cols, Address matrix, std::int64_t stride, bool half) {
            Self self{};
            self.params.rows = rows;
            self.params.cols = cols;
            self.matrix = {at<void>(matrix), stride, 0.0f, half};
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
            "build",  // returns the offset
            [](Self& self, Address image0, Address text0, Address image1, Address text1, std::int64_t image_dim, std::int64_t text_dim,
               float image_weight, float text_weight, bool arc, bool half, int device, Address stream) {
                self.params.cost = arc ? geoflow::Cost::arc : geoflow::Cost::chord;
                self.params.image_dim = image_dim;
                self.params.text_dim = text_dim;
                self.params.image_weight = image_weight;
                self.params.text_weight = text_weight;
                self.matrix.offset = geoflow::cost_offset(self.params);
                geoflow::sinkhorn_cuda_scores(
                    self.params, {at<const void>(image0), at<const void>(text0), at<const void>(image1), at<const void>(text1), half},
                    self.matrix, {device, stream});
                return self.matrix.offset;
            },
            release, py::kw_only(), "image0"_a, "text0"_a, "image1"_a, "text1"_a, "image_dim"_a, "text_dim"_a, "image_weight"_a,
            "text_weight"_a, "arc"_a, "half"_a, "device"_a, "stream"_a)
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
            "result",
            [](const Self& self, Address workspace, Address index, Address f, Address g, Address row_mass, Address row_cost, int device,
               Address stream) {
                geoflow::sinkhorn_cuda_result(
                    self.params, self.matrix, at<void>(workspace),
                    {at<std::int64_t>(index), at<double>(f), at<double>(g), at<float>(row_mass), at<float>(row_cost)},
                    {device, stream});
            },
            release, py::kw_only(), "workspace"_a, "index"_a, "f"_a, "g"_a, "row_mass"_a, "row_cost"_a, "device"_a, "stream"_a)
        .def(
            "sample",
            [](const Self& self, Address workspace, Address row_mass, Address uniform, Address index, int device, Address stream) {
                geoflow::sinkhorn_cuda_sample(self.params, self.matrix, at<void>(workspace), at<const float>(row_mass),
                                              at<const double>(uniform), at<std::int64_t>(index), {device, stream});
            },
            release, py::kw_only(), "workspace"_a, "row_mass"_a, "uniform"_a, "index"_a, "device"_a, "stream"_a);
}

#endif

// (address of the table, segments, width, eps, by stream, threads)
using SegmentArguments = std::tuple<Address, std::int64_t, std::int64_t, float, bool, int>;

geoflow::SegmentShape segment_shape(const SegmentArguments& given) {
    const auto [lines, count, width, eps, by_stream, threads] = given;
    return {{at<const geoflow::Segment>(lines), count}, width, eps, by_stream, threads};
}

void bind_segments(py::module_& m, const geoflow::NetworkKernels& run) {
    const auto release = py::call_guard<py::gil_scoped_release>();
    m.def(
        "adaln_segments",
        [run](const SegmentArguments& shape, Address x, bool x_half, Address bias, Address shift, Address scale, Address y, bool y_half) {
            run.adaln_segments(segment_shape(shape), at<const void>(x), x_half, at<const float>(bias), at<const float>(shift),
                               at<const float>(scale), at<void>(y), y_half);
        },
        release);
    m.def(
        "gate_adaln_segments",
        [run](const SegmentArguments& shape, std::int64_t heads, Address h, Address branch, Address layer_scale, Address shift,
              Address scale, Address out, Address y, bool half) {
            run.gate_adaln_segments(segment_shape(shape), heads, at<const float>(h), at<const void>(branch), at<const float>(layer_scale),
                                    at<const float>(shift), at<const float>(scale), at<float>(out), at<void>(y), half);
        },
        release);
    m.def(
        "swiglu_segments",
        [run](const SegmentArguments& shape, Address wide, Address inner, bool half) {
            run.swiglu_segments(segment_shape(shape), at<const void>(wide), at<void>(inner), half);
        },
        release);
}

// (1 + scale) LayerNorm(x) + shift; each row of shift and scale serves as many consecutive rows.
Result<float> adaln(const Tensor& x_, const Tensor& shift_, const Tensor& scale_, double eps) {
    const auto x = rows(x_, "x"), shift = rows(shift_, "shift"), scale = rows(scale_, "scale");
    if (!x.width) throw py::value_error("x must have at least one column");
    const RowShape shape = shape_of(x, shift, "shift");
    if (scale.count != shift.count || scale.width != shift.width) throw py::value_error("shift and scale must have one shape and dtype");
    Result<float> y = result_like(x_, "x");
    compute(x.count * x.width, [&] {
        geoflow::network_kernels().adaln(shape, static_cast<float>(eps), x, shift, scale, y.rows(x.width));
    });
    return y;
}

// Partial sums of blocks of rows, [groups * blocks, width], become those of the groups, [groups, width].
Result<float> sum_blocks(Result<float>&& partial, const RowShape& shape) {
    const std::int64_t groups = shape.rows / shape.rows_per_group, blocks = geoflow::blocks_of(shape);
    if (blocks == 1) return std::move(partial);
    Result<float> sums({groups, shape.width});
    for (std::int64_t g = 0; g < groups; ++g) {
        float* const to = sums.data() + g * shape.width;
        const float* from = partial.data() + g * blocks * shape.width;
        std::copy_n(from, shape.width, to);
        for (std::int64_t b = 1; b < blocks; ++b) {
            from += shape.width;
            for (std::int64_t k = 0; k < shape.width; ++k) to[k] += from[k];
        }
    }
    return sums;
}

// Where every row has a shift of its own, its gradient is `grad` itself, for which an empty tensor stands.
std::tuple<Result<float>, Result<float>, Result<float>> adaln_backward(const Tensor& grad_, const Tensor& x_, const Tensor& scale_,
                                                                       double eps) {
    const auto grad = rows(grad_, "grad"), x = rows(x_, "x"), scale = rows(scale_, "scale");
    check_shape(grad_, "grad", x_, "x");
    const RowShape shape = shape_of(x, scale, "scale");
    Result<float> d_x = result_like(x_, "x");
    if (!x.count) throw geoflow::NotServed("there are no rows");
    const bool own = shape.rows_per_group == 1;
    const std::int64_t blocks = scale.count * geoflow::blocks_of(shape);
    Result<float> d_shift(own ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{blocks, x.width}), d_scale({blocks, x.width});
    compute(x.count * x.width, [&] {
        geoflow::network_kernels().adaln_backward(shape, static_cast<float>(eps), grad, x, scale, d_x.rows(x.width),
                                                  own ? geoflow::RowsView{nullptr, 0} : d_shift.rows(x.width), d_scale.rows(x.width));
    });
    if (own) return {std::move(d_x), std::move(d_shift), std::move(d_scale)};
    return {std::move(d_x), sum_blocks(std::move(d_shift), shape), sum_blocks(std::move(d_scale), shape)};
}

void bind_adaln(py::module_& m) {
    m.def("adaln", &adaln, "x"_a, "shift"_a, "scale"_a, "eps"_a);
    m.def("adaln_backward", &adaln_backward, "grad"_a, "x"_a, "scale"_a, "eps"_a);
}

void bind_network(py::module_& m) {
    using geoflow::RowsView;
    const geoflow::NetworkKernels& run = geoflow::network_kernels();
    const auto release = py::call_guard<py::gil_scoped_release>();
    m.def("swiglu", run.swiglu, release, "shape"_a, "gate"_a, "value"_a, "y"_a);
    m.def("swiglu_backward", run.swiglu_backward, release, "shape"_a, "grad"_a, "gate"_a, "value"_a, "d_gate"_a, "d_value"_a);
    m.def(
        "gate_residual",
        [run](RowShape shape, float factor, RowsView residual, RowsView gate, RowsView value, RowsView layer_scale, Address keep,
              RowsView y) { run.gate_residual(shape, factor, residual, gate, value, layer_scale, at<const std::uint8_t>(keep), y); },
        release, "shape"_a, "factor"_a, "residual"_a, "gate"_a, "value"_a, "layer_scale"_a, "keep"_a, "y"_a);
    m.def(
        "gate_residual_backward",
        [run](RowShape shape, float factor, RowsView grad, RowsView gate, RowsView value, RowsView layer_scale, Address keep,
              RowsView d_gate, RowsView d_value, RowsView partial) {
            run.gate_residual_backward(shape, factor, grad, gate, value, layer_scale, at<const std::uint8_t>(keep), d_gate, d_value,
                                       partial);
        },
        release, "shape"_a, "factor"_a, "grad"_a, "gate"_a, "value"_a, "layer_scale"_a, "keep"_a, "d_gate"_a, "d_value"_a, "partial"_a);
    m.def(
        "flow_loss",
        [run](RowShape shape, Address generated, RowsView v, RowsView target, RowsView x, RowsView loss) {
            run.flow_loss(shape, at<const std::uint8_t>(generated), v, target, x, loss);
        },
        release, "shape"_a, "generated"_a, "v"_a, "target"_a, "x"_a, "loss"_a);
    m.def(
        "flow_loss_backward",
        [run](RowShape shape, Address generated, RowsView grad, RowsView v, RowsView target, RowsView x, RowsView d_v) {
            run.flow_loss_backward(shape, at<const std::uint8_t>(generated), grad, v, target, x, d_v);
        },
        release, "shape"_a, "generated"_a, "grad"_a, "v"_a, "target"_a, "x"_a, "d_v"_a);
    m.def(
        "keep_mask",
        [run](std::int64_t count, double share, std::uint32_t seed, Address keep, int threads) {
            run.keep_mask(count, share, seed, at<std::uint8_t>(keep), threads);
        },
        release, "count"_a, "share"_a, "seed"_a, "keep"_a, "threads"_a);
    bind_segments(m, run);
    m.attr("reduction_rows") = geoflow::kReductionRows;
}

void bind_solver(py::module_& m) {
    const geoflow::SolverKernels& run = geoflow::solver_kernels();
    const auto release = py::call_guard<py::gil_scoped_release>();
    m.def("tangent_step", run.tangent_step, release, "shape"_a, "h"_a, "guidance"_a, "renormalise"_a, "x"_a, "v"_a, "v_free"_a, "y"_a);
    m.def("tangent_stage", run.tangent_stage, release, "shape"_a, "h"_a, "guidance"_a, "weight"_a, "x"_a, "at"_a, "v"_a, "v_free"_a,
          "total"_a, "y"_a, "new_total"_a);
    m.def("tangent_ab2", run.tangent_ab2, release, "shape"_a, "h"_a, "guidance"_a, "share"_a, "x"_a, "v"_a, "v_free"_a, "carried"_a,
          "y"_a, "new_carried"_a);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of geoflow_fast; use geoflow_fast.ops, which checks what it passes here.";
    m.def("cuda_status", &cuda_status);
    m.def("openmp", &openmp);
    m.def("isa", &geoflow::isa_name);
    m.def("supported_isas", &geoflow::supported_isas);
    m.def("isa_problem", &geoflow::isa_problem);
    m.def("mkl_is_narrow", &geoflow::mkl_is_narrow);
    m.def("has_bfloat16", &geoflow::has_avx512_bf16);
    m.def("has_int8", &geoflow::has_avx512_vnni);
    py::register_exception<geoflow::NotServed>(m, "NotServed", PyExc_ValueError);
    m.def("connect", &geoflow::connect, py::kw_only(), "tensor"_a, "exchange"_a, "to_dlpack"_a, "from_dlpack"_a, "usable_threads"_a, "alone"_a);
    m.def("fill_results", [](bool fill) { geoflow::fill_results = fill; }, "fill"_a);
    m.def("caches", [] { return std::array<std::int64_t, 3>{geoflow::caches().first, geoflow::caches().second, geoflow::caches().shared}; });
    bind_adaln(m);
    bind_network(m);
    bind_solver(m);
    bind_interpolant(m);
    bind_noise(m);
    bind_transport(m);
    bind_gallery(m);
    bind_search(m);
#if defined(GEOFLOW_WITH_CUDA)
    bind_cuda_transport(m);
#endif
}
