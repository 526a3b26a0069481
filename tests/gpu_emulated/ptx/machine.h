// What PTX instructions do: the vocabulary of the C++ that translate.py writes. Registers are plain bits; an
// instruction's type says how they are read. Threads are fibers of ../cuda_emulation/emulation.h, global addresses are
// the CPU's, and shared ones are offsets into the emulation's shared memory.
//
// Every access to memory must be aligned to its size, as the hardware demands, and, where the launch has listed its
// tensors, must touch their elements alone.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "emulation.h"

namespace ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
__extension__ using s128 = __int128;
__extension__ using u128 = unsigned __int128;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using f32 = float;
using f64 = double;
using pred = bool;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

// ---- registers ----

template <int kBytes>
using Bits = std::conditional_t<kBytes == 1, u8, std::conditional_t<kBytes == 2, u16, std::conditional_t<kBytes == 4, u32, u64>>>;

// A register, or a constant, as an instruction of type T reads it.
template <typename T, typename From>
inline T as(From bits) {
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(bits);
    } else {
        return std::bit_cast<T>(static_cast<Bits<sizeof(T)>>(bits));
    }
}

// What a register holds after an instruction of type T has written to it: narrower results are extended.
template <typename Register, typename T>
inline Register bits(T value) {
    if constexpr (std::is_integral_v<T>) {
        return static_cast<Register>(value);
    } else {
        return std::bit_cast<Bits<sizeof(T)>>(value);
    }
}

[[noreturn]] inline void fail(int line, const char* what) {
    std::fprintf(stderr, "PTX line %d: %s\n", line, what);
    std::exit(3);
}

// ---- where a thread is ----

struct Grid {
    u32 y = 1, z = 1;
};
inline Grid grid;  // of the launch; emulated blocks are numbered along x first
// Cooperative launches find a word for the barrier of the grid behind the first one here.
alignas(16) inline u32 grid_workspace[4];

inline u32 tid_x() { return emulation::here().thread; }
inline u32 ntid_x() { return emulation::here().threads; }
inline u32 laneid() { return emulation::here().thread % 32; }
inline u32 nctaid_x() { return emulation::here().blocks / (grid.y * grid.z); }
inline u32 nctaid_y() { return grid.y; }
inline u32 nctaid_z() { return grid.z; }
inline u32 ctaid_x() { return emulation::here().block % nctaid_x(); }
inline u32 ctaid_y() { return emulation::here().block / nctaid_x() % grid.y; }
inline u32 ctaid_z() { return emulation::here().block / nctaid_x() / grid.y; }
constexpr u32 tid_y() { return 0; }
constexpr u32 tid_z() { return 0; }
constexpr u32 ntid_y() { return 1; }
constexpr u32 ntid_z() { return 1; }
inline u32 envreg1() { return static_cast<u32>(reinterpret_cast<u64>(grid_workspace) >> 32); }
inline u32 envreg2() { return static_cast<u32>(reinterpret_cast<u64>(grid_workspace)); }

// ---- memory ----

// Addresses of the two kinds, so that no instruction takes one for the other.
struct global {
    u64 at;
};
struct shared {
    u32 at;
};
struct parameter {
    const u8* at;
};

// Memory that a launch was given; `owned` has a byte for each of its bytes.
struct Region {
    u64 begin, end;
    const u8* owned;
};
inline std::vector<Region> regions;

inline u64 shared_window() { return reinterpret_cast<u64>(emulation::shared_window()); }
inline u32 shared_address(const void* pointer) { return static_cast<u32>(reinterpret_cast<u64>(pointer) - shared_window()); }

inline bool belongs(u64 at, u64 bytes) {
    if (regions.empty()) return true;  // AddressSanitizer knows
    for (const Region& region : regions) {
        if (at < region.begin || at + bytes > region.end) continue;
        for (u64 k = at - region.begin; k < at - region.begin + bytes; ++k) {
            if (region.owned[k] == 0) return false;
        }
        return true;
    }
    return false;
}

template <typename T>
inline T* place(global address, int count, int line) {
    const u64 bytes = sizeof(T) * static_cast<u64>(count);
    if (address.at % bytes != 0) fail(line, "an access to global memory is not aligned to its size");
    if (!belongs(address.at, bytes)) fail(line, "an access to global memory outside the kernel's tensors");
    return reinterpret_cast<T*>(address.at);
}

template <typename T>
inline T* place(shared address, int count, int line) {
    if (address.at % (sizeof(T) * static_cast<u32>(count)) != 0)
        fail(line, "an access to shared memory is not aligned to its size");
    return reinterpret_cast<T*>(shared_window() + address.at);
}

