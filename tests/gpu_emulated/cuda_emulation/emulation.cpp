#include "emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// Switching stacks takes a few instructions of assembly, or the thirteen times slower ucontext where nobody wrote them.
#if defined(__x86_64__) && !defined(EMULATION_PORTABLE)
#define EMULATION_ASSEMBLY
#else
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize_thread, noinline))
#else
#define UNSEEN
#endif

// ThreadSanitizer must see the kernels' accesses and nothing of the machinery here, which all fibers share without
// order: functions that fibers call are UNSEEN, and what they leave is picked up by the scheduler, which is UNSEEN too.

namespace emulation {
namespace {

// Code for sanitizers is compiled without optimisation and keeps every register of a translated kernel in memory.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStackBytes = 256 << 10;
#else
constexpr std::size_t kStackBytes = 64 << 10;
#endif
constexpr std::size_t kArenaBytes = 64 << 20;
constexpr std::size_t kRedZone = 64;
constexpr int kMaxArrays = 16, kMaxCopies = 128;
constexpr int kMostWaitingRounds = 100000;  // in which nobody did anything but look at memory

enum class State : int { ready, at_warp, at_block, at_grid, finished, passing };

struct Block {
    int waiting = 0, finished = 0;
    unsigned phase = 0;
    char order[2];  // what ThreadSanitizer sees of the barrier: two, so that a fast thread's next arrival does not
                    // count for this one
    int arrays = 0;
    const void* site[kMaxArrays];
    void* array[kMaxArrays];
    void* dynamic = nullptr;
    std::size_t shared = 0;  // bytes
};

struct Warp {
    int waiting = 0, finished = 0;
};

struct Waiting {
    Copy copy;
    int group;
};

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Position position{};
    Block* block = nullptr;
    Warp* warp = nullptr;
    int first_of_warp = 0;
    State state = State::ready;
    Meeting finish = nullptr;
    void* brought = nullptr;
    int site = 0;
    Waiting* copies =
        nullptr;  // [kMaxCopies], allocated with the fiber: kept apart so that fibers stay small and in cache
    int copy_count = 0, open_group = 0;
#if defined(__SANITIZE_THREAD__)
    void* sanitizer = nullptr;
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
#endif
#if !defined(EMULATION_ASSEMBLY)
    ucontext_t context;
#endif
};

Schedule schedule_kind = Schedule::forward;
std::uint64_t random_state;
const std::function<void()>* kernel_body;
std::vector<Fiber> fibers;
std::vector<Waiting> waiting_copies;
std::vector<Warp> warps;
std::vector<Block> blocks;
Fiber* current;
int grid_waiting;
unsigned grid_phase;
char grid_order[2];
char launch_order[2];  // begin, end
std::size_t dynamic_bytes;
char* arena;
std::size_t arena_used;
#if defined(__SANITIZE_THREAD__)
void* scheduler_sanitizer;
#endif
#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack;
std::size_t scheduler_stack_bytes;
void* scheduler_fake_stack;
#endif
void* scheduler_stack_pointer;
#if !defined(EMULATION_ASSEMBLY)
ucontext_t scheduler_context;
#endif

// xorshift64*: written out here because ThreadSanitizer would see the standard library's.
UNSEEN std::uint64_t random_bits() {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (random_state * 0x2545f4914f6cdd1dull) >> 16;
}

void synchronise(bool release, void* order) {
#if defined(__SANITIZE_THREAD__)
    if (release) {
        __tsan_release(order);
    } else {
        __tsan_acquire(order);
    }
#else
    static_cast<void>(release), static_cast<void>(order);
#endif
}

#if defined(EMULATION_ASSEMBLY)
// Saves the callee-saved registers on the old stack and takes those on the new one.
extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch, .-emulation_switch
.section .note.GNU-stack,"",@progbits
.text
)");
#endif

