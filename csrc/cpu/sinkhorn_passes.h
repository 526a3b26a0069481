// The passes of the CPU transport solver, compiled once per instruction set. See sinkhorn_cpu.h for what they do.
//
// Rows are cut into at most kBlocks blocks by a rule that knows the row count alone. A block sums its columns in float, blocks are
// added in double in ascending order: the result is the same for any number of threads.
#pragma once
#include <cmath>
#include <cstdint>

#include "cpu/gemm.h"
#include "cpu/simd.h"
#include "cpu/sinkhorn_cpu.h"

namespace {

using geoflow::Domain;
using geoflow::Factor;
using geoflow::IterationReport;
using geoflow::OtMatrix;
using geoflow::Outcome;
using geoflow::Poll;
using geoflow::Range;

constexpr std::int64_t kBlocks = 64;
// A matrix larger than this is written past the cache: by the time it is read again it would have left the cache anyway.
constexpr std::int64_t kStreamingBytes = 32 << 20;
constexpr float kLowest = -3e38f;
// Row and column sums of the kernel domain outside these bounds have lost terms to underflow, or are about to overflow.
constexpr float kLeastSum = 1e-30f;
constexpr float kMostSum = 1e30f;

// Waking a thread costs more than this many entries do.
constexpr std::int64_t kEntriesPerThread = 1 << 16;

int useful_threads(const OtMatrix& matrix, int threads) {
    return static_cast<int>(least(threads, 1 + matrix.rows * matrix.cols / kEntriesPerThread));
}

std::int64_t block_rows(std::int64_t rows) { return round_up((rows + kBlocks - 1) / kBlocks, 4); }

// ---- building the matrix ------------------------------------------------------------------------------------------------------

// Extremes of the scores one thread has seen; padded to a cache line of its own.
struct alignas(64) Extremes {
    floats low, high;
    void clear() { low = broadcast(-kLowest), high = broadcast(kLowest); }
    GEOFLOW_INLINE void add(floats x) { low = min(low, x), high = max(high, x); }
};

Range merge(const Extremes* seen, int threads) {
    Range range{-kLowest, kLowest};
    for (int t = 0; t < threads; ++t) {
        const float low = smallest(seen[t].low), high = largest(seen[t].high);
        range.low = low < range.low ? low : range.low;
        range.high = high > range.high ? high : range.high;
    }
    return range;
}

template <bool streaming>
GEOFLOW_INLINE void store_entry(float* to, floats x) {
    if (streaming)
        store_streaming(to, x);
    else
        store(to, x);
}

// Turns inner products into matrix entries, `cols` of them; the rest up to a multiple of 16 is padding and becomes a finite number.
template <bool kernel, bool streaming>
GEOFLOW_INLINE void finish_row(float inverse_eps, const float* image, const float* text, std::int64_t cols, float* to, Extremes& seen) {
    for (std::int64_t j = 0; j < round_up(cols, geoflow::kLeading); j += kLanes) {
        const floats s = arcsine(load(image + j)) + arcsine(load(text + j));
        if (j + kLanes <= cols) {
            seen.add(s);
        } else {
            for (std::int64_t lane = 0; lane < cols - j; ++lane) seen.add(broadcast(s[lane]));
        }
        store_entry<streaming>(to + j, kernel ? exponential(s * inverse_eps) : s);
    }
}

// Dense products in single precision. A class of products in less has the same member.
struct DenseProducts {
    template <class... Arguments>
    static bool tiles(const Arguments&... arguments) {
        return product_tiles(arguments...);
    }
};

template <class Dense, bool kernel>
bool build(const OtMatrix& matrix, const Factor& image, const Factor& text, int most_threads, Poll poll, Range* range) {
    const int threads = useful_threads(matrix, most_threads);
    const std::int64_t ld = matrix.ld();
    const float inverse_eps = static_cast<float>(1 / matrix.eps);
    const Scratch slots(threads * std::int64_t{sizeof(Extremes) / sizeof(float)});
    Extremes* const seen = reinterpret_cast<Extremes*>(slots.get());
    for (int t = 0; t < threads; ++t) seen[t].clear();

    const bool streaming = matrix.rows * ld * std::int64_t{sizeof(float)} > kStreamingBytes;
    const auto finish = [&](const Tile<2>& tile) {
        Extremes mine = seen[thread_number()];
        for (std::int64_t i = 0; i < tile.rows; ++i) {
            const float* const image_row = tile.value[0] + i * tile.ld;
            const float* const text_row = tile.value[1] + i * tile.ld;
            float* const to = matrix.data + (tile.row + i) * ld + tile.col;
            if (streaming)
                finish_row<kernel, true>(inverse_eps, image_row, text_row, tile.cols, to, mine);
            else
                finish_row<kernel, false>(inverse_eps, image_row, text_row, tile.cols, to, mine);
        }
        seen[thread_number()] = mine;
    };
    const Product products[2] = {{image.noise, image.data, image.dim}, {text.noise, text.data, text.dim}};
    const bool done = Dense::tiles(products, matrix.rows, matrix.cols, threads, poll, finish);
    *range = merge(seen, threads);
    return done;
}

// Fills the matrix in the domain it is marked with; the extremes are those of S. Returns false when interrupted.
template <class Dense>
bool build(const OtMatrix& matrix, const Factor& image, const Factor& text, int threads, Poll poll, Range* range) {
    return matrix.domain == Domain::kernel ? build<Dense, true>(matrix, image, text, threads, poll, range)
                                           : build<Dense, false>(matrix, image, text, threads, poll, range);
}

// ---- between the domains ------------------------------------------------------------------------------------------------------

template <class Map>
void map_entries(const OtMatrix& matrix, int threads, const Map& map) {
    const std::int64_t ld = matrix.ld();
#pragma omp parallel for num_threads(useful_threads(matrix, threads)) schedule(static)
    for (std::int64_t i = 0; i < matrix.rows; ++i)
        for (std::int64_t j = 0; j < ld; j += kLanes) store(matrix.data + i * ld + j, map(load(matrix.data + i * ld + j)));
}

// In place, with the matrix's centre and eps.
void enter_kernel(OtMatrix& matrix, int threads) {
    const float centre = static_cast<float>(matrix.centre), inverse_eps = static_cast<float>(1 / matrix.eps);
    map_entries(matrix, threads, [=](floats s) { return exponential((s - centre) * inverse_eps); });
    matrix.domain = Domain::kernel;
}

void leave_kernel(OtMatrix& matrix, int threads) {
    const float centre = static_cast<float>(matrix.centre), eps = static_cast<float>(matrix.eps);
    map_entries(matrix, threads, [=](floats k) { return centre + eps * logarithm(k); });
    matrix.domain = Domain::score;
}

// ---- iterations ---------------------------------------------------------------------------------------------------------------

// The column potential as the passes want it, [ld]: exp((g - middle) / eps) in the kernel domain, g - middle in the score domain.
// The padding vanishes from every row sum.
struct ColumnWeights {
    float* value;
    double middle;
};

ColumnWeights column_weights(const OtMatrix& matrix, double eps, const double* g, float* value) {
    double low = g[0], high = g[0];
    for (std::int64_t j = 1; j < matrix.cols; ++j) {
        low = g[j] < low ? g[j] : low;
        high = g[j] > high ? g[j] : high;
    }
    const double middle = 0.5 * (low + high);
    const bool kernel = matrix.domain == Domain::kernel;
    for (std::int64_t j = 0; j < matrix.cols; ++j)
        value[j] = static_cast<float>(kernel ? std::exp((g[j] - middle) / eps) : g[j] - middle);
    for (std::int64_t j = matrix.cols; j < matrix.ld(); ++j) value[j] = kernel ? 0.0f : kLowest;
    return {value, middle};
}

// Vectors that make up kLeading columns. Each has a sum of its own, since an addition waits for the last one.
constexpr int kChains = static_cast<int>(geoflow::kLeading / kLanes);

GEOFLOW_INLINE floats total_of(const floats (&chain)[kChains]) { return kChains == 1 ? chain[0] : chain[0] + chain[kChains - 1]; }

// Row sums of K v for `Rows` rows at once: each vector of v is loaded once for all of them.
template <int Rows>
GEOFLOW_INLINE void row_dots(const float* k, std::int64_t ld, const float* v, float* dots) {
    floats acc[Rows][kChains];
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < kChains; ++c) acc[r][c] = broadcast(0.0f);
    for (std::int64_t j = 0; j < ld; j += geoflow::kLeading) {
        floats weight[kChains];
#pragma GCC unroll 2
        for (int c = 0; c < kChains; ++c) weight[c] = load(v + j + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
            for (int c = 0; c < kChains; ++c) acc[r][c] += load(k + r * ld + j + c * kLanes) * weight[c];
    }
    for (int r = 0; r < Rows; ++r) dots[r] = sum(total_of(acc[r]));
}

// One read of `Rows` rows of K: their sums, u = a / sum, and u K added to the column sums while the rows are still in cache.
template <int Rows>
GEOFLOW_INLINE bool kernel_rows(const float* k, std::int64_t ld, const float* v, float a, float* dots, float* columns) {
    row_dots<Rows>(k, ld, v, dots);
    floats u[Rows];
    bool fine = true;
    for (int r = 0; r < Rows; ++r) {
        fine = fine && dots[r] >= kLeastSum && dots[r] <= kMostSum;
        u[r] = broadcast(a / dots[r]);
    }
    for (std::int64_t j = 0; j < ld; j += kLanes) {
        floats total = load(columns + j);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) total += u[r] * load(k + r * ld + j);
        store(columns + j, total);
    }
    return fine;
}

