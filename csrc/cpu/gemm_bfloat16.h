// C = A B^T from factors rounded to bfloat16, with sums in single precision, for processors with AVX512-BF16: an instruction
// multiplies 32 pairs of numbers, twice as many as in single precision.
//
// Coordinates go in pairs, the two halves of a 32-bit lane. The rows of encoders have a few coordinates far larger than the others,
// and there the rounding hurts: of the largest ones, about 1 in 32, what rounding took away from either factor follows as one pair
// more, (rest of a, a) and (b, rest of b). This leaves the error that rows with equally large coordinates would have.
//   B is rounded and packed once, in strips of 32 columns, the last one 16 wide if that is enough: at most 15 columns of padding
//   a panel of rows of A is rounded once by the thread that multiplies it, and stays in L2 for all tiles
//   per step of depth, at most depth_pairs(), a strip of B stays in L1 and the rows pass from L2
//   12 x 32 or 24 x 16 micro-kernel: 24 accumulators of the 32 registers
// Every entry is summed in an order that depends on the depth alone: results do not depend on threads or on neighbours.
#pragma once
#include "cpu/gemm_rows.h"

#if defined(__AVX512BF16__)
#include <algorithm>
#include <vector>

namespace {

constexpr std::int64_t kWide = 16;  // lanes of a 512-bit vector
constexpr std::int64_t kPairStrip = 2 * kWide;
constexpr std::int64_t kPairRows = 24;  // a multiple of the rows of every micro-kernel

// Pairs at a time, such that a strip of B takes nine sixteenths of L1: rows of 512 coordinates then go in two steps through one of 32 KB.
// The sums do not depend on it.
inline std::int64_t depth_pairs() {
    return most(32, geoflow::caches().first / 16 * 9 / (kPairStrip * std::int64_t{sizeof(std::int32_t)}));
}

// Rows at a time, such that what is rounded of A, `lda` pairs of each row, stays in L2.
inline std::int64_t pair_panel_rows(std::int64_t lda) {
    const std::int64_t fit = geoflow::caches().second / 8 * 7 / (lda * std::int64_t{sizeof(std::int32_t)}) / kPairRows * kPairRows;
    return least(kPanelRows, most(kPairRows, fit));
}

// How a row becomes pairs: all coordinates in order, then the largest ones once more.
class PairLayout {
  public:
    // The largest coordinates are those of some rows of the list, evenly spaced.
    template <class Element>
    explicit PairLayout(const RowList<Element>& rows)
        : depth_(rows.depth),
          whole_((rows.depth + 1) / 2),
          largest_(least(rows.depth, round_up(rows.depth, kPerLarge * kWide) / kPerLarge)) {
        struct Coordinate {
            float square;
            std::int32_t index;
        };
        std::vector<Coordinate> all(depth_);
        for (std::int64_t k = 0; k < depth_; ++k) all[k] = {0.0f, static_cast<std::int32_t>(k)};
        const std::int64_t looks = least(kLooks, rows.count);
        for (std::int64_t i = 0; i < looks; ++i) {
            const Element* const row = rows.row(i * rows.count / looks);
            for (std::int64_t k = 0; k < depth_; ++k) all[k].square += widen(row[k]) * widen(row[k]);
        }
        for (Coordinate& x : all) x.square = x.square >= 0 ? x.square : 0.0f;  // a NaN has no place in an order
        const auto larger = [](const Coordinate& a, const Coordinate& b) {
            return a.square > b.square || (a.square == b.square && a.index < b.index);
        };
        std::partial_sort(all.begin(), all.begin() + static_cast<std::int64_t>(largest_.size()), all.end(), larger);
        for (std::size_t j = 0; j < largest_.size(); ++j) largest_[j] = all[j].index;
    }

    std::int64_t pairs() const { return whole_ + static_cast<std::int64_t>(largest_.size()); }
    // Room that pairs take, in which the vectors written last end.
    std::int64_t room() const { return whole_ + round_up(pairs() - whole_, kWide) + kWide; }

    // The pairs of a row; those of the largest coordinates are (rest, rounded) if `rest_first`, else the other way round.
    void round(const float* row, bool rest_first, std::int32_t* to) const {
        for (std::int64_t k = 0; k < depth_; k += 2 * kWide) {
            const __m512 low = _mm512_maskz_loadu_ps(lanes(depth_ - k), row + k);
            const __mmask16 more = lanes(depth_ - k - kWide);
            const __m512 high = more ? _mm512_maskz_loadu_ps(more, row + k + kWide) : _mm512_setzero_ps();
            _mm512_storeu_si512(to + k / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        const std::int64_t count = pairs() - whole_;
        for (std::int64_t j = 0; j < count; j += kWide) {
            const __mmask16 some = lanes(count - j);
            const __m512i at = _mm512_maskz_loadu_epi32(some, largest_.data() + j);
            const __m512 x = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), some, at, row, sizeof(float));
            const __m512i rounded = low_halves(x);
            const __m512i rest = low_halves(_mm512_sub_ps(x, (__m512)to_high_halves(rounded)));
            const __m512i first = rest_first ? rest : rounded, second = rest_first ? rounded : rest;
            _mm512_storeu_si512(to + whole_ + j, _mm512_or_si512(first, to_high_halves(second)));
        }
    }

