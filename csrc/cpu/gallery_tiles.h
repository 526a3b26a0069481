// The gallery posterior on tiles of inner products, compiled once per instruction set.
//
// Items are the rows of the product, the samples of a block of queries its columns, so the gallery is read once per block of
// about kColumnBlock samples. While a tile [items, samples] is in cache, each item's log-mean-exp over a query's samples is
// formed; when a query's last sample has arrived, the scores of the panel's items go into the query's statistics and top-k.
// Work: 2 d flops and one exponential per (item, sample). Nothing of size items x queries is stored unless it is asked for.
//
// The columns of eight queries are interleaved, so that a vector holds the same sample of all eight and no sum runs across its lanes:
// with four samples per query, what follows the product then takes a few per cent of it.
//
// The statistics of each panel are kept until its slice of the gallery is done and then merged in the order of the panels, and
// ties among top items go by index: results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/gemm_rows.h"
#include "cpu/top_items.h"
#include "gallery.h"

namespace {

using geoflow::GalleryParams;
using geoflow::GalleryStatistics;

constexpr std::int64_t kSlicePanels = 1024;
constexpr std::int64_t kSliceItems = kSlicePanels * kPanelRows;
constexpr float kLowest = -1e30f;  // stands for a bias of -inf: differences of it are numbers, and exp of them is nothing

struct PanelStatistics {
    float peak, weight, moment;
};

// max and sum of exp(scale (x - max)) over a stretch of samples, of one query or of eight in lanes. The sum is NaN when an x is not
// finite.
template <class Value>
struct Stretch {
    Value max, sum;
};

GEOFLOW_INLINE ints first_lanes(std::int64_t count) {
    return lane_numbers() < static_cast<std::int32_t>(count);
}

// `count` samples of one query side by side. A whole vector must be readable at any of the x.
inline void reduce_stretch(const float* x, std::int64_t count, float scale, Stretch<float>& result) {
    if (count == 1) {  // plain search: one sample per query
        result = {x[0], 1.0f + x[0] * 0.0f};
        return;
    }
    const std::int64_t whole = count / kLanes * kLanes;
    const ints rest = first_lanes(count - whole);
    floats high = broadcast(x[0]), last = high;
    for (std::int64_t k = 0; k < whole; k += kLanes) high = max(high, load(x + k));
    if (whole < count) {
        last = select(rest, load(x + whole), last);
        high = max(high, last);
    }
    const float top = largest(high);
    // exponential() clamps its argument and would hide a NaN, so a multiple by zero of each x is added.
    floats total = broadcast(0.0f);
    for (std::int64_t k = 0; k < whole; k += kLanes) {
        const floats v = load(x + k);
        total += exponential((v - top) * scale) + v * 0.0f;
    }
    if (whole < count) total += select(rest, exponential((last - top) * scale) + last * 0.0f, broadcast(0.0f));
    result = {top, sum(total)};
}

// `count` columns, each a sample in one of eight interleaved queries.
inline void reduce_stretch(const float* x, std::int64_t count, float scale, Stretch<floats>& result) {
    floats top = load(x), total = broadcast(0.0f);
    for (std::int64_t k = kLanes; k < count; k += kLanes) top = max(top, load(x + k));
    for (std::int64_t k = 0; k < count; k += kLanes) {
        const floats v = load(x + k);
        total += exponential((v - top) * scale) + v * 0.0f;
    }
    result = {top, total};
}

inline void absorb_stretch(Stretch<float>& a, const Stretch<float>& b, float scale) {
    const float top = a.max > b.max ? a.max : b.max;
    a = {top, a.sum * std::exp(scale * (a.max - top)) + b.sum * std::exp(scale * (b.max - top))};
}

inline void absorb_stretch(Stretch<floats>& a, const Stretch<floats>& b, float scale) {
    const floats top = max(a.max, b.max);
    a = {top, a.sum * exponential(scale * (a.max - top)) + b.sum * exponential(scale * (b.max - top))};
}

// The samples of a block of queries as columns of the product: first whole groups of eight queries, in which column 8 m + lane is
// sample m of the query in that lane, then the samples of the other queries in their order.
class SampleColumns {
  public:
    explicit SampleColumns(const GalleryParams& params) : params_(params) {}