// The same in the score domain for one row: log-sum-exp of (g + S) / eps, and the normalised row added to the column sums.
GEOFLOW_INLINE double score_row(const float* s, std::int64_t ld, const float* g, float inverse_eps, float a, float* row,
                                float* columns) {
    floats best = broadcast(kLowest);
    for (std::int64_t j = 0; j < ld; j += kLanes) best = max(best, load(s + j) + load(g + j));
    const float top = largest(best);
    floats acc[kChains];
    for (int c = 0; c < kChains; ++c) acc[c] = broadcast(0.0f);
    for (std::int64_t first = 0; first < ld; first += geoflow::kLeading) {
#pragma GCC unroll 2
        for (int c = 0; c < kChains; ++c) {
            const std::int64_t j = first + c * kLanes;
            const floats e = exponential((load(s + j) + load(g + j) - top) * inverse_eps);
            acc[c] += e;
            store(row + j, e);
        }
    }
    const float total = sum(total_of(acc));
    const floats u = broadcast(a / total);
    for (std::int64_t j = 0; j < ld; j += kLanes) store(columns + j, load(columns + j) + u * load(row + j));
    return double(top) + std::log(double(total)) / double(inverse_eps);
}

// Everything one solve needs besides the matrix: O(cols) floats per block of rows.
class Passes {
  public:
    Passes(const OtMatrix& matrix, int threads)
        : m_(matrix), threads_(useful_threads(matrix, threads)), ld_(matrix.ld()), step_(block_rows(matrix.rows)),
          blocks_((matrix.rows + step_ - 1) / step_), block_sums_(blocks_ * ld_), weights_(ld_), rows_(threads_ * ld_) {}

