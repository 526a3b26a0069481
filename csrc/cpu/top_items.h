// The best of a stream of scored items.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

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

// The best `count` of what all of `parts` hold, best first.
inline std::vector<Candidate> best_of(const std::vector<const TopItems*>& parts, std::int64_t count) {
    std::vector<Candidate> all;
    for (const TopItems* part : parts) all.insert(all.end(), part->candidates().begin(), part->candidates().end());
    std::sort(all.begin(), all.end(), better);
    if (static_cast<std::int64_t>(all.size()) > count) all.resize(count);
    return all;
}

}  // namespace
