// Runs the shipped score kernel in the emulation. Arguments: schedule seed rows cols dim0 dim1. In: x0 [rows, dim0], y0
// [cols, dim0], x1 [rows, dim1], y1 [cols, dim1], float16. Out: score [rows, cols up to a multiple of 4], float16 if
// compiled with HALF_ENTRIES.
#include <memory>

#include "cuda/score.cuh"
#include "driver.h"

using namespace driver;
using namespace geoflow::cuda;

#if defined(HALF_ENTRIES)
using Entry = Half;
#else
using Entry = float;
#endif

void make_scores() {
    const int rows = integer("rows"), cols = integer("cols"), dim[2] = {integer("dim0"), integer("dim1")};
    const std::int64_t stride = (cols + 3) / 4 * 4;
    std::unique_ptr<Array<Half>> points[4];
    for (int k = 0; k < 4; ++k) {
        points[k] = std::make_unique<Array<Half>>(static_cast<std::size_t>((k % 2 == 0 ? rows : cols) * dim[k / 2]));
        points[k]->read();
    }
    Array<Entry> out(static_cast<std::size_t>(rows * stride));
    const ScoreFactor factors[2] = {{points[0]->data, points[1]->data, dim[0]},
                                    {points[2]->data, points[3]->data, dim[1]}};
    const auto tiles = [](int size) { return (size + kScoreTile - 1) / kScoreTile; };
    const emulation::Launch launch = {tiles(rows) * tiles(cols), kScoreThreads, kScoreSharedBytes, false};
    const ScoreProblem problem = {{factors[0], factors[1]}, out.data, rows, cols, stride};
    emulation::run(launch, [&] { score_kernel<Entry>(problem); });
    out.write();
}

int main(int argument_count, char** argument_values) {
    read_arguments(argument_count, argument_values);
    make_scores();
    return 0;
}