    // Sinkhorn iterations from column potential g, in place; f is written. Stops at tol, at max_iter or when interrupted.
    IterationReport run(double eps, double tol, std::int64_t max_iter, double* f, double* g, Poll poll) {
        const Scratch sums(2 * m_.cols);
        double* const s = reinterpret_cast<double*>(sums.get());
        IterationReport report{Outcome::stopped, 0, INFINITY};
        while (report.iterations < max_iter) {
            if (!poll()) {
                report.outcome = Outcome::interrupted;
                return report;
            }
            const ColumnWeights w = column_weights(m_, eps, g, weights_.get());
            if (!row_pass(w, eps, f) || !column_sums(w, s)) {
                report.outcome = Outcome::out_of_range;
                return report;
            }
            ++report.iterations;
            report.error = update_columns(s, eps, f, g);
            if (report.error <= tol) {
                report.outcome = Outcome::converged;
                return report;
            }
        }
        return report;
    }

  private:
    const float* row(std::int64_t i) const { return m_.data + i * ld_; }

    // f from g, and each block's share of the column sums. False when the kernel domain cannot represent a row sum.
    bool row_pass(const ColumnWeights& w, double eps, double* f) {
        bool fine = true;
        const bool kernel = m_.domain == Domain::kernel;
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1) reduction(&& : fine)
        for (std::int64_t block = 0; block < blocks_; ++block) {
            const std::int64_t begin = block * step_, end = least(begin + step_, m_.rows);
            float* const columns = block_sums_.get() + block * ld_;
            for (std::int64_t j = 0; j < ld_; ++j) columns[j] = 0.0f;
            if (kernel)
                fine = kernel_block(begin, end, w, eps, f, columns) && fine;
            else
                score_block(begin, end, w, eps, f, columns);
        }
        return fine;
    }

    bool kernel_block(std::int64_t begin, std::int64_t end, const ColumnWeights& w, double eps, double* f, float* columns) {
        const float a = static_cast<float>(1.0 / double(m_.rows));
        const double shift = m_.centre + w.middle, log_a = -std::log(double(m_.rows));
        bool fine = true;
        float dots[4];
        for (std::int64_t i = begin; i < end; i += 4) {
            const std::int64_t count = least(4, end - i);
            if (count == 4) {
                fine = kernel_rows<4>(row(i), ld_, w.value, a, dots, columns) && fine;
            } else {
                for (std::int64_t r = 0; r < count; ++r)
                    fine = kernel_rows<1>(row(i + r), ld_, w.value, a, dots + r, columns) && fine;
            }
            for (std::int64_t r = 0; r < count; ++r) f[i + r] = eps * (log_a - std::log(double(dots[r]))) - shift;
        }
        return fine;
    }

    void score_block(std::int64_t begin, std::int64_t end, const ColumnWeights& w, double eps, double* f, float* columns) {
        const float a = static_cast<float>(1.0 / double(m_.rows)), inverse_eps = static_cast<float>(1 / eps);
        const double log_a = -std::log(double(m_.rows));
        float* const scratch = rows_.get() + thread_number() * ld_;
        for (std::int64_t i = begin; i < end; ++i)
            f[i] = eps * log_a - w.middle - score_row(row(i), ld_, w.value, inverse_eps, a, scratch, columns);
    }

    // Adds the blocks. False when a column of the kernel domain left its range.
    bool column_sums(const ColumnWeights& w, double* s) {
        constexpr std::int64_t kStretch = 512;  // columns whose totals stay in L1 while the blocks pass by
        bool fine = true;
        const bool kernel = m_.domain == Domain::kernel;
#pragma omp parallel for num_threads(threads_) schedule(static) reduction(&& : fine)
        for (std::int64_t begin = 0; begin < m_.cols; begin += kStretch) {
            const std::int64_t end = least(begin + kStretch, m_.cols);
            for (std::int64_t j = begin; j < end; ++j) s[j] = 0;
            for (std::int64_t block = 0; block < blocks_; ++block) {
                const float* const part = block_sums_.get() + block * ld_;
                for (std::int64_t j = begin; j < end; ++j) s[j] += double(part[j]);
            }
            if (!kernel) continue;
            for (std::int64_t j = begin; j < end; ++j) {
                fine = fine && s[j] >= double(kLeastSum) && s[j] <= double(kMostSum) && w.value[j] > kLeastSum;
                s[j] *= double(w.value[j]);
            }
        }
        return fine;
    }

    // g from the column sums; returns the L1 violation they had.
    double update_columns(const double* s, double eps, const double* f, double* g) {
        const double b = 1.0 / double(m_.cols);
        double error = 0;
        bool lost = false;
        for (std::int64_t j = 0; j < m_.cols; ++j) {
            error += std::abs(s[j] - b);
            lost = lost || s[j] < double(kLeastSum);
        }
        if (lost) {
            exact_columns(eps, f, g);
        } else {
            for (std::int64_t j = 0; j < m_.cols; ++j) g[j] += eps * std::log(b / s[j]);
        }
        return error;
    }

    // g by a log-sum-exp down the columns: for columns that no row gives any mass that a float can hold. A second read of the
    // matrix, needed only while potentials are far from settled at a tiny eps.
    void exact_columns(double eps, const double* f, double* g) {
        const Scratch state(2 * blocks_ * ld_);
        const float inverse_eps = static_cast<float>(1 / eps);
        double shift = f[0];
        for (std::int64_t i = 1; i < m_.rows; ++i) shift = f[i] > shift ? f[i] : shift;
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
        for (std::int64_t block = 0; block < blocks_; ++block) {
            float* const top = state.get() + 2 * block * ld_;
            float* const total = top + ld_;
            for (std::int64_t j = 0; j < ld_; ++j) top[j] = kLowest, total[j] = 0.0f;
            for (std::int64_t i = block * step_; i < least((block + 1) * step_, m_.rows); ++i) {
                const floats fi = broadcast(static_cast<float>(f[i] - shift));
                for (std::int64_t j = 0; j < ld_; j += kLanes) {
                    const floats z = load(row(i) + j) + fi, old = load(top + j), best = max(old, z);
                    const floats kept = load(total + j) * exponential((old - best) * inverse_eps);
                    store(total + j, kept + exponential((z - best) * inverse_eps));
                    store(top + j, best);
                }
            }
        }
        const double log_b = -std::log(double(m_.cols));
#pragma omp parallel for num_threads(threads_) schedule(static)
        for (std::int64_t j = 0; j < m_.cols; ++j) {
            const float* const top = state.get() + j;
            double best = top[0], total = 0;
            for (std::int64_t block = 1; block < blocks_; ++block) {
                const double here = top[2 * block * ld_];
                best = here > best ? here : best;
            }
            for (std::int64_t block = 0; block < blocks_; ++block)
                total += double(top[(2 * block + 1) * ld_]) * std::exp((double(top[2 * block * ld_]) - best) / eps);
            g[j] = eps * (log_b - std::log(total)) - best - shift;
        }
    }

    const OtMatrix m_;
    const int threads_;
    const std::int64_t ld_, step_, blocks_;
    const Scratch block_sums_, weights_, rows_;
};

