// sin(x)/x, with internal linkage: an AVX2 copy must never be the one a baseline file links to.
#pragma once
#include <cmath>

namespace {

// By its series where the quotient loses digits.
inline double sinc(double x) {
    const double square = x * x;
    return square < 1e-4 ? 1 - square / 6 * (1 - square / 20 * (1 - square / 42)) : std::sin(x) / x;
}

}  // namespace
