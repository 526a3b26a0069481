// Exact search, compiled once per target.
//
// Vectors run along the coordinates: a score is kLanes partial sums, one multiply-add each per vector of coordinates, which are added
// pairwise in the end. So one query reads the gallery as fast as memory gives it, many queries share every vector of a row, rows in
// half precision become floats in registers, and a score is the same beside any other queries.
//   four rows at a time, for up to kQueries queries: 4 kQueries accumulators, and a load for every 4 or kQueries multiply-adds
//   a panel of rows takes a quarter of L2 and passes by each group of queries, which stays in L1
//   queries are copied to rows of a length that is no power of two: those of 1024 floats would share a set of L1 with each other
// While a panel is in cache, its scores are compared with the worst of each query's best items.
#pragma once
#include <cmath>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/top_items.h"
#include "search.h"

namespace {

using geoflow::RowCodes;
using geoflow::SearchParams;
using geoflow::SearchResult;

constexpr int kRows = 4;
constexpr int kQueries = kLanes == 16 ? 6 : 3;
typedef float float4 __attribute__((vector_size(16)));

// The last coordinates, fewer than a vector, followed by zeros.
template <class Element>
GEOFLOW_INLINE floats load_rest(const Element* from, std::int64_t count) {
    floats x{};
    for (std::int64_t c = 0; c < count; ++c) x[c] = widen(from[c]);
    return x;
}

// Lanes l, l + 4, l + 8, ... added up.
GEOFLOW_INLINE float4 quarter(floats x) {
    float4 part[kLanes / 4];
    std::memcpy(part, &x, sizeof x);
    return kLanes == 16 ? (part[0] + part[2 % (kLanes / 4)]) + (part[1] + part[3 % (kLanes / 4)]) : part[0] + part[1];
}

// The sums of four vectors.
GEOFLOW_INLINE float4 sums_of(const floats (&x)[kRows]) {
    const float4 a = quarter(x[0]), b = quarter(x[1]), c = quarter(x[2]), d = quarter(x[3]);
    typedef std::int32_t int4 __attribute__((vector_size(16)));
    const float4 ab = __builtin_shuffle(a, b, int4{0, 4, 1, 5}) + __builtin_shuffle(a, b, int4{2, 6, 3, 7});
    const float4 cd = __builtin_shuffle(c, d, int4{0, 4, 1, 5}) + __builtin_shuffle(c, d, int4{2, 6, 3, 7});
    return __builtin_shuffle(ab, cd, int4{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, int4{2, 3, 6, 7});
}

// Floats between queries.
constexpr std::int64_t query_stride(std::int64_t dim) { return round_up(dim, 16) + 16; }

// Scores of four rows for `Queries` queries, which are query_stride(dim) floats apart and followed by zeros: to score[q * stride + r]. Asks for the cache lines of `ahead` if they are given.
template <int Queries, bool Fetch, class Element>
GEOFLOW_INLINE void score_rows(const Element* const (&row)[kRows], const Element* const (&ahead)[kRows], const float* query,
                               std::int64_t dim, float* score, std::int64_t stride) {
    floats acc[Queries][kRows];
#pragma GCC unroll 6
    for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[q][r] = floats{};
    std::int64_t k = 0;
    for (; k + kLanes <= dim; k += kLanes) {
        floats x[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            x[r] = load(row[r] + k);
            if (Fetch) __builtin_prefetch(ahead[r] + k, 0, 2);
        }
#pragma GCC unroll 6
        for (int q = 0; q < Queries; ++q) {
            const floats y = load(query + q * query_stride(dim) + k);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[q][r] += x[r] * y;
        }
    }
    if (k < dim)
        for (int q = 0; q < Queries; ++q)
            for (int r = 0; r < kRows; ++r) acc[q][r] += load_rest(row[r] + k, dim - k) * load(query + q * query_stride(dim) + k);
#pragma GCC unroll 6
    for (int q = 0; q < Queries; ++q) {
        const float4 s = sums_of(acc[q]);
        std::memcpy(score + q * stride, &s, sizeof s);
    }
}

// Scores of `count` rows in order for `Queries` queries; the stride is a multiple of 4 and at least count.
template <int Queries, class Element>
void score_panel(const Element* rows, std::int64_t count, std::int64_t left, bool fetch, const float* query, std::int64_t dim, float* score,
                 std::int64_t stride) {
    for (std::int64_t i = 0; i < count; i += kRows) {
        const Element *row[kRows], *ahead[kRows];
        for (int r = 0; r < kRows; ++r) {
            row[r] = rows + least(i + r, count - 1) * dim;
            ahead[r] = rows + least(i + r + kRows, left - 1) * dim;
        }
        if (fetch)
            score_rows<Queries, true>(row, ahead, query, dim, score + i, stride);
        else
            score_rows<Queries, false>(row, ahead, query, dim, score + i, stride);
    }
}

template <class Element>
void score_panel(int queries, const Element* rows, std::int64_t count, std::int64_t left, bool fetch, const float* query, std::int64_t dim,
                 float* score, std::int64_t stride) {
    static_assert(kQueries <= 6);
    switch (queries) {
        case 1: return score_panel<1>(rows, count, left, fetch, query, dim, score, stride);
        case 2: return score_panel<2>(rows, count, left, fetch, query, dim, score, stride);
        case 3: return score_panel<3>(rows, count, left, fetch, query, dim, score, stride);
        case 4: return score_panel<least(4, kQueries)>(rows, count, left, fetch, query, dim, score, stride);
        case 5: return score_panel<least(5, kQueries)>(rows, count, left, fetch, query, dim, score, stride);
        default: return score_panel<kQueries>(rows, count, left, fetch, query, dim, score, stride);
    }
}

// Offers those of `count` scores that are above the worst of `top`.
inline void offer_scores(const float* score, std::int64_t count, std::int64_t first_item, TopItems& top) {
    std::int64_t r = 0;
    for (; r + kLanes <= count; r += kLanes) {
        const ints above = load(score + r) > top.threshold();
        bool any = false;
        for (int lane = 0; lane < kLanes; ++lane) any |= above[lane] != 0;
        if (!any) continue;
        for (int lane = 0; lane < kLanes; ++lane) top.offer(score[r + lane], first_item + r + lane);
    }
    for (; r < count; ++r) top.offer(score[r], first_item + r);
}

// Rows of a panel: a quarter of L2.
inline std::int64_t search_panel(std::int64_t row_bytes) {
    return least(1024, most(4 * kLanes, geoflow::caches().second / 4 / row_bytes / kLanes * kLanes));
}

// The queries as score_rows wants them.
class PaddedQueries {
  public:
    explicit PaddedQueries(const SearchParams& p) : stride_(query_stride(p.dim)), padded_(p.queries_count * stride_) {
        for (std::int64_t q = 0; q < p.queries_count; ++q) {
            std::memcpy(padded_.get() + q * stride_, p.queries + q * p.dim, static_cast<std::size_t>(p.dim) * sizeof(float));
            for (std::int64_t k = p.dim; k < stride_; ++k) padded_.get()[q * stride_ + k] = 0.0f;
        }
    }
    const float* query(std::int64_t q) const { return padded_.get() + q * stride_; }

  private:
    const std::int64_t stride_;
    const Scratch padded_;
};

template <class Element>
bool search_elements(const SearchParams& p, const SearchResult& result) {
    const Element* const gallery = static_cast<const Element*>(p.gallery);
    const std::int64_t panel_rows = search_panel(p.dim * std::int64_t{sizeof(Element)});
    const std::int64_t panels = (p.items + panel_rows - 1) / panel_rows;
    std::vector<std::vector<TopItems>> top(p.threads, std::vector<TopItems>(p.queries_count, TopItems(p.top_k)));
    const std::int64_t scores_size = round_up(kQueries * panel_rows, 1024);
    const Scratch scores(scores_size * p.threads);
    const PaddedQueries padded(p);
    bool go_on = true;
#pragma omp parallel num_threads(p.threads)
    {
        float* const score = scores.get() + thread_number() * scores_size;
        std::vector<TopItems>& mine = top[thread_number()];
#pragma omp for schedule(monotonic : dynamic, 1)
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            if (thread_number() == 0 && !p.keep_going()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
            if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
            const std::int64_t first = panel * panel_rows, count = least(panel_rows, p.items - first);
            for (std::int64_t q = 0; q < p.queries_count; q += kQueries) {
                const int some = static_cast<int>(least(kQueries, p.queries_count - q));
                score_panel(some, gallery + first * p.dim, count, p.items - first, q == 0, padded.query(q), p.dim, score, panel_rows);
                for (int c = 0; c < some; ++c) offer_scores(score + c * panel_rows, count, first, mine[q + c]);
            }
        }
    }
    if (!go_on) return false;
    for (std::int64_t q = 0; q < p.queries_count; ++q) {
        std::vector<const TopItems*> parts;
        for (const std::vector<TopItems>& of_thread : top) parts.push_back(&of_thread[q]);
        const std::vector<Candidate> best = best_of(parts, p.top_k);
        for (std::int64_t k = 0; k < p.top_k; ++k) {
            const bool there = k < static_cast<std::int64_t>(best.size());
            result.score[q * p.top_k + k] = there ? best[k].score : std::nanf("");
            result.index[q * p.top_k + k] = there ? best[k].index : -1;
        }
    }
    return true;
}

// ---- rotated rows in bytes ------------------------------------------------------------------------------------------------------

// A sign that looks random, always the same for a coordinate and stage.
inline float sign_of(std::uint64_t coordinate, std::uint64_t stage) {
    std::uint64_t z = coordinate * 0x9e3779b97f4a7c15u + stage * 0xd1b54a32d192ed03u + 0x2545f4914f6cdd1du;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z >> 63) ? -1.0f : 1.0f;
}

// Signs and a Hadamard transform of the first `order` coordinates, then of the last: orthogonal for any width, and coordinates far
// larger than the others are spread over all of them.
class Rotation {
  public:
    explicit Rotation(std::int64_t dim) : dim_(dim), sign_(2 * dim) {
        while (2 * order_ <= dim) order_ *= 2;
        const float scale = 1.0f / std::sqrt(static_cast<float>(order_));
        for (std::int64_t stage = 0; stage < 2; ++stage)
            for (std::int64_t k = 0; k < order_; ++k) sign_[stage * dim + k] = scale * sign_of(k, stage);
    }

