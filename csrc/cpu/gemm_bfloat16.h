// C = A B^T with both factors rounded to bfloat16 and sums in single precision, for processors with AVX512-BF16: an instruction
// multiplies 32 pairs of numbers, twice as many as in single precision.
//
// Coordinates go in pairs, the two numbers of one 32-bit lane:
//   B is rounded and packed once, in strips of 32 columns, the last one 16 wide if that is enough: at most 15 columns of padding
//   a panel of kPanelRows rows of A is rounded once by the thread that multiplies it, and stays in L2 for all tiles
//   per kDepthPairs pairs of depth a strip of B stays in L1, the rows pass from L2
//   12 x 32 or 24 x 16 micro-kernel: 24 accumulators of the 32 registers
// Every entry is summed in an order that depends on the depth alone: results do not depend on threads or on neighbours.
#pragma once
#include "cpu/gemm_rows.h"

#if defined(__AVX512BF16__)

namespace {

constexpr std::int64_t kWide = 16;  // lanes of a 512-bit vector
constexpr std::int64_t kPairStrip = 2 * kWide;
constexpr std::int64_t kDepthPairs = 128;

// Coordinates [k, k + 32) of a row as 16 pairs in bfloat16, zeros past its end.
GEOFLOW_INLINE __m512i rounded_pairs(const float* row, std::int64_t k, std::int64_t depth) {
    const auto lanes = [](std::int64_t count) {
        return static_cast<__mmask16>(count >= kWide ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    };
    const __m512 low = _mm512_maskz_loadu_ps(lanes(depth - k), row + k);
    const __mmask16 rest = lanes(depth - k - kWide);
    const __m512 high = rest ? _mm512_maskz_loadu_ps(rest, row + k + kWide) : _mm512_setzero_ps();
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// to[pairs, a multiple of 16] = the rounded row
inline void round_row(const float* row, std::int64_t depth, std::int32_t* to) {
    for (std::int64_t k = 0; k < depth; k += 2 * kWide) _mm512_storeu_si512(to + k / 2, rounded_pairs(row, k, depth));
}

// Packs the rounded rows of b [count, depth] into a strip [pairs][width], whose other columns are zero.
inline void pack_pairs(const float* b, std::int64_t count, std::int64_t depth, std::int64_t width, std::int32_t* to) {
    const std::int64_t pairs = (depth + 1) / 2;
    for (std::int64_t c = 0; c < width; ++c)
        for (std::int64_t k = 0; k < depth; k += 2 * kWide) {
            std::int32_t some[kWide] = {};
            if (c < count) _mm512_storeu_si512(some, rounded_pairs(b + c * depth, k, depth));
            for (std::int64_t p = k / 2; p < least(pairs, k / 2 + kWide); ++p) to[p * width + c] = some[p - k / 2];
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

// As row_tiles in gemm_rows.h, with both factors rounded.
template <class Poll, class Epilogue>
bool bfloat16_tiles(const RowList& a, const float* b, std::int64_t columns, int threads, const Poll& poll, const Epilogue& epilogue) {
    const std::int64_t pairs = (a.depth + 1) / 2, lda = round_up(pairs, kWide), padded = round_up(columns, kWide);
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
#pragma omp for schedule(static)
        for (std::int64_t s = 0; s < strips; ++s) {
            const std::int64_t first = s * kPairStrip, width = least(kPairStrip, padded - first);
            pack_pairs(b + first * a.depth, least(width, columns - first), a.depth, width, packed_b + first * pairs);
        }
#pragma omp for schedule(monotonic : dynamic, 1)
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            if (thread_number() == 0 && !poll()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
            if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
            const std::int64_t row = panel * kPanelRows, end = least(row + kPanelRows, a.count);
            const std::int64_t multiplied = round_up(end - row, 24);
            for (std::int64_t r = 0; r < multiplied; ++r) round_row(a.row(row + r), a.depth, rows + r * lda);
            for (std::int64_t col = 0; col < columns; col += kTileColumns) {
                const std::int64_t tile_end = least(col + kTileColumns, padded);
                for (std::int64_t p = 0; p < pairs; p += kDepthPairs) {
                    const std::int64_t step = least(kDepthPairs, pairs - p);
                    for (std::int64_t first = col; first < tile_end; first += kPairStrip) {
                        const std::int64_t width = least(kPairStrip, padded - first);
                        const std::int32_t* const strip = packed_b + first * pairs + p * width;
                        float* const corner = values + (first - col);
                        if (width == kPairStrip)
                            for (std::int64_t r = 0; r < multiplied; r += 12)
                                pair_kernel<12, 2>(rows + r * lda + p, lda, strip, step, p > 0, corner + r * ld, ld);
                        else
                            for (std::int64_t r = 0; r < multiplied; r += 24)
                                pair_kernel<24, 1>(rows + r * lda + p, lda, strip, step, p > 0, corner + r * ld, ld);
                    }
                }
                epilogue(Tile<1>{row, end - row, col, least(columns, tile_end) - col, ld, {values}});
            }
        }
    }
    return go_on;
}

}  // namespace

#endif  // __AVX512BF16__
