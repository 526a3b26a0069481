// Entropic optimal transport, of given costs or between two clouds of points on the product of two spheres, where
//     C_ij = acos<image0_i, image1_j> + acos<text0_i, text1_j>:
// what the CPU and the CUDA solvers share.
//
// Rows are noise, columns are data, both marginals uniform: a = 1/rows, b = 1/cols. The plan is
//     P_ij = exp((f_i + g_j - C_ij) / eps).
// One iteration reads the matrix once:
//     f_i  = -eps log sum_j exp((g_j - C_ij) / eps) + eps log a       row update: row sums become exact
//     s_j  = sum_i P_ij                                               column sums of that plan, from the same read
//     error = sum_j |s_j - b|                                         L1 violation of the column marginal
//     g_j += eps log(b / s_j)                                         column update: column sums become exact
// The row violation after the column update is at most `error` (P is multiplied by b/s_j column by column, so row i moves by at most
// sum_j P_ij |b/s_j - 1|). Stopping at error <= tol therefore guarantees the row marginal to tol, and needs no further read.
//
// Both solvers store the centred score  S_ij = offset - C_ij  instead of C: in high dimension C sits at its middle value, and what
// matters, the small difference to it, would lose its low bits next to pi. The offset shifts every f_i by the same amount.
#pragma once

#include <cstdint>

namespace geoflow {

struct SinkhornParams {
    std::int64_t rows;       // noise points
    std::int64_t cols;       // data points
    std::int64_t image_dim;  // width of image0 and image1; 0 where scores are given
    std::int64_t text_dim;   // width of text0 and text1; 0 where scores are given
    float eps;               // > 0, in units of the cost
    float tol;               // > 0, L1
    std::int32_t max_iter;   // >= 1
};

struct SinkhornStatus {
    double iterations;      // matrix reads done
    double marginal_error;  // `error` above at the last iteration
    double converged;       // 1 when it is at most tol
};

}  // namespace geoflow
