// Gallery posterior: parameters and entry point, free of any framework.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"
#include "rows.h"

namespace geoflow {

// Scores s_qj = log mean_m exp(kappa <g_j, x_qm> + sample_bias_qm) + bias_j of the items j, the rows of a gallery.
struct GalleryParams {
    const float* samples;      // [queries, draws, dim], of any norm
    const float* sample_bias;  // [queries, draws] or null; -inf leaves a sample out, but not all of a query
    const void* gallery;       // [items, dim]
    const float* bias;         // [items] or null
    std::int64_t queries, draws, items, dim;
    float kappa;
    int threads;
    bool (*keep_going)();      // asked now and then by the calling thread; false ends the call
    Storage storage;           // of the gallery's rows
    bool bfloat16;             // inner products of rounded factors, but for the best items: only where has_avx512_bf16()
};

// The scores reduced over the items while they are computed.
struct GalleryStatistics {
    std::int64_t top_k;       // at most items
    double* peak;             // [queries]: max_j s_j
    double* weight;           // [queries]: sum_j exp(s_j - peak)
    double* moment;           // [queries]: sum_j (s_j - peak) exp(s_j - peak)
    double* top_score;        // [queries, top_k], largest first, equal scores by index
    std::int64_t* top_index;  // [queries, top_k]
};

// The passes, compiled once per instruction set.
struct GalleryKernels {
    bool (*posterior)(const GalleryParams& params, const GalleryStatistics& result);
    bool (*scores)(const GalleryParams& params, float* scores);
};

// The kernels for this processor.
GEOFLOW_DECLARE_KERNELS(GalleryKernels, gallery_kernels)

// Its posterior from products in bfloat16, with the best items of each query, somewhat more than top_k, scored in single precision.
bool gallery_posterior_bfloat16(const GalleryParams& params, const GalleryStatistics& result);

// Both return false when interrupted; the outputs are then unspecified. A NaN or infinity in the input makes the weight of every
// query it touches NaN, and the scores that it touches.
bool gallery_posterior(const GalleryParams& params, const GalleryStatistics& result);
bool gallery_scores(const GalleryParams& params, float* scores);  // [queries, items]

}  // namespace geoflow
