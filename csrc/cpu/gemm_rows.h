// C = A B^T in single precision for a few columns: the rows of A are read where they lie and never copied.
//
// Packing a row of A costs about as much as multiplying it by a dozen columns. Here a micro-kernel broadcasts from its rows
// directly; their cache lines are asked for one group of rows ahead, since no hardware prefetcher follows that many short runs.
// Rows in half precision become floats a block of depth at a time, in a buffer that stays in cache. Kernels with 16 lanes take so many
// rows at once that those of 1024 floats, which share a set of L1, would push each other out: there all rows go through the buffer.
//   B is packed once, in strips of two vectors of columns, the last one of one to three vectors; up to eight columns are one strip of 8
//   a tile is kPanelRows rows by up to kTileStrips strips; per block of depth a strip of B stays in L1, the rows pass from L2
//   micro-kernels of one, two or three vectors have kAccumulators accumulators each: 12 x 8, 6 x 16, 4 x 24 with eight lanes
// Every entry is summed in an order that depends on the depth alone: results do not depend on threads or on neighbours.
#pragma once
#include <type_traits>

#include "cpu/gemm.h"

namespace {

constexpr std::int64_t kTileStrips = kTileColumns / kStripColumns;
constexpr std::int64_t kFewColumns = 8;
constexpr std::int64_t kBufferDepth = 256;               // at most, of rows that are copied
constexpr std::int64_t kBufferStride = kBufferDepth + 16;  // not a power of two, for the sets of L1
typedef float few_floats __attribute__((vector_size(4 * kFewColumns)));

// Rows of a matrix [count, depth].
template <class Element>
struct RowList {
    const Element* data;
    std::int64_t count, depth;

    // Past the end, the last row again.
    const Element* row(std::int64_t i) const { return data + least(i, count - 1) * depth; }
};

// Columns as packed strips; all but the last are kStripColumns wide.
struct StripList {
    std::int64_t strips, last_width;

    explicit StripList(std::int64_t columns) {
        const std::int64_t vectors = (columns + kLanes - 1) / kLanes;
        strips = vectors > 1 ? vectors / 2 : 1;
        last_width = columns <= kFewColumns ? kFewColumns : vectors * kLanes - (strips - 1) * kStripColumns;
    }
    std::int64_t width(std::int64_t strip) const { return strip + 1 < strips ? kStripColumns : last_width; }
    std::int64_t columns() const { return (strips - 1) * kStripColumns + last_width; }
};

template <class Vector>
GEOFLOW_INLINE Vector load_vector(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// c[Rows][Vectors] (leading dimension ldc) = or += depth coordinates of the rows rows[0], rows[1], ... times b[depth][Vectors]
template <class Vector, int Rows, int Vectors, bool Accumulate, class RowPointers>
GEOFLOW_INLINE void row_kernel(const RowPointers& rows, const float* __restrict b, std::int64_t depth, float* __restrict c,
                               std::int64_t ldc) {
    constexpr std::int64_t kWidth = sizeof(Vector) / sizeof(float);
    Vector acc[Rows][Vectors];
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) acc[r][v] = Accumulate ? load_vector<Vector>(c + r * ldc + v * kWidth) : Vector{};
#pragma GCC unroll 2
    for (std::int64_t k = 0; k < depth; ++k) {
        Vector column[Vectors];
#pragma GCC unroll 3
        for (int v = 0; v < Vectors; ++v) column[v] = load_vector<Vector>(b + v * kWidth);
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r) {
            const Vector coordinate = rows[r][k] - Vector{};
#pragma GCC unroll 3
            for (int v = 0; v < Vectors; ++v) acc[r][v] += coordinate * column[v];
        }
        b += Vectors * kWidth;
    }
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) std::memcpy(c + r * ldc + v * kWidth, &acc[r][v], sizeof(Vector));
}

// Coordinates [k, k + depth) of rows [first, end) as floats: where they lie, or copied once for all strips.
template <class Element>
class PanelRows {
  public:
    static constexpr bool kCopied = !std::is_same<Element, float>::value || kLanes == 16;
    // Floats that the buffer has.
    static constexpr std::int64_t kRoom = kCopied ? kPanelRows * kBufferStride : 0;

    // Pointers to the rows from i on.
    struct Copies {
        const float* base;
        GEOFLOW_INLINE const float* operator[](int r) const { return base + r * kBufferStride; }
    };
    template <int Rows>
    struct Originals {
        const float* rows[Rows];
        GEOFLOW_INLINE const float* operator[](int r) const { return rows[r]; }
    };
    template <int Rows>
    auto rows(std::int64_t i) const {
        if constexpr (kCopied) {
            return Copies{buffer_ + (i - first_) * kBufferStride};
        } else {
            Originals<Rows> found;
            for (int r = 0; r < Rows; ++r) found.rows[r] = a_.row(i + r) + k_;
            return found;
        }
    }

    PanelRows(const RowList<Element>& a, std::int64_t first, std::int64_t end, std::int64_t k, std::int64_t depth, float* buffer)
        : a_(a), first_(first), k_(k), depth_(depth), buffer_(buffer) {
        if constexpr (kCopied)
            for (std::int64_t i = first; i < end; ++i) {
                const Element* const from = a.row(i) + k;
                float* const to = buffer + (i - first) * kBufferStride;
                std::int64_t c = 0;
                for (; c + kLanes <= depth; c += kLanes) store(to + c, load(from + c));
                for (; c < depth; ++c) to[c] = widen(from[c]);
            }
    }

