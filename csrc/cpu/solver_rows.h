// The row loops of the solvers' steps, compiled once per instruction set.
//
// A step is a linear combination of the rows it reads. One pass over them gives the inner products that its coefficients
// depend on, and a second one, from L1, writes it: each tensor crosses the memory bus once. Sums, angles and coefficients
// are in double, so that a point is rounded once a step and whole turns of a long step come off exactly.
// Everything has internal linkage: an AVX2 copy of an inline function must never be the one a baseline file links to.
#pragma once
#include <cmath>
#include <cstdint>

#include "cpu/sinc.h"
#include "solver.h"

namespace {

using geoflow::RowShape;
using geoflow::RowsView;

// The entries of one row of g = v + guidance (v - free).
struct Guided {
    const float *v, *free;
    double guidance;

    Guided(RowsView v, RowsView v_free, double guidance, std::int64_t r)
        : v(row(v, r)), free(v_free.data ? row(v_free, r) : row(v, r)), guidance(v_free.data ? guidance : 0) {}
    double operator[](std::int64_t k) const { return v[k] + guidance * (double(v[k]) - free[k]); }
};

// Squared norm of an exact combination, of which rounding may leave a negative number.
double length(double squared) { return squared > 0 ? std::sqrt(squared) : 0; }

void tangent_step(RowShape shape, double h, double guidance, bool renormalise, RowsView x, RowsView v, RowsView v_free,
                  RowsView y) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        const float* __restrict here = row(x, r);
        float* __restrict there = row(y, r);
        const Guided g(v, v_free, guidance, r);
        double xx = 0, xg = 0, gg = 0;
#pragma omp simd reduction(+ : xx, xg, gg)
        for (std::int64_t k = 0; k < shape.width; ++k) {
            const double speed = g[k];
            xx += double(here[k]) * here[k];
            xg += here[k] * speed;
            gg += speed * speed;
        }
        // With u = g - <x, g> x, which is orthogonal to x up to its rounding: y is p x + q u.
        const double xu = xg - xg * xx, uu = gg - xg * xg - xg * xu;
        const double turn = renormalise ? 0 : std::fabs(h) * length(uu);
        const double p = std::cos(turn), q = h * sinc(turn);
        const double norm = length(p * p * xx + 2 * p * q * xu + q * q * uu);
        const double from_x = (p - q * xg) / norm, from_g = q / norm;
#pragma omp simd
        for (std::int64_t k = 0; k < shape.width; ++k) there[k] = static_cast<float>(from_x * here[k] + from_g * g[k]);
    }
}

// total + weight u with u = g - along at.
void add_row(const float* __restrict total, double weight, const Guided& g, double along, const float* __restrict at,
             float* __restrict new_total, std::int64_t width) {
#pragma omp simd
    for (std::int64_t k = 0; k < width; ++k)
        new_total[k] = static_cast<float>(total[k] + weight * (g[k] - along * at[k]));
}

void tangent_stage(RowShape shape, double h, double guidance, double weight, RowsView x, RowsView at, RowsView v,
                   RowsView v_free, RowsView total, RowsView y, RowsView new_total) {
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        const float *__restrict here = row(x, r), *__restrict taken = row(at, r);
        float* __restrict there = row(y, r);
        const Guided g(v, v_free, guidance, r);
        double along = 0, squares = 0;
#pragma omp simd reduction(+ : along)
        for (std::int64_t k = 0; k < shape.width; ++k) along += taken[k] * g[k];
#pragma omp simd reduction(+ : squares)
        for (std::int64_t k = 0; k < shape.width; ++k) {
            const double end = here[k] + h * (g[k] - along * taken[k]);
            squares += end * end;
        }
        const double scale = 1 / std::sqrt(squares);
#pragma omp simd
        for (std::int64_t k = 0; k < shape.width; ++k)
            there[k] = static_cast<float>(scale * (here[k] + h * (g[k] - along * taken[k])));
        if (total.data) add_row(row(total, r), weight, g, along, taken, row(new_total, r), shape.width);
    }
}

void tangent_ab2(RowShape shape, double h, double guidance, double share, RowsView x, RowsView v, RowsView v_free,
                 RowsView carried, RowsView y, RowsView new_carried) {
    const double before = carried.data ? -share : 0, now = 1 - before;
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        const float *__restrict here = row(x, r), *__restrict old = carried.data ? row(carried, r) : here;
        float *__restrict there = row(y, r), *__restrict carried_on = row(new_carried, r);
        const Guided g(v, v_free, guidance, r);
        double xg = 0;
#pragma omp simd reduction(+ : xg)
        for (std::int64_t k = 0; k < shape.width; ++k) xg += here[k] * g[k];
        // With u = g - <x, g> x, the velocity of the step is c = now u + before old.
        double xx = 0, xc = 0, uc = 0, cc = 0;
#pragma omp simd reduction(+ : xx, xc, uc, cc)
        for (std::int64_t k = 0; k < shape.width; ++k) {
            const double u = g[k] - xg * here[k], c = now * u + before * old[k];
            xx += double(here[k]) * here[k];
            xc += here[k] * c;
            uc += u * c;
            cc += c * c;
        }
        // The step h c turns by its length w. Transport takes <h c, u> ((1 - cos w) / w^2 h c + sin w / w x) off u.
        const double turn = std::fabs(h) * std::sqrt(cc), half = sinc(turn / 2);
        const double p = std::cos(turn), q = h * sinc(turn), norm = length(p * p * xx + 2 * p * q * xc + q * q * cc);
        const double off_c = h * uc * half * half / 2 * h, off_x = uc * q, from_x = p / norm, from_c = q / norm;
#pragma omp simd
        for (std::int64_t k = 0; k < shape.width; ++k) {
            const double u = g[k] - xg * here[k], c = now * u + before * old[k];
            there[k] = static_cast<float>(from_x * here[k] + from_c * c);
            carried_on[k] = static_cast<float>(u - off_c * c - off_x * here[k]);
        }
    }
}

const geoflow::SolverKernels kSolverKernels = {tangent_step, tangent_stage, tangent_ab2};

}  // namespace
