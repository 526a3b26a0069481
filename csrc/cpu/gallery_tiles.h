// The gallery posterior on tiles of inner products, compiled once per instruction set.
//
// Items are the rows of the product, the samples of a block of queries its columns, so the gallery is read once per block of
// about kColumnBlock samples. While a tile [items, samples] is in cache, each item's log-mean-exp over a query's samples is
// formed; when a query's last sample has arrived, the scores of the panel's items go into the query's statistics and top-k.
// Work: 2 d flops and one exponential per (item, sample). Nothing of size items x queries is stored unless it is asked for.
//
// The statistics of each panel are kept until its slice of the gallery is done and then merged in the order of the panels, and
// ties among top items go by index: results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/gemm_rows.h"
#include "gallery.h"

namespace {

using geoflow::GalleryParams;
using geoflow::GalleryStatistics;

constexpr std::int64_t kSlicePanels = 1024;
constexpr std::int64_t kSliceItems = kSlicePanels * kPanelRows;

struct PanelStatistics {
    float peak, weight, moment;
};

struct Candidate {
    float score;
    std::int64_t index;
};

inline bool better(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.index < b.index);
}

// The best `capacity` candidates seen so far, the worst of them at the front.
class TopItems {
  public:
    explicit TopItems(std::int64_t capacity) : capacity_(capacity) {}

    // Indices offered later must be larger: an equal score then never replaces an earlier one.
    void offer(float score, std::int64_t index) {
        if (full()) {
            if (!(score > candidates_.front().score)) return;
            std::pop_heap(candidates_.begin(), candidates_.end(), better);
            candidates_.back() = {score, index};
        } else {
            candidates_.push_back({score, index});
        }
        std::push_heap(candidates_.begin(), candidates_.end(), better);
    }

    // Scores at or below this one are not wanted.
    float threshold() const { return full() ? candidates_.front().score : -std::numeric_limits<float>::infinity(); }
    const std::vector<Candidate>& candidates() const { return candidates_; }

  private:
    bool full() const { return static_cast<std::int64_t>(candidates_.size()) == capacity_; }
    std::int64_t capacity_;
    std::vector<Candidate> candidates_;
};

// max and sum of exp(kappa (x - max)) over a stretch of samples. The sum is NaN when an x is not finite.
struct Stretch {
    float max, sum;
};

GEOFLOW_INLINE int8x first_lanes(std::int64_t count) {
    return int8x{0, 1, 2, 3, 4, 5, 6, 7} < static_cast<std::int32_t>(count);
}

// A whole vector must be readable at any of the x.
inline Stretch reduce_stretch(const float* x, std::int64_t count, float kappa) {
    if (count == 1) return {x[0], 1.0f + x[0] * 0.0f};  // plain search: one sample per query
    const std::int64_t whole = count / kLanes * kLanes;
    const int8x rest = first_lanes(count - whole);
    float8 high = broadcast(x[0]), last = high;
    for (std::int64_t k = 0; k < whole; k += kLanes) high = max(high, load(x + k));
    if (whole < count) {
        last = select(rest, load(x + whole), last);
        high = max(high, last);
    }
    const float top = largest(high);
    // exponential() clamps its argument and would hide a NaN, so a multiple by zero of each x is added.
    float8 total = broadcast(0.0f);
    for (std::int64_t k = 0; k < whole; k += kLanes) {
        const float8 v = load(x + k);
        total += exponential((v - top) * kappa) + v * 0.0f;
    }
    if (whole < count) total += select(rest, exponential((last - top) * kappa) + last * 0.0f, broadcast(0.0f));
    return {top, sum(total)};
}

inline Stretch merge(const Stretch& a, const Stretch& b, float kappa) {
    const float top = a.max > b.max ? a.max : b.max;
    return {top, a.sum * std::exp(kappa * (a.max - top)) + b.sum * std::exp(kappa * (b.max - top))};
}

// Scores of items for blocks of queries, a panel of items at a time.
class PanelScorer {
  public:
    explicit PanelScorer(const GalleryParams& params)
        : params_(params),
          block_queries_(std::max<std::int64_t>(1, least(params.queries, kColumnBlock / params.draws))),
          running_(params.threads, std::vector<Stretch>(block_queries_ * kPanelRows)) {}

