// The row loops of the solvers' steps, compiled once per instruction set.
//
// A row stays in L1 between its passes, with the output's row as their scratch, so each tensor crosses the memory bus
// once. Arithmetic is in double: it waits for memory all the same, points are rounded once a step, and whole turns of a
// long step come off exactly.
// Everything has internal linkage: an AVX2 copy of an inline function must never be the one a baseline file links to.
#pragma once
#include <cmath>
#include <cstdint>

#include "cpu/sinc.h"
#include "solver.h"

namespace {

using geoflow::RowShape;
using geoflow::RowsView;

// Sum of term(k) over a row.
template <typename Term>
inline double row_sum(std::int64_t width, Term term) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t k = 0; k < width; ++k) sum += term(k);
    return sum;
}

// The velocity of one row, which is projected at `at`; `free` is null without guidance.
struct Guided {
    const float *at, *v, *free;
    double guidance;
};

// Writes the tangent part of the guided velocity to `to`, and returns its squared norm.
double tangent_row(Guided g, float* __restrict to, std::int64_t width) {
    const float *__restrict at = g.at, *__restrict v = g.v, *__restrict free = g.free ? g.free : g.v;
    const double guidance = g.guidance;
    const auto velocity = [=](std::int64_t k) { return v[k] + guidance * (double(v[k]) - free[k]); };
    const double along = row_sum(width, [=](std::int64_t k) { return at[k] * velocity(k); });
    return row_sum(width, [=](std::int64_t k) {
        to[k] = static_cast<float>(velocity(k) - along * at[k]);
        return double(to[k]) * to[k];
    });
}

// y = p x + q y, scaled to unit norm.
void combine_row(const float* __restrict x, double p, double q, float* __restrict y, std::int64_t width) {
    const double squares = row_sum(width, [=](std::int64_t k) { return (p * x[k] + q * y[k]) * (p * x[k] + q * y[k]); });
    const double factor = 1 / std::sqrt(squares), from_x = p * factor, from_y = q * factor;
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) y[k] = static_cast<float>(from_x * x[k] + from_y * y[k]);
}

Guided guided(RowsView at, RowsView v, RowsView v_free, double guidance, std::int64_t r) {
    return {row(at, r), row(v, r), v_free.data ? row(v_free, r) : nullptr, guidance};
}

void tangent_step(RowShape shape, double h, double guidance, bool renormalise, RowsView x, RowsView v, RowsView v_free,
                  RowsView y) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        const double squares = tangent_row(guided(x, v, v_free, guidance, r), row(y, r), shape.width);
        const double turn = renormalise ? 0 : std::fabs(h) * std::sqrt(squares);
        combine_row(row(x, r), std::cos(turn), h * sinc(turn), row(y, r), shape.width);
    }
}

void tangent_stage(RowShape shape, double h, double guidance, double weight, RowsView x, RowsView at, RowsView v,
                   RowsView v_free, RowsView total, RowsView y, RowsView new_total) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        tangent_row(guided(at, v, v_free, guidance, r), row(y, r), shape.width);
        if (total.data) {
            const float *__restrict before = row(total, r), *__restrict tangent = row(y, r);
            float* __restrict after = row(new_total, r);
#pragma omp simd
            for (std::int64_t k = 0; k < shape.width; ++k) after[k] = static_cast<float>(before[k] + weight * tangent[k]);
        }
        combine_row(row(x, r), 1.0, h, row(y, r), shape.width);
    }
}

// Two rows of scratch: `u`, the tangent velocity, becomes the one that is carried on; `y`, the combined velocity that
// the step follows, becomes the point.
void ab2_row(const float* __restrict x, const float* carried, double h, double share, float* __restrict u,
             float* __restrict y, std::int64_t width) {
    const double squares = row_sum(width, [=](std::int64_t k) {
        y[k] = static_cast<float>(u[k] + share * (double(u[k]) - carried[k]));
        return double(y[k]) * y[k];
    });
    const double both = row_sum(width, [=](std::int64_t k) { return double(u[k]) * y[k]; });
    // The step p = h y turns by |p|. Transport takes <p, u> ((1 - cos|p|) / |p|^2 p + sin|p| / |p| x) off u.
    const double turn = std::fabs(h) * std::sqrt(squares), half = sinc(turn / 2);
    const double off_x = h * both * sinc(turn), off_y = h * both * half * half / 2 * h;
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k) u[k] = static_cast<float>(u[k] - (off_y * y[k] + off_x * x[k]));
    combine_row(x, std::cos(turn), h * sinc(turn), y, width);
}

void tangent_ab2(RowShape shape, double h, double guidance, double share, RowsView x, RowsView v, RowsView v_free,
                 RowsView carried, RowsView y, RowsView new_carried) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        float* u = row(new_carried, r);
        tangent_row(guided(x, v, v_free, guidance, r), u, shape.width);
        ab2_row(row(x, r), carried.data ? row(carried, r) : u, h, share, u, row(y, r), shape.width);
    }
}

const geoflow::SolverKernels kSolverKernels = {tangent_step, tangent_stage, tangent_ab2};

}  // namespace