UNSEEN void to_scheduler() {
    Fiber* self = current;
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(self->state == State::finished ? nullptr : &self->fake_stack, scheduler_stack,
                                   scheduler_stack_bytes);
#endif
#if defined(EMULATION_ASSEMBLY)
    emulation_switch(&self->stack_pointer, scheduler_stack_pointer);
#else
    swapcontext(&self->context, &scheduler_context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self->fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

UNSEEN void to_fiber(Fiber& fiber) {
    current = &fiber;
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fiber.sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, kStackBytes);
#endif
#if defined(EMULATION_ASSEMBLY)
    emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer);
#else
    swapcontext(&scheduler_context, &fiber.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

UNSEEN void mark(State state) { current->state = state; }

UNSEEN void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    synchronise(false, &launch_order[0]);
    (*kernel_body)();
    synchronise(true, &launch_order[1]);
    mark(State::finished);
    to_scheduler();
    std::abort();
}

// `skip` moves the stack's top down by another amount per fiber, or all would compete for the same lines of the cache.
UNSEEN void prepare(Fiber& fiber, char* stack, std::size_t skip) {
    fiber.stack = stack;
#if defined(EMULATION_ASSEMBLY)
    // As if emulation_switch had been called from fiber_main's caller: six registers, then the address to return to.
    // The stack is 16-byte aligned before the call that a function expects to have brought it there.
    void** top = reinterpret_cast<void**>(stack + kStackBytes - skip) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);
    fiber.stack_pointer = top - 6;
    std::memset(fiber.stack_pointer, 0, 6 * sizeof(void*));
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
#endif
#if defined(__SANITIZE_THREAD__)
    fiber.sanitizer = __tsan_create_fiber(0);
#endif
}

// Shared memory: exact size, red zones for AddressSanitizer on both sides, every byte 0xff (a NaN as float, -1 as int).
UNSEEN void* allocate_shared(std::size_t bytes) {
    const std::size_t start = (arena_used + kRedZone + 127) / 128 * 128;
    require(start + bytes + kRedZone <= kArenaBytes, "shared memory of all blocks exceeds the arena");
    volatile char* start_byte = arena + start;
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(arena + arena_used, start - arena_used);
    __asan_unpoison_memory_region(arena + start, bytes);
    __asan_poison_memory_region(arena + start + bytes, kRedZone);
#endif
    for (std::size_t k = 0; k < bytes; ++k) start_byte[k] = static_cast<char>(0xff);
    arena_used = start + bytes;
    return arena + start;
}

UNSEEN float bits_to_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// 2^exponent, and the exponent of a number that is not zero.
UNSEEN double power_of_two(int exponent) {
    const std::uint64_t bits = static_cast<std::uint64_t>(exponent + 1023) << 52;
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

UNSEEN int exponent_of(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<int>(bits >> 52 & 0x7ff) - 1023;
}

// sum + products in a tensor core: all terms are cut off at the last bit that a float32 of the largest term has, added,
// and cut off again. Newer cores keep a bit or two more.
UNSEEN float add_truncated(float sum, const double* products, int count) {
    int largest = sum == 0.0f ? -200 : exponent_of(sum);
    for (int k = 0; k < count; ++k) {
        if (products[k] != 0.0 && exponent_of(products[k]) > largest) largest = exponent_of(products[k]);
    }
    if (largest <= -126) return sum;  // nothing to add
    if (largest >= 128) {             // not all are numbers: the sum is none either, or infinite
        double total = sum;
        for (int k = 0; k < count; ++k) total += products[k];
        return static_cast<float>(total);
    }
    const double unit = power_of_two(23 - largest);
    std::int64_t total = static_cast<std::int64_t>(sum * unit);
    for (int k = 0; k < count; ++k) total += static_cast<std::int64_t>(products[k] * unit);
    std::int64_t kept = total < 0 ? -total : total, bit = 1;
    while (kept / bit >= std::int64_t{1} << 24) bit *= 2;
    kept = kept / bit * bit;
    return static_cast<float>(static_cast<double>(total < 0 ? -kept : kept) / unit);
}

// The numbers of a register: one, or two of 16 bits.
UNSEEN void unpack(Number number, std::uint32_t bits, double* target) {
    if (number == Number::cut_tf32) {
        target[0] = bits_to_float(bits & ~0x1fffu);
    } else if (number == Number::float16) {
        target[0] = half_to_float(static_cast<std::uint16_t>(bits));
        target[1] = half_to_float(static_cast<std::uint16_t>(bits >> 16));
    } else {
        target[0] = bits_to_float(bits << 16);
        target[1] = bits_to_float(bits & 0xffff0000u);
    }
}

UNSEEN void multiply_warp(void* const* brought) {
    const auto lanes = [brought](int lane) -> const Fragments& { return *static_cast<const Fragments*>(brought[lane]); };
    const Number number = lanes(0).number;
    const int words = number < Number::float16 ? 1 : 2;  // numbers in a register
    double a[16][16], b[8][16];                        // rows of the one, columns of the other
    const auto place = [number](double* target, std::uint32_t bits) { unpack(number, bits, target); };
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane / 4, member = lane % 4;
        const Fragments& f = lanes(lane);
        require(f.number == number, "lanes of a warp multiply numbers of different types");
        for (int k = 0; k < 4; ++k) place(a[group + k % 2 * 8] + (member + k / 2 * 4) * words, f.a[k]);
        for (int k = 0; k < 2; ++k) place(b[group] + (member + k * 4) * words, f.b[k]);
    }
    const int together = 4 * words;  // products that sm_80 adds at a time
    for (int lane = 0; lane < 32; ++lane) {
        for (int k = 0; k < 4; ++k) {
            const int row = lane / 4 + k / 2 * 8, col = lane % 4 * 2 + k % 2;
            float sum = lanes(lane).sum[k];
            for (int first = 0; first < 8 * words; first += together) {
                double products[8];
                for (int i = 0; i < together; ++i) products[i] = a[row][first + i] * b[col][first + i];
                sum = add_truncated(sum, products, together);
            }
            lanes(lane).sum[k] = sum;
        }
    }
}