    std::int64_t block_queries() const { return block_queries_; }

    // Calls sink(query, first item, items, const float (&score)[kPanelRows]) for every panel of `items` items from `first_item` and
    // each of up to block_queries() queries from `first_query`; scores past the panel's items are copies of the first.
    template <class Sink>
    bool run(std::int64_t first_item, std::int64_t items, std::int64_t first_query, std::int64_t queries, const Sink& sink) {
        const std::int64_t* const pick = params_.pick ? params_.pick + first_item : nullptr;
        const float* const rows = pick ? params_.gallery : params_.gallery + first_item * params_.dim;
        const float* const samples = params_.samples + first_query * params_.draws * params_.dim;
        const auto epilogue = [&](const Tile<1>& tile) {
            reduce_tile(tile, [&](std::int64_t query, const Stretch* stretch) {
                float score[kPanelRows];
                score_items(stretch, tile.rows, first_item + tile.row, score);
                sink(first_query + query, first_item + tile.row, tile.rows, score);
            });
        };
        return row_tiles({rows, pick, items, params_.dim}, samples, queries * params_.draws, params_.threads, params_.keep_going,
                         epilogue);
    }

  private:
    // Calls finished(query of the block, its stretch for each item of the panel) for the queries whose last sample is in this tile.
    template <class Finished>
    void reduce_tile(const Tile<1>& tile, const Finished& finished) {
        std::vector<Stretch>& running = running_[thread_number()];
        const std::int64_t draws = params_.draws, end = tile.col + tile.cols;
        for (std::int64_t q = tile.col / draws; q * draws < end; ++q) {
            const std::int64_t from = std::max(tile.col, q * draws), to = least(end, (q + 1) * draws);
            Stretch* const mine = running.data() + q * kPanelRows;
            for (std::int64_t r = 0; r < tile.rows; ++r) {
                const float* x = tile.value[0] + r * tile.ld + (from - tile.col);
                const Stretch part = reduce_stretch(x, to - from, params_.kappa);
                mine[r] = from == q * draws ? part : merge(mine[r], part, params_.kappa);
            }
            if (to == (q + 1) * draws) finished(q, mine);
        }
    }

    void score_items(const Stretch* stretch, std::int64_t rows, std::int64_t first_item, float (&score)[kPanelRows]) const {
        const float share = 1.0f / static_cast<float>(params_.draws);
        float top[kPanelRows], mean[kPanelRows];
        for (std::int64_t r = 0; r < kPanelRows; ++r) {
            const std::int64_t item = r < rows ? r : 0;
            top[r] = params_.kappa * stretch[item].max + (params_.bias ? params_.bias[first_item + item] : 0.0f);
            mean[r] = stretch[item].sum * share;
        }
        for (std::int64_t r = 0; r < kPanelRows; r += kLanes) {
            const float8 m = load(mean + r);
            store(score + r, load(top + r) + logarithm(m) + m * 0.0f);  // logarithm() would hide a NaN
        }
    }

    const GalleryParams& params_;
    const std::int64_t block_queries_;
    std::vector<std::vector<Stretch>> running_;  // per thread: [queries of the block, kPanelRows]
};

// Statistics of one panel's scores, and its best items offered to `top`.
inline PanelStatistics close_panel(const float (&score)[kPanelRows], std::int64_t rows, std::int64_t first_item, TopItems& top) {
    float8 high = load(score);
    for (std::int64_t r = kLanes; r < rows; r += kLanes) high = max(high, load(score + r));
    const float peak = largest(high);
    float8 weight = broadcast(0.0f), moment = weight;
    for (std::int64_t r = 0; r < rows; r += kLanes) {
        const float8 below = load(score + r) - peak;
        const float8 mass = select(first_lanes(rows - r), exponential(below) + below * 0.0f, broadcast(0.0f));
        weight += mass;
        moment += mass * below;
    }
    if (peak > top.threshold())
        for (std::int64_t r = 0; r < rows; ++r)
            if (score[r] > top.threshold()) top.offer(score[r], first_item + r);
    return {peak, sum(weight), sum(moment)};
}

