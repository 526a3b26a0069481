// The row loops of the network's memory-bound parts, compiled once per instruction set.
//
// A row (512 floats in the paper's network) stays in L1 between its passes, so each tensor crosses the memory bus once.
// Loops are plain and branch-free so that the compiler vectorises them; exponentials are a polynomial for the same reason.
// Everything has internal linkage: an AVX2 copy of an inline function must never be the one a baseline file links to.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "network.h"
#include "simd.h"

namespace {

using geoflow::RowShape;
using geoflow::RowsView;

// What enters or leaves a product may be stored as bfloat16: T is float or BFloat16.
template <class T>
T narrowed(float x);

template <>
inline float narrowed<float>(float x) {
    return x;
}

// To the nearest, of two equally near ones the even.
template <>
inline BFloat16 narrowed<BFloat16>(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<std::uint16_t>(x != x ? 0x7fc0u : rounded)};
}

// e^x to about 2 units in the last place, for any x: 2^n times a polynomial in the remainder |r| <= log(2)/2.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 127u) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

struct Moments {
    float mean, rstd;
};

Moments moments(const float* __restrict x, std::int64_t width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t k = 0; k < width; ++k) sum += x[k];
    const float mean = sum / width;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t k = 0; k < width; ++k) squares += (x[k] - mean) * (x[k] - mean);
    return {mean, 1.0f / std::sqrt(squares / width + eps)};
}

template <class T>
void adaln_row(const float* __restrict x, const float* __restrict shift, const float* __restrict scale, T* __restrict y,
               Moments m, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k)
        y[k] = narrowed<T>((x[k] - m.mean) * m.rstd * (1 + scale[k]) + shift[k]);
}

void adaln(RowShape shape, float eps, RowsView x, RowsView shift, RowsView scale, RowsView y) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        const std::int64_t group = r / shape.rows_per_group;
        const Moments m = moments(row(x, r), shape.width, eps);
        adaln_row(row(x, r), row(shift, group), row(scale, group), row(y, r), m, shape.width);
    }
}

// With u = LayerNorm(x) and g = grad (1 + scale): d_x = rstd (g - mean(g) - u mean(g u)); d_scale grows by grad u.
void adaln_backward_row(const float* __restrict grad, const float* __restrict x, const float* __restrict scale,
                        float* __restrict d_x, float* __restrict d_scale, Moments m, std::int64_t width) {
    float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (std::int64_t k = 0; k < width; ++k) {
        const float unit = (x[k] - m.mean) * m.rstd, g = grad[k] * (1 + scale[k]);
        sum += g;
        along += g * unit;
        d_scale[k] += grad[k] * unit;
    }
    sum /= width;
    along /= width;
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        const float unit = (x[k] - m.mean) * m.rstd, g = grad[k] * (1 + scale[k]);
        d_x[k] = m.rstd * (g - sum - unit * along);
    }
}

// Calls run(row, group, block) for all rows; those of a block follow each other in one thread.
template <class Begin, class Run>
void over_blocks(const RowShape& shape, const Begin& begin_block, const Run& run) {
    const std::int64_t blocks = geoflow::blocks_of(shape), groups = shape.rows / shape.rows_per_group;
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t b = 0; b < groups * blocks; ++b) {
        const std::int64_t group = b / blocks, begin = group * shape.rows_per_group, end = begin + shape.rows_per_group;
        const std::int64_t first = begin + b % blocks * geoflow::kReductionRows, last = first + geoflow::kReductionRows;
        begin_block(b);
        for (std::int64_t r = first; r < (last < end ? last : end); ++r) run(r, group, b);
    }
}

