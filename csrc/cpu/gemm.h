// C = A B^T in single precision for row-major A [m, depth] and B [n, depth], handed out tile by tile while each tile is in cache.
//
// The matrix C is never stored: `product_tiles` calls an epilogue with every finished tile, once, from the thread that computed it.
// Several products of the same shape but different depth may run together; their tiles arrive side by side, so an epilogue can
// combine them (the sum of two arc lengths is a function of two inner products).
//
// Blocking, by the caches that the processor says it has:
//   B is packed column_block() columns at a time into strips of two vectors, shared by the threads (stays in L3)
//   A is packed at most kPanelRows rows at a time into strips of kStripRows, one panel per thread, full depth (stays in L2)
//   a tile is one panel of rows by kTileColumns columns; per depth_block() of depth a strip of B stays in L1 while A passes by from L2
//   6 x 16 micro-kernel with eight lanes: 12 accumulators, 2 vectors of B, 1 broadcast of A: 15 of the 16 AVX2 registers
//   12 x 32 micro-kernel with 16 lanes: 24 accumulators of the 32 AVX-512 registers
// Every entry is summed in an order that depends on the depth alone: results do not depend on threads or on neighbours.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "cpu/cpu_features.h"
#include "cpu/simd.h"

namespace {

constexpr int kAccumulators = kLanes == 16 ? 24 : 12;  // of a micro-kernel
constexpr std::int64_t kStripRows = kAccumulators / 2;
constexpr std::int64_t kStripColumns = 2 * kLanes;
constexpr std::int64_t kPanelRows = 96;
constexpr std::int64_t kTileColumns = 256;
constexpr std::int64_t kColumnBlock = 2048;  // at most

constexpr std::int64_t round_up(std::int64_t x, std::int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
constexpr std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// Coordinates at a time, such that a strip of B takes half of L1. The sums do not depend on it.
inline std::int64_t depth_block() {
    return most(64, geoflow::caches().first / 2 / (kStripColumns * std::int64_t{sizeof(float)}) / 32 * 32);
}

// Columns at a time, such that what is packed of B takes half of L3.
inline std::int64_t column_block(std::int64_t depth) {
    const std::int64_t fit = geoflow::caches().shared / 2 / (depth * std::int64_t{sizeof(float)}) / kTileColumns * kTileColumns;
    return least(kColumnBlock, most(kTileColumns, fit));
}

// Rows at a time, such that what is packed of A stays in L2.
inline std::int64_t panel_rows(std::int64_t depth) {
    const std::int64_t fit = geoflow::caches().second / 8 * 7 / (depth * std::int64_t{sizeof(float)}) / kStripRows * kStripRows;
    return least(kPanelRows, most(2 * kStripRows, fit));
}

inline int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Asks the kernel for large pages, which it grants only on request on many systems: fewer page faults, fewer TLB misses.
inline void prefer_large_pages(void* begin, std::size_t bytes) {
#if defined(__linux__)
    constexpr std::uintptr_t page = 4096;
    const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page;
    const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(begin) + bytes) / page * page;
    // Advice only: a refusal changes nothing but speed.
    if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)begin, (void)bytes;
#endif
}

// Scratch floats, aligned to a page.
class Scratch {
  public:
    explicit Scratch(std::int64_t count) : bytes_(static_cast<std::size_t>(round_up(most(count, 1) * std::int64_t{sizeof(float)}, 1 << 12))) {
        data_ = static_cast<float*>(geoflow::take_scratch(bytes_));
        prefer_large_pages(data_, bytes_);
#if defined(__SANITIZE_ADDRESS__)
        std::memset(data_, 0xff, bytes_);  // NaN: a result shows what is read before it is written
#endif
    }
    ~Scratch() { geoflow::give_scratch(data_, bytes_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    float* get() const { return data_; }

  private:
    const std::size_t bytes_;
    float* data_;
};

template <class Element>
float inner_product(const Element* a, const float* b, std::int64_t dim) {
    constexpr int kChains = 4;  // sums side by side, since each waits for its last addition
    floats part[kChains] = {};
    std::int64_t k = 0;
    for (; k + kChains * kLanes <= dim; k += kChains * kLanes)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) part[c] += load(a + k + c * kLanes) * load(b + k + c * kLanes);
    for (; k + kLanes <= dim; k += kLanes) part[0] += load(a + k) * load(b + k);
    float rest = 0;
    for (; k < dim; ++k) rest += widen(a[k]) * b[k];
    return sum((part[0] + part[1]) + (part[2] + part[3])) + rest;
}

struct Product {
    const float* a;      // [m, depth]
    const float* b;      // [n, depth]
    std::int64_t depth;
};

// One finished tile. value[p] is product p, row-major with leading dimension `ld`; the epilogue may overwrite its `cols` columns and
// no others: `ld` may be less than a vector. Columns up to the next multiple of 16 are readable, and zero in `product_tiles`.
template <int Products>
struct Tile {
    std::int64_t row, rows, col, cols, ld;
    float* value[Products];
};

// Packs rows of x [count, depth] into strips [depth][Width], the last one padded with zeros.
template <int Width>
void pack_strip(const float* x, std::int64_t count, std::int64_t depth, float* to) {
    if (count == Width) {
        for (std::int64_t k = 0; k < depth; ++k)
            for (int r = 0; r < Width; ++r) to[k * Width + r] = x[r * depth + k];
        return;
    }
    for (std::int64_t k = 0; k < depth; ++k)
        for (int r = 0; r < Width; ++r) to[k * Width + r] = r < count ? x[r * depth + k] : 0.0f;
}

// c[kStripRows][kStripColumns] (leading dimension ldc) = or += a[depth][kStripRows]^T b[depth][kStripColumns]
template <bool Accumulate>
GEOFLOW_INLINE void micro_kernel(const float* __restrict a, const float* __restrict b, std::int64_t depth, float* __restrict c,
                                 std::int64_t ldc) {
    floats acc[kStripRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kStripRows; ++r)
        for (int h = 0; h < 2; ++h) acc[r][h] = Accumulate ? load(c + r * ldc + h * kLanes) : broadcast(0.0f);
#pragma GCC unroll 2
    for (std::int64_t k = 0; k < depth; ++k) {
        const floats b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kStripRows; ++r) {
            const floats ar = broadcast(a[r]);
            acc[r][0] += ar * b0;
            acc[r][1] += ar * b1;
        }
        a += kStripRows;
        b += kStripColumns;
    }
#pragma GCC unroll 12
    for (int r = 0; r < kStripRows; ++r)
        for (int h = 0; h < 2; ++h) store(c + r * ldc + h * kLanes, acc[r][h]);
}

