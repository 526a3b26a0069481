// Every threaded entry point of csrc/cpu with 1 and with 4 threads, for ThreadSanitizer. Results must be equal bit by bit.
//   race_driver          runs them all and prints how many calls were compared
//   race_driver --race   makes a data race on purpose: a run that does not report it proves nothing
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cpu/cpu_features.h"
#include "cpu/sinkhorn_cpu.h"
#include "gallery.h"
#include "interpolant.h"
#include "network.h"
#include "noise.h"
#include "search.h"
#include "solver.h"

namespace {

constexpr int kThreads = 4;
int compared = 0;
std::mt19937 source(7);

bool always() { return true; }

template <typename T>
std::vector<T> normal(std::int64_t count) {
    std::normal_distribution<T> draw;
    std::vector<T> values(count);
    for (T& value : values) value = draw(source);
    return values;
}

template <typename T>
std::vector<T> unit_rows(std::int64_t rows, std::int64_t width) {
    std::vector<T> values = normal<T>(rows * width);
    for (std::int64_t r = 0; r < rows; ++r) {
        T square = 0;
        for (std::int64_t k = 0; k < width; ++k) square += values[r * width + k] * values[r * width + k];
        for (std::int64_t k = 0; k < width; ++k) values[r * width + k] /= std::sqrt(square);
    }
    return values;
}

// Runs the same call with one thread and with several; `call(threads)` returns its outputs as bytes.
void compare(const std::string& what, const std::function<std::string(int)>& call) {
    if (call(1) != call(kThreads)) {
        std::fprintf(stderr, "%s depends on the number of threads\n", what.c_str());
        std::exit(2);
    }
    ++compared;
}

template <typename T>
void append(std::string& bytes, const std::vector<T>& values) {
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

void check_gallery(std::int64_t queries, std::int64_t draws, std::int64_t items, std::int64_t dim, bool biased) {
    const auto samples = unit_rows<float>(queries * draws, dim), gallery = unit_rows<float>(items, dim);
    const auto bias = normal<float>(items), sample_bias = normal<float>(queries * draws);
    geoflow::GalleryParams params{samples.data(), biased ? sample_bias.data() : nullptr, gallery.data(), bias.data(), queries, draws, items,
                                  dim, 20.0f, 1, always, geoflow::Storage::single, false};
    const auto posterior = [&](int threads) {
        params.threads = threads;
        const std::int64_t top_k = items < 5 ? items : 5;
        std::vector<double> peak(queries), weight(queries), moment(queries), score(queries * top_k);
        std::vector<std::int64_t> index(queries * top_k);
        geoflow::gallery_posterior(params, {top_k, peak.data(), weight.data(), moment.data(), score.data(), index.data()});
        std::string bytes;
        append(bytes, peak), append(bytes, weight), append(bytes, moment), append(bytes, score), append(bytes, index);
        return bytes;
    };
    compare("gallery_posterior", posterior);
    params.bfloat16 = geoflow::has_avx512_bf16();
    compare("gallery_posterior in bfloat16", posterior);
    compare("gallery_scores", [&](int threads) {
        params.threads = threads;
        std::vector<float> scores(queries * items);
        geoflow::gallery_scores(params, scores.data());
        std::string bytes;
        append(bytes, scores);
        return bytes;
    });
}

void check_search(std::int64_t queries, std::int64_t items, std::int64_t dim) {
    using namespace geoflow;
    const auto x = unit_rows<float>(queries, dim), gallery = unit_rows<float>(items, dim);
    const std::int64_t top_k = items < 5 ? items : 5, stride = code_stride(dim);
    SearchParams params{x.data(), gallery.data(), Storage::single, queries, items, dim, top_k, 1, always};
    std::vector<std::uint8_t> code(items * stride);
    std::vector<float> scale(items), error(items);
    float largest = 0;
    compare("encode", [&](int threads) {
        params.threads = threads;
        largest = search_kernels().encode(params, {code.data(), scale.data(), error.data()});
        std::string bytes = std::to_string(largest);
        append(bytes, code), append(bytes, scale), append(bytes, error);
        return bytes;
    });
    const auto search = [&](bool coded) {
        return [&, coded](int threads) {
            params.threads = threads;
            std::vector<float> score(queries * top_k);
            std::vector<std::int64_t> index(queries * top_k), kept(queries);
            const SearchResult result{score.data(), index.data()};
            if (coded)
                search_codes(params, {{code.data(), scale.data(), error.data()}, largest, items, kept.data()}, result);
            else
                search_kernels().search(params, result);
            std::string bytes;
            append(bytes, score), append(bytes, index);
            return bytes;
        };
    };
    compare("gallery_search", search(false));
    if (!has_avx512_vnni()) return;
    compare("search_codes", search(true));
}

template <typename T>
void check_interpolant(std::int64_t rows, std::int64_t image_dim, std::int64_t text_dim) {
    const std::int64_t widths[2] = {image_dim, text_dim};
    std::vector<std::vector<T>> noise, data;
    for (std::int64_t width : widths) noise.push_back(unit_rows<T>(rows, width)), data.push_back(unit_rows<T>(rows, width));
    std::vector<T> t(rows);
    std::vector<std::int8_t> direction(rows);
    for (std::int64_t r = 0; r < rows; ++r) t[r] = T(r) / T(rows), direction[r] = static_cast<std::int8_t>(r % 3);
    compare("masked_interpolant", [&](int threads) {
        geoflow::InterpolantParams<T> params{};
        std::vector<std::vector<T>> point, velocity;
        for (int k = 0; k < 2; ++k) point.emplace_back(rows * widths[k]), velocity.emplace_back(rows * widths[k]);
        for (int k = 0; k < 2; ++k)
            params.stream[k] = {noise[k].data(), data[k].data(), point[k].data(), velocity[k].data(), widths[k],
                                k == 0 ? geoflow::kImageToText : geoflow::kTextToImage};
        params.t = t.data();
        params.direction = direction.data();
        params.rows = rows;
        params.tolerance = 1e-3;
        params.threads = threads;
        std::string bytes = std::to_string(geoflow::masked_interpolant(params));
        for (int k = 0; k < 2; ++k) append(bytes, point[k]), append(bytes, velocity[k]);
        return bytes;
    });
}

// With an eps whose exponentials are in range, and one that comes down by halves over scores.
void check_transport(std::int64_t rows, std::int64_t cols, std::int64_t dim, const geoflow::RoundedKernels* rounded) {
    using namespace geoflow;
    const auto image_noise = unit_rows<float>(rows, dim), image = unit_rows<float>(cols, dim);
    const auto text_noise = unit_rows<float>(rows, dim + 9), text = unit_rows<float>(cols, dim + 9);
    std::vector<double> uniform(rows);
    for (double& u : uniform) u = (source() % 1000) / 1000.0;
    for (const double eps : {0.3, 0.003})
        for (const bool draws : {false, true})
            compare("transport", [&](int threads) {
                std::vector<double> f(rows), g(cols);
                std::vector<std::int64_t> index(rows);
                const OtProblem problem{{image_noise.data(), image.data(), dim}, {text_noise.data(), text.data(), dim + 9},
                                        rows, cols, draws ? uniform.data() : nullptr};
                const IterationReport report =
                    cpu_solver().solve(problem, {eps, 1e-3, 20, threads, always}, rounded, {index.data(), f.data(), g.data()});
                std::string bytes = std::to_string(report.iterations) + " " + std::to_string(report.error);
                append(bytes, f), append(bytes, g), append(bytes, index);
                return bytes;
            });
}

void check_noise(std::int64_t rows, std::int64_t width) {
    std::vector<std::int64_t> numbers(rows);
    for (std::int64_t i = 0; i < rows; ++i) numbers[i] = 7 * i;
    compare("counter_noise", [&](int threads) {
        std::vector<float> out(rows * width);
        geoflow::noise_kernels().counter_noise({numbers.data(), out.data(), rows, width, 5, 6, 0, true, threads});
        std::string bytes;
        append(bytes, out);
        return bytes;
    });
}

void check_sinkhorn(std::int64_t rows, std::int64_t cols) {
    using namespace geoflow;
    compare("sinkhorn", [&](int threads) {
        const OtMatrix shape{nullptr, rows, cols, Domain::score, 0.0, 1.0};
        std::vector<float> room(rows * shape.ld() + 16);
        float* const scores = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(room.data()) + 63) / 64 * 64);
        for (std::int64_t k = 0; k < rows * shape.ld(); ++k) scores[k] = static_cast<float>(k % 97) / 97.0f - 0.5f;
        std::vector<double> f(rows), g(cols);
        const IterationReport report =
            cpu_solver().sinkhorn(scores, rows, cols, {-0.5f, 0.5f}, {0.01, 1e-3, 20, threads, always}, f.data(), g.data());
        std::string bytes = std::to_string(report.iterations) + " " + std::to_string(report.error);
        append(bytes, f), append(bytes, g);
        return bytes;
    });
}