template <typename T>
inline const T* place(parameter address, int, int) {
    return reinterpret_cast<const T*>(address.at);
}

template <typename T, int kCount, typename Address>
inline auto load(Address address, int line) {
    const T* source = place<T>(address, kCount, line);
    if constexpr (kCount == 1) {
        return *source;
    } else {
        std::array<T, kCount> values;
        for (int k = 0; k < kCount; ++k) values[k] = source[k];
        return values;
    }
}

// Whether memory holds what is to be stored. ThreadSanitizer does not see these reads.
#if defined(__SANITIZE_THREAD__)
template <typename T>
__attribute__((no_sanitize_thread, noinline)) bool holds(const T* target, T value) {
    return *reinterpret_cast<const Bits<sizeof(T)>*>(target) == std::bit_cast<Bits<sizeof(T)>>(value);
}
#else
template <typename T>
constexpr bool holds(const T*, T) {
    return false;
}
#endif

// Triton lets all threads that have a copy of a value store it, so what another has stored already is not stored again:
// ThreadSanitizer would call it a race, which nobody can lose. CUDA kernels, whose launches list no tensors, do not.
template <typename T>
inline void store_one(T* target, T value) {
    if (regions.empty() || !holds(target, value)) *target = value;
}

template <typename T, int kCount, typename Address, typename Values>
inline void store(Address address, const Values& values, int line) {
    T* target = place<T>(address, kCount, line);
    if constexpr (kCount == 1) {
        store_one<T>(target, values);
    } else {
        for (int k = 0; k < kCount; ++k) store_one<T>(target + k, values[k]);
    }
}

enum class Order { relaxed = __ATOMIC_RELAXED, acquire = __ATOMIC_ACQUIRE, release = __ATOMIC_RELEASE,
                   acq_rel = __ATOMIC_ACQ_REL, seq_cst = __ATOMIC_SEQ_CST };
enum class Update { add, min, max, exch, inc };

// Threads that look at memory in a certain order may be waiting for others, so these go on first.
template <typename T, Order kOrder, typename Address>
inline T load_ordered(Address address, int line) {
    const auto* source = place<Bits<sizeof(T)>>(address, 1, line);
    emulation::pass();
    return as<T>(__atomic_load_n(source, static_cast<int>(kOrder)));
}

template <Order kOrder, typename Address, typename T>
inline void store_ordered(Address address, T value, int line) {
    auto* target = place<Bits<sizeof(T)>>(address, 1, line);
    __atomic_store_n(target, bits<Bits<sizeof(T)>>(value), static_cast<int>(kOrder));
}

// Returns what was there before.
template <Update kUpdate, Order kOrder, typename Address, typename T>
inline T update(Address address, T value, int line) {
    using Word = Bits<sizeof(T)>;
    Word* target = place<Word>(address, 1, line);
    emulation::pass();
    Word before = __atomic_load_n(target, __ATOMIC_RELAXED), after;
    do {
        const T old = as<T>(before);
        T next = value;
        if constexpr (kUpdate == Update::add) next = old + value;
        if constexpr (kUpdate == Update::min) next = std::min(old, value);
        if constexpr (kUpdate == Update::max) next = std::max(old, value);
        if constexpr (kUpdate == Update::inc) next = old >= value ? 0 : old + 1;
        after = bits<Word>(next);
    } while (!__atomic_compare_exchange_n(target, &before, after, false, static_cast<int>(kOrder), __ATOMIC_RELAXED));
    return as<T>(before);
}

inline void copy_async(shared target, global source, u32 bytes, u32 valid, int line) {
    if (valid > bytes) fail(line, "an asynchronous copy of more bytes than there is room for");
    void* to = reinterpret_cast<void*>(shared_window() + target.at);
    if (target.at % bytes != 0) fail(line, "an asynchronous copy to a misaligned address");
    if (valid > 0 && source.at % bytes != 0) fail(line, "an asynchronous copy from a misaligned address");
    if (valid > 0 && !belongs(source.at, valid)) fail(line, "an asynchronous copy from outside the kernel's tensors");
    emulation::copy_later({to, reinterpret_cast<const void*>(source.at), static_cast<int>(bytes), static_cast<int>(valid)});
}

inline void wait_for_all_copies() {
    emulation::copy_commit();
    emulation::copy_wait(0);
}

// ---- barriers, and what the lanes of a warp do together ----

inline void block_barrier(u32 number, int line) {
    if (number != 0) fail(line, "only barrier 0 is emulated");
    emulation::block_barrier();
}