class GallerySolver {
  public:
    GallerySolver(const GalleryParams& params, const GalleryStatistics& result)
        : params_(params),
          result_(result),
          scorer_(params),
          top_(params.threads, std::vector<TopItems>(params.queries, TopItems(result.top_k))),
          statistics_(least(kSlicePanels, params.items / kPanelRows + 1) * scorer_.block_queries()) {
        for (std::int64_t q = 0; q < params.queries; ++q) {
            result.peak[q] = -std::numeric_limits<double>::infinity();
            result.weight[q] = result.moment[q] = 0;
        }
    }

    bool run() {
        for (std::int64_t item = 0; item < params_.items; item += kSliceItems)
            for (std::int64_t query = 0; query < params_.queries; query += scorer_.block_queries())
                if (!run_slice(item, query)) return false;
        for (std::int64_t q = 0; q < params_.queries; ++q) read_out_top(q);
        return true;
    }

  private:
    bool run_slice(std::int64_t first_item, std::int64_t first_query) {
        const std::int64_t items = least(kSliceItems, params_.items - first_item), block = scorer_.block_queries();
        const std::int64_t queries = least(block, params_.queries - first_query);
        const auto close = [&](std::int64_t query, std::int64_t item, std::int64_t rows, const float(&score)[kPanelRows]) {
            statistics_[(item - first_item) / kPanelRows * block + query - first_query] =
                close_panel(score, rows, item, top_[thread_number()][query]);
        };
        if (!scorer_.run(first_item, items, first_query, queries, close)) return false;
        for (std::int64_t panel = 0; panel * kPanelRows < items; ++panel)
            for (std::int64_t q = 0; q < queries; ++q) absorb(first_query + q, statistics_[panel * block + q]);
        return true;
    }

    void absorb(std::int64_t query, const PanelStatistics& part) {
        double &peak = result_.peak[query], &weight = result_.weight[query], &moment = result_.moment[query];
        const double common = std::max<double>(peak, part.peak);
        const double old_scale = weight == 0 ? 0.0 : std::exp(peak - common), old_shift = weight == 0 ? 0.0 : peak - common;
        const double scale = std::exp(part.peak - common), shift = part.peak - common;
        moment = old_scale * (moment + old_shift * weight) + scale * (part.moment + shift * part.weight);
        weight = old_scale * weight + scale * part.weight;
        peak = common;
    }

    void read_out_top(std::int64_t query) {
        std::vector<Candidate> all;
        for (const std::vector<TopItems>& mine : top_)
            all.insert(all.end(), mine[query].candidates().begin(), mine[query].candidates().end());
        std::sort(all.begin(), all.end(), better);
        for (std::int64_t k = 0; k < result_.top_k; ++k) {
            const bool there = k < static_cast<std::int64_t>(all.size());
            result_.top_score[query * result_.top_k + k] = there ? all[k].score : std::nan("");
            result_.top_index[query * result_.top_k + k] = there ? all[k].index : -1;
        }
    }

    const GalleryParams& params_;
    const GalleryStatistics& result_;
    PanelScorer scorer_;
    std::vector<std::vector<TopItems>> top_;   // per thread: [queries]
    std::vector<PanelStatistics> statistics_;  // [panels of the slice, queries of the block]
};

// Scores [queries, items] themselves.
inline bool store_scores(const GalleryParams& params, float* scores) {
    PanelScorer scorer(params);
    const auto keep = [&](std::int64_t query, std::int64_t item, std::int64_t rows, const float(&score)[kPanelRows]) {
        std::copy(score, score + rows, scores + query * params.items + item);
    };
    for (std::int64_t query = 0; query < params.queries; query += scorer.block_queries())
        if (!scorer.run(0, params.items, query, least(scorer.block_queries(), params.queries - query), keep)) return false;
    return true;
}

const geoflow::GalleryKernels kGalleryKernels = {
    [](const GalleryParams& params, const GalleryStatistics& result) { return GallerySolver(params, result).run(); },
    store_scores,
};

}  // namespace
