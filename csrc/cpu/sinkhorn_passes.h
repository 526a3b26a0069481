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

using geoflow::Cost;
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

template <bool streaming>
GEOFLOW_INLINE void store_entry(std::uint16_t* to, floats x) {
    store(to, x);
}

struct ScoreRule {
    float image_weight, text_weight, inverse_eps;
};

template <Cost kind>
GEOFLOW_INLINE floats score(const ScoreRule& rule, floats image, floats text) {
    if (kind == Cost::arc) return rule.image_weight * arcsine(image) + rule.text_weight * arcsine(text);
    return 2.0f * (rule.image_weight * image + rule.text_weight * text);
}

// Turns inner products into matrix entries, `cols` of them; the rest up to a multiple of 16 is padding and becomes a finite number.
template <Cost kind, bool kernel, bool streaming, class Element>
GEOFLOW_INLINE void finish_row(const ScoreRule& rule, const float* image, const float* text, std::int64_t cols, Element* to,
                               Extremes& seen) {
    for (std::int64_t j = 0; j < round_up(cols, geoflow::kLeading); j += kLanes) {
        const floats s = score<kind>(rule, load(image + j), load(text + j));
        if (j + kLanes <= cols) {
            seen.add(s);
        } else {
            for (std::int64_t lane = 0; lane < cols - j; ++lane) seen.add(broadcast(s[lane]));
        }
        store_entry<streaming>(to + j, kernel ? exponential(s * rule.inverse_eps) : s);
    }
}

// Dense products in single precision. A class of products in less has the same member.
struct DenseProducts {
    template <class... Arguments>
    static bool tiles(const Arguments&... arguments) {
        return product_tiles(arguments...);
    }
};

template <class Dense, Cost kind, bool kernel, class Element>
bool build(const OtMatrix& matrix, const Factor& image, const Factor& text, int most_threads, Poll poll, Range* range) {
    const int threads = useful_threads(matrix, most_threads);
    Element* const out = static_cast<Element*>(matrix.data);
    const std::int64_t ld = matrix.ld();
    const ScoreRule rule{image.weight, text.weight, static_cast<float>(1 / matrix.eps)};
    const Scratch slots(threads * std::int64_t{sizeof(Extremes) / sizeof(float)});
    Extremes* const seen = reinterpret_cast<Extremes*>(slots.get());
    for (int t = 0; t < threads; ++t) seen[t].clear();
    prefer_large_pages(out, static_cast<std::size_t>(matrix.rows * ld) * sizeof(Element));

    const bool streaming = matrix.rows * ld * std::int64_t{sizeof(Element)} > kStreamingBytes;
    const auto finish = [&](const Tile<2>& tile) {
        Extremes mine = seen[thread_number()];
        for (std::int64_t i = 0; i < tile.rows; ++i) {
            const float* const image_row = tile.value[0] + i * tile.ld;
            const float* const text_row = tile.value[1] + i * tile.ld;
            Element* const to = out + (tile.row + i) * ld + tile.col;
            if (streaming)
                finish_row<kind, kernel, true>(rule, image_row, text_row, tile.cols, to, mine);
            else
                finish_row<kind, kernel, false>(rule, image_row, text_row, tile.cols, to, mine);
        }
        seen[thread_number()] = mine;
    };
    const Product products[2] = {{image.noise, image.data, image.dim}, {text.noise, text.data, text.dim}};
    const bool done = Dense::tiles(products, matrix.rows, matrix.cols, threads, poll, finish);
    *range = merge(seen, threads);
    return done;
}

template <class Dense, class Element>
bool build_elements(const OtMatrix& matrix, const Factor& image, const Factor& text, Cost cost, int threads, Poll poll,
                    Range* range) {
    const bool kernel = matrix.domain == Domain::kernel;
    if (cost == Cost::arc)
        return kernel ? build<Dense, Cost::arc, true, Element>(matrix, image, text, threads, poll, range)
                      : build<Dense, Cost::arc, false, Element>(matrix, image, text, threads, poll, range);
    return kernel ? build<Dense, Cost::chord, true, Element>(matrix, image, text, threads, poll, range)
                  : build<Dense, Cost::chord, false, Element>(matrix, image, text, threads, poll, range);
}

