// Kernels of csrc/cpu on fixed inputs: prints "<call> <number> <number> ..." so that builds for two processors can be compared.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/sinkhorn_cpu.h"
#include "gallery.h"
#include "interpolant.h"
#include "network.h"
#include "noise.h"
#include "search.h"
#include "solver.h"

namespace {

using namespace geoflow;

bool always() { return true; }

std::uint64_t state = 1;

// Between -1 and 1, the same on every machine.
float number() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state >> 40)) / 8388608.0f - 1.0f;
}

std::vector<float> numbers(std::int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = number();
    return values;
}

std::vector<float> unit_rows(std::int64_t rows, std::int64_t width) {
    std::vector<float> values = numbers(rows * width);
    for (std::int64_t r = 0; r < rows; ++r) {
        double square = 0;
        for (std::int64_t k = 0; k < width; ++k) square += double(values[r * width + k]) * values[r * width + k];
        for (std::int64_t k = 0; k < width; ++k) values[r * width + k] = static_cast<float>(values[r * width + k] / std::sqrt(square));
    }
    return values;
}

template <class T>
void print(const char* call, const std::vector<T>& values) {
    std::printf("%s", call);
    for (T value : values) std::printf(" %.9g", static_cast<double>(value));
    std::printf("\n");
}

// Numbers below 1 in the bits of a half precision, cut off. The upper halves of the bits of floats are bfloat16; IEEE half has an exponent
// that is 112 less and three more bits behind it, and what is too small for it becomes zero.
std::vector<std::uint16_t> cut(const std::vector<float>& values, Storage storage) {
    std::vector<std::uint16_t> halves;
    for (float value : values) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const std::uint32_t sign = bits >> 31, rest = bits & 0x7fffffff, least = 113u << 23;
        const std::uint32_t half = sign << 15 | (rest < least ? 0 : (rest - (112u << 23)) >> 13);
        halves.push_back(static_cast<std::uint16_t>(storage == Storage::half ? half : bits >> 16));
    }
    return halves;
}

void galleries() {
    constexpr std::int64_t queries = 19, draws = 5, items = 301, dim = 83, top_k = 4;
    const auto samples = unit_rows(queries * draws, dim), gallery = unit_rows(items, dim);
    for (const Storage storage : {Storage::single, Storage::half, Storage::bfloat16}) {
        const auto halves = cut(gallery, storage);
        const void* const rows = storage == Storage::single ? static_cast<const void*>(gallery.data()) : halves.data();
        const GalleryParams params{samples.data(), nullptr, rows, nullptr, queries, draws, items, dim, 20.0f, 2, always, storage, false};
        std::vector<double> peak(queries), weight(queries), moment(queries), score(queries * top_k);
        std::vector<std::int64_t> index(queries * top_k);
        gallery_posterior(params, {top_k, peak.data(), weight.data(), moment.data(), score.data(), index.data()});
        print("peak", peak), print("weight", weight), print("moment", moment), print("top", score), print("items", index);
        std::vector<float> found(queries * top_k);
        const SearchParams search{samples.data(), rows, storage, queries, items, dim, top_k, 2, always};
        search_kernels().search(search, {found.data(), index.data()});
        print("search", found), print("found", index);
        std::vector<std::uint8_t> code(items * code_stride(dim));
        std::vector<float> step(items), error(items);
        const float largest = search_kernels().encode(search, {code.data(), step.data(), error.data()});
        print("code", code), print("code_scale", step), print("code_error", error), print("largest", std::vector<float>{largest});
    }
}

void transport() {
    constexpr std::int64_t rows = 90, cols = 77, dim = 24;
    const auto noise = unit_rows(rows, dim), data = unit_rows(cols, dim);
    const Factor factor{noise.data(), data.data(), dim};
    std::vector<double> f(rows), g(cols);
    std::vector<std::int64_t> index(rows);
    ot_solve({factor, factor, rows, cols, nullptr}, {0.1, 1e-6, 50, 2, always}, {index.data(), f.data(), g.data()});
    print("f", f), print("g", g), print("index", index);
}

void rows_of_networks() {
    constexpr std::int64_t rows = 13, width = 37;
    auto x = unit_rows(rows, width), v = numbers(rows * width), y = numbers(rows * width), shift = numbers(width), scale = numbers(width);
    std::vector<std::int64_t> numbers_of_rows(rows);
    for (std::int64_t i = 0; i < rows; ++i) numbers_of_rows[i] = 7 * i;
    std::vector<float> noise(rows * width);
    noise_kernels().counter_noise({numbers_of_rows.data(), noise.data(), rows, width, 5, 6, 0, true, 2});
    print("noise", noise);
    const RowShape shape{rows, width, rows, 2}, single{rows, width, 1, 2};
    const auto view = [&](std::vector<float>& of) { return RowsView{of.data(), width}; };
    network_kernels().adaln(shape, 1e-5f, view(v), view(shift), view(scale), view(y));
    print("adaln", y);
    network_kernels().swiglu(shape, view(v), view(x), view(y));
    print("swiglu", y);
    network_kernels().gate_residual(shape, 1.0f, view(x), view(v), view(v), view(scale), nullptr, view(y));
    print("gate_residual", y);
    const std::vector<std::uint8_t> generated(rows, 1);
    std::vector<float> loss(rows, 0.0f);
    network_kernels().flow_loss(shape, generated.data(), view(v), view(y), view(x), {loss.data(), 1});
    print("flow_loss", loss);
    solver_kernels().tangent_step(single, 0.1, 0.0, false, view(x), view(v), {nullptr, 0}, view(y));
    print("tangent_step", y);
    std::vector<float> carried(rows * width);
    solver_kernels().tangent_ab2(single, 0.1, 0.0, 0.5, view(x), view(v), {nullptr, 0}, {nullptr, 0}, view(y), view(carried));
    print("tangent_ab2", y), print("carried", carried);
}

void interpolant() {
    constexpr std::int64_t rows = 11, width = 29;
    const auto noise = unit_rows(rows, width), data = unit_rows(rows, width);
    std::vector<float> t(rows), point(rows * width), velocity(rows * width), other_point(rows * width), other_velocity(rows * width);
    std::vector<std::int8_t> direction(rows);
    for (std::int64_t r = 0; r < rows; ++r) t[r] = static_cast<float>(r) / rows, direction[r] = static_cast<std::int8_t>(r % 3);
    InterpolantParams<float> params{};
    params.stream[0] = {noise.data(), data.data(), point.data(), velocity.data(), width, kImageToText};
    params.stream[1] = {noise.data(), data.data(), other_point.data(), other_velocity.data(), width, kTextToImage};
    params.t = t.data();
    params.direction = direction.data();
    params.rows = rows;
    params.tolerance = 1e-3;
    params.threads = 2;
    masked_interpolant(params);
    print("point", point), print("velocity", velocity);
}

}  // namespace

int main() {
    std::printf("isa %s\n", isa_name().c_str());
    galleries();
    transport();
    rows_of_networks();
    interpolant();
    return 0;
}