    void arrange(std::int64_t first_query, std::int64_t queries) {
        const std::int64_t first = first_query * params_.draws, dim = params_.dim;
        count_ = queries * params_.draws;
        grouped_ = params_.draws > 1 ? queries / kLanes * kLanes * params_.draws : 0;
        samples_ = params_.samples + first * dim;
        if (grouped_) {
            arranged_.resize(count_ * dim);
            for (std::int64_t c = 0; c < count_; ++c) std::copy_n(samples_ + source(c) * dim, dim, arranged_.data() + c * dim);
            samples_ = arranged_.data();
        }
        if (params_.sample_bias) {
            bias_.assign(round_up(count_, kLanes), 0.0f);
            for (std::int64_t c = 0; c < count_; ++c) bias_[c] = std::max(params_.sample_bias[first + source(c)], kLowest);
        }
    }

    const float* samples() const { return samples_; }                     // [count, dim]
    const float* bias() const { return bias_.data(); }                    // [count rounded up to vectors]
    std::int64_t count() const { return count_; }
    std::int64_t grouped() const { return grouped_; }                     // columns of whole groups
    std::int64_t group_width() const { return kLanes * params_.draws; }

  private:
    std::int64_t source(std::int64_t column) const {
        if (column >= grouped_) return column;
        const std::int64_t group = column / group_width(), draw = column % group_width() / kLanes;
        return (group * kLanes + column % kLanes) * params_.draws + draw;
    }

    const GalleryParams& params_;
    const float* samples_ = nullptr;
    std::int64_t count_ = 0, grouped_ = 0;
    std::vector<float> arranged_, bias_;
};

// Inner products in single precision. A class of products in less has the same members, and kExact false.
struct SingleProducts {
    static constexpr bool kExact = true;

    template <class... Arguments>
    static bool tiles(const Arguments&... arguments) {
        return row_tiles(arguments...);
    }
};

// Scores of items for blocks of queries, a panel of items at a time.
template <class Products, class Element>
class PanelScorer {
  public:
    explicit PanelScorer(const GalleryParams& params)
        : params_(params),
          scale_(params.sample_bias ? 1.0f : params.kappa),
          block_queries_(least(params.queries, queries_per_block(params.draws))),
          columns_(params),
          running_(params.threads) {}

    std::int64_t block_queries() const { return block_queries_; }

    // Calls sink(query, first item, items, const float (&score)[kPanelRows]) for every panel of `items` items from `first_item` and
    // each of up to block_queries() queries from `first_query`; scores past the panel's items are copies of the first.
    template <class Sink>
    bool run(std::int64_t first_item, std::int64_t items, std::int64_t first_query, std::int64_t queries, const Sink& sink) {
        const Element* const rows = static_cast<const Element*>(params_.gallery) + first_item * params_.dim;
        columns_.arrange(first_query, queries);
        const auto epilogue = [&](const Tile<1>& tile) {
            const std::int64_t item = first_item + tile.row;
            if (params_.sample_bias) add_sample_bias(tile);
            Running& running = running_[thread_number()];
            reduce_units(tile, 0, columns_.grouped(), columns_.group_width(), running.group, [&](std::int64_t group) {
                float score[kLanes][kPanelRows];
                score_items(running.group, tile.rows, item, score);
                for (int lane = 0; lane < kLanes; ++lane) sink(first_query + group * kLanes + lane, item, tile.rows, score[lane]);
            });
            reduce_units(tile, columns_.grouped(), columns_.count(), params_.draws, running.query, [&](std::int64_t query) {
                float score[kPanelRows];
                score_items(running.query, tile.rows, item, score);
                sink(first_query + columns_.grouped() / params_.draws + query, item, tile.rows, score);
            });
        };
        return Products::tiles(RowList<Element>{rows, items, params_.dim}, columns_.samples(), columns_.count(), params_.threads,
                               params_.keep_going, epilogue);
    }

  private:
    // Of a panel's items, the stretches of the group or query that the tiles so far have left unfinished.
    struct Running {
        Stretch<floats> group[kPanelRows];
        Stretch<float> query[kPanelRows];
    };

    // As many as have kColumnBlock samples: whole groups, if that is more than one.
    static std::int64_t queries_per_block(std::int64_t draws) {
        const std::int64_t most = std::max<std::int64_t>(1, kColumnBlock / draws);
        return most < kLanes ? most : most / kLanes * kLanes;
    }

    // Turns each inner product x into kappa x + bias of its sample.
    void add_sample_bias(const Tile<1>& tile) const {
        const float* const bias = columns_.bias() + tile.col;
        for (std::int64_t r = 0; r < tile.rows; ++r) {
            float* const x = tile.value[0] + r * tile.ld;
            for (std::int64_t c = 0; c < tile.cols; c += kLanes)
                store_first(x + c, load(x + c) * params_.kappa + load(bias + c), tile.cols - c);
        }
    }