// ---- reading the plan ---------------------------------------------------------------------------------------------------------

// Weights of one row, proportional to P_ij, eight at a time; `top` (score domain) is the row's largest g + S.
struct RowWeights {
    const float* matrix;
    const float* column;
    float top, inverse_eps;
    bool kernel;
    GEOFLOW_INLINE floats operator()(std::int64_t j) const {
        const floats x = load(matrix + j), c = load(column + j);
        return kernel ? x * c : exponential((x + c - top) * inverse_eps);
    }
};

// Column of the largest K v or S + g; the lowest of equals.
std::int64_t best_column(const float* x, const float* c, std::int64_t ld, bool kernel, float* top) {
    floats best = broadcast(kLowest);
    ints where{}, at = lane_numbers();
    for (std::int64_t j = 0; j < ld; j += kLanes) {
        const floats value = kernel ? load(x + j) * load(c + j) : load(x + j) + load(c + j);
        const ints better = value > best;
        best = select(better, value, best);
        where = (at & better) | (where & ~better);
        at += static_cast<std::int32_t>(kLanes);
    }
    *top = largest(best);
    std::int64_t first = ld;
    for (int lane = 0; lane < kLanes; ++lane)
        if (best[lane] == *top && where[lane] < first) first = where[lane];
    return first;
}

