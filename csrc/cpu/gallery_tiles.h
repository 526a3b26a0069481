// The gallery posterior on tiles of inner products, compiled once per instruction set.
//
// Items are the rows of the product, the samples of a block of queries its columns, so the gallery is read once per block of
// about kColumnBlock samples. While a tile [items, samples] is in cache, each item's log-mean-exp over a query's samples is
// formed; when a query's last sample has arrived, the scores of the panel's items go into the query's statistics and top-k.
// Work: 2 d flops and one exponential per (item, sample). Nothing of size items x queries is ever stored.
//
// The statistics of each panel are kept until its slice of the gallery is done and then merged in the order of the panels, and
// ties among top items go by index: results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/gemm.h"
#include "gallery.h"

namespace {

using geoflow::GalleryParams;

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
            if (!(score > found_.front().score)) return;
            std::pop_heap(found_.begin(), found_.end(), better);
            found_.back() = {score, index};
        } else {
            found_.push_back({score, index});
        }
        std::push_heap(found_.begin(), found_.end(), better);
    }

    // Scores at or below this one are not wanted.
    float threshold() const { return full() ? found_.front().score : -std::numeric_limits<float>::infinity(); }
    const std::vector<Candidate>& found() const { return found_; }

  private:
    bool full() const { return static_cast<std::int64_t>(found_.size()) == capacity_; }
    std::int64_t capacity_;
    std::vector<Candidate> found_;
};

// max and sum of exp(kappa (x - max)) over a stretch of samples. The sum is NaN when an x is not finite.
struct Stretch {
    float max, sum;
};

inline Stretch reduce_stretch(const float* x, std::int64_t count, float kappa) {
    const std::int64_t whole = count / kLanes * kLanes;
    float last[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) last[lane] = x[whole + lane < count ? whole + lane : 0];
    float8 high = load(last);
    for (std::int64_t k = 0; k < whole; k += kLanes) high = max(high, load(x + k));
    const float top = largest(high);
    float8 total = broadcast(0.0f), poison = broadcast(0.0f);
    for (std::int64_t k = 0; k < whole; k += kLanes) {
        const float8 v = load(x + k);
        total += exponential((v - top) * kappa);
        poison += v * 0.0f;  // exponential() clamps its argument and would hide a NaN
    }
    float result = sum(total) + sum(poison);
    if (whole < count) {
        const float8 v = load(last), e = exponential((v - top) * kappa) + v * 0.0f;
        for (std::int64_t lane = 0; lane < count - whole; ++lane) result += e[lane];
    }
    return {top, result};
}

inline Stretch merge(const Stretch& a, const Stretch& b, float kappa) {
    const float top = a.max > b.max ? a.max : b.max;
    return {top, a.sum * std::exp(kappa * (a.max - top)) + b.sum * std::exp(kappa * (b.max - top))};
}

// What one thread keeps: the running stretch of every item of its panel for every query of the block, and its top items.
struct Worker {
    std::vector<Stretch> running;  // [queries of the block, kPanelRows]
    std::vector<TopItems> top;     // [queries]
};

// Statistics of one panel's scores, and its best items offered to `top`.
inline PanelStatistics close_panel(const float* score, std::int64_t rows, std::int64_t first_item, TopItems& top) {
    float peak = score[0];
    for (std::int64_t r = 1; r < rows; ++r) peak = score[r] > peak ? score[r] : peak;
    float weight = 0, moment = 0;
    for (std::int64_t r = 0; r < rows; r += kLanes) {
        const float8 below = load(score + r) - peak;
        const float8 mass = exponential(below) + below * 0.0f;
        for (std::int64_t lane = 0; lane < least(kLanes, rows - r); ++lane) {
            weight += mass[lane];
            moment += mass[lane] * below[lane];
        }
    }
    if (peak > top.threshold())
        for (std::int64_t r = 0; r < rows; ++r)
            if (score[r] > top.threshold()) top.offer(score[r], first_item + r);
    return {peak, weight, moment};
}

class GallerySolver {
  public:
    explicit GallerySolver(const GalleryParams& params)
        : params_(params),
          block_queries_(std::max<std::int64_t>(1, kColumnBlock / params.draws)),
          workers_(params.threads),
          statistics_(kSlicePanels * block_queries_) {
        for (Worker& worker : workers_) {
            worker.running.resize(block_queries_ * kPanelRows);
            worker.top.assign(params.queries, TopItems(params.top_k));
        }
        for (std::int64_t q = 0; q < params.queries; ++q) {
            params.peak[q] = -std::numeric_limits<double>::infinity();
            params.weight[q] = params.moment[q] = 0;
        }
    }

