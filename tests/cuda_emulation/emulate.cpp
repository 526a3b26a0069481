// Runs one of the shipped kernels in the emulation: arguments as name=value, arrays as raw bytes on standard input and output.
//   emulate score schedule= seed= passes= width= rows= cols= dim0= dim1= weight0= weight1= arc=
//       in: x0 [rows, dim0], y0 [cols, dim0], x1 [rows, dim1], y1 [cols, dim1]; out: score [rows, stride], stride = cols up to a multiple of 4
//   emulate sinkhorn schedule= seed= width= wide= blocks= rows= cols= stride= cost= eps= tol= max_iter= offset=
//       in: matrix [rows, stride], uniform [rows] float64; out: status (two int32 and a float), f [rows], g [cols] float64,
//       row_mass [rows], row_cost [rows], argmax [rows], draw [rows] int64
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "cuda/score.cuh"
#include "cuda/sinkhorn.cuh"
#include "emulation.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

using namespace geoflow::cuda;

std::map<std::string, std::string> arguments;

double number(const char* name) {
    const auto found = arguments.find(name);
    emulation::require(found != arguments.end(), name);
    return std::atof(found->second.c_str());
}

int integer(const char* name) { return static_cast<int>(number(name)); }

// Of exactly this size, so that AddressSanitizer knows its ends; every byte 0xff, a NaN as float.
template <typename T>
struct Array {
    explicit Array(std::size_t size) : count(size), data(static_cast<T*>(std::aligned_alloc(16, (size * sizeof(T) + 15) / 16 * 16))) {
        std::memset(static_cast<void*>(data), 0xff, size * sizeof(T));
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(data + size, (size * sizeof(T) + 15) / 16 * 16 - size * sizeof(T));
#endif
    }
    ~Array() { std::free(data); }
    Array(const Array&) = delete;

    void read() { emulation::require(std::fread(data, sizeof(T), count, stdin) == count, "input too short"); }
    void write() const { emulation::require(std::fwrite(data, sizeof(T), count, stdout) == count, "output failed"); }

    std::size_t count;
    T* data;
};

void score() {
    const int rows = integer("rows"), cols = integer("cols"), dim[2] = {integer("dim0"), integer("dim1")};
    const std::int64_t stride = (cols + 3) / 4 * 4;
    std::unique_ptr<Array<float>> points[4];
    for (int k = 0; k < 4; ++k) {
        points[k] = std::make_unique<Array<float>>(static_cast<std::size_t>((k % 2 == 0 ? rows : cols) * dim[k / 2]));
        points[k]->read();
    }
    Array<float> out(static_cast<std::size_t>(rows * stride));
    const ScoreProblem problem = {{{points[0]->data, points[1]->data, dim[0], static_cast<float>(number("weight0"))},
                                   {points[2]->data, points[3]->data, dim[1], static_cast<float>(number("weight1"))}},
                                  out.data,
                                  rows,
                                  cols,
                                  stride,
                                  integer("arc") != 0};
    const auto tiles = [](int size) { return (size + kScoreTile - 1) / kScoreTile; };
    const emulation::Launch launch = {tiles(rows) * tiles(cols), kScoreThreads, kScoreSharedBytes, false};
    const bool precise = integer("passes") == 3, aligned = integer("width") == 4;
    emulation::run(launch, [&] {
        if (precise) {
            aligned ? score_kernel<3, 4>(problem) : score_kernel<3, 1>(problem);
        } else {
            aligned ? score_kernel<1, 4>(problem) : score_kernel<1, 1>(problem);
        }
    });
    out.write();
}

template <int kWidth>
void solve(int vectors, int blocks, const SinkhornProblem& p, const SinkhornWorkspace& w) {
    const auto launch = [&](std::size_t bytes) { return emulation::Launch{blocks, kThreads, bytes, true}; };
    if (vectors == 1) emulation::run(launch(kSinkhornSharedBytes<1>), [&] { sinkhorn_kernel<1, kWidth>(p, w); });
    if (vectors == 2) emulation::run(launch(kSinkhornSharedBytes<2>), [&] { sinkhorn_kernel<2, kWidth>(p, w); });
    if (vectors == 4) emulation::run(launch(kSinkhornSharedBytes<4>), [&] { sinkhorn_kernel<4, kWidth>(p, w); });
    if (vectors == 0) emulation::run(launch(0), [&] { sinkhorn_wide_kernel<kWidth>(p, w); });
}

void sinkhorn() {
    geoflow::SinkhornParams params{};
    params.rows = integer("rows");
    params.cols = integer("cols");
    params.cost = static_cast<geoflow::Cost>(integer("cost"));
    params.eps = static_cast<float>(number("eps"));
    params.tol = static_cast<float>(number("tol"));
    params.max_iter = integer("max_iter");
    const std::int64_t stride = integer("stride"), padded = (params.cols + 3) / 4 * 4;
    const int blocks = integer("blocks");
    const float offset = static_cast<float>(number("offset"));
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    Array<float> matrix(size(params.rows * stride)), reference(size(padded)), delta(size(padded)), row_max(size(params.rows)),
        row_log(size(params.rows)), partial_sum(size(blocks * padded)), partial_max(size(blocks * padded)),
        group_error(size((params.cols + 31) / 32));
    Array<geoflow::SinkhornStatus> status(1);
    Array<double> uniform(size(params.rows)), f(size(params.rows)), g(size(params.cols));
    Array<float> row_mass(size(params.rows)), row_cost(size(params.rows));
    Array<std::int64_t> index(size(params.rows)), draw(size(params.rows));
    matrix.read();
    uniform.read();
    std::memset(reference.data, 0, reference.count * sizeof(float));
    std::memset(delta.data, 0, delta.count * sizeof(float));
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, stride, offset);
    const SinkhornWorkspace workspace = {reference.data,   delta.data,       row_max.data, row_log.data, partial_sum.data,
                                         partial_max.data, group_error.data, status.data,  padded};
    const SinkhornResult result = {index.data, f.data, g.data, row_mass.data, row_cost.data, params.eps, offset};
    const int vectors = integer("wide") != 0 ? 0 : sinkhorn_vectors(params.cols);
    const bool aligned = integer("width") == 4;
    aligned ? solve<4>(vectors, blocks, problem, workspace) : solve<1>(vectors, blocks, problem, workspace);
    const emulation::Launch last = {blocks, kResultThreads, 0, false};
    emulation::run(last, [&] {
        aligned ? sinkhorn_result_kernel<4>(problem, workspace, result) : sinkhorn_result_kernel<1>(problem, workspace, result);
    });
    emulation::run(last, [&] {
        aligned ? sinkhorn_sample_kernel<4>(problem, workspace, row_mass.data, uniform.data, draw.data)
                : sinkhorn_sample_kernel<1>(problem, workspace, row_mass.data, uniform.data, draw.data);
    });
    status.write();
    f.write();
    g.write();
    row_mass.write();
    row_cost.write();
    index.write();
    draw.write();
}

}  // namespace

int main(int count, char** values) {
    emulation::require(count >= 2, "which kernel: score or sinkhorn?");
    for (int k = 2; k < count; ++k) {
        const std::string text = values[k];
        arguments[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    }
    emulation::use_schedule(static_cast<emulation::Schedule>(integer("schedule")), static_cast<std::uint64_t>(number("seed")));
    std::string(values[1]) == "score" ? score() : sinkhorn();
    return 0;
}
