// C = A B^T in single precision for a few columns: the rows of A are read where they lie, in any order, and never copied.
//
// Packing a row of A costs about as much as multiplying it by a dozen columns. Here a micro-kernel broadcasts from its rows
// directly; their cache lines are asked for one group of rows ahead, since no hardware prefetcher follows that many short runs.
//   B is packed once, in strips of 16 columns, the last one 8 to 24 wide: at most 7 columns of padding
//   a tile is kPanelRows rows by up to kTileStrips strips; per kDepthBlock of depth a strip of B stays in L1, the rows pass from L2
//   6 x 16, 4 x 24 or 12 x 8 micro-kernel: 12 accumulators each
// Every entry is summed in an order that depends on the depth alone: results do not depend on threads or on neighbours.
#pragma once
#include "cpu/gemm.h"

namespace {

constexpr std::int64_t kTileStrips = kTileColumns / kStripColumns;

// Rows of a matrix [*, depth]: all of them in order, or those that `pick` lists.
struct RowList {
    const float* data;
    const std::int64_t* pick;  // [count] or null
    std::int64_t count, depth;

    // Past the end, the last row again.
    const float* row(std::int64_t i) const {
        const std::int64_t kept = least(i, count - 1);
        return data + (pick ? pick[kept] : kept) * depth;
    }
};

// Columns as packed strips; all but the last are kStripColumns wide.
struct StripList {
    std::int64_t strips, last_width;

    explicit StripList(std::int64_t columns) {
        const std::int64_t vectors = (columns + kLanes - 1) / kLanes;
        strips = vectors > 1 ? vectors / 2 : 1;
        last_width = vectors * kLanes - (strips - 1) * kStripColumns;
    }
    std::int64_t width(std::int64_t strip) const { return strip + 1 < strips ? kStripColumns : last_width; }
    std::int64_t columns() const { return (strips - 1) * kStripColumns + last_width; }
};

// c[Rows][8 Vectors] (leading dimension ldc) = or += depth coordinates of `rows` times b[depth][8 Vectors]
template <int Rows, int Vectors, bool Accumulate>
GEOFLOW_INLINE void row_kernel(const float* const (&rows)[Rows], const float* __restrict b, std::int64_t depth, float* __restrict c,
                               std::int64_t ldc) {
    float8 acc[Rows][Vectors];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) acc[r][v] = Accumulate ? load(c + r * ldc + v * kLanes) : broadcast(0.0f);
#pragma GCC unroll 2
    for (std::int64_t k = 0; k < depth; ++k) {
        float8 column[Vectors];
#pragma GCC unroll 3
        for (int v = 0; v < Vectors; ++v) column[v] = load(b + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const float8 coordinate = broadcast(rows[r][k]);
#pragma GCC unroll 3
            for (int v = 0; v < Vectors; ++v) acc[r][v] += coordinate * column[v];
        }
        b += Vectors * kLanes;
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

// Coordinates [k, k + depth) of rows [first, end) times one strip of B; `fetch` when the rows are not in cache yet.
template <int Rows, int Vectors>
void multiply_strip(const RowList& a, std::int64_t first, std::int64_t end, std::int64_t k, std::int64_t depth, const float* b,
                    bool fetch, float* c, std::int64_t ldc) {
    for (std::int64_t i = first; i < end; i += Rows, c += Rows * ldc) {
        const float* rows[Rows];
        for (int r = 0; r < Rows; ++r) rows[r] = a.row(i + r) + k;
        if (fetch)
            for (int r = 0; r < Rows; ++r) {
                const float* const ahead = a.row(i + Rows + r) + k;
                for (std::int64_t line = 0; line < depth; line += 16) __builtin_prefetch(ahead + line, 0, 2);
            }
        if (k == 0)
            row_kernel<Rows, Vectors, false>(rows, b, depth, c, ldc);
        else
            row_kernel<Rows, Vectors, true>(rows, b, depth, c, ldc);
    }
}

// c = rows [first, end) times strips [from, to). It has room for the rows rounded up to a multiple of 12.
inline void multiply_rows(const RowList& a, std::int64_t first, std::int64_t end, const float* packed_b, const StripList& b,
                          std::int64_t from, std::int64_t to, float* c, std::int64_t ldc) {
    for (std::int64_t k = 0; k < a.depth; k += kDepthBlock) {
        const std::int64_t step = least(kDepthBlock, a.depth - k);
        for (std::int64_t s = from; s < to; ++s) {
            const std::int64_t width = b.width(s);
            const float* const strip = packed_b + s * kStripColumns * a.depth + k * width;
            float* const corner = c + (s - from) * kStripColumns;
            if (width == kStripColumns)
                multiply_strip<6, 2>(a, first, end, k, step, strip, s == 0, corner, ldc);
            else if (width > kStripColumns)
                multiply_strip<4, 3>(a, first, end, k, step, strip, s == 0, corner, ldc);
            else
                multiply_strip<12, 1>(a, first, end, k, step, strip, s == 0, corner, ldc);
        }
    }
}

inline void pack_strips(const float* b, std::int64_t columns, std::int64_t depth, const StripList& strips, std::int64_t s, float* to) {
    const std::int64_t first = s * kStripColumns, count = least(strips.width(s), columns - first);
    float* const strip = to + first * depth;
    if (strips.width(s) == kStripColumns)
        pack_strip<kStripColumns>(b + first * depth, count, depth, strip);
    else if (strips.width(s) > kStripColumns)
        pack_strip<kStripColumns + kLanes>(b + first * depth, count, depth, strip);
    else
        pack_strip<kLanes>(b + first * depth, count, depth, strip);
}

// As product_tiles in gemm.h for one product a b^T with b [columns, depth] in a single block of columns: calls
// epilogue(const Tile<1>&) for every tile. Panels of kPanelRows rows are each handled by one thread, their tiles in ascending columns.
// A vector may be loaded from any entry of a tile: what follows the last one is readable.
template <class Poll, class Epilogue>
bool row_tiles(const RowList& a, const float* b, std::int64_t columns, int threads, const Poll& poll, const Epilogue& epilogue) {
    const StripList strips(columns);
    const std::int64_t panels = (a.count + kPanelRows - 1) / kPanelRows;
    const std::int64_t ld = least(strips.columns(), kTileColumns + kLanes);
    const std::int64_t tile_size = round_up(kPanelRows * ld + kLanes, 1024);
    const Scratch packed_b(strips.columns() * a.depth);
    const Scratch tiles(tile_size * threads);
    bool go_on = true;

#pragma omp parallel num_threads(threads)
    {
        float* const values = tiles.get() + thread_number() * tile_size;
#pragma omp for schedule(static)
        for (std::int64_t s = 0; s < strips.strips; ++s) pack_strips(b, columns, a.depth, strips, s, packed_b.get());
#pragma omp for schedule(monotonic : dynamic, 1)
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            if (thread_number() == 0 && !poll()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
            if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
            const std::int64_t row = panel * kPanelRows, end = least(row + kPanelRows, a.count);
            for (std::int64_t from = 0; from < strips.strips; from += kTileStrips) {
                const std::int64_t to = least(from + kTileStrips, strips.strips), col = from * kStripColumns;
                const std::int64_t cols = (to == strips.strips ? columns : to * kStripColumns) - col;
                multiply_rows(a, row, end, packed_b.get(), strips, from, to, values, ld);
                epilogue(Tile<1>{row, end - row, col, cols, ld, {values}});
            }
        }
    }
    return go_on;
}

}  // namespace
