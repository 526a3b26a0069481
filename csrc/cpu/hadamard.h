// Inner products of structured noise with data, by fast Walsh-Hadamard transforms instead of a matrix product.
//
// A block of structured noise is Q = H D1 H D2 H D3 / order^1.5, H the Hadamard matrix of a power-of-two order and D random signs.
// All `order` inner products of one data vector x are Q x: three transforms of order log2(order) additions per entry, against 2 dim
// operations for a matrix product. Columns are handled kGroup at a time with the group along the vector lanes, so a butterfly is a
// plain vector addition and no lane ever moves. The data's coordinates beyond dim are zero (noise is cut there and rescaled).
#pragma once
#include "cpu/gemm.h"

namespace {

constexpr std::int64_t kGroup = 16;  // columns per group: one cache line of a float matrix

struct HadamardProduct {
    const float* data;   // [n, dim]
    const float* signs;  // [blocks, 3, order]: D1, D2, D3 of each block
    const float* scale;  // [m]: 1 over the norm of each row cut to dim coordinates; null when dim == order, where it is 1
    std::int64_t dim, order;  // order is a power of two, at least 32
};

// Radix-R butterflies on rows i, i + h, ..., i + (R-1) h of [R*h][kGroup], from `x` to `y` (which may be x); with Signed, row k is
// multiplied by signs[k] first.
template <int R, bool Signed>
GEOFLOW_INLINE void butterflies(const float* x, float* y, std::int64_t h, const float* signs) {
    for (std::int64_t i = 0; i < h; ++i) {
        for (std::int64_t lane = 0; lane < kGroup; lane += kLanes) {
            floats v[R];
#pragma GCC unroll 16
            for (int k = 0; k < R; ++k) {
                v[k] = load(x + (i + k * h) * kGroup + lane);
                if (Signed) v[k] *= broadcast(signs[i + k * h]);
            }
#pragma GCC unroll 4
            for (int half = R / 2; half >= 1; half /= 2)
#pragma GCC unroll 16
                for (int k = 0; k < R; ++k)
                    if (!(k & half)) {
                        const floats a = v[k], b = v[k + half];
                        v[k] = a + b;
                        v[k + half] = a - b;
                    }
#pragma GCC unroll 16
            for (int k = 0; k < R; ++k) store(y + (i + k * h) * kGroup + lane, v[k]);
        }
    }
}

// y <- H diag(signs) x, both [order][kGroup], in place or not; order >= 32 for a signed transform. The widest butterflies first,
// then each part on its own, which soon fits in L1.
template <bool Signed>
void hadamard_transform(const float* x, float* y, std::int64_t order, const float* signs) {
    if (order > 16) {
        const std::int64_t h = order / 8;
        butterflies<8, Signed>(x, y, h, signs);
        for (int part = 0; part < 8; ++part)
            hadamard_transform<false>(y + part * h * kGroup, y + part * h * kGroup, h, nullptr);
    } else if (order == 16) {
        butterflies<16, false>(x, y, 1, nullptr);
    } else if (order == 8) {
        butterflies<8, false>(x, y, 1, nullptr);
    } else {
        butterflies<4, false>(x, y, 1, nullptr);
    }
}

// x [order][kGroup] = columns [col, col + cols) of the data, transposed, scaled by order^-1.5 and padded with zeros.
inline void load_group(const HadamardProduct& p, std::int64_t col, std::int64_t cols, float* x) {
    const float scale = 1.0f / (static_cast<float>(p.order) * __builtin_sqrtf(static_cast<float>(p.order)));
    for (std::int64_t k = 0; k < p.dim; ++k)
        for (std::int64_t c = 0; c < kGroup; ++c) x[k * kGroup + c] = c < cols ? scale * p.data[(col + c) * p.dim + k] : 0.0f;
    for (std::int64_t k = p.dim * kGroup; k < p.order * kGroup; ++k) x[k] = 0.0f;
}

// y [rows][kGroup] = inner products of noise rows [row, row + rows) with the group x; row is a multiple of the order.
inline void multiply_group(const HadamardProduct& p, const float* x, std::int64_t row, std::int64_t rows, float* y) {
    for (std::int64_t done = 0; done < rows; done += p.order, y += p.order * kGroup) {
        const float* const signs = p.signs + (row + done) / p.order * 3 * p.order;
        hadamard_transform<true>(x, y, p.order, signs + 2 * p.order);
        hadamard_transform<true>(y, y, p.order, signs + p.order);
        hadamard_transform<true>(y, y, p.order, signs);
        if (!p.scale) continue;
        for (std::int64_t i = 0; i < least(p.order, rows - done); ++i)
            for (std::int64_t c = 0; c < kGroup; ++c) y[i * kGroup + c] *= p.scale[row + done + i];
    }
}

// As product_tiles in gemm.h, for structured noise: calls epilogue(const Tile<2>&) for every tile of the two products [m, n].
template <class Poll, class Epilogue>
bool hadamard_tiles(const HadamardProduct (&products)[2], std::int64_t m, std::int64_t n, int threads, const Poll& poll,
                    const Epilogue& epilogue) {
    const std::int64_t chunk = products[0].order > products[1].order ? products[0].order : products[1].order;
    const std::int64_t groups = (n + kGroup - 1) / kGroup;
    const std::int64_t per_thread = 4 * chunk * kGroup;
    const Scratch scratch(per_thread * threads);
    bool go_on = true;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (std::int64_t group = 0; group < groups; ++group) {
        if (thread_number() == 0 && !poll()) __atomic_store_n(&go_on, false, __ATOMIC_RELAXED);
        if (!__atomic_load_n(&go_on, __ATOMIC_RELAXED)) continue;
        float* const x = scratch.get() + thread_number() * per_thread;
        float* const y = x + 2 * chunk * kGroup;
        const std::int64_t col = group * kGroup, cols = least(kGroup, n - col);
        for (int p = 0; p < 2; ++p) load_group(products[p], col, cols, x + p * chunk * kGroup);
        for (std::int64_t row = 0; row < m; row += chunk) {
            const std::int64_t rows = least(chunk, m - row);
            for (int p = 0; p < 2; ++p)
                multiply_group(products[p], x + p * chunk * kGroup, row, rows, y + p * chunk * kGroup);
            epilogue(Tile<2>{row, rows, col, cols, kGroup, {y, y + chunk * kGroup}});
        }
    }
    return go_on;
}

}  // namespace
