// The entropic transport solver for CPUs: one [rows, ld] matrix that Python owns, and the passes over it.
//
// The matrix holds either the centred score S_ij = offset - C_ij (Domain::score) or K_ij = exp((S_ij - centre) / eps)
// (Domain::kernel), as float or as IEEE half. The kernel domain costs one multiply-add per entry and pass, but only carries a
// bounded range of S/eps; the score domain costs an exponential and carries any range. Rows are `ld` elements apart, ld the
// column count rounded up to kLeading; the padding is never read as data. Potentials f and g are in double and refer to S:
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
    void* data;            // 64-byte aligned
    std::int64_t rows;
    std::int64_t cols;
    bool half;             // element type: IEEE half or float
    Domain domain;
    double centre;         // of the kernel domain
    double eps;            // of the kernel domain: the eps that K was built with

    std::int64_t ld() const { return (cols + kLeading - 1) / kLeading * kLeading; }
};

// One sphere's inner products.
struct Factor {
    const float* noise;  // [rows, dim]
    const float* data;   // [cols, dim]
    std::int64_t dim;
    float weight;
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

// The passes, compiled once per instruction set. Nothing here depends on the number of threads but time.
struct CpuSolver {
    // Fills the matrix from two factors, in the domain it is marked with; kernel needs |S| <= 80 eps for every possible S (centre
    // 0). `range` receives the extremes of S. Returns false when interrupted.
    bool (*build)(const OtMatrix& matrix, const Factor& image, const Factor& text, Cost cost, int threads, Poll poll, Range* range);

    // Fills the matrix with S = offset - C from a given contiguous C [rows, cols]. Returns the extremes of S, infinite ones when
    // an entry is not finite.
    Range (*import_cost)(const OtMatrix& matrix, const float* cost, float offset, int threads);

    // In place, between the domains, with the matrix's centre and eps.
    void (*enter_kernel)(const OtMatrix& matrix, int threads);
    void (*leave_kernel)(const OtMatrix& matrix, int threads);

    // Sinkhorn iterations from column potential g, in place; f is written. Stops at tol, at max_iter or when interrupted.
    IterationReport (*iterate)(const OtMatrix& matrix, double eps, double tol, std::int64_t max_iter, double* f, double* g,
                               int threads, Poll poll);

    // Half an iteration on a panel: the matrix holds some rows of a problem with `total_rows`. Writes f of these rows and s[j], the sum
    // of P_ij over them, so that adding s over all panels gives the column sums of an iteration. False when out of range.
    bool (*panel_pass)(const OtMatrix& matrix, double eps, std::int64_t total_rows, double* f, const double* g, double* s, int threads);

    // One pass with final potentials. index[i] is argmax_j P_ij, or with `uniform` [rows] in [0, 1) the inverse distribution
    // function of row i at uniform[i]; null to skip. With f, returns sum_ij P_ij S_ij; neither index needs it.
    double (*read_out)(const OtMatrix& matrix, double eps, const double* f, const double* g, const double* uniform,
                       std::int64_t* index, int threads);
};

// The solver for this processor.
GEOFLOW_DECLARE_KERNELS(CpuSolver, cpu_solver)

// Only where has_avx512_bf16(): `build` from inner products of rows rounded to bfloat16; and index[i] = argmax_j P_ij
// of such a matrix, in which entries of S within `margin` of a row's best are computed again in single precision.
bool build_bfloat16(const OtMatrix& matrix, const Factor& image, const Factor& text, Cost cost, int threads, Poll poll, Range* range);
void resolve_near_ties(const OtMatrix& matrix, const Factor& image, const Factor& text, Cost cost, double eps, const double* g,
                       double margin, std::int64_t* index, int threads);

}  // namespace geoflow