void adaln_backward(RowShape shape, float eps, RowsView grad, RowsView x, RowsView scale, RowsView d_x, RowsView d_shift,
                    RowsView d_scale) {
    const auto clear = [&](std::int64_t block) {
        std::memset(row(d_scale, block), 0, sizeof(float) * shape.width);
        if (d_shift.data) std::memset(row(d_shift, block), 0, sizeof(float) * shape.width);
    };
    over_blocks(shape, clear, [&](std::int64_t r, std::int64_t group, std::int64_t block) {
        const Moments m = moments(row(x, r), shape.width, eps);
        adaln_backward_row(row(grad, r), row(x, r), row(scale, group), row(d_x, r), row(d_scale, block), m, shape.width);
        if (!d_shift.data) return;
        const float* __restrict from = row(grad, r);
        float* __restrict to = row(d_shift, block);
#pragma omp simd
        for (std::int64_t k = 0; k < shape.width; ++k) to[k] += from[k];
    });
}

void swiglu_row(const float* __restrict gate, const float* __restrict value, float* __restrict y, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) y[k] = gate[k] * sigmoid(gate[k]) * value[k];
}

void swiglu(RowShape shape, RowsView gate, RowsView value, RowsView y) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) swiglu_row(row(gate, r), row(value, r), row(y, r), shape.width);
}

void swiglu_backward_row(const float* __restrict grad, const float* __restrict gate, const float* __restrict value,
                         float* __restrict d_gate, float* __restrict d_value, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        const float s = sigmoid(gate[k]), silu = gate[k] * s;
        d_gate[k] = grad[k] * value[k] * (s + silu * (1 - s));
        d_value[k] = grad[k] * silu;
    }
}

void swiglu_backward(RowShape shape, RowsView grad, RowsView gate, RowsView value, RowsView d_gate, RowsView d_value) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r)
        swiglu_backward_row(row(grad, r), row(gate, r), row(value, r), row(d_gate, r), row(d_value, r), shape.width);
}

template <bool kGate, bool kKeep>
void gate_residual_row(const float* __restrict residual, const float* __restrict gate, const float* __restrict value,
                       const float* __restrict layer_scale, const std::uint8_t* __restrict keep, float factor,
                       float* __restrict y, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        float branch = value[k] * layer_scale[k];
        if (kGate) branch *= sigmoid(gate[k]);
        if (kKeep) branch *= factor * static_cast<float>(keep[k]);
        y[k] = residual[k] + branch;
    }
}

template <bool kGate, bool kKeep>
void gate_residual_of(RowShape shape, float factor, RowsView residual, RowsView gate, RowsView value,
                      RowsView layer_scale, const std::uint8_t* keep, RowsView y) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r)
        gate_residual_row<kGate, kKeep>(row(residual, r), kGate ? row(gate, r) : nullptr, row(value, r),
                                               row(layer_scale, r / shape.rows_per_group),
                                               kKeep ? keep + r * shape.width : nullptr, factor, row(y, r), shape.width);
}

void gate_residual(RowShape shape, float factor, RowsView residual, RowsView gate, RowsView value, RowsView layer_scale,
                   const std::uint8_t* keep, RowsView y) {
    const auto run = gate.data ? (keep ? gate_residual_of<true, true> : gate_residual_of<true, false>)
                               : (keep ? gate_residual_of<false, true> : gate_residual_of<false, false>);
    run(shape, factor, residual, gate, value, layer_scale, keep, y);
}

template <bool kGate, bool kKeep>
void gate_residual_backward_row(const float* __restrict grad, const float* __restrict gate,
                                const float* __restrict value, const float* __restrict layer_scale,
                                const std::uint8_t* __restrict keep, float factor, float* __restrict d_gate,
                                float* __restrict d_value, float* __restrict d_layer_scale, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        const float kept = kKeep ? factor * static_cast<float>(keep[k]) : 1.0f;
        const float s = kGate ? sigmoid(gate[k]) : 1.0f;
        const float upstream = grad[k] * kept * s;
        d_layer_scale[k] += upstream * value[k];
        d_value[k] = upstream * layer_scale[k];
        if (kGate) d_gate[k] = upstream * layer_scale[k] * value[k] * (1 - s);
    }
}

