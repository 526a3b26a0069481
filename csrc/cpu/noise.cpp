// Normal numbers by counters, compiled once for every target: Philox 4x32-10, whose words Box and Muller's transform turns into normal
// numbers. A row depends on its counter alone, so the result is the same for any number of threads.
#include "noise.h"

#include <cmath>

#include "cpu/gemm.h"
#include "cpu/simd.h"

namespace {

using geoflow::NoiseParams;

typedef std::uint64_t products __attribute__((vector_size(8 * kLanes)));

// One round: the high and the low words of two products, mixed with the other words and the keys.
GEOFLOW_INLINE void philox_round(uints (&c)[4], std::uint32_t key0, std::uint32_t key1) {
    const products first = __builtin_convertvector(c[0], products) * 0xD2511F53ull;
    const products second = __builtin_convertvector(c[2], products) * 0xCD9E8D57ull;
    const uints c0 = __builtin_convertvector(second >> 32, uints) ^ c[1] ^ key0;
    const uints c2 = __builtin_convertvector(first >> 32, uints) ^ c[3] ^ key1;
    c[1] = __builtin_convertvector(second, uints);
    c[3] = __builtin_convertvector(first, uints);
    c[0] = c0, c[2] = c2;
}

// sqrt(-2 log u) of u = (k + 1/2) / 2^24 for k below 2^24. Near 1, 1 - u is exact where u is not.
GEOFLOW_INLINE floats radius(ints k) {
    const floats u = (__builtin_convertvector(k, floats) + 0.5f) * 0x1p-24f;
    const floats below = (__builtin_convertvector(0xffffff - k, floats) + 0.5f) * 0x1p-24f;
    const floats near_one = -below * (1.0f + below * (0.5f + below * (1.0f / 3 + below * 0.25f)));  // log(1 - below)
    return square_root(-2.0f * select(below < 0.01f, near_one, logarithm(u)));
}

// cos and sin of (k + 1/2) / 2^24 turns: an exact quarter, and the rest within an eighth by its series.
GEOFLOW_INLINE void circle(ints k, floats& cosine, floats& sine) {
    const ints quarter = (k + (1 << 21)) >> 22;
    const floats x = (__builtin_convertvector(k - (quarter << 22), floats) + 0.5f) * (0x1p-22f * 1.57079632679489662f);
    const floats z = x * x;
    const floats s = x + x * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
    const floats c = 1.0f - 0.5f * z + z * z * (4.166664568298827e-2f - z * (1.388731625493765e-3f - z * 2.443315711809948e-5f));
    const ints odd = -(quarter & 1);
    cosine = (floats)((ints)select(odd, s, c) ^ (((quarter + 1) & 2) << 30));
    sine = (floats)((ints)select(odd, c, s) ^ ((quarter & 2) << 30));
}

// The columns are in four blocks: word k of a counter's four makes the columns of block k.
void draw_row(const NoiseParams& p, std::uint32_t number, float* row) {
    const std::int64_t quarter = (p.width + 3) / 4;
    for (std::int64_t j = 0; j < quarter; j += kLanes) {
        uints c[4] = {uints{} + number, (uints)lane_numbers() + static_cast<std::uint32_t>(j), uints{} + p.step, uints{} + p.stream};
        auto key0 = static_cast<std::uint32_t>(p.seed), key1 = static_cast<std::uint32_t>(p.seed >> 32);
        for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) philox_round(c, key0, key1);
        for (int pair = 0; pair < 4; pair += 2) {
            floats normal[2];
            circle((ints)(c[pair + 1] >> 8), normal[0], normal[1]);
            const floats length = radius((ints)(c[pair] >> 8));
            for (int k = 0; k < 2; ++k) {
                const std::int64_t first = (pair + k) * quarter, left = least(quarter, p.width - first) - j;
                if (left > 0) store_first(row + first + j, length * normal[k], left);
            }
        }
    }
    if (!p.unit) return;
    const float factor = 1.0f / std::sqrt(inner_product(row, row, p.width));
    for (std::int64_t j = 0; j < p.width; ++j) row[j] *= factor;
}

void counter_noise(const NoiseParams& p) {
#pragma omp parallel for num_threads(p.threads) schedule(static)
    for (std::int64_t i = 0; i < p.rows; ++i) draw_row(p, static_cast<std::uint32_t>(p.numbers[i]), p.out + i * p.width);
}

const geoflow::NoiseKernels kNoiseKernels = {counter_noise};

}  // namespace

namespace geoflow {

const NoiseKernels& GEOFLOW_KERNELS(noise_kernels)() { return kNoiseKernels; }

}  // namespace geoflow
