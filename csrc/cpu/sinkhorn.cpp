// The transport solver, compiled once for every target: builds the matrix, chooses its domain, comes down to eps by halves, iterates and
// reads the plan.
#include <cmath>
#include <cstring>

#include "cpu/sinkhorn_passes.h"

namespace {

using geoflow::OtProblem;
using geoflow::OtResult;
using geoflow::OtSettings;
using geoflow::RoundedKernels;

constexpr double kPi = 3.14159265358979323846;
// Largest |S - centre| / eps whose exponential the kernel domain may hold: a float reaches e^+-87.
constexpr double kKernelReach = 80;
// Rows in bfloat16: from which sizes on they pay, how much of eps their rounding may be, and how many times its size two scores must
// differ for their order to be trusted.
constexpr std::int64_t kLeastRoundedWidth = 128, kLeastRoundedEntries = 1 << 20;
constexpr double kRoundingShare = 0.01, kRoundingSpread = 6;

// Iterates to the end, from potentials of zero, on a matrix of scores within `range`, or of exponentials that cannot leave theirs.
IterationReport run(OtMatrix& matrix, Range range, const OtSettings& s, double* f, double* g) {
    const double spread = double(range.high) - double(range.low);
    IterationReport all{Outcome::stopped, 0, INFINITY};
    const auto iterate = [&](double eps, std::int64_t most) {
        const IterationReport report = Passes(matrix, s.threads).run(eps, s.tol, most, f, g, s.poll);
        all = {report.outcome, all.iterations + report.iterations, report.error};
    };
    std::memset(f, 0, static_cast<std::size_t>(matrix.rows) * sizeof(double));
    std::memset(g, 0, static_cast<std::size_t>(matrix.cols) * sizeof(double));
    if (matrix.domain == Domain::score) {
        if (spread / 2 <= kKernelReach * s.eps) {
            matrix.centre = (double(range.low) + double(range.high)) / 2;
            enter_kernel(matrix, s.threads);
        } else {
            // Far below the spread, potentials that settled at a larger eps save most of the iterations. One is left for the end.
            for (double eps = spread / 10; eps > 2 * s.eps; eps /= 2) {
                const std::int64_t left = least(s.max_iter / 16, s.max_iter - 1 - all.iterations);
                if (left <= 0) break;
                iterate(eps, left);
                if (all.outcome == Outcome::interrupted) return all;
            }
        }
    }
    iterate(s.eps, s.max_iter - all.iterations);
    if (all.outcome == Outcome::out_of_range) {  // exponentials cannot follow the potentials; scores can
        leave_kernel(matrix, s.threads);
        iterate(s.eps, s.max_iter - all.iterations);
    }
    return all;
}

// The root mean square, and somewhat more, of what rounding rows to bfloat16 does to a cost: a product of two coordinates is off by
// .6 2^-8, those of a row are independent, and d^(-1/2) is the share of each.
double rounding_of(const OtProblem& p) {
    return 0x1p-8 * (1 / std::sqrt(double(p.image.dim)) + 1 / std::sqrt(double(p.text.dim)));
}

IterationReport solve(const OtProblem& p, const OtSettings& s, const RoundedKernels* rounded, const OtResult& result) {
    const double rounding = rounding_of(p);
    if (least(p.image.dim, p.text.dim) < kLeastRoundedWidth || p.rows * p.cols < kLeastRoundedEntries || rounding > kRoundingShare * s.eps)
        rounded = nullptr;
    // Scores of points are within pi: where that is in reach, exponentials are written at once.
    OtMatrix matrix{nullptr, p.rows, p.cols, kPi <= kKernelReach * s.eps ? Domain::kernel : Domain::score, 0.0, s.eps};
    const Scratch memory(p.rows * matrix.ld());
    matrix.data = memory.get();
    Range range{};
    if (!(rounded ? rounded->build : build<DenseProducts>)(matrix, p.image, p.text, s.threads, s.poll, &range))
        return {Outcome::interrupted, 0, INFINITY};
    const IterationReport report = run(matrix, range, s, result.f, result.g);
    if (report.outcome == Outcome::interrupted) return report;
    if (rounded && !p.uniform)
        rounded->resolve(matrix, p.image, p.text, s.eps, result.g, kRoundingSpread * rounding, result.index, s.threads);
    else
        read_out(matrix, s.eps, result.g, p.uniform, result.index, s.threads);
    for (std::int64_t i = 0; i < p.rows; ++i) result.f[i] += kPi;  // of C = pi - S
    return report;
}

IterationReport sinkhorn(float* scores, std::int64_t rows, std::int64_t cols, Range range, const OtSettings& s, double* f, double* g) {
    OtMatrix matrix{scores, rows, cols, Domain::score, 0.0, s.eps};
    return run(matrix, range, s, f, g);
}

const geoflow::CpuSolver kCpuSolver = {solve, sinkhorn};

}  // namespace

namespace geoflow {

const CpuSolver& GEOFLOW_KERNELS(cpu_solver)() { return kCpuSolver; }

}  // namespace geoflow
