// The part of GCC's OpenMP interface that csrc/cpu uses, on std::thread, so that ThreadSanitizer sees every thread start, join and
// barrier. GCC's own libgomp waits on futexes that the sanitizer does not know, and each barrier would be reported as a race.
//
// Iterations of a dynamic loop are handed out by relaxed atomics: OpenMP orders nothing between the iterations of two threads, and
// neither does this. Linked instead of libgomp; a construct that is not here is an error of the linker.
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kMostLoops = 256;  // work-sharing loops in one parallel region

struct Team {
    int size = 1;
    std::array<std::atomic<long>, kMostLoops> handed_out{};  // chunks of each loop, by the order in which they are met

    std::mutex mutex;
    std::condition_variable all_here;
    int waiting = 0;
    long barriers = 0;

    void barrier() {
        std::unique_lock<std::mutex> lock(mutex);
        const long mine = barriers;
        if (++waiting == size) {
            waiting = 0;
            ++barriers;
            all_here.notify_all();
        } else {
            all_here.wait(lock, [&] { return barriers != mine; });
        }
    }
};

struct Loop {
    long start, end, step, chunk;
    int number;
};

thread_local Team* team = nullptr;
thread_local int thread_in_team = 0;
thread_local int loops_met = 0;
thread_local Loop loop{};
std::mutex atomic_section;

bool next_chunk(long* first, long* last) {
    const long before = team->handed_out[loop.number].fetch_add(1, std::memory_order_relaxed);
    const long from = loop.start + before * loop.chunk * loop.step;
    if (loop.step > 0 ? from >= loop.end : from <= loop.end) return false;
    const long to = from + loop.chunk * loop.step;
    *first = from;
    *last = (loop.step > 0 ? to > loop.end : to < loop.end) ? loop.end : to;
    return true;
}

void run_member(Team* members, int number, void (*body)(void*), void* data) {
    team = members;
    thread_in_team = number;
    loops_met = 0;
    body(data);
    team = nullptr;
    thread_in_team = 0;
}

}  // namespace

extern "C" {

int omp_get_thread_num() { return thread_in_team; }
int omp_get_num_threads() { return team ? team->size : 1; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    if (team != nullptr || threads == 0) {
        std::fprintf(stderr, "a parallel region inside another, or of no stated size: csrc/cpu has neither\n");
        std::abort();
    }
    Team members;
    members.size = static_cast<int>(threads);
    std::vector<std::thread> others;
    for (int number = 1; number < members.size; ++number) others.emplace_back(run_member, &members, number, body, data);
    run_member(&members, 0, body, data);
    for (std::thread& other : others) other.join();
}

void GOMP_barrier() {
    if (team) team->barrier();
}

void GOMP_atomic_start() { atomic_section.lock(); }
void GOMP_atomic_end() { atomic_section.unlock(); }

bool GOMP_loop_dynamic_start(long start, long end, long step, long chunk, long* first, long* last) {
    if (loops_met == kMostLoops) std::abort();
    loop = {start, end, step, chunk, loops_met++};
    return next_chunk(first, last);
}
bool GOMP_loop_dynamic_next(long* first, long* last) { return next_chunk(first, last); }
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* first, long* last) {
    return GOMP_loop_dynamic_start(start, end, step, chunk, first, last);
}
bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) { return next_chunk(first, last); }
void GOMP_loop_end() { GOMP_barrier(); }
void GOMP_loop_end_nowait() {}

}  // extern "C"
