// A GPU's thread hierarchy on one CPU thread: every GPU thread is a fiber that runs until it meets a barrier, a shuffle
// or a warp-wide multiplication, and the scheduler decides who goes next. Kernels are the shipped headers, compiled by
// the host's compiler.
//
// What it finds: wrong indices and masks (results; AddressSanitizer on exact allocations, shared arrays each with red
// zones), reads of shared memory that nobody wrote (it starts as NaN), barriers that not all threads reach,
// asynchronous copies used before they were waited for (they arrive as late as allowed), results that depend on the
// order of threads (schedules), missing barriers (ThreadSanitizer: fibers know only barriers as order), blocks with more
// shared memory than the smallest device has, and what truncation in tensor cores does to sums. What it does not: weak
// memory order, bank conflicts, the last bits of approximate instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emulation {

struct Position {
    unsigned thread;  // in its block
    unsigned block;
    unsigned blocks;
    unsigned threads;  // of a block
};

enum class Schedule {
    forward,   // all threads in order, copies arrive when waited for
    reversed,  // last thread first, copies arrive at once
    shuffled,  // another random order every round, copies arrive at random
    greedy,    // one warp as far as it gets, then the next
};

struct Launch {
    int blocks;
    int threads;
    std::size_t dynamic_bytes;
    bool cooperative;  // all blocks alive together, grid_barrier allowed; else one after another
};

void use_schedule(Schedule schedule, std::uint64_t seed);
// Of a block, static and dynamic together; at first that of sm_86, sm_89 and sm_120, the least there is from sm_80 on.
inline std::size_t largest_shared = 99 << 10;
void run(const Launch& launch, const std::function<void()>& kernel);
// Prints the message and ends the process with status 3.
void require(bool condition, const char* message);

// For use by the calling GPU thread.
const Position& here();
void* shared_array(const void* site, std::size_t bytes);
void* dynamic_shared();
std::size_t dynamic_shared_bytes();
// Where the shared memory of all blocks lies: below 2^32 bytes, so that offsets serve as shared addresses.
char* shared_window();
void block_barrier();
void grid_barrier();
// Lets all others go on first, as a thread must that waits for a change in memory.
void pass();
// The lanes of a warp meet at the instruction `site`: `finish` is called once, with what each of the 32 brought.
using Meeting = void (*)(void* const* lanes);
void meet(Meeting finish, void* mine, int site = 0);
// What lane `source` offers.
std::uint64_t exchange_bits(std::uint64_t value, int source, int site = 0);

// All lanes of the warp offer `value`; the result is what lane `source` offered.
template <typename T>
T exchange(T value, int source) {
    static_assert(sizeof(T) <= 8);
    std::uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = exchange_bits(bits, source);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

struct Copy {
    void* target;
    const void* source;
    int bytes;
    int valid;  // the rest becomes zero
};
void copy_later(const Copy& copy);
void copy_commit();
void copy_wait(int pending);

// Fragments of mma.sync as one lane holds them: m16n8k8 with TF32 inputs, or m16n8k16 with pairs of 16-bit numbers.
// The hardware ignores the last 13 bits of a TF32 number; `cut_tf32` cuts them off.
enum class Number { cut_tf32, float16, bfloat16 };
struct Fragments {
    float* sum;              // [4]
    const std::uint32_t* a;  // [4]
    const std::uint32_t* b;  // [2]
    Number number;
};
// Sums as tensor cores do: a few products at a time, and towards zero.
void warp_multiply(const Fragments& fragments, int site = 0);

float half_to_float(std::uint16_t bits);
std::uint16_t float_to_half(float x);  // to the nearest, of two the even one

}  // namespace emulation