void check_network(std::int64_t rows, std::int64_t width, std::int64_t groups) {
    using namespace geoflow;
    const NetworkKernels& run = network_kernels();
    auto x = normal<float>(rows * width), y = normal<float>(rows * width), z = normal<float>(rows * width);
    auto shift = normal<float>(groups * width), scale = normal<float>(groups * width), column = normal<float>(rows);
    std::vector<std::uint8_t> mask(rows * width);
    for (std::uint8_t& bit : mask) bit = source() % 2;
    const auto view = [&](std::vector<float>& of) { return RowsView{of.data(), width}; };
    const std::int64_t per_group = rows / groups, blocks = (per_group + kReductionRows - 1) / kReductionRows;
    // Each kernel fills up to three outputs of these sizes.
    const auto check = [&](const char* what, std::int64_t c_rows, const auto& call) {
        compare(what, [&](int threads) {
            std::vector<float> a(rows * width), b(rows * width), c(c_rows * width);
            call(RowShape{rows, width, per_group, threads}, view(a), view(b), view(c));
            std::string bytes;
            append(bytes, a), append(bytes, b), append(bytes, c);
            return bytes;
        });
    };
    using V = RowsView;
    check("adaln", 1, [&](RowShape s, V a, V, V) { run.adaln(s, 1e-5f, view(x), view(shift), view(scale), a); });
    check("adaln_backward", groups * blocks, [&](RowShape s, V a, V b, V c) {
        run.adaln_backward(s, 1e-5f, view(y), view(x), view(scale), a, b, c);
    });
    check("swiglu", 1, [&](RowShape s, V a, V, V) { run.swiglu(s, view(x), view(y), a); });
    check("swiglu_backward", 1, [&](RowShape s, V a, V b, V) { run.swiglu_backward(s, view(z), view(x), view(y), a, b); });
    check("gate_residual", 1, [&](RowShape s, V a, V, V) {
        run.gate_residual(s, 1.25f, view(x), view(y), view(z), view(scale), mask.data(), a);
    });
    check("gate_residual_backward", groups * blocks, [&](RowShape s, V a, V b, V c) {
        run.gate_residual_backward(s, 1.25f, view(x), view(y), view(z), view(scale), mask.data(), a, b, c);
    });
    // Two segments of one tangent each, one after the other, which share their shift and scale.
    const std::int32_t half = static_cast<std::int32_t>(rows / 4), at = 2 * half;
    const Segment lines[2] = {{half, 1, 0, half, at, at + half, 0, half, 0, 0}, {half, 1, at, at + half, 0, half, at, at + half, 0, 1}};
    auto products = normal<float>(2 * rows * width), bias = normal<float>(2 * width);
    const auto segments = [&](std::int64_t columns, int threads) { return SegmentShape{{lines, 2}, columns, 1e-5f, false, threads}; };
    check("adaln_segments", 1, [&](RowShape s, V a, V, V) {
        run.adaln_segments(segments(width, s.threads), x.data(), false, bias.data(), shift.data(), scale.data(), a.data, false);
    });
    check("gate_adaln_segments", 1, [&](RowShape s, V a, V b, V) {
        run.gate_adaln_segments(segments(width, s.threads), 1, x.data(), products.data(), bias.data(), shift.data(), scale.data(), a.data,
                                b.data, false);
    });
    check("swiglu_segments", 1, [&](RowShape s, V a, V, V) {
        run.swiglu_segments(segments(width, s.threads), products.data(), a.data, false);
    });
    check("flow_loss", 1, [&](RowShape s, V a, V, V) { run.flow_loss(s, mask.data(), view(x), view(y), view(z), {a.data, 1}); });
    check("flow_loss_backward", 1, [&](RowShape s, V a, V, V) {
        run.flow_loss_backward(s, mask.data(), {column.data(), 1}, view(x), view(y), view(z), a);
    });
    compare("keep_mask", [&](int threads) {
        std::vector<std::uint8_t> keep(rows * width);
        run.keep_mask(rows * width, 0.3, 5, keep.data(), threads);
        std::string bytes;
        append(bytes, keep);
        return bytes;
    });
}

