// What the processor at hand can do, asked once at run time, and which variant of a table of kernels it gets.
//
// Each family of kernels is a table of functions. Its source is compiled once for every target of targets.json, with the flags of that
// instruction set and GEOFLOW_TARGET as its name; the tables have internal linkage, so that no file links to another's functions.
// <family>_kernels() in dispatch.cpp returns the one to use.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#define GEOFLOW_JOIN_NAMES(a, b) a##_##b
#define GEOFLOW_JOIN(a, b) GEOFLOW_JOIN_NAMES(a, b)
// The function of a family that a source compiled for a target defines: gallery_kernels_avx2 for GEOFLOW_KERNELS(gallery_kernels).
#define GEOFLOW_KERNELS(family) GEOFLOW_JOIN(family, GEOFLOW_TARGET)
#define GEOFLOW_DECLARE_KERNELS(Table, family) \
    const Table& family();                     \
    const Table& family##_baseline();          \
    const Table& family##_avx2();              \
    const Table& family##_avx512();

namespace geoflow {

// Each has what those before it have. On 64-bit ARM the baseline is NEON.
enum class Isa : int { baseline, avx2, avx512, avx512vnni, avx512bf16 };

// The one whose kernels run: the best that the processor has, or the one that GEOFLOW_ISA names.
Isa isa();
// Names of those that this processor can run, the best last, and of the one that runs.
std::vector<std::string> supported_isas();
std::string isa_name();
// Why GEOFLOW_ISA cannot be obeyed; empty if it can.
std::string isa_problem();

// Whether MKL, with which torch multiplies float32 matrices, leaves half of this processor's width unused.
bool mkl_is_narrow();

inline bool has_avx512_vnni() { return isa() >= Isa::avx512vnni; }
inline bool has_avx512_bf16() { return isa() >= Isa::avx512bf16; }

// Bytes of the data caches: those of a core, and what cores share.
struct Caches {
    std::int64_t first, second, shared;
};
const Caches& caches();

// Memory of a multiple of 4096 bytes, aligned to that. What is given back is kept for later calls, up to a limit, so that calls one
// after the other neither allocate nor touch fresh pages.
void* take_scratch(std::size_t bytes);
void give_scratch(void* memory, std::size_t bytes);

}  // namespace geoflow