  private:
    static constexpr std::int64_t kPerLarge = 32, kLooks = 512;

    static __mmask16 lanes(std::int64_t count) {
        return static_cast<__mmask16>(count >= kWide ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    }

    // The bits of x in bfloat16, each in the lower half of a lane. (GCC 12 warns of the forms without a mask.)
    static __m512i low_halves(__m512 x) { return _mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)_mm512_cvtneps_pbh(x)); }
    static __m512i to_high_halves(__m512i x) { return _mm512_maskz_slli_epi32(0xffff, x, 16); }

    std::int64_t depth_, whole_;
    std::vector<std::int32_t> largest_;
};

// Packs the rows of b [count, depth] into a strip [pairs][width], whose other columns are zero.
inline void pack_pairs(const PairLayout& layout, const float* b, std::int64_t count, std::int64_t depth, std::int64_t width,
                       std::int32_t* to) {
    std::vector<std::int32_t> row(layout.room(), 0);
    for (std::int64_t c = 0; c < width; ++c) {
        if (c < count) layout.round(b + c * depth, false, row.data());
        for (std::int64_t p = 0; p < layout.pairs(); ++p) to[p * width + c] = c < count ? row[p] : 0;
    }
}

// c[Rows][16 Vectors] (leading dimension ldc) = or += `pairs` pairs of the rows a (leading dimension lda) times b[pairs][16 Vectors]
template <int Rows, int Vectors>
GEOFLOW_INLINE void pair_kernel(const std::int32_t* __restrict a, std::int64_t lda, const std::int32_t* __restrict b, std::int64_t pairs,
                                bool accumulate, float* __restrict c, std::int64_t ldc) {
    __m512 acc[Rows][Vectors];
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) acc[r][v] = accumulate ? _mm512_loadu_ps(c + r * ldc + v * kWide) : _mm512_setzero_ps();
    for (std::int64_t p = 0; p < pairs; ++p) {
        __m512bh column[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) column[v] = (__m512bh)_mm512_loadu_si512(b + v * kWide);
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(a[r * lda + p]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], column[v], pair);
        }
        b += Vectors * kWide;
    }
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) _mm512_storeu_ps(c + r * ldc + v * kWide, acc[r][v]);
}

// c [rows, a multiple of kPairRows; columns, a multiple of 16] = rows a times the strips b, all of `pairs` pairs
inline void multiply_pairs(const std::int32_t* a, std::int64_t lda, std::int64_t rows, const std::int32_t* b, std::int64_t columns,
                           std::int64_t pairs, float* c, std::int64_t ldc) {
    const std::int64_t most_pairs = depth_pairs(), steps = (pairs + most_pairs - 1) / most_pairs;
    for (std::int64_t s = 0; s < steps; ++s) {
        const std::int64_t p = s * pairs / steps, depth = (s + 1) * pairs / steps - p;
        for (std::int64_t first = 0; first < columns; first += kPairStrip) {
            const std::int64_t width = least(kPairStrip, columns - first);
            const std::int32_t* const strip = b + first * pairs + p * width;
            if (width == kPairStrip)
                for (std::int64_t r = 0; r < rows; r += 12)
                    pair_kernel<12, 2>(a + r * lda + p, lda, strip, depth, s > 0, c + r * ldc + first, ldc);
            else
                for (std::int64_t r = 0; r < rows; r += 24)
                    pair_kernel<24, 1>(a + r * lda + p, lda, strip, depth, s > 0, c + r * ldc + first, ldc);
        }
    }
}

// A row itself, or its copy in floats.
inline const float* as_floats(const float* row, std::int64_t, float*) { return row; }

template <class Element>
const float* as_floats(const Element* row, std::int64_t depth, float* to) {
    std::int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) store(to + k, load(row + k));
    for (; k < depth; ++k) to[k] = widen(row[k]);
    return to;
}