template <class Element>
Range import_elements(const OtMatrix& matrix, const float* cost, float offset, int threads) {
    Element* const out = static_cast<Element*>(matrix.data);
    const std::int64_t ld = matrix.ld(), cols = matrix.cols;
    prefer_large_pages(out, static_cast<std::size_t>(matrix.rows * ld) * sizeof(Element));
    float low = -kLowest, high = kLowest;
    bool finite = true;
#pragma omp parallel for num_threads(useful_threads(matrix, threads)) schedule(static) reduction(min : low) reduction(max : high) reduction(&& : finite)
    for (std::int64_t i = 0; i < matrix.rows; ++i) {
        for (std::int64_t first = 0; first < ld; first += kLanes) {
            floats s = broadcast(0.0f);
            for (std::int64_t lane = 0; lane < kLanes && first + lane < cols; ++lane) {
                const float value = offset - cost[i * cols + first + lane];
                s[lane] = value;
                finite = finite && value >= kLowest && value <= -kLowest;
                low = value < low ? value : low;
                high = value > high ? value : high;
            }
            store(out + i * ld + first, s);
        }
    }
    return finite ? Range{low, high} : Range{-INFINITY, INFINITY};
}

// ---- between the domains ------------------------------------------------------------------------------------------------------

template <class Element, class Map>
void map_entries(const OtMatrix& matrix, int threads, const Map& map) {
    Element* const data = static_cast<Element*>(matrix.data);
    const std::int64_t ld = matrix.ld();
#pragma omp parallel for num_threads(useful_threads(matrix, threads)) schedule(static)
    for (std::int64_t i = 0; i < matrix.rows; ++i)
        for (std::int64_t j = 0; j < ld; j += kLanes) store(data + i * ld + j, map(load(data + i * ld + j)));
}

template <class Element>
void enter_kernel_elements(const OtMatrix& matrix, int threads) {
    const float centre = static_cast<float>(matrix.centre), inverse_eps = static_cast<float>(1 / matrix.eps);
    map_entries<Element>(matrix, threads, [=](floats s) { return exponential((s - centre) * inverse_eps); });
}