template <bool kGate, bool kKeep>
void gate_residual_backward_of(RowShape shape, float factor, RowsView grad, RowsView gate, RowsView value,
                               RowsView layer_scale, const std::uint8_t* keep, RowsView d_gate, RowsView d_value,
                               RowsView partial) {
    const auto clear = [&](std::int64_t block) { std::memset(row(partial, block), 0, sizeof(float) * shape.width); };
    over_blocks(shape, clear, [&](std::int64_t r, std::int64_t group, std::int64_t block) {
        gate_residual_backward_row<kGate, kKeep>(row(grad, r), kGate ? row(gate, r) : nullptr, row(value, r), row(layer_scale, group),
                                                 kKeep ? keep + r * shape.width : nullptr, factor, kGate ? row(d_gate, r) : nullptr,
                                                 row(d_value, r), row(partial, block), shape.width);
    });
}

void gate_residual_backward(RowShape shape, float factor, RowsView grad, RowsView gate, RowsView value,
                            RowsView layer_scale, const std::uint8_t* keep, RowsView d_gate, RowsView d_value,
                            RowsView partial) {
    const auto run = gate.data ? (keep ? gate_residual_backward_of<true, true> : gate_residual_backward_of<true, false>)
                               : (keep ? gate_residual_backward_of<false, true> : gate_residual_backward_of<false, false>);
    run(shape, factor, grad, gate, value, layer_scale, keep, d_gate, d_value, partial);
}

// ---- the end of a cross-gate on both streams ----
//
// Products are [2 heads, B, 2 part], those of the image's heads first: the gates of a stream's own rows, and then the values that it sends
// to the other stream.

using geoflow::CrossShape;

template <class T>
T* of_head(T* products, const CrossShape& shape, std::int64_t stream, std::int64_t head, std::int64_t row_of_stream) {
    return products + ((stream * shape.heads + head) * shape.rows + row_of_stream) * 2 * shape.part;
}

template <bool kKeep>
void cross_residual_of(const CrossShape& shape, float factor, RowsView residual, const float* products,
                       const float* layer_scale, const std::uint8_t* keep, RowsView y) {
    const std::int64_t part = shape.part, width = shape.heads * part;
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < 2 * shape.rows; ++r) {
        const std::int64_t stream = r / shape.rows, own = r % shape.rows;
        for (std::int64_t head = 0, first = 0; head < shape.heads; ++head, first += part)
            gate_residual_row<true, kKeep>(row(residual, r) + first, of_head(products, shape, stream, head, own),
                                           of_head(products, shape, 1 - stream, head, own) + part, layer_scale + stream * width + first,
                                           kKeep ? keep + r * width + first : nullptr, factor, row(y, r) + first, part);
    }
}

void cross_residual(const CrossShape& shape, float factor, RowsView residual, const float* products,
                    const float* layer_scale, const std::uint8_t* keep, RowsView y) {
    (keep ? cross_residual_of<true> : cross_residual_of<false>)(shape, factor, residual, products, layer_scale, keep, y);
}

template <bool kKeep>
void cross_residual_backward_of(const CrossShape& shape, float factor, RowsView grad, const float* products,
                                const float* layer_scale, const std::uint8_t* keep, float* d_products, RowsView partial) {
    const std::int64_t part = shape.part, width = shape.heads * part;
    const std::int64_t blocks = (shape.rows + geoflow::kReductionRows - 1) / geoflow::kReductionRows;
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t b = 0; b < 2 * blocks; ++b) {
        const std::int64_t stream = b / blocks, begin = b % blocks * geoflow::kReductionRows, end = begin + geoflow::kReductionRows;
        std::memset(row(partial, b), 0, sizeof(float) * width);
        for (std::int64_t own = begin; own < (end < shape.rows ? end : shape.rows); ++own) {
            const std::int64_t r = stream * shape.rows + own;
            for (std::int64_t head = 0, first = 0; head < shape.heads; ++head, first += part)
                gate_residual_backward_row<true, kKeep>(
                    row(grad, r) + first, of_head(products, shape, stream, head, own),
                    of_head(products, shape, 1 - stream, head, own) + part, layer_scale + stream * width + first,
                    kKeep ? keep + r * width + first : nullptr, factor, of_head(d_products, shape, stream, head, own),
                    of_head(d_products, shape, 1 - stream, head, own) + part, row(partial, b) + first, part);
        }
    }
}

