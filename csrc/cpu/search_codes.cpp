// Exact search by inner products in integers, for processors with AVX512-VNNI.
//
// Rows g and queries x are rotated by R, which leaves inner products as they are, and rounded to bytes: R g = s c + e, R x = t b + f.
//     <g, x> = s t <c, b> + <e, R x> + <s c, f>,   |<e, R x>| <= |e| |x|,   |<s c, f>| <= |s c| |f|      (Cauchy-Schwarz)
// So <c, b>, which an instruction sums over 64 coordinates, bounds every score from both sides. A pass keeps the items whose upper
// bound reaches the k-th largest lower bound so far. These are scored in single precision, the largest upper bound first, until none
// that is left reaches the k-th largest score: no item that is not scored can be among the best, nor tie with them.
//   up to kFewColumns columns: vectors along the coordinates, four rows at a time, as fast as memory gives the codes. Up to three
//     queries are rounded in two parts, which halves the width of the bounds
//   more queries: strips of 16 or 32, four coordinates of a row at a time against all of a strip
#if defined(__AVX512VNNI__)
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/search_rows.h"

namespace {

using geoflow::CodeParams;

constexpr int kFewColumns = 6;
constexpr std::int64_t kCodePanel = 96;  // rows at most, a multiple of those of every micro-kernel

// Rows of a panel: a quarter of L2. The results do not depend on it.
inline std::int64_t code_panel(std::int64_t stride) {
    constexpr std::int64_t rows = 24;  // of the tallest micro-kernel
    return least(kCodePanel, most(rows, geoflow::caches().second / 4 / stride / rows * rows));
}

// A query in bytes: one or two parts, of which the second is in units of a 254th of the first's.
struct CodedQuery {
    float unit[2];            // of each part
    std::int32_t shift[2];    // 128 times the sum of the part's bytes: codes of rows are stored with 128 added
    float norm, common;       // a score is off by at most error_j norm + common
};

class CodedQueries {
  public:
    CodedQueries(const SearchParams& p, const CodeParams& codes)
        : parts(p.queries_count <= kFewColumns / 2 ? 2 : 1),
          columns(p.queries_count * parts),
          stride(geoflow::code_stride(p.dim)),
          bytes(columns * stride, 0),
          queries(p.queries_count) {
        std::vector<float> rotated(p.queries_count * p.dim);
        rotate_queries(p, rotated.data());
        const Rotation rotation(p.dim);
        for (std::int64_t q = 0; q < p.queries_count; ++q) code(p, codes, rotation, q, rotated.data() + q * p.dim);
    }

    const std::int64_t parts, columns, stride;
    std::vector<std::int8_t> bytes;  // [columns, stride]: the parts of a query follow each other
    std::vector<CodedQuery> queries;