    bool run() {
        for (std::int64_t item = 0; item < params_.items; item += kSliceItems)
            for (std::int64_t query = 0; query < params_.queries; query += block_queries_)
                if (!run_slice(item, query)) return false;
        for (std::int64_t q = 0; q < params_.queries; ++q) read_out_top(q);
        return true;
    }

  private:
    bool run_slice(std::int64_t first_item, std::int64_t first_query) {
        const std::int64_t items = least(kSliceItems, params_.items - first_item);
        const std::int64_t queries = least(block_queries_, params_.queries - first_query);
        const Product products[1] = {{params_.gallery + first_item * params_.dim,
                                      params_.samples + first_query * params_.draws * params_.dim, params_.dim}};
        const auto epilogue = [&](const Tile<1>& tile) { reduce_tile(tile, first_item, first_query); };
        const std::int64_t columns = queries * params_.draws;
        if (!product_tiles(products, items, columns, kPanelRows, params_.threads, params_.keep_going, epilogue, columns))
            return false;
        for (std::int64_t panel = 0; panel * kPanelRows < items; ++panel)
            for (std::int64_t q = 0; q < queries; ++q) absorb(first_query + q, statistics_[panel * block_queries_ + q]);
        return true;
    }

    void reduce_tile(const Tile<1>& tile, std::int64_t first_item, std::int64_t first_query) {
        Worker& worker = workers_[thread_number()];
        const std::int64_t draws = params_.draws, end = tile.col + tile.cols;
        for (std::int64_t q = tile.col / draws; q * draws < end; ++q) {
            const std::int64_t from = std::max(tile.col, q * draws), to = least(end, (q + 1) * draws);
            Stretch* running = worker.running.data() + q * kPanelRows;
            for (std::int64_t r = 0; r < tile.rows; ++r) {
                const float* x = tile.value[0] + r * tile.ld + (from - tile.col);
                const Stretch part = reduce_stretch(x, to - from, params_.kappa);
                running[r] = from == q * draws ? part : merge(running[r], part, params_.kappa);
            }
            if (to < (q + 1) * draws) continue;
            float score[kPanelRows];
            score_items(running, tile.rows, first_item + tile.row, score);
            statistics_[tile.row / kPanelRows * block_queries_ + q] =
                close_panel(score, tile.rows, first_item + tile.row, worker.top[first_query + q]);
        }
    }

    void score_items(const Stretch* running, std::int64_t rows, std::int64_t first_item, float (&score)[kPanelRows]) const {
        const float share = 1.0f / static_cast<float>(params_.draws);
        for (std::int64_t r = 0; r < kPanelRows; ++r) {
            const Stretch& item = running[r < rows ? r : 0];
            score[r] = params_.kappa * item.max + std::log(item.sum * share);
            if (params_.bias) score[r] += params_.bias[first_item + (r < rows ? r : 0)];
        }
    }

    void absorb(std::int64_t query, const PanelStatistics& part) {
        double &peak = params_.peak[query], &weight = params_.weight[query], &moment = params_.moment[query];
        const double common = std::max<double>(peak, part.peak);
        const double old_scale = weight == 0 ? 0.0 : std::exp(peak - common), old_shift = weight == 0 ? 0.0 : peak - common;
        const double scale = std::exp(part.peak - common), shift = part.peak - common;
        moment = old_scale * (moment + old_shift * weight) + scale * (part.moment + shift * part.weight);
        weight = old_scale * weight + scale * part.weight;
        peak = common;
    }

    void read_out_top(std::int64_t query) {
        std::vector<Candidate> all;
        for (const Worker& worker : workers_)
            all.insert(all.end(), worker.top[query].found().begin(), worker.top[query].found().end());
        std::sort(all.begin(), all.end(), better);
        for (std::int64_t k = 0; k < params_.top_k; ++k) {
            const bool there = k < static_cast<std::int64_t>(all.size());
            params_.top_score[query * params_.top_k + k] = there ? all[k].score : std::nan("");
            params_.top_index[query * params_.top_k + k] = there ? all[k].index : -1;
        }
    }

    const GalleryParams& params_;
    const std::int64_t block_queries_;
    std::vector<Worker> workers_;
    std::vector<PanelStatistics> statistics_;  // [panels of the slice, queries of the block]
};

}  // namespace