    // While `count` rows from i on are multiplied, asks for the cache lines of what comes next: of copies the next block of depth, or
    // the first one of the next panel; else the next rows.
    void fetch(std::int64_t i, std::int64_t count) const {
        const bool is_last = k_ + depth_ >= a_.depth;
        const std::int64_t ahead = !kCopied ? count : is_last ? kPanelRows : 0, k = !kCopied ? k_ : is_last ? 0 : k_ + depth_;
        constexpr std::int64_t line = 64 / sizeof(Element);
        for (std::int64_t r = i + ahead; r < i + ahead + count; ++r) {
            const Element* const row = a_.row(r) + k;
            for (std::int64_t c = 0; c < depth_; c += line) __builtin_prefetch(row + c, 0, 2);
        }
    }

  private:

    const RowList<Element>& a_;
    const std::int64_t first_, k_, depth_;
    float* const buffer_;
};

// `depth` coordinates of rows [first, end) times one strip of B, from coordinate `k` on; `fetch` when the rows are not in cache yet.
template <class Vector, int Rows, int Vectors, class Panel>
void multiply_strip(const Panel& panel, std::int64_t first, std::int64_t end, std::int64_t k, std::int64_t depth, const float* b,
                    bool fetch, float* c, std::int64_t ldc) {
    for (std::int64_t i = first; i < end; i += Rows, c += Rows * ldc) {
        const auto rows = panel.template rows<Rows>(i);
        if (fetch) panel.fetch(i, Rows);
        if (k == 0)
            row_kernel<Vector, Rows, Vectors, false>(rows, b, depth, c, ldc);
        else
            row_kernel<Vector, Rows, Vectors, true>(rows, b, depth, c, ldc);
    }
}

// c = rows [first, end) times strips [from, to). It has room for the rows rounded up to a multiple of kAccumulators; `buffer` has room
// for a panel of rows.
template <class Element>
void multiply_rows(const RowList<Element>& a, std::int64_t first, std::int64_t end, const float* packed_b, const StripList& b,
                   std::int64_t from, std::int64_t to, float* buffer, float* c, std::int64_t ldc) {
    const std::int64_t block = b.strips == 1 ? kBufferDepth : least(depth_block(), kBufferDepth);
    for (std::int64_t k = 0; k < a.depth; k += block) {
        const std::int64_t step = least(block, a.depth - k);
        const PanelRows<Element> panel(a, first, end, k, step, buffer);
        for (std::int64_t s = from; s < to; ++s) {
            const std::int64_t width = b.width(s);
            const float* const strip = packed_b + s * kStripColumns * a.depth + k * width;
            float* const corner = c + (s - from) * kStripColumns;
            if (width == kStripColumns)
                multiply_strip<floats, kAccumulators / 2, 2>(panel, first, end, k, step, strip, s == 0, corner, ldc);
            else if (width > kStripColumns)
                multiply_strip<floats, kAccumulators / 3, 3>(panel, first, end, k, step, strip, s == 0, corner, ldc);
            else if (width == kFewColumns)
                multiply_strip<few_floats, kAccumulators, 1>(panel, first, end, k, step, strip, s == 0, corner, ldc);
            else
                multiply_strip<floats, kAccumulators, 1>(panel, first, end, k, step, strip, s == 0, corner, ldc);
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
    else if (strips.width(s) == kFewColumns)
        pack_strip<kFewColumns>(b + first * depth, count, depth, strip);
    else
        pack_strip<kLanes>(b + first * depth, count, depth, strip);
}

// As product_tiles in gemm.h for one product a b^T with b [columns, depth] in a single block of columns: calls
// epilogue(const Tile<1>&) for every tile. Panels of kPanelRows rows are each handled by one thread, their tiles in ascending columns.
// A vector may be loaded from any entry of a tile: what follows the last one is readable.
template <class Element, class Poll, class Epilogue>
bool row_tiles(const RowList<Element>& a, const float* b, std::int64_t columns, int threads, const Poll& poll, const Epilogue& epilogue) {
    const StripList strips(columns);
    const std::int64_t panels = (a.count + kPanelRows - 1) / kPanelRows;
    const std::int64_t ld = least(strips.columns(), kTileColumns + kLanes);
    const std::int64_t tile_size = round_up(kPanelRows * ld + kLanes, 1024);
    const std::int64_t buffer_size = PanelRows<Element>::kRoom;
    const Scratch packed_b(strips.columns() * a.depth);
    const Scratch private_scratch((tile_size + buffer_size) * threads);
    bool go_on = true;

#pragma omp parallel num_threads(threads)
    {
        float* const values = private_scratch.get() + thread_number() * (tile_size + buffer_size);
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
                multiply_rows(a, row, end, packed_b.get(), strips, from, to, values + tile_size, values, ld);
                epilogue(Tile<1>{row, end - row, col, cols, ld, {values}});
            }
        }
    }
    return go_on;
}

}  // namespace