inline void require_whole_warp(u32 lanes, int line) {
    if (lanes != ~0u) fail(line, "only whole warps are emulated");
}

// Order in memory comes from the atomic operations beside the fence, which carry their own here.
inline void fence() {}

enum class Shuffle { up, down, bfly, idx };
struct Shuffled {
    u32 value;
    bool inside;
};

template <Shuffle kMode>
inline Shuffled shuffle(u32 value, u32 which, u32 limits, u32 lanes, int line) {
    require_whole_warp(lanes, line);
    const u32 lane = laneid(), by = which % 32, segment = limits >> 8 & 31;
    const u32 first = lane & segment, last = first | (limits & 31 & ~segment);
    const s32 source = kMode == Shuffle::up     ? static_cast<s32>(lane) - static_cast<s32>(by)
                       : kMode == Shuffle::down ? static_cast<s32>(lane + by)
                       : kMode == Shuffle::bfly ? static_cast<s32>(lane ^ by)
                                                : static_cast<s32>(first | (by & ~segment));
    const bool inside = kMode == Shuffle::up ? source >= static_cast<s32>(last) : source <= static_cast<s32>(last);
    const u64 received = emulation::exchange_bits(value, inside ? source : static_cast<s32>(lane), line);
    return {static_cast<u32>(received), inside};
}

enum class Reduction { add, min, max, any };

template <Reduction kKind, typename T>
inline T reduce_warp(T value, u32 lanes, int line) {
    require_whole_warp(lanes, line);
    for (u32 step = 16; step > 0; step /= 2) {
        const T other = as<T>(emulation::exchange_bits(bits<u32>(value), static_cast<int>(laneid() ^ step), line));
        if constexpr (kKind == Reduction::add) value = static_cast<T>(static_cast<u32>(value) + static_cast<u32>(other));
        if constexpr (kKind == Reduction::min) value = std::min(value, other);
        if constexpr (kKind == Reduction::max) value = std::max(value, other);
        if constexpr (kKind == Reduction::any) value |= other;
    }
    return value;
}

inline u32 vote(bool ballot, u32 lanes, int line) {
    return reduce_warp<Reduction::any>(ballot ? 1u << laneid() : 0u, lanes, line);
}

// Orders the warp's accesses to memory, for which a ballot that nobody counts will do.
inline void warp_barrier(u32 lanes, int line) { vote(false, lanes, line); }

// Lane 8 k + r brings the address of row r of matrix k; lane 4 r + c of the warp is given entries 2 c and 2 c + 1 of row
// r of each matrix, or, turned, entries r of rows 2 c and 2 c + 1.
template <int kCount, bool kTurned>
inline auto load_matrix(shared row, int line) {
    std::array<u32, kCount> values;
    const u32 lane = laneid();
    for (u32 k = 0; k < kCount; ++k) {
        const auto row_of = [&](u32 r) {
            const auto at = static_cast<u32>(emulation::exchange_bits(row.at, static_cast<int>(8 * k + r), line));
            if (at % 16 != 0) fail(line, "a row of a matrix in shared memory is not aligned to 16 bytes");
            return reinterpret_cast<const u16*>(shared_window() + at);
        };
        if constexpr (kTurned) {
            const u16 low = row_of(lane % 4 * 2)[lane / 4], high = row_of(lane % 4 * 2 + 1)[lane / 4];
            values[k] = low | static_cast<u32>(high) << 16;
        } else {
            const u16* source = row_of(lane / 4) + lane % 4 * 2;
            values[k] = source[0] | static_cast<u32>(source[1]) << 16;
        }
    }
    return values;
}

inline std::array<f32, 4> multiply(emulation::Number number, const std::array<u32, 4>& a, const std::array<u32, 2>& b,
                                   std::array<f32, 4> sum, int line) {
    emulation::warp_multiply({sum.data(), a.data(), b.data(), number}, line);
    return sum;
}

// ---- arithmetic that C++ has no operator for ----

inline u32 bit_field(u32 a, u32 start, u32 count) {
    start %= 256, count %= 256;
    const u32 shifted = start < 32 ? a >> start : 0;
    return count < 32 ? shifted & ((1u << count) - 1) : shifted;
}

inline s32 signed_bit_field(s32 a, u32 start, u32 count) {
    start %= 256, count %= 256;
    if (count == 0) return 0;
    const u32 top = std::min(start + count - 1, 31u);  // beyond the register its sign goes on
    const u32 field = bit_field(static_cast<u32>(a), start, count);
    const bool negative = static_cast<u32>(a) >> top & 1;
    return static_cast<s32>(negative && count < 32 ? field | ~0u << count : field);
}