struct Offer {
    std::uint64_t value, received;
    int source;
};

UNSEEN void exchange_offers(void* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
        Offer& mine = *static_cast<Offer*>(lanes[lane]);
        mine.received = static_cast<const Offer*>(lanes[mine.source])->value;
    }
}

UNSEEN void finish_warp(Fiber* lanes) {
    void* brought[32];
    for (int lane = 0; lane < 32; ++lane) {
        require(lanes[lane].finish == lanes[0].finish && lanes[lane].site == lanes[0].site,
                "lanes of a warp meet in different instructions");
        brought[lane] = lanes[lane].brought;
    }
    lanes[0].finish(brought);
    for (int lane = 0; lane < 32; ++lane) lanes[lane].state = State::ready;
}

// Counts a fiber that has just stopped and releases those whose meeting is complete.
UNSEEN void account(Fiber& fiber, int threads) {
    const int count = static_cast<int>(fibers.size());
    switch (fiber.state) {
        case State::at_warp:
            if (++fiber.warp->waiting == 32) {
                fiber.warp->waiting = 0;
                finish_warp(&fibers[fiber.first_of_warp]);
            }
            break;
        case State::at_block:
            if (++fiber.block->waiting == threads) {
                fiber.block->waiting = 0;
                ++fiber.block->phase;
                for (Fiber& other : fibers) {
                    if (other.block == fiber.block) other.state = State::ready;
                }
            }
            break;
        case State::at_grid:
            if (++grid_waiting == count) {
                grid_waiting = 0;
                ++grid_phase;
                for (Fiber& other : fibers) other.state = State::ready;
            }
            break;
        default: break;
    }
}

UNSEEN void deadlock() {
    int count[6] = {};
    for (const Fiber& fiber : fibers) ++count[static_cast<int>(fiber.state)];
    std::fprintf(stderr,
                 "deadlock: %d threads wait in a warp, %d at a block's barrier, %d at the grid's, %d have returned, %d wait "
                 "for a change in memory\n",
                 count[1], count[2], count[3], count[4], count[5]);
    std::exit(3);
}

// Lets every fiber run until it stops, in the schedule's order, until all have returned.
UNSEEN void schedule(int threads) {
    const int count = static_cast<int>(fibers.size());
    std::vector<int> order(count);
    for (int k = 0; k < count; ++k) order[k] = schedule_kind == Schedule::reversed ? count - 1 - k : k;
    int finished = 0, waiting_rounds = 0;
    while (finished < count) {
        if (schedule_kind == Schedule::shuffled) {
            for (int k = count - 1; k > 0; --k)
                std::swap(order[k], order[random_bits() % static_cast<std::uint64_t>(k + 1)]);
        }
        bool moved = false, passed = false;
        for (int k = 0; k < count; ++k) {
            Fiber& fiber = fibers[order[k]];
            if (fiber.state != State::ready && fiber.state != State::passing) continue;
            fiber.state = State::ready;
            to_fiber(fiber);
            (fiber.state == State::passing ? passed : moved) = true;
            if (fiber.state == State::finished) ++finished;
            account(fiber, threads);
            if (schedule_kind == Schedule::greedy && k % 32 == 31 && fibers[k - 31].state == State::ready) k -= 32;
        }
        waiting_rounds = moved ? 0 : waiting_rounds + 1;
        if (!moved && (!passed || waiting_rounds > kMostWaitingRounds)) deadlock();
    }
}