  private:
    void code(const SearchParams& p, const CodeParams& codes, const Rotation& rotation, std::int64_t q, float* x) {
        CodedQuery& query = queries[q];
        double square = 0, lost = 0;
        float peak = 0;
        for (std::int64_t k = 0; k < p.dim; ++k) {
            square += double(x[k]) * x[k];
            peak = std::max(peak, std::fabs(x[k]));
        }
        for (std::int64_t part = 0; part < parts; ++part, peak /= 254) {
            const float unit = peak / 127, inverse = peak > 0 ? 127 / peak : 0;
            std::int32_t sum = 0;
            for (std::int64_t k = 0; k < p.dim; ++k) {
                const int byte = std::max(-127, std::min(127, static_cast<int>(std::lrintf(x[k] * inverse))));
                bytes[(q * parts + part) * stride + k] = static_cast<std::int8_t>(byte);
                sum += byte;
                x[k] -= unit * static_cast<float>(byte);
            }
            query.unit[part] = unit;
            query.shift[part] = 128 * sum;
        }
        for (std::int64_t k = 0; k < p.dim; ++k) lost += double(x[k]) * x[k];
        // |s c| <= |g| + |e|, and |e| <= sqrt(dim) s / 2. The rest is what rounding does to a score in single precision and to s t <c, b>.
        const float width = static_cast<float>(p.dim), norm = static_cast<float>(std::sqrt(square)) * (1 + 1e-5f);
        const float rest = static_cast<float>(std::sqrt(lost)) * (1 + 1e-5f) + rotation.rounding() * norm;
        const float rounding = (width / 8 + 64) * 1.2e-7f;
        query.norm = norm;
        query.common = codes.largest_norm * ((1 + std::sqrt(width) / 254) * rest + rounding * norm);
    }
};

// Integers that fit a float's range only roughly are within a 2^24th, which `rounding` above includes.
GEOFLOW_INLINE __m512 as_floats(__m512i x) { return _mm512_maskz_cvtepi32_ps(0xffff, x); }

// ---- few queries ------------------------------------------------------------------------------------------------------------------

// dot[c * kCodePanel + r] of four rows and Columns columns.
template <int Columns>
GEOFLOW_INLINE void dot_rows(const std::uint8_t* const (&row)[kRows], const std::uint8_t* ahead, const std::int8_t* column,
                             std::int64_t stride, std::int32_t* dot) {
    __m512i acc[Columns][kRows];
    for (int c = 0; c < Columns; ++c)
        for (int r = 0; r < kRows; ++r) acc[c][r] = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < stride; k += 64) {
        __m512i x[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            x[r] = _mm512_loadu_si512(row[r] + k);
            __builtin_prefetch(ahead + r * stride + k, 0, 2);
        }
#pragma GCC unroll 6
        for (int c = 0; c < Columns; ++c) {
            const __m512i y = _mm512_loadu_si512(column + c * stride + k);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[c][r] = _mm512_dpbusd_epi32(acc[c][r], x[r], y);
        }
    }
#pragma GCC unroll 6
    for (int c = 0; c < Columns; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) dot[c * kCodePanel + r] = _mm512_reduce_add_epi32(acc[c][r]);
}

template <int Columns>
void dot_panel(const std::uint8_t* rows, std::int64_t count, std::int64_t left, const std::int8_t* column, std::int64_t stride,
               std::int32_t* dot) {
    for (std::int64_t i = 0; i < count; i += kRows) {
        const std::uint8_t* row[kRows];
        for (int r = 0; r < kRows; ++r) row[r] = rows + least(i + r, count - 1) * stride;
        // A few kilobytes ahead, but within the codes.
        dot_rows<Columns>(row, rows + most(0, least(i + 4 * kRows, left - kRows)) * stride, column, stride, dot + i);
    }
}

// ---- many queries -----------------------------------------------------------------------------------------------------------------

// Columns [first, first + 16 or 32) as strips [stride / 4][width][4 bytes].
inline void pack_columns(const CodedQueries& coded, std::int64_t first, std::int64_t width, std::int32_t* to) {
    for (std::int64_t c = 0; c < width; ++c)
        for (std::int64_t k = 0; k < coded.stride / 4; ++k) {
            std::int32_t four = 0;
            if (first + c < coded.columns) std::memcpy(&four, coded.bytes.data() + (first + c) * coded.stride + 4 * k, sizeof four);
            to[k * width + c] = four;
        }
}

// Asks for the cache lines of `count` rows, but of none past the last.
inline void fetch_rows(const std::uint8_t* rows, std::int64_t count, std::int64_t left, std::int64_t stride) {
    for (std::int64_t k = 0; k < least(count, left) * stride; k += 64) __builtin_prefetch(rows + k, 0, 2);
}

// dot[r * ld + c] of Rows rows and a strip of 16 Vectors columns.
template <int Rows, int Vectors>
GEOFLOW_INLINE void dot_strip(const std::uint8_t* rows, std::int64_t stride, const std::int32_t* strip, std::int32_t* dot, std::int64_t ld) {
    __m512i acc[Rows][Vectors];
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) acc[r][v] = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < stride; k += 4) {
        __m512i column[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) column[v] = _mm512_loadu_si512(strip + v * 16);
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r) {
            std::int32_t four;
            std::memcpy(&four, rows + r * stride + k, sizeof four);
            const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], row, column[v]);
        }
        strip += 16 * Vectors;
    }
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) _mm512_storeu_si512(dot + r * ld + v * 16, acc[r][v]);
}