void check_solver(std::int64_t rows, std::int64_t width) {
    using namespace geoflow;
    const SolverKernels& run = solver_kernels();
    auto x = unit_rows<float>(rows, width), at = unit_rows<float>(rows, width);
    auto v = normal<float>(rows * width), free = v, old = v;
    const auto view = [&](std::vector<float>& of) { return RowsView{of.data(), width}; };
    const auto check = [&](const char* what, const auto& call) {
        compare(what, [&](int threads) {
            std::vector<float> a(rows * width), b(rows * width);
            call(RowShape{rows, width, 1, threads}, view(a), view(b));
            std::string bytes;
            append(bytes, a), append(bytes, b);
            return bytes;
        });
    };
    check("tangent_step", [&](RowShape s, RowsView a, RowsView) {
        run.tangent_step(s, 0.1, 3.0, false, view(x), view(v), view(free), a);
    });
    check("tangent_stage", [&](RowShape s, RowsView a, RowsView b) {
        run.tangent_stage(s, 0.1, 3.0, 0.2, view(x), view(at), view(v), view(free), view(old), a, b);
    });
    check("tangent_ab2", [&](RowShape s, RowsView a, RowsView b) {
        run.tangent_ab2(s, 0.1, 3.0, 0.5, view(x), view(v), view(free), view(old), a, b);
    });
}