UNSEEN void land(Fiber& fiber, int newest_group) {
    int kept = 0;
    for (int k = 0; k < fiber.copy_count; ++k) {
        if (fiber.copies[k].group > newest_group) fiber.copies[kept++] = fiber.copies[k];
    }
    fiber.copy_count = kept;
}

// The copy itself is the calling GPU thread's access, for the sanitizers too.
void perform(const Copy& copy) {
    std::memcpy(copy.target, copy.source, static_cast<std::size_t>(copy.valid));
    std::memset(static_cast<char*>(copy.target) + copy.valid, 0, static_cast<std::size_t>(copy.bytes - copy.valid));
}

UNSEEN const Copy* next_copy(int newest_group, int& cursor) {
    while (cursor < current->copy_count) {
        const int k = cursor++;
        if (current->copies[k].group <= newest_group) return &current->copies[k].copy;
    }
    return nullptr;
}

UNSEEN int oldest_needed(int pending) { return current->open_group - 1 - pending; }

UNSEEN bool arrives_at_once() {
    return schedule_kind == Schedule::reversed || (schedule_kind == Schedule::shuffled && random_bits() % 2 == 0);
}

UNSEEN void keep_copy(const Copy& copy) {
    require(current->copy_count < kMaxCopies, "more asynchronous copies under way than the emulation can hold");
    current->copies[current->copy_count++] = {copy, current->open_group};
}

UNSEEN void* block_order() { return &current->block->order[current->block->phase % 2]; }
UNSEEN void* grid_order_now() { return &grid_order[grid_phase % 2]; }

UNSEEN void set_up(const Launch& launch, int block_count) {
    blocks.assign(static_cast<std::size_t>(block_count), Block());
    warps.assign(static_cast<std::size_t>(block_count * launch.threads / 32), Warp());
    fibers.assign(static_cast<std::size_t>(block_count * launch.threads), Fiber());
    waiting_copies.resize(fibers.size() * kMaxCopies);
    arena_used = 0;
    grid_waiting = 0;
    dynamic_bytes = launch.dynamic_bytes;
    for (Block& block : blocks) {
        block.shared = dynamic_bytes;
        require(block.shared <= largest_shared, "a block has more shared memory than the device");
        block.dynamic = dynamic_bytes > 0 ? allocate_shared(dynamic_bytes) : nullptr;
    }
}

}  // namespace

UNSEEN float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // The exponent moves by 112; multiplying by a power of two makes denormal numbers normal ones, too.
    const float size = bits_to_float(rest << 13) * static_cast<float>(power_of_two(112));
    return sign != 0 ? -size : size;
}

UNSEEN std::uint16_t float_to_half(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    const float size = bits_to_float(bits & 0x7fffffffu);
    if (!(size == size)) return sign | 0x7e00u;
    if (size >= 65520.0f) return sign | 0x7c00u;
    if (size == 0.0f) return sign;
    // The place of the last bit that is kept: ten below the first, but no further down than 2^-24.
    const int last = std::max(exponent_of(size) - 10, -24);
    const double exact = size * power_of_two(-last);
    auto kept = static_cast<std::uint32_t>(exact);
    const double left = exact - kept;
    if (left > 0.5 || (left == 0.5 && kept % 2 == 1)) ++kept;
    // Normal numbers carry their first bit into the exponent, which starts at 1 for last = -24.
    return static_cast<std::uint16_t>(sign + static_cast<std::uint32_t>(last + 24) * 1024u + kept);
}

void require(bool condition, const char* message) {
    if (condition) return;
    std::fprintf(stderr, "emulation: %s\n", message);
    std::exit(3);
}

void use_schedule(Schedule schedule, std::uint64_t seed) {
    schedule_kind = schedule;
    random_state = 0x9e3779b97f4a7c15ull + seed;
}