void cross_residual_backward(const CrossShape& shape, float factor, RowsView grad, const float* products,
                             const float* layer_scale, const std::uint8_t* keep, float* d_products, RowsView partial) {
    (keep ? cross_residual_backward_of<true> : cross_residual_backward_of<false>)(shape, factor, grad, products, layer_scale, keep,
                                                                                  d_products, partial);
}

// <x, v - target>
float error_along(const float* __restrict v, const float* __restrict target, const float* __restrict x,
                  std::int64_t width) {
    float along = 0;
#pragma omp simd reduction(+ : along)
    for (std::int64_t k = 0; k < width; ++k) along += x[k] * (v[k] - target[k]);
    return along;
}

void flow_loss(RowShape shape, const std::uint8_t* generated, RowsView v, RowsView target, RowsView x, RowsView loss) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        if (!generated[r]) continue;
        const float *vr = row(v, r), *ur = row(target, r), *xr = row(x, r);
        const float along = error_along(vr, ur, xr, shape.width);
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (std::int64_t k = 0; k < shape.width; ++k) {
            const float error = vr[k] - ur[k] - along * xr[k];
            squares += error * error;
        }
        *row(loss, r) += squares;
    }
}

void flow_loss_backward(RowShape shape, const std::uint8_t* generated, RowsView grad, RowsView v, RowsView target,
                        RowsView x, RowsView d_v) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        float* __restrict out = row(d_v, r);
        if (!generated[r]) {
            std::memset(out, 0, sizeof(float) * shape.width);
            continue;
        }
        const float *vr = row(v, r), *ur = row(target, r), *xr = row(x, r);
        const float along = error_along(vr, ur, xr, shape.width), twice = 2 * *row(grad, r);
#pragma omp simd
        for (std::int64_t k = 0; k < shape.width; ++k) out[k] = twice * (vr[k] - ur[k] - along * xr[k]);
    }
}

// Finaliser of MurmurHash3: every input bit flips every output bit with probability close to a half.
inline std::uint32_t mix(std::uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}

void keep_mask(std::int64_t count, double share, std::uint32_t seed, std::uint8_t* keep, int threads) {
    // Compared as signed integers, for which every instruction set has a vector comparison.
    const std::int32_t threshold = static_cast<std::int32_t>(share * 4294967295.0 - 2147483648.0);
    constexpr std::int64_t kChunk = 1 << 14;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t begin = 0; begin < count; begin += kChunk) {
        const std::uint32_t key = mix(seed ^ mix(static_cast<std::uint32_t>(begin / kChunk) + 0x9e3779b9u));
        const std::int32_t size = static_cast<std::int32_t>(count - begin < kChunk ? count - begin : kChunk);
        std::uint8_t* __restrict out = keep + begin;
#pragma omp simd
        for (std::int32_t k = 0; k < size; ++k) {
            const auto draw = static_cast<std::int32_t>(mix(key + static_cast<std::uint32_t>(k) * 0x9e3779b9u));
            out[k] = draw >= threshold;
        }
    }
}

// ---- segments: points and tangents of several solves, of both streams ----
//
// A segment's tangents share what depends on its points alone: the moments of a row, and the slopes of gates. These stand in
// rows of scratch memory, one set for each thread.

template <class X, class Y>
void adaln_tangent_row(const float* __restrict x, const X* __restrict d_x, const float* __restrict scale, Y* __restrict d_y,
                       Moments m, std::int64_t width) {
    float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (std::int64_t k = 0; k < width; ++k) {
        sum += widen(d_x[k]);
        along += widen(d_x[k]) * ((x[k] - m.mean) * m.rstd);
    }
    sum /= width;
    along /= width;
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        const float unit = (x[k] - m.mean) * m.rstd;
        d_y[k] = narrowed<Y>(m.rstd * (widen(d_x[k]) - sum - unit * along) * (1 + scale[k]));
    }
}

template <class X>
void widen_row(const X* __restrict x, const float* __restrict bias, float* __restrict y, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) y[k] = widen(x[k]) + bias[k];
}

