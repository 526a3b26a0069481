// What the processor at hand can do, asked once at run time, and which variant of a table of kernels it gets.
//
// Each family of kernels is a table of functions that is compiled twice from one header: in <family>.cpp for any processor, and in
// <family>_avx2.cpp with AVX2, FMA and F16C on x86-64. The table has internal linkage, so that neither file links to the other's
// functions; <family>_kernels() returns the one to use. The gallery posterior has a variant with bfloat16 products beside these, in
// gallery_avx512bf16.cpp, which is run where it is asked for.
#pragma once
#include <cstdlib>

namespace geoflow {

// True when the AVX2, FMA and F16C variants of the hot loops may run. GEOFLOW_AVX2=0 in the environment forbids them, so that
// the baseline variants can be tested and compared on any machine.
inline bool has_avx2_fma() {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool usable = [] {
        const char* wish = std::getenv("GEOFLOW_AVX2");
        if (wish != nullptr && wish[0] == '0') return false;
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    }();
    return usable;
#else
    return false;
#endif
}

// True when products in bfloat16 may run. GEOFLOW_AVX512BF16=0 forbids them, and so does GEOFLOW_AVX2=0.
inline bool has_avx512_bf16() {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool usable = [] {
        const char* wish = std::getenv("GEOFLOW_AVX512BF16");
        if (!has_avx2_fma() || (wish != nullptr && wish[0] == '0')) return false;
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
    }();
    return usable;
#else
    return false;
#endif
}

template <class Table>
const Table& fastest(const Table& baseline, const Table& avx2) {
    return has_avx2_fma() ? avx2 : baseline;
}

}  // namespace geoflow