    // Columns [begin, end) of the block are units of `width` columns each. Reduces those that the tile holds, and calls finished(unit)
    // when the last column of one has been absorbed into `running`, which has a stretch for each item of the panel.
    template <class Value, class Finished>
    void reduce_units(const Tile<1>& tile, std::int64_t begin, std::int64_t end, std::int64_t width, Stretch<Value>* running,
                      const Finished& finished) const {
        const std::int64_t first = std::max(begin, tile.col), last = least(end, tile.col + tile.cols);
        for (std::int64_t from = first, to; from < last; from = to) {
            const std::int64_t unit = (from - begin) / width, unit_begin = begin + unit * width;
            to = least(last, unit_begin + width);
            for (std::int64_t r = 0; r < tile.rows; ++r) {
                const float* const x = tile.value[0] + r * tile.ld + (from - tile.col);
                if (from == unit_begin) {
                    reduce_stretch(x, to - from, scale_, running[r]);
                } else {
                    Stretch<Value> part;
                    reduce_stretch(x, to - from, scale_, part);
                    absorb_stretch(running[r], part, scale_);
                }
            }
            if (to == unit_begin + width) finished(unit);
        }
    }

    GEOFLOW_INLINE floats score_of(floats max, floats sum, floats bias) const {
        const floats mean = sum * (1.0f / static_cast<float>(params_.draws));
        return max * scale_ + bias + logarithm(mean) + mean * 0.0f;  // logarithm() would hide a NaN
    }

    float item_bias(std::int64_t item) const { return params_.bias ? params_.bias[item] : 0.0f; }

    void score_items(const Stretch<float>* stretch, std::int64_t rows, std::int64_t first_item, float (&score)[kPanelRows]) const {
        float top[kPanelRows], total[kPanelRows], bias[kPanelRows];
        for (std::int64_t r = 0; r < kPanelRows; ++r) {
            const std::int64_t item = r < rows ? r : 0;
            top[r] = stretch[item].max;
            total[r] = stretch[item].sum;
            bias[r] = item_bias(first_item + item);
        }
        for (std::int64_t r = 0; r < kPanelRows; r += kLanes)
            store(score + r, score_of(load(top + r), load(total + r), load(bias + r)));
    }

    void score_items(const Stretch<floats>* stretch, std::int64_t rows, std::int64_t first_item,
                     float (&score)[kLanes][kPanelRows]) const {
        for (std::int64_t r = 0; r < rows; ++r) {
            const floats s = score_of(stretch[r].max, stretch[r].sum, broadcast(item_bias(first_item + r)));
            for (int lane = 0; lane < kLanes; ++lane) score[lane][r] = s[lane];
        }
        for (int lane = 0; lane < kLanes; ++lane) std::fill(score[lane] + rows, score[lane] + kPanelRows, score[lane][0]);
    }

    const GalleryParams& params_;
    const float scale_;  // what the tiles' values are multiplied by: kappa, unless that has been done together with a bias
    const std::int64_t block_queries_;
    SampleColumns columns_;
    std::vector<Running> running_;  // per thread
};

// Statistics of one panel's scores, and its best items offered to `top`.
inline PanelStatistics close_panel(const float (&score)[kPanelRows], std::int64_t rows, std::int64_t first_item, TopItems& top) {
    floats high = load(score);
    for (std::int64_t r = kLanes; r < rows; r += kLanes) high = max(high, load(score + r));
    const float peak = largest(high);
    floats weight = broadcast(0.0f), moment = weight;
    for (std::int64_t r = 0; r < rows; r += kLanes) {
        const floats below = load(score + r) - peak;
        const floats mass = select(first_lanes(rows - r), exponential(below) + below * 0.0f, broadcast(0.0f));
        weight += mass;
        moment += mass * below;
    }
    if (peak > top.threshold())
        for (std::int64_t r = 0; r < rows; ++r)
            if (score[r] > top.threshold()) top.offer(score[r], first_item + r);
    return {peak, sum(weight), sum(moment)};
}

// The score of one item in single precision, its sum over the draws in double.
template <class Element>
float exact_score(const GalleryParams& params, std::int64_t query, std::int64_t item) {
    const Element* const row = static_cast<const Element*>(params.gallery) + item * params.dim;
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    for (std::int64_t m = query * params.draws; m < (query + 1) * params.draws; ++m) {
        const double bias = params.sample_bias ? std::max(params.sample_bias[m], kLowest) : 0.0;
        const double value = params.kappa * static_cast<double>(inner_product(row, params.samples + m * params.dim, params.dim)) + bias;
        const double common = std::max(top, value);
        total = total * std::exp(top - common) + std::exp(value - common);
        top = common;
    }
    const double bias = params.bias ? params.bias[item] : 0.0;
    return static_cast<float>(top + std::log(total / static_cast<double>(params.draws)) + bias);
}

// Streams the items once. Products that are not exact serve for all items but the best ones of each query: a few more of these than
// are asked for are kept, and in the end scored again in single precision, also within the sums.
template <class Products, class Element>
class GallerySolver {
  public:
    GallerySolver(const GalleryParams& params, const GalleryStatistics& result)
        : params_(params),
          result_(result),
          scorer_(params),
          kept_(Products::kExact ? result.top_k : least(params.items, result.top_k + std::max<std::int64_t>(result.top_k, kSpare))),
          top_(params.threads, std::vector<TopItems>(params.queries, TopItems(kept_))),
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
#pragma omp parallel for num_threads(params_.threads) schedule(static)
        for (std::int64_t q = 0; q < params_.queries; ++q) read_out_top(q);
        return true;
    }

