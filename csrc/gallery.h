// Gallery posterior: parameters and entry point, free of any framework.
#pragma once
#include <cstdint>

namespace geoflow {

// Scores s_qj = log mean_m exp(kappa <g_j, x_qm>) + bias_j, reduced over the items j while they are computed.
struct GalleryParams {
    const float* samples;     // [queries, draws, dim]
    const float* gallery;     // [items, dim]
    const float* bias;        // [items] or null
    std::int64_t queries, draws, items, dim;
    std::int64_t top_k;       // at most items
    float kappa;
    double* peak;             // [queries]: max_j s_j
    double* weight;           // [queries]: sum_j exp(s_j - peak)
    double* moment;           // [queries]: sum_j (s_j - peak) exp(s_j - peak)
    double* top_score;        // [queries, top_k], largest first, equal scores by index
    std::int64_t* top_index;  // [queries, top_k]
    int threads;
    bool (*keep_going)();     // asked now and then by the calling thread; false ends the call
};

// False when interrupted; the outputs are then unspecified. A NaN or infinity in the input makes the weight of every query it
// touches NaN.
bool gallery_posterior(const GalleryParams& params);

}  // namespace geoflow