UNSEEN void run(const Launch& launch, const std::function<void()>& kernel) {
    require(launch.threads % 32 == 0, "a block must consist of whole warps");
    const auto reserve = [](std::size_t bytes) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        require(memory != MAP_FAILED, "out of memory");
        return static_cast<char*>(memory);
    };
    if (arena == nullptr) arena = reserve(kArenaBytes);
    kernel_body = &kernel;
#if defined(__SANITIZE_THREAD__)
    scheduler_sanitizer = __tsan_get_current_fiber();
#endif
    const int together = launch.cooperative ? launch.blocks : 1;
    const std::size_t stack_bytes = kStackBytes * static_cast<std::size_t>(together * launch.threads);
    char* stacks = reserve(stack_bytes);
    for (int first = 0; first < launch.blocks; first += together) {
        set_up(launch, together);
        for (int k = 0; k < together * launch.threads; ++k) {
            Fiber& fiber = fibers[static_cast<std::size_t>(k)];
            fiber.position = {static_cast<unsigned>(k % launch.threads),
                              static_cast<unsigned>(first + k / launch.threads), static_cast<unsigned>(launch.blocks),
                              static_cast<unsigned>(launch.threads)};
            fiber.block = &blocks[static_cast<std::size_t>(k / launch.threads)];
            fiber.warp = &warps[static_cast<std::size_t>(k / 32)];
            fiber.first_of_warp = k / 32 * 32;
            fiber.copies = &waiting_copies[static_cast<std::size_t>(k) * kMaxCopies];
            prepare(fiber, stacks + kStackBytes * static_cast<std::size_t>(k),
                    static_cast<std::size_t>(k) * 192 % 8192);
        }
        synchronise(true, &launch_order[0]);
        schedule(launch.threads);
        synchronise(false, &launch_order[1]);
#if defined(__SANITIZE_THREAD__)
        for (Fiber& fiber : fibers) __tsan_destroy_fiber(fiber.sanitizer);
#endif
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(arena, kArenaBytes);
#endif
    }
    munmap(stacks, stack_bytes);
}

UNSEEN const Position& here() { return current->position; }

UNSEEN void* dynamic_shared() { return current->block->dynamic; }

UNSEEN std::size_t dynamic_shared_bytes() { return dynamic_bytes; }

UNSEEN char* shared_window() { return arena; }

UNSEEN void* shared_array(const void* site, std::size_t bytes) {
    Block& block = *current->block;
    for (int k = 0; k < block.arrays; ++k) {
        if (block.site[k] == site) return block.array[k];
    }
    require(block.arrays < kMaxArrays, "too many shared arrays");
    block.shared += bytes;
    require(block.shared <= largest_shared, "a block has more shared memory than the device");
    block.site[block.arrays] = site;
    return block.array[block.arrays++] = allocate_shared(bytes);
}

void block_barrier() {
    void* order = block_order();
    synchronise(true, order);
    mark(State::at_block);
    to_scheduler();
    synchronise(false, order);
}

void grid_barrier() {
    void* order = grid_order_now();
    synchronise(true, order);
    mark(State::at_grid);
    to_scheduler();
    synchronise(false, order);
}

void pass() {
    mark(State::passing);
    to_scheduler();
}

UNSEEN void meet(Meeting finish, void* mine, int site) {
    Fiber& self = *current;
    self.finish = finish;
    self.brought = mine;
    self.site = site;
    self.state = State::at_warp;
    to_scheduler();
}

UNSEEN std::uint64_t exchange_bits(std::uint64_t value, int source, int site) {
    Offer offer = {value, 0, source};
    meet(exchange_offers, &offer, site);
    return offer.received;
}

UNSEEN void warp_multiply(const Fragments& fragments, int site) {
    Fragments mine = fragments;
    meet(multiply_warp, &mine, site);
}

void copy_later(const Copy& copy) {
    if (arrives_at_once()) {
        perform(copy);
    } else {
        keep_copy(copy);
    }
}

UNSEEN void copy_commit() { ++current->open_group; }

void copy_wait(int pending) {
    const int newest = oldest_needed(pending);
    int cursor = 0;
    while (const Copy* copy = next_copy(newest, cursor)) perform(*copy);
    land(*current, newest);
}

}  // namespace emulation
