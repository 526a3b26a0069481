// What the processor at hand can do, asked once at run time.
#pragma once

namespace geoflow {

// True when the AVX2, FMA and F16C variants of the hot loops may run.
inline bool has_avx2_fma() {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool present =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return present;
#else
    return false;
#endif
}

}  // namespace geoflow
