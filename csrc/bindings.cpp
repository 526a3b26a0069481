// What Python calls. Functions of tensors check them (tensor.h) and return new ones; those that take addresses rely on their caller,
// geoflow_fast/ops/extension.py, and an address of 0 stands for a part that is left out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
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

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

using geoflow::check_shape;
using geoflow::compute;
using geoflow::dense;
using geoflow::optional_vector;
using geoflow::Result;
using geoflow::result_like;
using geoflow::Rows;
using geoflow::rows;
using geoflow::RowShape;
using geoflow::RowsView;
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

template <class T>
using Four = std::tuple<Result<T>, Result<T>, Result<T>, Result<T>>;

// NotServed where a row is not on the sphere, a time not in [0, 1] or a direction unknown, if `check`: the caller finds out which.
template <class T>
Four<T> masked_interpolant(const Tensor& image0_, const Tensor& text0_, const Tensor& image1_, const Tensor& text1_, const Tensor& t_,
                           const Tensor& direction_, const Tensor& drop_, bool check, double tolerance) {
    check_matrix(image0_, "image0", 2);
    check_matrix(text0_, "text0", 2);
    const auto image0 = geoflow::dense<T>(image0_, "image0"), text0 = geoflow::dense<T>(text0_, "text0");
    const auto image1 = geoflow::dense<T>(image1_, "image1"), text1 = geoflow::dense<T>(text1_, "text1");
    check_shape(image1_, "image1", image0_, "image0");
    check_shape(text1_, "text1", text0_, "text0");
    geoflow::InterpolantParams<T> params{};
    params.rows = image0.count;
    if (text0.count != params.rows)
        throw py::value_error("text0 has " + std::to_string(text0.count) + " rows, but image0 has " + std::to_string(params.rows));
    params.t = geoflow::vector<T>(t_, "t", params.rows);
    params.direction = geoflow::vector<std::int8_t>(direction_, "direction", params.rows);
    params.drop = geoflow::optional_vector<bool>(drop_, "drop", params.rows);
    params.tolerance = tolerance;
    const std::int64_t numbers = params.rows * (image0.width + text0.width);
    params.threads = threads_for(numbers);
    Four<T> results{result_like<T>(image0_, "image0"), result_like<T>(text0_, "text0"), result_like<T>(image0_, "image0"),
                    result_like<T>(text0_, "text0")};
    auto& [image_t, text_t, v_image, v_text] = results;
    params.stream[0] = {image0.data, image1.data, image_t.data(), v_image.data(), image0.width, geoflow::kImageToText};
    params.stream[1] = {text0.data, text1.data, text_t.data(), v_text.data(), text0.width, geoflow::kTextToImage};
    for (std::int64_t r = 0; check && r < params.rows; ++r)
        if (!(params.t[r] >= 0 && params.t[r] <= 1) || params.direction[r] < geoflow::kJoint || params.direction[r] > geoflow::kTextToImage)
            throw geoflow::NotServed("t or direction of row " + std::to_string(r) + " is out of range");
    std::int64_t bad = -1;
    compute(numbers, [&] { bad = geoflow::masked_interpolant(params); });
    if (check && bad >= 0) throw geoflow::NotServed("row " + std::to_string(bad) + " holds a point that is not on the unit sphere");
    return results;
}

void bind_interpolant(py::module_& m) {
    m.def(
        "masked_interpolant",
        [](const Tensor& image0, const Tensor& text0, const Tensor& image1, const Tensor& text1, const Tensor& t, const Tensor& direction,
           const Tensor& drop, bool check, double tolerance) -> py::object {
            if (image0.view("image0").type.bits == 64)
                return py::cast(masked_interpolant<double>(image0, text0, image1, text1, t, direction, drop, check, tolerance));
            return py::cast(masked_interpolant<float>(image0, text0, image1, text1, t, direction, drop, check, tolerance));
        },
        "image0"_a, "text0"_a, "image1"_a, "text1"_a, "t"_a, "direction"_a, "drop"_a, "check"_a,
        "tolerance"_a = geoflow::kUnitTolerance);
}