// As row_tiles in gemm_rows.h, from rounded factors.
template <class Element, class Poll, class Epilogue>
bool bfloat16_tiles(const RowList<Element>& a, const float* b, std::int64_t columns, int threads, const Poll& poll, const Epilogue& epilogue) {
    const PairLayout layout(a);
    const std::int64_t pairs = layout.pairs(), lda = round_up(layout.room(), kWide), padded = round_up(columns, kWide);
    const std::int64_t strips = (padded + kPairStrip - 1) / kPairStrip, panels = (a.count + kPanelRows - 1) / kPanelRows;
    const std::int64_t ld = least(padded, kTileColumns);
    const std::int64_t tile_size = round_up(kPanelRows * ld + kWide, 1024), panel_size = round_up(kPanelRows * lda, 1024);
    const Scratch packed(padded * pairs), private_scratch((tile_size + panel_size) * threads);
    std::int32_t* const packed_b = reinterpret_cast<std::int32_t*>(packed.get());
    bool go_on = true;

#pragma omp parallel num_threads(threads)
    {
        float* const values = private_scratch.get() + thread_number() * (tile_size + panel_size);
        std::int32_t* const rows = reinterpret_cast<std::int32_t*>(values + tile_size);
        std::vector<float> wide(std::is_same<Element, float>::value ? 0 : a.depth);
#pragma omp for schedule(static)
        for (std::int64_t s = 0; s < strips; ++s) {
            const std::int64_t first = s * kPairStrip, width = least(kPairStrip, padded - first);
            pack_pairs(layout, b + first * a.depth, least(width, columns - first), a.depth, width, packed_b + first * pairs);
        }
#pragma omp for schedule(monotonic : dynamic, 1)
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            if (thread_number() == 0 && !poll()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
            if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
            const std::int64_t row = panel * kPanelRows, count = least(kPanelRows, a.count - row);
            const std::int64_t multiplied = round_up(count, kPairRows);
            for (std::int64_t r = 0; r < multiplied; ++r) layout.round(as_floats(a.row(row + r), a.depth, wide.data()), true, rows + r * lda);
            for (std::int64_t col = 0; col < columns; col += ld) {
                multiply_pairs(rows, lda, multiplied, packed_b + col * pairs, least(ld, padded - col), pairs, values, ld);
                epilogue(Tile<1>{row, count, col, least(ld, columns - col), ld, {values}});
            }
        }
    }
    return go_on;
}

// As product_tiles in gemm.h, from rounded factors.
template <int Products, class Poll, class Epilogue>
bool bfloat16_product_tiles(const Product (&products)[Products], std::int64_t m, std::int64_t n, int threads, const Poll& poll,
                            const Epilogue& epilogue) {
    std::vector<PairLayout> layouts;
    std::int64_t pairs = 0, lda = 0;  // of all products
    for (const Product& p : products) {
        layouts.emplace_back(RowList<float>{p.a, m, p.depth});
        pairs += layouts.back().pairs(), lda += round_up(layouts.back().room(), kWide);
    }
    const std::int64_t panel_height = pair_panel_rows(lda), panels = (m + panel_height - 1) / panel_height;
    const std::int64_t block = round_up(least(column_block(pairs), n), kWide), ld = least(block, kTileColumns);
    const std::int64_t tile_size = round_up(panel_height * ld + kWide, 1024);
    const std::int64_t per_thread = Products * tile_size + round_up(panel_height * lda, 1024);
    const Scratch packed(block * pairs), private_scratch(per_thread * threads);
    std::int32_t* const packed_b = reinterpret_cast<std::int32_t*>(packed.get());
    bool go_on = true;

#pragma omp parallel num_threads(threads)
    {
        float* const values = private_scratch.get() + thread_number() * per_thread;
        std::int32_t* const rows = reinterpret_cast<std::int32_t*>(values + Products * tile_size);
        for (std::int64_t col = 0; col < n; col += block) {
            const std::int64_t cols = least(block, n - col), padded = round_up(cols, kWide);
#pragma omp for schedule(static)
            for (std::int64_t first = 0; first < padded; first += kPairStrip) {
                std::int32_t* to = packed_b;
                for (int p = 0; p < Products; ++p) {
                    const std::int64_t width = least(kPairStrip, padded - first), depth = products[p].depth;
                    pack_pairs(layouts[p], products[p].b + (col + first) * depth, least(width, cols - first), depth, width,
                               to + first * layouts[p].pairs());
                    to += block * layouts[p].pairs();
                }
            }
#pragma omp for schedule(monotonic : dynamic, 1)
            for (std::int64_t panel = 0; panel < panels; ++panel) {
                if (thread_number() == 0 && !poll()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
                if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
                const std::int64_t row = panel * panel_height, count = least(panel_height, m - row);
                const std::int64_t multiplied = round_up(count, kPairRows);
                std::int32_t* a = rows;
                for (int p = 0; p < Products; ++p) {
                    const std::int64_t stride = round_up(layouts[p].room(), kWide);
                    for (std::int64_t r = 0; r < multiplied; ++r)
                        layouts[p].round(products[p].a + least(row + r, m - 1) * products[p].depth, true, a + r * stride);
                    a += panel_height * stride;
                }
                for (std::int64_t first = 0; first < cols; first += ld) {
                    Tile<Products> tile{row, count, col + first, least(ld, cols - first), ld, {}};
                    a = rows;
                    const std::int32_t* b = packed_b;
                    for (int p = 0; p < Products; ++p) {
                        const std::int64_t stride = round_up(layouts[p].room(), kWide), of_product = layouts[p].pairs();
                        tile.value[p] = values + p * tile_size;
                        multiply_pairs(a, stride, multiplied, b + first * of_product, least(ld, padded - first), of_product, tile.value[p], ld);
                        a += panel_height * stride;
                        b += block * of_product;
                    }
                    epilogue(tile);
                }
            }
        }
    }
    return go_on;
}

}  // namespace

#endif  // __AVX512BF16__