  private:
    static constexpr std::int64_t kSpare = 16;
    static constexpr double kSumRounding = 1e-6;  // of a sum of exponentials, relative

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
        std::vector<const TopItems*> parts;
        for (const std::vector<TopItems>& mine : top_) parts.push_back(&mine[query]);
        std::vector<Candidate> all = best_of(parts, kept_);
        if constexpr (!Products::kExact) correct(query, all);
        for (std::int64_t k = 0; k < result_.top_k; ++k) {
            const bool there = k < static_cast<std::int64_t>(all.size());
            result_.top_score[query * result_.top_k + k] = there ? all[k].score : std::nan("");
            result_.top_index[query * result_.top_k + k] = there ? all[k].index : -1;
        }
    }

    // Replaces the scores of the best items by exact ones, in the list, which is sorted again, and in the query's sums.
    void correct(std::int64_t query, std::vector<Candidate>& all) const {
        double &peak = result_.peak[query], &weight = result_.weight[query], &moment = result_.moment[query];
        if (!std::isfinite(weight + moment)) return;  // as the caller must learn
        const double noise = kSumRounding * weight;
        add(all, peak, -1.0, weight, moment);
        if (weight < noise) weight = moment = 0;  // nothing but these items
        for (Candidate& item : all) item.score = exact_score<Element>(params_, query, item.index);
        if (!std::all_of(all.begin(), all.end(), [](const Candidate& item) { return std::isfinite(item.score); })) {
            weight = std::nan("");
            return;
        }
        std::sort(all.begin(), all.end(), better);
        const double shift = peak - all.front().score, scale = std::exp(shift);
        moment = scale * (moment + shift * weight);
        weight *= scale;
        peak = all.front().score;
        add(all, peak, 1.0, weight, moment);
    }

    static void add(const std::vector<Candidate>& items, double peak, double sign, double& weight, double& moment) {
        for (const Candidate& item : items) {
            const double below = item.score - peak, mass = sign * std::exp(below);
            weight += mass;
            moment += mass * below;
        }
    }

    const GalleryParams& params_;
    const GalleryStatistics& result_;
    PanelScorer<Products, Element> scorer_;
    const std::int64_t kept_;                  // items of a query
    std::vector<std::vector<TopItems>> top_;   // per thread: [queries]
    std::vector<PanelStatistics> statistics_;  // [panels of the slice, queries of the block]
};

// Scores [queries, items] themselves.
template <class Element>
bool store_scores(const GalleryParams& params, float* scores) {
    PanelScorer<SingleProducts, Element> scorer(params);
    const auto keep = [&](std::int64_t query, std::int64_t item, std::int64_t rows, const float(&score)[kPanelRows]) {
        std::copy(score, score + rows, scores + query * params.items + item);
    };
    for (std::int64_t query = 0; query < params.queries; query += scorer.block_queries())
        if (!scorer.run(0, params.items, query, least(scorer.block_queries(), params.queries - query), keep)) return false;
    return true;
}

template <class Products>
bool stream_posterior(const GalleryParams& params, const GalleryStatistics& result) {
    return by_storage(params.storage, [&](auto element) { return GallerySolver<Products, decltype(element)>(params, result).run(); });
}

const geoflow::GalleryKernels kGalleryKernels = {
    stream_posterior<SingleProducts>,
    [](const GalleryParams& params, float* scores) {
        return by_storage(params.storage, [&](auto element) { return store_scores<decltype(element)>(params, scores); });
    },
};

}  // namespace
