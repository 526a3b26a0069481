// What the processor at hand can do, asked once at run time.
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

}  // namespace geoflow