// Keeps what may be among the best. `along` takes a vector of items of a query, `across` a vector of queries of an item, each with the
// middles and half-widths of their bounds.
class Survivors {
  public:
    Survivors(const SearchParams& p, const CodeParams& codes)
        : threads_(p.threads, OfThread{std::vector<TopItems>(p.queries_count, TopItems(p.top_k)),
                                       std::vector<std::vector<Candidate>>(p.queries_count),
                                       std::vector<float>(round_up(p.queries_count, 16), -std::numeric_limits<float>::infinity())}),
          most_(codes.most_kept) {}

    GEOFLOW_INLINE void along(std::int64_t query, std::int64_t item, std::int64_t some, __m512 middle, __m512 wide) {
        OfThread& mine = threads_[thread_number()];
        const __m512 upper = _mm512_add_ps(middle, wide);
        const __mmask16 lanes = static_cast<__mmask16>((1u << some) - 1);
        const __mmask16 open = _mm512_mask_cmp_ps_mask(lanes, upper, _mm512_set1_ps(mine.threshold[query]), _CMP_GE_OQ);
        if (!open) return;
        float u[16], m[16];
        _mm512_storeu_ps(u, upper), _mm512_storeu_ps(m, _mm512_sub_ps(middle, wide));
        for (int lane = 0; lane < some; ++lane)
            if (open >> lane & 1) keep(mine, query, item + lane, u[lane], m[lane]);
    }

    GEOFLOW_INLINE void across(std::int64_t query, std::int64_t some, std::int64_t item, __m512 middle, __m512 wide) {
        OfThread& mine = threads_[thread_number()];
        const __m512 upper = _mm512_add_ps(middle, wide);
        const __mmask16 lanes = static_cast<__mmask16>((1u << some) - 1);
        const __mmask16 open = _mm512_mask_cmp_ps_mask(lanes, upper, _mm512_loadu_ps(mine.threshold.data() + query), _CMP_GE_OQ);
        if (!open) return;
        float u[16], m[16];
        _mm512_storeu_ps(u, upper), _mm512_storeu_ps(m, _mm512_sub_ps(middle, wide));
        for (int lane = 0; lane < some; ++lane)
            if (open >> lane & 1) keep(mine, query + lane, item, u[lane], m[lane]);
    }

    // Those of a query that all threads kept and that its final threshold does not exclude, largest upper bound first; none, and
    // false, if there are too many.
    bool of_query(std::int64_t query, std::int64_t top_k, std::vector<Candidate>& found) const {
        std::vector<const TopItems*> parts;
        for (const OfThread& one : threads_) parts.push_back(&one.lowest[query]);
        const std::vector<Candidate> low = best_of(parts, top_k);
        const float threshold =
            static_cast<std::int64_t>(low.size()) == top_k ? low.back().score : -std::numeric_limits<float>::infinity();
        found.clear();
        for (const OfThread& one : threads_) {
            if (static_cast<std::int64_t>(one.kept[query].size()) > most_) return false;
            for (const Candidate& item : one.kept[query])
                if (item.score >= threshold) found.push_back(item);
        }
        std::sort(found.begin(), found.end(), better);
        return static_cast<std::int64_t>(found.size()) <= most_;
    }

  private:
    struct OfThread {
        std::vector<TopItems> lowest;
        std::vector<std::vector<Candidate>> kept;
        std::vector<float> threshold;
    };

    void keep(OfThread& mine, std::int64_t query, std::int64_t item, float upper, float lower) const {
        std::vector<Candidate>& kept = mine.kept[query];
        if (static_cast<std::int64_t>(kept.size()) > most_) return;  // given up
        kept.push_back({upper, item});
        mine.lowest[query].offer(lower, item);
        mine.threshold[query] = mine.lowest[query].threshold();
    }

    std::vector<OfThread> threads_;
    const std::int64_t most_;
};

// ---- the pass ---------------------------------------------------------------------------------------------------------------------