template <typename T>
inline T insert_bit_field(T field, T into, u32 start, u32 count) {
    constexpr u32 kWidth = 8 * sizeof(T);
    start %= 256, count %= 256;
    if (start >= kWidth) return into;
    const T mask = (count < kWidth ? (T{1} << count) - 1 : ~T{0}) << start;
    return (into & ~mask) | (field << start & mask);
}

// Each four bits of `which` name a byte of b:a; the highest of them spreads its sign.
inline u32 permute_bytes(u32 a, u32 b, u32 which) {
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 result = 0;
    for (u32 k = 0; k < 4; ++k) {
        const u32 choice = which >> 4 * k & 15;
        u32 byte = static_cast<u32>(bytes >> 8 * (choice & 7)) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * k;
    }
    return result;
}

inline u32 look_up(u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (u32 k = 0; k < 8; ++k) {
        if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    }
    return result;
}

inline f32 flush(f32 x) { return std::fabs(x) < std::numeric_limits<f32>::min() ? std::copysign(0.0f, x) : x; }

// Cut off, kept within the type's range, and 0 if it is no number.
template <typename T, typename From>
inline T to_integer(From x) {
    if (x != x) return 0;
    if (x <= static_cast<From>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
    if (x >= static_cast<From>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
    return static_cast<T>(x);
}

inline f32 widen(f16 x) { return emulation::half_to_float(x.bits); }
inline f32 widen(bf16 x) { return std::bit_cast<f32>(static_cast<u32>(x.bits) << 16); }

template <typename T>
inline T narrow(f32 x) {
    if constexpr (std::is_same_v<T, f16>) {
        return {emulation::float_to_half(x)};
    } else {
        const u32 all = std::bit_cast<u32>(x);
        if (x != x) return {0x7fff};
        return {static_cast<u16>((all + 0x7fff + (all >> 16 & 1)) >> 16)};
    }
}

// To the nearest of TF32's ten bits of fraction, of two away from zero.
inline u32 round_to_tf32(u32 all) { return (all & 0x7fffffff) > 0x7f800000 ? 0x7fffffff & ~0x1fffu : (all + 0x1000) & ~0x1fffu; }

// `exact`, off by as much as the instruction may be, up or down as the operand's bits decide: a result that depends on
// more than is promised does not agree with float64.
inline f32 approximate(f64 exact, f32 operand, f64 error) {
    const u32 mixed = std::bit_cast<u32>(operand) * 2654435761u;
    if (operand == 0.0f || !std::isfinite(exact)) return static_cast<f32>(exact);
    const f64 rough = exact * (mixed >> 31 ? 1 + error : 1 - error);
    // What the exact result is bound by, the rough one is, too: a power of two is hit, and nothing turns infinite.
    return static_cast<f32>(std::fabs(rough) > std::numeric_limits<f32>::max() ? exact : rough);
}

// The upper half of the reciprocal of the upper half.
inline f64 rough_reciprocal(f64 x) {
    constexpr u64 kUpper = 0xffffffff00000000ull;
    return as<f64>(bits<u64>(1 / as<f64>(bits<u64>(x) & kUpper)) & kUpper);
}

// Within 2^-22 between 0.5 and 2, relatively elsewhere.
inline f32 approximate_log2(f32 x) {
    const f64 exact = std::log2(f64(x));
    if (x > 0.5f && x < 2.0f) return static_cast<f32>(exact + (std::bit_cast<u32>(x) * 2654435761u >> 31 ? 2.3e-7 : -2.3e-7));
    return approximate(exact, x, 1.6e-7);
}

// ---- which instructions ran, and what kernels were given ----

// Of the first thread of a launch: adds its kernel, threads, blocks, dynamic shared memory and parameters to the file
// that GEOFLOW_PTX_PARAMETERS names.
inline void note_launch(const char* kernel, const u8* parameters, int bytes) {
    const emulation::Position& here = emulation::here();
    const char* path = here.thread == 0 && here.block == 0 ? std::getenv("GEOFLOW_PTX_PARAMETERS") : nullptr;
    if (path == nullptr) return;
    if (std::FILE* file = std::fopen(path, "a")) {
        std::fprintf(file, "%s %u %u %zu ", kernel, here.threads, here.blocks, emulation::dynamic_shared_bytes());
        for (int k = 0; k < bytes; ++k) std::fprintf(file, "%02x", parameters[k]);
        std::fputc('\n', file);
        std::fclose(file);
    }
}

}  // namespace ptx