// X and Y: how x and y are stored.
template <class X, class Y>
void adaln_segments_of(const geoflow::SegmentShape& shape, const X* x, const float* bias, const float* shift, const float* scale,
                       Y* y) {
    const std::int64_t width = shape.width;
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> wide(width), zero(bias ? 0 : width);
        for (const geoflow::Segment& s : shape.segments) {
            const std::int64_t group = shape.by_stream ? s.stream : s.group;
            const float *own_shift = shift + group * width, *own_scale = scale + group * width;
            const float* own_bias = bias ? bias + s.stream * width : zero.data();
#pragma omp for schedule(static) nowait
            for (std::int64_t r = 0; r < s.pairs; ++r) {
                widen_row(x + (s.point + r) * width, own_bias, wide.data(), width);
                const Moments m = moments(wide.data(), width, shape.eps);
                adaln_row(wide.data(), own_shift, own_scale, y + (s.to_point + r) * width, m, width);
                for (std::int64_t t = 0, at = r; t < s.tangents; ++t, at += s.pairs)
                    adaln_tangent_row(wide.data(), x + (s.tangent + at) * width, own_scale, y + (s.to_tangent + at) * width, m, width);
            }
        }
    }
}

void adaln_segments(const geoflow::SegmentShape& shape, const void* x, bool x_half, const float* bias, const float* shift,
                    const float* scale, void* y, bool y_half) {
    const auto run = [&](auto from, auto to) {
        adaln_segments_of(shape, static_cast<const decltype(from)*>(x), bias, shift, scale, static_cast<decltype(to)*>(y));
    };
    if (x_half)
        y_half ? run(BFloat16{}, BFloat16{}) : run(BFloat16{}, 0.0f);
    else
        y_half ? run(0.0f, BFloat16{}) : run(0.0f, 0.0f);
}

// What a tangent of a cross-gate adds up from: d_out = d_h + to_value d_value + to_gate d_gate.
template <class T>
void gate_point_row(const float* __restrict h, const T* __restrict gate, const T* __restrict value,
                    const float* __restrict layer_scale, float* __restrict to_value, float* __restrict to_gate,
                    float* __restrict out, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        const float s = sigmoid(widen(gate[k])), content = widen(value[k]);
        to_value[k] = layer_scale[k] * s;
        to_gate[k] = to_value[k] * (1 - s) * content;
        out[k] = h[k] + to_value[k] * content;
    }
}

template <class T>
void gate_tangent_row(const float* __restrict d_h, const T* __restrict d_gate, const T* __restrict d_value,
                      const float* __restrict to_value, const float* __restrict to_gate, float* __restrict d_out,
                      std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k)
        d_out[k] = d_h[k] + to_value[k] * widen(d_value[k]) + to_gate[k] * widen(d_gate[k]);
}

template <class T>
void scaled_sum_row(const float* __restrict h, const T* __restrict branch, const float* __restrict layer_scale,
                    float* __restrict out, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) out[k] = h[k] + layer_scale[k] * widen(branch[k]);
}