    // What rounding does to a row of norm 1 at most: a sum of log2(order) roundings and a product, twice.
    float rounding() const { return 2 * (std::log2(static_cast<float>(order_)) + 3) * 1.2e-7f; }

    void apply(float* x) const {
        transform(x, sign_.data());
        if (order_ < dim_) transform(x + dim_ - order_, sign_.data() + dim_);
    }

  private:
    void transform(float* __restrict x, const float* __restrict sign) const {
        for (std::int64_t k = 0; k < order_; ++k) x[k] *= sign[k];
        for (std::int64_t half = 1; half < order_; half *= 2)
            for (std::int64_t first = 0; first < order_; first += 2 * half)
                for (std::int64_t k = first; k < first + half; ++k) {
                    const float a = x[k], b = x[k + half];
                    x[k] = a + b;
                    x[k + half] = a - b;
                }
    }

    std::int64_t dim_, order_ = 1;
    std::vector<float> sign_;
};

template <class Element>
float encode_elements(const SearchParams& p, const RowCodes& rows) {
    const Rotation rotation(p.dim);
    float largest = 0;
#pragma omp parallel num_threads(p.threads) reduction(max : largest)
    {
        std::vector<float> x(p.dim);
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < p.items; ++i) {
            const Element* const row = static_cast<const Element*>(p.gallery) + i * p.dim;
            double square = 0, lost = 0;
            for (std::int64_t k = 0; k < p.dim; ++k) {
                x[k] = widen(row[k]);
                square += double(x[k]) * x[k];
            }
            const float norm = static_cast<float>(std::sqrt(square)) * (1 + 1e-6f);
            rotation.apply(x.data());
            float peak = 0;
            for (std::int64_t k = 0; k < p.dim; ++k) peak = std::fabs(x[k]) > peak ? std::fabs(x[k]) : peak;
            std::uint8_t* const to = rows.code + i * geoflow::code_stride(p.dim);
            std::memset(to, 128, static_cast<std::size_t>(geoflow::code_stride(p.dim)));
            const float scale = peak / 127, inverse = peak > 0 ? 127 / peak : 0;
            for (std::int64_t k = 0; k < p.dim; ++k) {
                const int code = static_cast<int>(std::lrintf(x[k] * inverse));
                to[k] = static_cast<std::uint8_t>(code + 128);
                const double rest = double(x[k]) - double(scale) * code;
                lost += rest * rest;
            }
            rows.scale[i] = scale;
            rows.error[i] = static_cast<float>(std::sqrt(lost)) * (1 + 1e-6f) + rotation.rounding() * norm;
            largest = norm > largest ? norm : largest;
        }
    }
    return largest;
}

inline void rotate_queries(const SearchParams& p, float* rotated) {
    const Rotation rotation(p.dim);
    std::memcpy(rotated, p.queries, static_cast<std::size_t>(p.queries_count * p.dim) * sizeof(float));
    for (std::int64_t q = 0; q < p.queries_count; ++q) rotation.apply(rotated + q * p.dim);
}

// ---- the table ------------------------------------------------------------------------------------------------------------------

const geoflow::SearchKernels kSearchKernels = {
    [](const SearchParams& p, const SearchResult& result) {
        return by_storage(p.storage, [&](auto element) { return search_elements<decltype(element)>(p, result); });
    },
    [](const SearchParams& p, const RowCodes& rows) {
        return by_storage(p.storage, [&](auto element) { return encode_elements<decltype(element)>(p, rows); });
    },
};

}  // namespace