template <class Element>
void leave_kernel_elements(const OtMatrix& matrix, int threads) {
    const float centre = static_cast<float>(matrix.centre), eps = static_cast<float>(matrix.eps);
    map_entries<Element>(matrix, threads, [=](floats k) { return centre + eps * logarithm(k); });
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
template <int Rows, class Element>
GEOFLOW_INLINE void row_dots(const Element* k, std::int64_t ld, const float* v, float* dots) {
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
template <int Rows, class Element>
GEOFLOW_INLINE bool kernel_rows(const Element* k, std::int64_t ld, const float* v, float a, float* dots, float* columns) {
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
template <class Element>
GEOFLOW_INLINE double score_row(const Element* s, std::int64_t ld, const float* g, float inverse_eps, float a, float* row,
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
template <class Element>
class Passes {
  public:
    Passes(const OtMatrix& matrix, int threads, std::int64_t total_rows)
        : m_(matrix), total_rows_(total_rows), threads_(useful_threads(matrix, threads)), ld_(matrix.ld()), step_(block_rows(matrix.rows)),
          blocks_((matrix.rows + step_ - 1) / step_), block_sums_(blocks_ * ld_), weights_(ld_), rows_(threads_ * ld_) {}

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

    bool panel_pass(double eps, double* f, const double* g, double* s) {
        const ColumnWeights w = column_weights(m_, eps, g, weights_.get());
        return row_pass(w, eps, f) && column_sums(w, s);
    }

  private:
    const Element* row(std::int64_t i) const { return static_cast<const Element*>(m_.data) + i * ld_; }

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
        const float a = static_cast<float>(1.0 / double(total_rows_));
        const double shift = m_.centre + w.middle, log_a = -std::log(double(total_rows_));
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
        const float a = static_cast<float>(1.0 / double(total_rows_)), inverse_eps = static_cast<float>(1 / eps);
        const double log_a = -std::log(double(total_rows_));
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
    const std::int64_t total_rows_;
    const int threads_;
    const std::int64_t ld_, step_, blocks_;
    const Scratch block_sums_, weights_, rows_;
};

// ---- reading the plan ---------------------------------------------------------------------------------------------------------

// Weights of one row, proportional to P_ij, eight at a time; `top` (score domain) is the row's largest g + S.
template <class Element>
struct RowWeights {
    const Element* matrix;
    const float* column;
    float top, inverse_eps;
    bool kernel;
    GEOFLOW_INLINE floats operator()(std::int64_t j) const {
        const floats x = load(matrix + j), c = load(column + j);
        return kernel ? x * c : exponential((x + c - top) * inverse_eps);
    }
};

// Column of the largest K v or S + g; the lowest of equals.
template <class Element>
std::int64_t best_column(const Element* x, const float* c, std::int64_t ld, bool kernel, float* top) {
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
template <class Weights>
std::int64_t draw_column(const Weights& weights, std::int64_t cols, std::int64_t ld, double total, double u) {
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

// Totals of one row: its weights, and its weights times S.
struct RowTotals {
    double weight, score;
};

template <class Element>
GEOFLOW_INLINE RowTotals row_totals(const RowWeights<Element>& weights, std::int64_t ld, float centre, float eps, bool want_score) {
    floats total = broadcast(0.0f), score = broadcast(0.0f);
    for (std::int64_t j = 0; j < ld; j += kLanes) {
        const floats w = weights(j);
        total += w;
        if (!want_score) continue;
        const floats entry = load(weights.matrix + j);
        score += w * (weights.kernel ? centre + eps * logarithm(entry) : entry);
    }
    return {double(sum(total)), double(sum(score))};
}

template <class Element>
double read_out_elements(const OtMatrix& matrix, double eps, const double* f, const double* g, const double* uniform,
                         std::int64_t* index, int threads) {
    const std::int64_t ld = matrix.ld(), rows = matrix.rows;
    const bool kernel = matrix.domain == Domain::kernel;
    const Scratch weights(ld), partial(2 * rows);
    double* const row_score = reinterpret_cast<double*>(partial.get());
    const ColumnWeights w = column_weights(matrix, eps, g, weights.get());
#pragma omp parallel for num_threads(useful_threads(matrix, threads)) schedule(static)
    for (std::int64_t i = 0; i < rows; ++i) {
        const Element* const x = static_cast<const Element*>(matrix.data) + i * ld;
        float top = 0;
        const std::int64_t best = best_column(x, w.value, ld, kernel, &top);
        if (index && !uniform) index[i] = best;
        if (!f && !uniform) continue;
        const RowWeights<Element> row{x, w.value, top, static_cast<float>(1 / eps), kernel};
        const RowTotals totals = row_totals(row, ld, static_cast<float>(matrix.centre), static_cast<float>(eps), f != nullptr);
        if (index && uniform) index[i] = draw_column(row, matrix.cols, ld, totals.weight, uniform[i]);
        // exp(f_i / eps) times the weights is the plan: they were taken relative to the middle of g and the centre or top of S
        if (f) row_score[i] = totals.score * std::exp((f[i] + w.middle + (kernel ? matrix.centre : double(top))) / eps);
    }
    double mean = 0;
    for (std::int64_t i = 0; f && i < rows; ++i) mean += row_score[i];
    return mean;
}

// ---- the table ----------------------------------------------------------------------------------------------------------------

const geoflow::CpuSolver kCpuSolver = {
    [](const OtMatrix& m, const Factor& image, const Factor& text, Cost cost, int threads, Poll poll, Range* range) {
        return m.half ? build_elements<DenseProducts, Half>(m, image, text, cost, threads, poll, range)
                      : build_elements<DenseProducts, float>(m, image, text, cost, threads, poll, range);
    },
    [](const OtMatrix& m, const float* cost, float offset, int threads) {
        return m.half ? import_elements<Half>(m, cost, offset, threads) : import_elements<float>(m, cost, offset, threads);
    },
    [](const OtMatrix& m, int threads) {
        m.half ? enter_kernel_elements<Half>(m, threads) : enter_kernel_elements<float>(m, threads);
    },
    [](const OtMatrix& m, int threads) {
        m.half ? leave_kernel_elements<Half>(m, threads) : leave_kernel_elements<float>(m, threads);
    },
    [](const OtMatrix& m, double eps, double tol, std::int64_t max_iter, double* f, double* g, int threads, Poll poll) {
        return m.half ? Passes<Half>(m, threads, m.rows).run(eps, tol, max_iter, f, g, poll)
                      : Passes<float>(m, threads, m.rows).run(eps, tol, max_iter, f, g, poll);
    },
    [](const OtMatrix& m, double eps, std::int64_t total_rows, double* f, const double* g, double* s, int threads) {
        return m.half ? Passes<Half>(m, threads, total_rows).panel_pass(eps, f, g, s)
                      : Passes<float>(m, threads, total_rows).panel_pass(eps, f, g, s);
    },
    [](const OtMatrix& m, double eps, const double* f, const double* g, const double* uniform, std::int64_t* index, int threads) {
        return m.half ? read_out_elements<Half>(m, eps, f, g, uniform, index, threads)
                      : read_out_elements<float>(m, eps, f, g, uniform, index, threads);
    },
};

}  // namespace