// Offers the survivors vectors of items of one query when there are few of these, or else vectors of queries and one item.
bool code_pass(const SearchParams& p, const CodeParams& codes, Survivors& survivors) {
    const CodedQueries coded(p, codes);
    const bool few = coded.columns <= kFewColumns;
    const std::int64_t stride = coded.stride, panel_rows = code_panel(stride), panels = (p.items + panel_rows - 1) / panel_rows;
    const std::int64_t padded = round_up(coded.columns, 16);
    const Scratch packed_room(few ? 0 : padded * stride / 4);
    std::int32_t* const packed = reinterpret_cast<std::int32_t*>(packed_room.get());
    std::vector<float> unit(padded, 0.0f), norm(padded, 0.0f), common(padded, 0.0f);
    std::vector<std::int32_t> shift(padded, 0);
    for (std::int64_t first = 0; !few && first < padded; first += 32)
        pack_columns(coded, first, least(32, padded - first), packed + first * stride / 4);
    for (std::int64_t q = 0; q < p.queries_count; ++q) {
        const CodedQuery& query = coded.queries[q];
        unit[q] = query.unit[0], norm[q] = query.norm, common[q] = query.common, shift[q] = query.shift[0];
    }
    // Of each thread: the products of a panel, and the last panel with rows that the gallery does not have.
    const std::int64_t dots = kCodePanel * 32, per_thread = round_up(dots + (few ? 0 : panel_rows * stride / 4), 1024);
    const Scratch private_scratch(per_thread * p.threads);
    bool go_on = true;
#pragma omp parallel num_threads(p.threads)
    {
        std::int32_t* const dot = reinterpret_cast<std::int32_t*>(private_scratch.get() + thread_number() * per_thread);
        std::uint8_t* const last = reinterpret_cast<std::uint8_t*>(dot + dots);
#pragma omp for schedule(monotonic : dynamic, 8)
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            if (thread_number() == 0 && !p.keep_going()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
            if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
            const std::int64_t first = panel * panel_rows, count = least(panel_rows, p.items - first);
            const std::uint8_t* rows = codes.rows.code + first * stride;
            const float *scale = codes.rows.scale + first, *error = codes.rows.error + first;
            if (few) {
                const auto run = [&](auto columns) {
                    dot_panel<decltype(columns)::value>(rows, count, p.items - first, coded.bytes.data(), stride, dot);
                };
                switch (coded.columns) {
                    case 2: run(std::integral_constant<int, 2>{}); break;
                    case 4: run(std::integral_constant<int, 4>{}); break;
                    case 5: run(std::integral_constant<int, 5>{}); break;
                    default: run(std::integral_constant<int, 6>{}); break;
                }
                for (std::int64_t q = 0; q < p.queries_count; ++q) {
                    const CodedQuery& query = coded.queries[q];
                    for (std::int64_t i = 0; i < count; i += 16) {
                        const std::int64_t some = least(16, count - i);
                        const __mmask16 lanes = static_cast<__mmask16>((1u << some) - 1);
                        __m512 middle = _mm512_setzero_ps();
                        for (std::int64_t part = 0; part < coded.parts; ++part) {
                            const __m512i raw = _mm512_loadu_si512(dot + (q * coded.parts + part) * kCodePanel + i);
                            const __m512 value = as_floats(_mm512_sub_epi32(raw, _mm512_set1_epi32(query.shift[part])));
                            middle = _mm512_fmadd_ps(value, _mm512_set1_ps(query.unit[part]), middle);
                        }
                        middle = _mm512_mul_ps(middle, _mm512_maskz_loadu_ps(lanes, scale + i));
                        const __m512 wide = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, error + i), _mm512_set1_ps(query.norm),
                                                            _mm512_set1_ps(query.common));
                        survivors.along(q, first + i, some, middle, wide);
                    }
                }
                continue;
            }
            if (count < panel_rows) {  // what is multiplied past the last row must exist
                std::copy(rows, rows + count * stride, last);
                rows = last;
            }
            for (std::int64_t q = 0; q < padded; q += 32) {
                const std::int64_t width = least(32, padded - q), height = width == 32 ? 12 : 24;
                const std::int32_t* const strip = packed + q * stride / 4;
                for (std::int64_t r = 0; r < panel_rows; r += height) {
                    const std::int64_t next = first + panel_rows + r;
                    if (q == 0) fetch_rows(codes.rows.code + next * stride, height, p.items - next, stride);
                    if (width == 32)
                        dot_strip<12, 2>(rows + r * stride, stride, strip, dot + r * 32, 32);
                    else
                        dot_strip<24, 1>(rows + r * stride, stride, strip, dot + r * 32, 32);
                }
                for (std::int64_t c = q; c < q + width && c < p.queries_count; c += 16) {
                    const __m512i off = _mm512_loadu_si512(shift.data() + c);
                    const __m512 units = _mm512_loadu_ps(unit.data() + c), norms = _mm512_loadu_ps(norm.data() + c);
                    const __m512 commons = _mm512_loadu_ps(common.data() + c);
                    const std::int64_t some = least(16, p.queries_count - c);
                    for (std::int64_t r = 0; r < count; ++r) {
                        const __m512 value = as_floats(_mm512_sub_epi32(_mm512_loadu_si512(dot + r * 32 + c - q), off));
                        const __m512 middle = _mm512_mul_ps(_mm512_mul_ps(value, units), _mm512_set1_ps(scale[r]));
                        survivors.across(c, some, first + r, middle, _mm512_fmadd_ps(norms, _mm512_set1_ps(error[r]), commons));
                    }
                }
            }
        }
    }
    return go_on;
}