// Inverse distribution function of one row at u in [0, 1): the first column whose cumulated weight exceeds u times the total.
std::int64_t draw_column(const RowWeights& weights, std::int64_t cols, std::int64_t ld, double total, double u) {
    const double target = u * total;
    double before = 0;
    std::int64_t last = 0;
    for (std::int64_t j = 0; j < ld; j += kLanes) {
        const floats w = weights(j);
        for (std::int64_t lane = 0; lane < kLanes && j + lane < cols; ++lane) {
            if (w[lane] > 0) last = j + lane;
            before += double(w[lane]);
            if (before > target) return j + lane;
        }
    }
    return last;
}

// One pass with final potentials. index[i] is argmax_j P_ij, or with `uniform` [rows] in [0, 1) the inverse distribution function of row
// i at uniform[i].
void read_out(const OtMatrix& matrix, double eps, const double* g, const double* uniform, std::int64_t* index, int threads) {
    const std::int64_t ld = matrix.ld();
    const bool kernel = matrix.domain == Domain::kernel;
    const Scratch weights(ld);
    const ColumnWeights w = column_weights(matrix, eps, g, weights.get());
#pragma omp parallel for num_threads(useful_threads(matrix, threads)) schedule(static)
    for (std::int64_t i = 0; i < matrix.rows; ++i) {
        const float* const x = matrix.data + i * ld;
        float top = 0;
        index[i] = best_column(x, w.value, ld, kernel, &top);
        if (!uniform) continue;
        const RowWeights row{x, w.value, top, static_cast<float>(1 / eps), kernel};
        floats total = broadcast(0.0f);
        for (std::int64_t j = 0; j < ld; j += kLanes) total += row(j);
        index[i] = draw_column(row, matrix.cols, ld, double(sum(total)), uniform[i]);
    }
}

}  // namespace