// Rows of standard normal numbers, each a function of its number; the seed has 64 bits, whatever its sign.
Result<float> counter_noise(const Tensor& numbers_, std::int64_t width, std::int64_t seed, std::uint32_t step, std::uint32_t stream,
                            bool unit) {
    const auto numbers = dense<std::int64_t>(numbers_, "numbers");
    const std::int64_t rows = numbers.width;  // of the vector
    Result<float> out({rows, width});
    const geoflow::NoiseParams params{numbers.data, out.data(), rows, width, static_cast<std::uint64_t>(seed), step, stream, unit,
                                      threads_for(rows * width)};
    compute(rows * width, [&] { geoflow::noise_kernels().counter_noise(params); });
    return out;
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

// Runs a solve and returns its report, unless the user interrupted it.
template <class Solve>
geoflow::IterationReport reported(const Solve& solve) {
    geoflow::IterationReport report{};
    {
        py::gil_scoped_release release;
        report = solve();
    }
    raise_if_interrupted(report.outcome == geoflow::Outcome::interrupted);
    return report;
}

// The plan between two clouds of points: index, f, g, and a report of iterations, column violation and whether that is within tol.
std::tuple<Result<std::int64_t>, Result<double>, Result<double>, Result<double>> ot_solve(
    const Tensor& image0_, const Tensor& text0_, const Tensor& image1_, const Tensor& text1_, double eps, double tol, std::int64_t max_iter,
    const Tensor& uniform_) {
    const auto image0 = dense(image0_, "image0"), text0 = dense(text0_, "text0"), image1 = dense(image1_, "image1"),
               text1 = dense(text1_, "text1");
    const std::int64_t rows = image0.count, cols = image1.count;
    if (image1.width != image0.width || text1.width != text0.width || text0.count != rows || text1.count != cols || !rows || !cols)
        throw py::value_error("the points of image0, text0, image1 and text1 do not fit each other");
    const double* const uniform = optional_vector<double>(uniform_, "uniform", rows);
    Result<std::int64_t> index({rows});
    Result<double> f({rows}), g({cols}), report({3});
    const geoflow::OtProblem problem{
        {image0.data, image1.data, image0.width}, {text0.data, text1.data, text0.width}, rows, cols, uniform};
    const geoflow::OtSettings settings{eps, tol, max_iter, threads_for(rows * cols), keep_going};
    const geoflow::IterationReport end =
        reported([&] { return geoflow::ot_solve(problem, settings, {index.data(), f.data(), g.data()}); });
    report.data()[0] = static_cast<double>(end.iterations);
    report.data()[1] = end.error;
    report.data()[2] = end.outcome == geoflow::Outcome::converged;
    return {std::move(index), std::move(f), std::move(g), std::move(report)};
}

// Potentials f and g of scores [rows, cols and padding] within `spread` around zero, which are overwritten; iterations and column violation.
std::tuple<Result<double>, Result<double>, std::int64_t, double> sinkhorn(const Tensor& scores_, std::int64_t cols, float spread, double eps,
                                                                         double tol, std::int64_t max_iter) {
    const auto scores = dense(scores_, "scores");
    if (!scores.count || cols < 1 || cols > scores.width || scores.width % geoflow::kLeading)
        throw py::value_error("scores must have at least one row and " + std::to_string(cols) + " columns, padded to a multiple of 16");
    Result<double> f({scores.count}), g({cols});
    const geoflow::OtSettings settings{eps, tol, max_iter, threads_for(scores.count * cols), keep_going};
    const geoflow::IterationReport end = reported([&] {
        return geoflow::cpu_solver().sinkhorn(const_cast<float*>(scores.data), scores.count, cols, {-spread / 2, spread / 2}, settings,
                                              f.data(), g.data());
    });
    return {std::move(f), std::move(g), end.iterations, end.error};
}

void bind_transport(py::module_& m) {
    m.attr("OT_LEADING") = geoflow::kLeading;
    m.def("ot_solve", &ot_solve);
    m.def("sinkhorn", &sinkhorn);
}

// The rows of a gallery [items, dim] as they are stored.
struct Items {
    const void* data;
    std::int64_t count, dim;
    geoflow::Storage storage;

    explicit Items(const Tensor& gallery) {
        const geoflow::dlpack::View& view = gallery.view("gallery");
        const auto is = [&](geoflow::dlpack::TypeCode code, int bits) { return view.type.code == code && view.type.bits == bits; };
        const bool single = is(geoflow::dlpack::kFloat, 32), half = is(geoflow::dlpack::kFloat, 16);
        if (!single && !half && !is(geoflow::dlpack::kBfloat, 16))
            throw geoflow::NotServed("gallery is " + geoflow::name_of(view.type) + ", expected torch.float32, torch.float16 or torch.bfloat16");
        storage = single ? geoflow::Storage::single : half ? geoflow::Storage::half : geoflow::Storage::bfloat16;
        const auto rows = geoflow::rows_of<void>(view, "gallery");
        if (view.dimensions != 2 || !rows.count || !rows.width)
            throw py::value_error("gallery must be [N, d] with N, d > 0, got " + geoflow::text_of(view.shape, view.dimensions));
        if (rows.count > 1 && rows.stride != rows.width) throw geoflow::NotServed("gallery must be contiguous");
        data = rows.data;
        count = rows.count;
        dim = rows.width;
    }
};

// What a multiplication counts, if that of a number in a pass over rows counts one.
constexpr std::int64_t kMultiplications = 8;

// Runs what returns false when interrupted; other Python threads run meanwhile if the work is worth a change of threads.
template <class Run>
void compute_or_stop(std::int64_t numbers, const Run& run) {
    bool done = false;
    compute(numbers, [&] { done = run(); });
    raise_if_interrupted(!done);
}

// Samples [queries, draws, dim] of a posterior over `gallery`; both biases may be left out.
geoflow::GalleryParams posterior_params(const Tensor& samples_, const Items& items, double kappa, const Tensor& item_bias,
                                        const Tensor& sample_bias, bool bfloat16) {
    const auto samples = geoflow::dense(samples_, "samples");
    const geoflow::dlpack::View& view = samples_.view("samples");
    if (view.dimensions != 3 || view.shape[2] != items.dim || !samples.count)
        throw py::value_error("samples must be [Q, M, " + std::to_string(items.dim) + "] with Q, M > 0, got " +
                              geoflow::text_of(view.shape, view.dimensions));
    const std::int64_t queries = view.shape[0], draws = view.shape[1];
    const auto weights = geoflow::optional(sample_bias, "sample_bias");
    if (weights && (weights.count != queries || weights.width != draws))
        throw py::value_error("sample_bias must be [" + std::to_string(queries) + ", " + std::to_string(draws) + "]");
    if (weights && queries > 1 && weights.stride != draws) throw geoflow::NotServed("sample_bias must be contiguous");
    if (bfloat16 && !geoflow::has_avx512_bf16()) throw geoflow::NotServed("this processor has no bfloat16 unit");
    const int threads = threads_for(samples.count * items.count * items.dim / kMultiplications);
    return {samples.data, weights.data, items.data, geoflow::optional_vector<float>(item_bias, "item_bias", items.count), queries, draws,
            items.count, items.dim, static_cast<float>(kappa), threads, keep_going, items.storage, bfloat16};
}

std::int64_t work_of(const geoflow::GalleryParams& params) {
    return params.queries * params.draws * params.items * params.dim / kMultiplications;
}

std::tuple<Result<double>, Result<double>, Result<double>, Result<double>, Result<std::int64_t>> gallery_posterior(
    const Tensor& samples, const Tensor& gallery, double kappa, std::int64_t top_k, const Tensor& item_bias, const Tensor& sample_bias,
    const std::string& precision) {
    const Items items(gallery);
    const auto params = posterior_params(samples, items, kappa, item_bias, sample_bias, precision == "bfloat16");
    if (top_k < 1 || top_k > items.count) throw py::value_error("top_k is " + std::to_string(top_k) + " of " + std::to_string(items.count) + " items");
    const std::int64_t queries = params.queries;
    Result<double> peak({queries}), weight({queries}), moment({queries}), top_score({queries, top_k});
    Result<std::int64_t> top_index({queries, top_k});
    const geoflow::GalleryStatistics result{top_k, peak.data(), weight.data(), moment.data(), top_score.data(), top_index.data()};
    compute_or_stop(work_of(params), [&] { return geoflow::gallery_posterior(params, result); });
    return {std::move(peak), std::move(weight), std::move(moment), std::move(top_score), std::move(top_index)};
}

Result<float> gallery_scores(const Tensor& samples, const Tensor& gallery, double kappa, const Tensor& item_bias, const Tensor& sample_bias) {
    const Items items(gallery);
    const auto params = posterior_params(samples, items, kappa, item_bias, sample_bias, false);
    Result<float> scores({params.queries, params.items});
    compute_or_stop(work_of(params), [&] { return geoflow::gallery_scores(params, scores.data()); });
    return scores;
}

void bind_gallery(py::module_& m) {
    m.def("gallery_posterior", &gallery_posterior, "samples"_a, "gallery"_a, "kappa"_a, "top_k"_a, "item_bias"_a, "sample_bias"_a,
          "precision"_a);
    m.def("gallery_scores", &gallery_scores, "samples"_a, "gallery"_a, "kappa"_a, "item_bias"_a, "sample_bias"_a);
}

// Queries [count, dim], which must be finite, and the items that they are compared with.
geoflow::SearchParams search_params(const Tensor& queries_, const Items& items, std::int64_t top_k) {
    const auto queries = geoflow::dense(queries_, "queries");
    const geoflow::dlpack::View& view = queries_.view("queries");
    if (view.dimensions != 2 || queries.width != items.dim)
        throw py::value_error("queries must be [Q, " + std::to_string(items.dim) + "], got " + geoflow::text_of(view.shape, view.dimensions));
    if (top_k < 1 || top_k > items.count) throw py::value_error("top_k is " + std::to_string(top_k) + " of " + std::to_string(items.count) + " items");
    for (std::int64_t r = 0; r < queries.count; ++r) {
        float sum = 0;  // of zeros, unless an entry is infinite or no number
        for (std::int64_t k = 0; k < queries.width; ++k) sum += 0.0f * queries.data[r * queries.width + k];
        if (!(sum == 0)) throw geoflow::NotServed("queries row " + std::to_string(r) + " is not finite");
    }
    const int threads = threads_for(queries.count * items.count * items.dim / kMultiplications);
    return {queries.data, items.data, items.storage, queries.count, items.count, items.dim, top_k, threads, keep_going};
}

std::int64_t work_of(const geoflow::SearchParams& params) { return params.queries_count * params.items * params.dim / kMultiplications; }

using Found = std::pair<Result<float>, Result<std::int64_t>>;

Found gallery_search(const Tensor& queries, const Tensor& gallery, std::int64_t top_k) {
    const auto params = search_params(queries, Items(gallery), top_k);
    Found found{Result<float>({params.queries_count, top_k}), Result<std::int64_t>({params.queries_count, top_k})};
    if (!params.queries_count) return found;
    compute_or_stop(work_of(params), [&] {
        return geoflow::search_kernels().search(params, {found.first.data(), found.second.data()});
    });
    return found;
}

// Codes [items, code_stride(dim)], scales and errors [items], and the largest norm of a row.
std::tuple<Result<std::uint8_t>, Result<float>, Result<float>, float> encode_rows(const Tensor& gallery) {
    const Items items(gallery);
    Result<std::uint8_t> code({items.count, geoflow::code_stride(items.dim)});
    Result<float> scale({items.count}), error({items.count});
    const std::int64_t numbers = items.count * items.dim * kMultiplications;
    const geoflow::SearchParams params{nullptr, items.data, items.storage, 0, items.count, items.dim, 1, threads_for(numbers), keep_going};
    float largest = 0;
    compute(numbers, [&] { largest = geoflow::search_kernels().encode(params, {code.data(), scale.data(), error.data()}); });
    return {std::move(code), std::move(scale), std::move(error), largest};
}

#if defined(__x86_64__)
// As gallery_search, by codes; and how many items of each query were scored, -1 where its bounds excluded too little.
std::tuple<Result<float>, Result<std::int64_t>, Result<std::int64_t>> search_codes(const Tensor& queries, const Tensor& gallery,
                                                                                   const Tensor& code_, const Tensor& scale,
                                                                                   const Tensor& error, double largest_norm,
                                                                                   std::int64_t top_k) {
    const Items items(gallery);
    const auto params = search_params(queries, items, top_k);
    const auto code = geoflow::dense<std::uint8_t>(code_, "code");
    if (code.count != items.count || code.width != geoflow::code_stride(items.dim))
        throw py::value_error("code must be [" + std::to_string(items.count) + ", " + std::to_string(geoflow::code_stride(items.dim)) + "]");
    if (!geoflow::has_avx512_vnni()) throw py::value_error("this processor has no int8 unit");
    const std::int64_t count = params.queries_count;
    Result<float> score({count, top_k});
    Result<std::int64_t> index({count, top_k}), kept({count});
    const geoflow::CodeParams codes{{const_cast<std::uint8_t*>(code.data), const_cast<float*>(geoflow::vector<float>(scale, "scale", items.count)),
                                     const_cast<float*>(geoflow::vector<float>(error, "error", items.count))},
                                    static_cast<float>(largest_norm), items.count / 16 + 1024, kept.data()};
    if (count) compute_or_stop(work_of(params), [&] { return geoflow::search_codes(params, codes, {score.data(), index.data()}); });
    return {std::move(score), std::move(index), std::move(kept)};
}
#endif

void bind_search(py::module_& m) {
    m.def("code_stride", &geoflow::code_stride, "dim"_a);
    m.def("gallery_search", &gallery_search, "queries"_a, "gallery"_a, "top_k"_a);
    m.def("encode_rows", &encode_rows, "gallery"_a);
#if defined(__x86_64__)
    m.def("search_codes", &search_codes, "queries"_a, "gallery"_a, "code"_a, "scale"_a, "error"_a, "largest_norm"_a, "top_k"_a);
#endif
}

#if defined(GEOFLOW_WITH_CUDA)

void bind_cuda_transport(py::module_& m) {
    const auto release = py::call_guard<py::gil_scoped_release>();
    m.def(
        "transport_workspace",
        [](std::int64_t rows, std::int64_t cols, std::int64_t stride, bool half, int device) {
            return geoflow::sinkhorn_cuda_workspace({rows, cols}, {nullptr, stride, half}, device);
        },
        release, py::kw_only(), "rows"_a, "cols"_a, "stride"_a, "half"_a, "device"_a);
    // All launches of a plan; without points, of the scores that the matrix holds.
    m.def(
        "transport",
        [](std::int64_t rows, std::int64_t cols, std::int64_t stride, bool half, Address matrix, Address image0, Address text0,
           Address image1, Address text1, std::int64_t image_dim, std::int64_t text_dim, float offset, float eps, float tol,
           std::int32_t max_iter, int halvings, std::optional<Address> uniform, Address workspace, Address row_mass, Address index, Address f, Address g,
           Address report, int device, Address stream) {
            const geoflow::SinkhornParams params{rows, cols, image_dim, text_dim, eps, tol, max_iter};
            const geoflow::CudaMatrix scores{at<void>(matrix), stride, half};
            const geoflow::CudaTarget target{device, stream};
            if (image1)
                geoflow::sinkhorn_cuda_scores(
                    params, {at<const void>(image0), at<const void>(text0), at<const void>(image1), at<const void>(text1)}, scores, target);
            geoflow::sinkhorn_cuda_solve(params, scores, halvings, at<void>(workspace), at<geoflow::SinkhornStatus>(report), target);
            geoflow::sinkhorn_cuda_result(params, scores, at<void>(workspace),
                                          {at<std::int64_t>(index), at<double>(f), at<double>(g), at<float>(row_mass), offset}, target);
            if (uniform)
                geoflow::sinkhorn_cuda_sample(params, scores, at<void>(workspace), at<const float>(row_mass), at<const double>(*uniform),
                                              at<std::int64_t>(index), target);
        },
        release, py::kw_only(), "rows"_a, "cols"_a, "stride"_a, "half"_a, "matrix"_a, "image0"_a, "text0"_a, "image1"_a, "text1"_a,
        "image_dim"_a, "text_dim"_a, "offset"_a, "eps"_a, "tol"_a, "max_iter"_a, "halvings"_a, "uniform"_a, "workspace"_a, "row_mass"_a,
        "index"_a, "f"_a, "g"_a, "report"_a, "device"_a, "stream"_a);
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
    const auto &first = shift_.view("shift"), &second = scale_.view("scale");
    if (first.dimensions != second.dimensions || !std::equal(first.shape, first.shape + first.dimensions, second.shape))
        throw py::value_error("shift and scale must have one shape and dtype");
    if (!std::isfinite(eps)) throw py::value_error("eps must be finite, got " + std::to_string(eps));
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

// Gate and value of a SwiGLU product; without a value, the two halves of `gate`.
std::pair<Rows<const float>, Rows<const float>> gate_and_value(const Tensor& gate_, const Tensor& value_) {
    const auto gate = rows(gate_, "gate");
    if (!value_.is_none()) {
        check_shape(value_, "value", gate_, "gate");
        return {gate, rows(value_, "value")};
    }
    if (gate.width % 2)
        throw py::value_error("gate holds both halves without value, so its width must be even, got " + std::to_string(gate.width));
    const std::int64_t width = gate.width / 2;
    return {{gate.data, gate.count, width, gate.stride}, {gate.data + width, gate.count, width, gate.stride}};
}

RowShape shape_of(const Rows<const float>& x) { return {x.count, x.width, 1, threads_for(x.count * x.width)}; }

Result<float> swiglu(const Tensor& gate_, const Tensor& value_) {
    const auto [gate, value] = gate_and_value(gate_, value_);
    const geoflow::dlpack::View& view = gate_.view("gate");
    std::vector<std::int64_t> sizes(view.shape, view.shape + view.dimensions);
    sizes.back() = gate.width;
    Result<float> y(sizes);
    const RowShape shape = shape_of(gate);
    const RowsView first = gate, second = value;
    compute(shape.rows * shape.width, [&] { geoflow::network_kernels().swiglu(shape, first, second, y.rows(shape.width)); });
    return y;
}

// An empty tensor stands for the gradient of an absent value.
std::pair<Result<float>, Result<float>> swiglu_backward(const Tensor& grad_, const Tensor& gate_, const Tensor& value_) {
    const auto [gate, value] = gate_and_value(gate_, value_);
    const auto grad = rows(grad_, "grad");
    if (grad.count != gate.count || grad.width != gate.width) throw py::value_error("grad must have the shape of the product of gate and value");
    const bool packed = value_.is_none();
    std::pair<Result<float>, Result<float>> results{result_like(gate_, "gate"),
                                                    packed ? Result<float>({0}) : result_like(gate_, "gate")};
    const std::int64_t width = gate.width, stride = packed ? 2 * width : width;
    const RowsView d_gate{results.first.data(), stride}, d_value{packed ? d_gate.data + width : results.second.data(), stride};
    const RowShape shape = shape_of(gate);
    const RowsView first = gate, second = value;
    compute(shape.rows * width, [&] { geoflow::network_kernels().swiglu_backward(shape, grad, first, second, d_gate, d_value); });
    return results;
}

void bind_swiglu(py::module_& m) {
    m.def("swiglu", &swiglu, "gate"_a, "value"_a);
    m.def("swiglu_backward", &swiglu_backward, "grad"_a, "gate"_a, "value"_a);
}

// The branch of a residual: gate and keep may be left out.
struct Branch {
    Rows<const float> gate, value, layer_scale;
    const std::uint8_t* keep;
    float factor;
    RowShape shape;

    // `like` has the shape of the branch.
    Branch(const Tensor& gate_, const Tensor& value_, const Tensor& layer_scale_, const Tensor& keep_, double dropout, const Tensor& like,
           const char* name)
        : gate(geoflow::optional(gate_, "gate")), value(rows(value_, "value")), layer_scale(rows(layer_scale_, "layer_scale")),
          keep(keep_.is_none() ? nullptr : reinterpret_cast<const std::uint8_t*>(geoflow::dense<bool>(keep_, "keep").data)),
          factor(static_cast<float>(1 / (1 - dropout))) {
        if (!(dropout >= 0 && dropout < 1)) throw py::value_error("dropout must be in [0, 1), got " + std::to_string(dropout));
        if (!value.width) throw py::value_error(std::string(name) + " must have at least one column");
        if (!gate_.is_none()) check_shape(gate_, "gate", like, name);
        if (!keep_.is_none()) check_shape(keep_, "keep", like, name);
        check_shape(value_, "value", like, name);
        shape = shape_of(value, layer_scale, "layer_scale");
    }
};

// residual + layer_scale * sigmoid(gate) * value, of which dropout leaves what `keep` says.
Result<float> gate_residual(const Tensor& residual_, const Tensor& gate_, const Tensor& value_, const Tensor& layer_scale_,
                            const Tensor& keep_, double dropout) {
    const auto residual = rows(residual_, "residual");
    const Branch b(gate_, value_, layer_scale_, keep_, dropout, residual_, "residual");
    Result<float> y = result_like(residual_, "residual");
    compute(residual.count * residual.width, [&] {
        geoflow::network_kernels().gate_residual(b.shape, b.factor, residual, b.gate, b.value, b.layer_scale, b.keep, y.rows(residual.width));
    });
    return y;
}

// The gradient of the residual is `grad` itself; an empty tensor stands for that of an absent gate.
std::tuple<Result<float>, Result<float>, Result<float>> gate_residual_backward(const Tensor& grad_, const Tensor& gate_,
                                                                               const Tensor& value_, const Tensor& layer_scale_,
                                                                               const Tensor& keep_, double dropout) {
    const auto grad = rows(grad_, "grad");
    const Branch b(gate_, value_, layer_scale_, keep_, dropout, grad_, "grad");
    if (!grad.count) throw geoflow::NotServed("there are no rows");
    Result<float> d_gate = gate_.is_none() ? Result<float>({0}) : result_like(grad_, "grad"), d_value = result_like(grad_, "grad");
    Result<float> partial({b.layer_scale.count * geoflow::blocks_of(b.shape), grad.width});
    compute(grad.count * grad.width, [&] {
        geoflow::network_kernels().gate_residual_backward(b.shape, b.factor, grad, b.gate, b.value, b.layer_scale, b.keep,
                                                          gate_.is_none() ? RowsView{nullptr, 0} : d_gate.rows(grad.width),
                                                          d_value.rows(grad.width), partial.rows(grad.width));
    });
    return {std::move(d_gate), std::move(d_value), sum_blocks(std::move(partial), b.shape)};
}

void bind_gate_residual(py::module_& m) {
    m.def("gate_residual", &gate_residual, "residual"_a, "gate"_a, "value"_a, "layer_scale"_a, "keep"_a, "dropout"_a);
    m.def("gate_residual_backward", &gate_residual_backward, "grad"_a, "gate"_a, "value"_a, "layer_scale"_a, "keep"_a, "dropout"_a);
}

// A cross-gate on both streams: rows [2 B, H] and products [2 heads, B, 2 part], those of the image's heads first.
struct CrossGate {
    Rows<const float> rows, layer_scale;
    const float* products;
    const std::uint8_t* keep;
    float factor;
    geoflow::CrossShape shape;

    CrossGate(const Tensor& rows_, const char* name, const Tensor& products_, const Tensor& layer_scale_, const Tensor& keep_,
              double dropout)
        : rows(geoflow::rows(rows_, name)), layer_scale(geoflow::dense(layer_scale_, "layer_scale")),
          products(geoflow::dense(products_, "products").data),
          keep(keep_.is_none() ? nullptr : reinterpret_cast<const std::uint8_t*>(geoflow::dense<bool>(keep_, "keep").data)),
          factor(static_cast<float>(1 / (1 - dropout))) {
        const auto& view = products_.view("products");
        if (view.dimensions != 3 || view.shape[0] % 2 || view.shape[2] % 2)
            throw py::value_error("products must be [2 heads, B, 2 part], got " + geoflow::text_of(view.shape, view.dimensions));
        shape = {view.shape[1], view.shape[0] / 2, view.shape[2] / 2, 1};
        const std::int64_t width = shape.heads * shape.part;
        if (rows.count != 2 * shape.rows || rows.width != width)
            throw py::value_error(std::string(name) + " must be [" + std::to_string(2 * shape.rows) + ", " + std::to_string(width) + "]");
        if (layer_scale.count != 2 || layer_scale.width != width)
            throw py::value_error("layer_scale must be [2, " + std::to_string(width) + "]");
        if (!keep_.is_none()) check_shape(keep_, "keep", rows_, name);
        if (!shape.rows || !width) throw geoflow::NotServed("there are no rows");
        shape.threads = geoflow::threads_for(rows.count * width);
    }
};

Result<float> cross_residual(const Tensor& residual, const Tensor& products, const Tensor& layer_scale, const Tensor& keep, double dropout) {
    const CrossGate gate(residual, "residual", products, layer_scale, keep, dropout);
    Result<float> y = result_like(residual, "residual");
    compute(gate.rows.count * gate.rows.width, [&] {
        geoflow::network_kernels().cross_residual(gate.shape, gate.factor, gate.rows, gate.products, gate.layer_scale.data, gate.keep,
                                                  y.rows(gate.rows.width));
    });
    return y;
}

std::pair<Result<float>, Result<float>> cross_residual_backward(const Tensor& grad, const Tensor& products, const Tensor& layer_scale,
                                                                const Tensor& keep, double dropout) {
    const CrossGate gate(grad, "grad", products, layer_scale, keep, dropout);
    const std::int64_t width = gate.rows.width;
    const RowShape per_stream{gate.rows.count, width, gate.shape.rows, gate.shape.threads};
    Result<float> d_products = result_like(products, "products"), partial({2 * geoflow::blocks_of(per_stream), width});
    compute(gate.rows.count * width, [&] {
        geoflow::network_kernels().cross_residual_backward(gate.shape, gate.factor, gate.rows, gate.products, gate.layer_scale.data,
                                                           gate.keep, d_products.data(), partial.rows(width));
    });
    return {std::move(d_products), sum_blocks(std::move(partial), per_stream)};
}

void bind_cross_residual(py::module_& m) {
    m.def("cross_residual", &cross_residual, "residual"_a, "products"_a, "layer_scale"_a, "keep"_a, "dropout"_a);
    m.def("cross_residual_backward", &cross_residual_backward, "grad"_a, "products"_a, "layer_scale"_a, "keep"_a, "dropout"_a);
}

// One stream of the loss, and in which rows it is generated.
struct LossStream {
    Rows<const float> v, target, x;
    std::vector<std::uint8_t> generated;
    RowShape shape;

    LossStream(const Tensor& v_, const Tensor& target_, const Tensor& x_, const Tensor& direction_, const char* const (&names)[3],
               std::int8_t given)
        : v(rows(v_, names[0])), target(rows(target_, names[1])), x(rows(x_, names[2])), generated(v.count), shape(shape_of(v)) {
        check_shape(target_, names[1], v_, names[0]);
        check_shape(x_, names[2], v_, names[0]);
        const std::int8_t* const direction = geoflow::vector<std::int8_t>(direction_, "direction", v.count);
        for (std::int64_t r = 0; r < v.count; ++r) {
            if (direction[r] < geoflow::kJoint || direction[r] > geoflow::kTextToImage) throw geoflow::NotServed("direction is out of range");
            generated[r] = direction[r] != given;
        }
    }
};

struct LossStreams {
    LossStream image, text;

    LossStreams(const Tensor& v_image, const Tensor& v_text, const Tensor& target_image, const Tensor& target_text, const Tensor& image_,
                const Tensor& text_, const Tensor& direction)
        : image(v_image, target_image, image_, direction, {"v_image", "target_image", "image"}, geoflow::kImageToText),
          text(v_text, target_text, text_, direction, {"v_text", "target_text", "text"}, geoflow::kTextToImage) {}
    std::int64_t rows() const { return image.v.count; }
    std::int64_t numbers() const { return rows() * (image.v.width + text.v.width); }
};

Result<float> flow_loss(const Tensor& v_image, const Tensor& v_text, const Tensor& target_image, const Tensor& target_text,
                        const Tensor& image, const Tensor& text, const Tensor& direction) {
    const LossStreams streams(v_image, v_text, target_image, target_text, image, text, direction);
    Result<float> loss({streams.rows()});
    std::fill_n(loss.data(), streams.rows(), 0.0f);
    compute(streams.numbers(), [&] {
        for (const LossStream* s : {&streams.image, &streams.text})
            geoflow::network_kernels().flow_loss(s->shape, s->generated.data(), s->v, s->target, s->x, loss.rows(1));
    });
    return loss;
}

std::pair<Result<float>, Result<float>> flow_loss_backward(const Tensor& grad_, const Tensor& v_image, const Tensor& v_text,
                                                           const Tensor& target_image, const Tensor& target_text, const Tensor& image,
                                                           const Tensor& text, const Tensor& direction) {
    const LossStreams streams(v_image, v_text, target_image, target_text, image, text, direction);
    const RowsView grad = geoflow::column(grad_, "grad", streams.rows());
    std::pair<Result<float>, Result<float>> d_v{result_like(v_image, "v_image"), result_like(v_text, "v_text")};
    compute(streams.numbers(), [&] {
        const auto run = [&](const LossStream& s, const Result<float>& to) {
            geoflow::network_kernels().flow_loss_backward(s.shape, s.generated.data(), grad, s.v, s.target, s.x, to.rows(s.v.width));
        };
        run(streams.image, d_v.first);
        run(streams.text, d_v.second);
    });
    return d_v;
}

void bind_flow_loss(py::module_& m) {
    m.def("flow_loss", &flow_loss, "v_image"_a, "v_text"_a, "target_image"_a, "target_text"_a, "image"_a, "text"_a, "direction"_a);
    m.def("flow_loss_backward", &flow_loss_backward, "grad"_a, "v_image"_a, "v_text"_a, "target_image"_a, "target_text"_a, "image"_a,
          "text"_a, "direction"_a);
}

void bind_keep_mask(py::module_& m) {
    m.def("keep_mask", [](const std::vector<std::int64_t>& sizes, double share, std::uint32_t seed) {
        Result<bool> keep(sizes);
        const std::int64_t count = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
        const int threads = threads_for(count);
        compute(count, [&] { geoflow::network_kernels().keep_mask(count, share, seed, reinterpret_cast<std::uint8_t*>(keep.data()), threads); });
        return keep;
    }, "shape"_a, "share"_a, "seed"_a);
}

// Rows of the shape of `x`, which may be left out.
Rows<const float> beside(const Tensor& y, const char* name, const Tensor& x, const char* like = "x") {
    if (!y.is_none()) check_shape(y, name, x, like);
    return geoflow::optional(y, name);
}

Rows<const float> needed(const Tensor& y, const char* name, const Tensor& x) {
    check_shape(y, name, x, "x");
    return rows(y, name);
}

Result<float> tangent_step(const Tensor& x_, const Tensor& v_, double h, const Tensor& v_free_, double guidance, bool renormalise) {
    check_matrix(x_, "x", 1);
    const auto x = rows(x_, "x"), v = needed(v_, "v", x_), v_free = beside(v_free_, "v_free", x_);
    Result<float> y = result_like(x_, "x");
    const RowShape shape = shape_of(x);
    compute(x.count * x.width, [&] {
        geoflow::solver_kernels().tangent_step(shape, h, guidance, renormalise, x, v, v_free, y.rows(x.width));
    });
    return y;
}

// The new total is empty without a total.
std::pair<Result<float>, Result<float>> tangent_stage(const Tensor& x_, const Tensor& at_, const Tensor& v_, double h,
                                                      const Tensor& v_free_, double guidance, const Tensor& total_, double weight) {
    const auto x = rows(x_, "x"), at = needed(at_, "at", x_), v = needed(v_, "v", x_), v_free = beside(v_free_, "v_free", x_),
               total = beside(total_, "total", x_);
    std::pair<Result<float>, Result<float>> results{result_like(x_, "x"), total_.is_none() ? Result<float>({0}) : result_like(x_, "x")};
    const RowShape shape = shape_of(x);
    compute(x.count * x.width, [&] {
        geoflow::solver_kernels().tangent_stage(shape, h, guidance, weight, x, at, v, v_free, total, results.first.rows(x.width),
                                                results.second.rows(x.width));
    });
    return results;
}

std::pair<Result<float>, Result<float>> tangent_ab2(const Tensor& x_, const Tensor& v_, double h, const Tensor& v_free_, double guidance,
                                                    const Tensor& carried_, double share) {
    const auto x = rows(x_, "x"), v = needed(v_, "v", x_), v_free = beside(v_free_, "v_free", x_), carried = beside(carried_, "carried", x_);
    std::pair<Result<float>, Result<float>> results{result_like(x_, "x"), result_like(x_, "x")};
    const RowShape shape = shape_of(x);
    compute(x.count * x.width, [&] {
        geoflow::solver_kernels().tangent_ab2(shape, h, guidance, share, x, v, v_free, carried, results.first.rows(x.width),
                                              results.second.rows(x.width));
    });
    return results;
}

void bind_solver(py::module_& m) {
    m.def("tangent_step", &tangent_step, "x"_a, "v"_a, "h"_a, "v_free"_a, "guidance"_a, "renormalise"_a);
    m.def("tangent_stage", &tangent_stage, "x"_a, "at"_a, "v"_a, "h"_a, "v_free"_a, "guidance"_a, "total"_a, "weight"_a);
    m.def("tangent_ab2", &tangent_ab2, "x"_a, "v"_a, "h"_a, "v_free"_a, "guidance"_a, "carried"_a, "share"_a);
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
    bind_swiglu(m);
    bind_gate_residual(m);
    bind_cross_residual(m);
    bind_flow_loss(m);
    bind_keep_mask(m);
    bind_segments(m, geoflow::network_kernels());
    bind_solver(m);
    bind_interpolant(m);
    m.def("counter_noise", &counter_noise);
    bind_transport(m);
    bind_gallery(m);
    bind_search(m);
#if defined(GEOFLOW_WITH_CUDA)
    bind_cuda_transport(m);
#endif
}