// c [row_strips kStripRows, col_strips kStripColumns] = packed a times packed b, both full depth.
inline void multiply_tile(const float* a, std::int64_t row_strips, const float* b, std::int64_t col_strips, std::int64_t depth,
                          float* c, std::int64_t ldc) {
    const std::int64_t block = depth_block();
    for (std::int64_t k = 0; k < depth; k += block) {
        const std::int64_t step = least(block, depth - k);
        for (std::int64_t j = 0; j < col_strips; ++j) {
            const float* strip_b = b + (j * depth + k) * kStripColumns;
            for (std::int64_t i = 0; i < row_strips; ++i) {
                const float* strip_a = a + (i * depth + k) * kStripRows;
                float* corner = c + i * kStripRows * ldc + j * kStripColumns;
                if (k == 0)
                    micro_kernel<false>(strip_a, strip_b, step, corner, ldc);
                else
                    micro_kernel<true>(strip_a, strip_b, step, corner, ldc);
            }
        }
    }
}

// Calls epilogue(const Tile<Products>&) for every tile of the products a b^T, each [m, n], from `threads` threads. A panel of rows is
// always handled by one thread, its tiles in ascending columns within a block of columns. `poll` is asked between panels by the
// calling thread; false makes the function return false early.
template <int Products, class Poll, class Epilogue>
bool product_tiles(const Product (&products)[Products], std::int64_t m, std::int64_t n, int threads, const Poll& poll,
                   const Epilogue& epilogue) {
    std::int64_t depth = 0, deepest = 0;
    for (const Product& p : products) depth += p.depth, deepest = most(deepest, p.depth);
    const std::int64_t panel_height = panel_rows(deepest), strips = panel_height / kStripRows;
    const std::int64_t panels = (m + panel_height - 1) / panel_height;
    const std::int64_t block = round_up(least(column_block(depth), n), kStripColumns);
    const std::int64_t ld = least(kTileColumns, block);
    const std::int64_t panel_size = strips * kStripRows * depth;
    const std::int64_t tile_size = strips * kStripRows * ld;
    const std::int64_t per_thread = round_up(panel_size + Products * tile_size, 1024);
    const Scratch packed_b(block * depth);
    const Scratch private_scratch(per_thread * threads);
    bool go_on = true;

#pragma omp parallel num_threads(threads)
    {
        float* const packed_a = private_scratch.get() + thread_number() * per_thread;
        float* const tiles = packed_a + panel_size;
        for (std::int64_t col = 0; col < n; col += block) {
            const std::int64_t cols = least(block, n - col);
            const std::int64_t col_strips = (cols + kStripColumns - 1) / kStripColumns;
#pragma omp for schedule(static)
            for (std::int64_t s = 0; s < col_strips; ++s) {
                float* to = packed_b.get();
                for (const Product& p : products) {
                    const std::int64_t first = s * kStripColumns;
                    pack_strip<kStripColumns>(p.b + (col + first) * p.depth, least(kStripColumns, cols - first), p.depth,
                                              to + first * p.depth);
                    to += block * p.depth;
                }
            }
#pragma omp for schedule(monotonic : dynamic, 1)
            for (std::int64_t panel = 0; panel < panels; ++panel) {
                if (thread_number() == 0 && !poll()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
                if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
                const std::int64_t row = panel * panel_height, rows = least(panel_height, m - row);
                const std::int64_t row_strips = (rows + kStripRows - 1) / kStripRows;
                float* to = packed_a;
                for (const Product& p : products) {
                    for (std::int64_t s = 0; s < row_strips; ++s)
                        pack_strip<kStripRows>(p.a + (row + s * kStripRows) * p.depth, least(kStripRows, rows - s * kStripRows),
                                               p.depth, to + s * kStripRows * p.depth);
                    to += strips * kStripRows * p.depth;
                }
                for (std::int64_t first = 0; first < cols; first += ld) {
                    Tile<Products> tile{row, rows, col + first, least(ld, cols - first), ld, {}};
                    const float* a = packed_a;
                    const float* b = packed_b.get();
                    for (int p = 0; p < Products; ++p) {
                        const std::int64_t d = products[p].depth;
                        tile.value[p] = tiles + p * tile_size;
                        multiply_tile(a, row_strips, b + first * d, (tile.cols + kStripColumns - 1) / kStripColumns, d,
                                      tile.value[p], ld);
                        a += strips * kStripRows * d;
                        b += block * d;
                    }
                    epilogue(tile);
                }
            }
        }
    }
    return go_on;
}

}  // namespace