template <class T>
void gate_adaln_segments_of(const geoflow::SegmentShape& shape, std::int64_t heads, const float* h, const T* branch,
                            const float* layer_scale, const float* shift, const float* scale, float* out, T* y) {
    const std::int64_t width = shape.width, part = heads ? width / heads : width, pitch = heads ? 2 * width : width;
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> to_value(heads ? width : 0), to_gate(heads ? width : 0);
        for (const geoflow::Segment& s : shape.segments) {
            const std::int64_t group = shape.by_stream ? s.stream : s.group;
            const float *own_shift = shift + group * width, *own_scale = scale + group * width;
            const float* weight = layer_scale + s.stream * width;
#pragma omp for schedule(static) nowait
            for (std::int64_t r = 0; r < s.pairs; ++r) {
                float* point = out + (s.to_point + r) * width;
                const float* before = h + (s.point + r) * width;
                if (!heads) scaled_sum_row(before, branch + (s.point + r) * width, weight, point, width);
                for (std::int64_t head = 0; head < heads; ++head) {
                    const std::int64_t first = head * part, gates = 2 * first;
                    gate_point_row(before + first, branch + (s.point + r) * pitch + gates,
                                   branch + (s.other_point + r) * pitch + gates + part, weight + first, to_value.data() + first,
                                   to_gate.data() + first, point + first, part);
                }
                const Moments m = moments(point, width, shape.eps);
                adaln_row(point, own_shift, own_scale, y + (s.to_point + r) * width, m, width);
                for (std::int64_t t = 0, at = r; t < s.tangents; ++t, at += s.pairs) {
                    float* tangent = out + (s.to_tangent + at) * width;
                    const float* d_before = h + (s.tangent + at) * width;
                    if (!heads) scaled_sum_row(d_before, branch + (s.tangent + at) * width, weight, tangent, width);
                    for (std::int64_t head = 0; head < heads; ++head) {
                        const std::int64_t first = head * part, gates = 2 * first;
                        gate_tangent_row(d_before + first, branch + (s.tangent + at) * pitch + gates,
                                         branch + (s.other_tangent + at) * pitch + gates + part, to_value.data() + first,
                                         to_gate.data() + first, tangent + first, part);
                    }
                    adaln_tangent_row(point, tangent, own_scale, y + (s.to_tangent + at) * width, m, width);
                }
            }
        }
    }
}

void gate_adaln_segments(const geoflow::SegmentShape& shape, std::int64_t heads, const float* h, const void* branch,
                         const float* layer_scale, const float* shift, const float* scale, float* out, void* y, bool half) {
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        gate_adaln_segments_of(shape, heads, h, static_cast<const T*>(branch), layer_scale, shift, scale, out, static_cast<T*>(y));
    };
    half ? run(BFloat16{}) : run(0.0f);
}

// d_y = slope d_gate + silu d_value
template <class T>
void swiglu_point_row(const T* __restrict gate, const T* __restrict value, float* __restrict slope, float* __restrict silu,
                      T* __restrict y, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) {
        const float g = widen(gate[k]), s = sigmoid(g), content = widen(value[k]);
        silu[k] = g * s;
        slope[k] = (s + silu[k] * (1 - s)) * content;
        y[k] = narrowed<T>(silu[k] * content);
    }
}

template <class T>
void swiglu_tangent_row(const T* __restrict d_gate, const T* __restrict d_value, const float* __restrict slope,
                        const float* __restrict silu, T* __restrict d_y, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) d_y[k] = narrowed<T>(slope[k] * widen(d_gate[k]) + silu[k] * widen(d_value[k]));
}

template <class T>
void swiglu_segments_of(const geoflow::SegmentShape& shape, const T* wide, T* inner) {
    const std::int64_t width = shape.width;
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> slope(width), silu(width);
        for (const geoflow::Segment& s : shape.segments)
#pragma omp for schedule(static) nowait
            for (std::int64_t r = 0; r < s.pairs; ++r) {
                const T* point = wide + (s.point + r) * 2 * width;
                swiglu_point_row(point, point + width, slope.data(), silu.data(), inner + (s.to_point + r) * width, width);
                for (std::int64_t t = 0, at = r; t < s.tangents; ++t, at += s.pairs) {
                    const T* tangent = wide + (s.tangent + at) * 2 * width;
                    swiglu_tangent_row(tangent, tangent + width, slope.data(), silu.data(), inner + (s.to_tangent + at) * width, width);
                }
            }
    }
}

void swiglu_segments(const geoflow::SegmentShape& shape, const void* wide, void* inner, bool half) {
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        swiglu_segments_of(shape, static_cast<const T*>(wide), static_cast<T*>(inner));
    };
    half ? run(BFloat16{}) : run(0.0f);
}

const geoflow::NetworkKernels kNetworkKernels = {
    adaln,         adaln_backward,         swiglu,    swiglu_backward,    adaln_segments, gate_adaln_segments, swiglu_segments,
    gate_residual, gate_residual_backward, cross_residual, cross_residual_backward, flow_loss, flow_loss_backward, keep_mask,
};

}  // namespace
