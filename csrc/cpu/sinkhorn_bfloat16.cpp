// The matrix of a transport problem from products in bfloat16, for processors with AVX512-BF16, and what mends its near ties.
#if defined(__AVX512BF16__)
#include "cpu/gemm_bfloat16.h"
#include "cpu/sinkhorn_passes.h"

namespace {

struct RoundedProducts {
    template <class... Arguments>
    static bool tiles(const Arguments&... arguments) {
        return bfloat16_product_tiles(arguments...);
    }
};

// S of one entry, from inner products in single precision.
double exact_score(const Factor& image, const Factor& text, std::int64_t i, std::int64_t j) {
    double score = 0;
    for (const Factor* factor : {&image, &text}) {
        const float* const noise = factor->noise + i * factor->dim;
        const double cosine = inner_product(noise, factor->data + j * factor->dim, factor->dim);
        score += std::asin(std::fmax(-1.0, std::fmin(1.0, cosine)));
    }
    return score;
}

void resolve_near_ties(const OtMatrix& matrix, const Factor& image, const Factor& text, double eps, const double* g, double margin,
                       std::int64_t* index, int threads) {
    const std::int64_t ld = matrix.ld();
    const bool kernel = matrix.domain == Domain::kernel;
    const Scratch weights(ld);
    const ColumnWeights w = column_weights(matrix, eps, g, weights.get());
    const float share = static_cast<float>(std::exp(-margin / eps)), below = static_cast<float>(margin);
#pragma omp parallel for num_threads(useful_threads(matrix, threads)) schedule(dynamic, 64)
    for (std::int64_t i = 0; i < matrix.rows; ++i) {
        const float* const x = matrix.data + i * ld;
        float top = 0;
        index[i] = best_column(x, w.value, ld, kernel, &top);
        const float least_value = kernel ? top * share : top - below;
        double best = -INFINITY;
        for (std::int64_t j = 0; j < ld; j += kLanes) {
            const floats value = kernel ? load(x + j) * load(w.value + j) : load(x + j) + load(w.value + j);
            if (largest(value) < least_value) continue;
            for (int lane = 0; lane < kLanes; ++lane) {
                if (!(value[lane] >= least_value) || j + lane >= matrix.cols) continue;
                const double exact = exact_score(image, text, i, j + lane) + g[j + lane];
                if (exact > best) best = exact, index[i] = j + lane;
            }
        }
    }
}

const geoflow::RoundedKernels kRoundedKernels = {build<RoundedProducts>, resolve_near_ties};

}  // namespace

namespace geoflow {

const RoundedKernels& rounded_kernels() { return kRoundedKernels; }

}  // namespace geoflow

#endif  // __AVX512BF16__