// Scores candidates, largest upper bound first, until no other can be among the best; returns how many.
template <class Element>
std::int64_t rescore(const SearchParams& p, const float* query, const std::vector<Candidate>& candidates, float* score, std::int64_t* index) {
    const Element* const gallery = static_cast<const Element*>(p.gallery);
    const std::int64_t count = static_cast<std::int64_t>(candidates.size());
    std::vector<Candidate> scored;
    std::vector<float> best;  // a heap of the top_k largest scores, the smallest at the front
    std::int64_t i = 0;
    const auto is_open = [&](std::int64_t k) {
        return static_cast<std::int64_t>(best.size()) < p.top_k || candidates[k].score >= best.front();
    };
    for (; i < count && is_open(i); i += kRows) {
        const Element *row[kRows], *ahead[kRows];
        for (int r = 0; r < kRows; ++r) {
            row[r] = gallery + candidates[least(i + r, count - 1)].index * p.dim;
            ahead[r] = gallery + candidates[least(i + r + kRows, count - 1)].index * p.dim;
        }
        float four[kRows];
        score_rows<1, true>(row, ahead, query, p.dim, four, kRows);
        for (std::int64_t r = 0; r < least(kRows, count - i); ++r) {
            scored.push_back({four[r], candidates[i + r].index});
            best.push_back(four[r]);
            std::push_heap(best.begin(), best.end(), std::greater<float>());
            if (static_cast<std::int64_t>(best.size()) > p.top_k) {
                std::pop_heap(best.begin(), best.end(), std::greater<float>());
                best.pop_back();
            }
        }
    }
    std::partial_sort(scored.begin(), scored.begin() + least(p.top_k, static_cast<std::int64_t>(scored.size())), scored.end(), better);
    for (std::int64_t k = 0; k < p.top_k; ++k) {
        const bool there = k < static_cast<std::int64_t>(scored.size());
        score[k] = there ? scored[k].score : std::nanf("");
        index[k] = there ? scored[k].index : -1;
    }
    return static_cast<std::int64_t>(scored.size());
}

}  // namespace

namespace geoflow {

bool search_codes(const SearchParams& params, const CodeParams& codes, const SearchResult& result) {
    Survivors survivors(params, codes);
    if (!code_pass(params, codes, survivors)) return false;
    const PaddedQueries padded(params);
#pragma omp parallel for num_threads(params.threads) schedule(dynamic, 1)
    for (std::int64_t q = 0; q < params.queries_count; ++q) {
        std::vector<Candidate> candidates;
        codes.kept[q] = -1;
        if (!survivors.of_query(q, params.top_k, candidates)) continue;
        codes.kept[q] = by_storage(params.storage, [&](auto element) {
            return rescore<decltype(element)>(params, padded.query(q), candidates, result.score + q * params.top_k,
                                              result.index + q * params.top_k);
        });
    }
    return true;
}

}  // namespace geoflow

#endif  // __AVX512VNNI__