// Threads write their number to one place without order.
void race_on_purpose() {
    int shared = 0;
#pragma omp parallel for num_threads(kThreads) schedule(static)
    for (int k = 0; k < 1000; ++k) shared += k;
    std::printf("%d\n", shared);
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 2 && std::strcmp(arguments[1], "--race") == 0) {
        race_on_purpose();
        return 0;
    }
    for (std::int64_t items : {1, 7, 129, 1023})
        for (bool biased : {false, true}) check_gallery(3, 5, items, 19, biased);
    check_gallery(40, 130, 300, 33, false);  // several column blocks
    check_gallery(19, 4, 300, 33, true);     // interleaved queries and others
    for (std::int64_t items : {1, 7, 129, 2023})
        for (std::int64_t queries : {1, 5, 40}) check_search(queries, items, 70);
    for (std::int64_t rows : {1, 7, 129, 513}) {
        check_interpolant<float>(rows, 24, 17);
        check_interpolant<double>(rows, 24, 17);
    }
    for (std::int64_t rows : {1, 7, 129, 400})
        check_transport(rows, rows + 3, 24, nullptr), check_sinkhorn(rows, rows + 3);
    for (std::int64_t rows : {1, 7, 129, 1023}) check_noise(rows, 37);
    check_transport(1200, 1100, 16, nullptr), check_sinkhorn(1200, 1100);  // enough entries for more than one thread
    if (geoflow::has_avx512_bf16()) check_transport(1200, 1100, 140, &geoflow::rounded_kernels());
    for (std::int64_t rows : {2, 14, 258, 1030}) check_network(rows, 37, 2);
    for (std::int64_t rows : {1, 7, 129, 1023}) check_solver(rows, 37);
    std::printf("%d\n", compared);
    return 0;
}
