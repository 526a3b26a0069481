// Runs the shipped solver, result and sampling kernels in the emulation, one after the other.
// Arguments: schedule seed wide blocks rows cols stride eps tol max_iter halvings offset.
// In: matrix [rows, stride], float16 if compiled with HALF_ENTRIES, uniform [rows] float64. Out: status [3], f [rows], g [cols] float64,
// row_mass [rows] float32, argmax [rows], draw [rows] int64.
#include "cuda/sinkhorn.cuh"
#include "driver.h"

using namespace driver;
using namespace geoflow::cuda;

namespace {

#if defined(HALF_ENTRIES)
using Entry = Half;
#else
using Entry = float;
#endif

void solve(int vectors, int blocks, const SinkhornProblem& p, const SinkhornWorkspace& w) {
    const auto launch = [&](std::size_t bytes) { return emulation::Launch{blocks, kThreads, bytes, true}; };
    if (vectors == 1) emulation::run(launch(kSinkhornSharedBytes<1, Entry>), [&] { sinkhorn_kernel<1, Entry>(p, w); });
    if (vectors == 2) emulation::run(launch(kSinkhornSharedBytes<2, Entry>), [&] { sinkhorn_kernel<2, Entry>(p, w); });
    if (vectors == 4) emulation::run(launch(kSinkhornSharedBytes<4, Entry>), [&] { sinkhorn_kernel<4, Entry>(p, w); });
    if (vectors == 0) emulation::run(launch(0), [&] { sinkhorn_wide_kernel<Entry>(p, w); });
}

}  // namespace

int main(int argument_count, char** argument_values) {
    read_arguments(argument_count, argument_values);
    geoflow::SinkhornParams params{};
    params.rows = integer("rows");
    params.cols = integer("cols");
    params.eps = static_cast<float>(number("eps"));
    params.tol = static_cast<float>(number("tol"));
    params.max_iter = integer("max_iter");
    const std::int64_t stride = integer("stride"), padded = (params.cols + 3) / 4 * 4;
    const int blocks = integer("blocks");
    const float offset = static_cast<float>(number("offset"));
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    Array<Entry> matrix(size(params.rows * stride));
    Array<float> reference(size(padded)), delta(size(padded)),
        row_max(size(params.rows)), row_log(size(params.rows)), partial_sum(size(blocks * padded)),
        partial_max(size(blocks * padded)), group_error(size((params.cols + 31) / 32));
    Array<geoflow::SinkhornStatus> status(1);
    Array<double> uniform(size(params.rows)), f(size(params.rows)), g(size(params.cols));
    Array<float> row_mass(size(params.rows));
    Array<std::int64_t> index(size(params.rows)), draw(size(params.rows));
    matrix.read();
    uniform.read();
    std::memset(reference.data, 0, reference.count * sizeof(float));
    std::memset(delta.data, 0, delta.count * sizeof(float));
    const SinkhornProblem problem = sinkhorn_problem(params, matrix.data, stride, integer("halvings"));
    const SinkhornWorkspace workspace = {reference.data,   delta.data,       row_max.data,
                                         row_log.data,     partial_sum.data, partial_max.data,
                                         group_error.data, status.data,      padded};
    const SinkhornResult result = {index.data, f.data, g.data, row_mass.data, params.eps, offset};
    const int vectors = integer("wide") != 0 ? 0 : sinkhorn_vectors(params.cols);
    solve(vectors, blocks, problem, workspace);
    const emulation::Launch last = {blocks, kResultThreads, 0, false};
    emulation::run(last, [&] { sinkhorn_result_kernel<Entry>(problem, workspace, result); });
    emulation::run(
        last, [&] { sinkhorn_sample_kernel<Entry>(problem, workspace, row_mass.data, uniform.data, draw.data); });
    status.write();
    f.write();
    g.write();
    row_mass.write();
    index.write();
    draw.write();
    return 0;
}
