// The entropic transport solver for CPUs: one [rows, ld] matrix and the passes over it.
//
// The matrix holds either the centred score S_ij = offset - C_ij (Domain::score) or K_ij = exp((S_ij - centre) / eps)
// (Domain::kernel). The kernel domain costs one multiply-add per entry and pass, but only carries a bounded range of S/eps; the score
// domain costs an exponential and carries any range. Rows are `ld` elements apart, ld the column count rounded up to kLeading; the
// padding is never read as data. Potentials f and g are in double and refer to S:
//     P_ij = exp((f_i + g_j + S_ij) / eps),
// so the row potential that belongs to C is f_i + offset.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"
#include "sinkhorn.h"

namespace geoflow {

constexpr std::int64_t kLeading = 16;

enum class Domain : std::int32_t { score = 0, kernel = 1 };

struct OtMatrix {
    float* data;  // 64-byte aligned
    std::int64_t rows;
    std::int64_t cols;
    Domain domain;
    double centre;  // of the kernel domain
    double eps;     // of the kernel domain: the eps that K was built with

    std::int64_t ld() const { return (cols + kLeading - 1) / kLeading * kLeading; }
};

// The points on one sphere.
struct Factor {
    const float* noise;  // [rows, dim]
    const float* data;   // [cols, dim]
    std::int64_t dim;
};

struct Range {
    float low, high;
};

enum class Outcome : std::int32_t {
    stopped = 0,       // max_iter iterations without reaching tol
    converged = 1,
    out_of_range = 2,  // the kernel domain overflowed or vanished: the potentials are as before the call's last iteration
    interrupted = 3,
};

struct IterationReport {
    Outcome outcome;
    std::int64_t iterations;
    double error;      // L1 violation of the column marginal before the last column update: bounds the row violation after it
};

// Returns false when the user interrupts. Asked by the calling thread only.
using Poll = bool (*)();

struct OtProblem {
    Factor image, text;
    std::int64_t rows, cols;
    const double* uniform;  // [rows] in [0, 1), or null
};

struct OtSettings {
    double eps, tol;
    std::int64_t max_iter;
    int threads;
    Poll poll;
};

struct OtResult {
    std::int64_t* index;  // [rows] argmax of the plan's rows, or draws from them at `uniform`
    double *f, *g;        // [rows], [cols]
};

// Only where has_avx512_bf16(): the matrix from inner products of rows rounded to bfloat16; and the argmax of the rows of such a plan, in
// which entries of S within `margin` of a row's best are computed again in single precision.
struct RoundedKernels {
    bool (*build)(const OtMatrix& matrix, const Factor& image, const Factor& text, int threads, Poll poll, Range* range);
    void (*resolve)(const OtMatrix& matrix, const Factor& image, const Factor& text, double eps, const double* g, double margin,
                    std::int64_t* index, int threads);
};
const RoundedKernels& rounded_kernels();

// The solver, compiled once per instruction set. Nothing here depends on the number of threads but time. What an interrupted call has
// written is not to be read.
struct CpuSolver {
    // The plan between points. `rounded` may be null.
    IterationReport (*solve)(const OtProblem& problem, const OtSettings& settings, const RoundedKernels* rounded, const OtResult& result);

    // The potentials of given scores [rows, ld] within `range`, whose padding is finite. They are overwritten.
    IterationReport (*sinkhorn)(float* scores, std::int64_t rows, std::int64_t cols, Range range, const OtSettings& settings, double* f,
                                double* g);
};

// The solver for this processor.
GEOFLOW_DECLARE_KERNELS(CpuSolver, cpu_solver)

// `solve` of this processor, with what it can round.
IterationReport ot_solve(const OtProblem& problem, const OtSettings& settings, const OtResult& result);

}  // namespace geoflow
