// Runs the shipped score kernel in the emulation. Arguments: schedule seed passes rows cols dim0 dim1 weight0 weight1
// arc. In: x0 [rows, dim0], y0 [cols, dim0], x1 [rows, dim1], y1 [cols, dim1]. Out: score [rows, cols up to a multiple
// of 4].
#include <memory>

#include "cuda/score.cuh"
#include "driver.h"

using namespace driver;
using namespace geoflow::cuda;

int main(int argument_count, char** argument_values) {
    read_arguments(argument_count, argument_values);
    const int rows = integer("rows"), cols = integer("cols"), dim[2] = {integer("dim0"), integer("dim1")};
    const std::int64_t stride = (cols + 3) / 4 * 4;
    std::unique_ptr<Array<float>> points[4];
    for (int k = 0; k < 4; ++k) {
        points[k] = std::make_unique<Array<float>>(static_cast<std::size_t>((k % 2 == 0 ? rows : cols) * dim[k / 2]));
        points[k]->read();
    }
    Array<float> out(static_cast<std::size_t>(rows * stride));
    const ScoreProblem problem = {{{points[0]->data, points[1]->data, dim[0], static_cast<float>(number("weight0"))},
                                   {points[2]->data, points[3]->data, dim[1], static_cast<float>(number("weight1"))}},
                                  out.data,
                                  rows,
                                  cols,
                                  stride,
                                  integer("arc") != 0};
    const auto tiles = [](int size) { return (size + kScoreTile - 1) / kScoreTile; };
    const emulation::Launch launch = {tiles(rows) * tiles(cols), kScoreThreads, kScoreSharedBytes, false};
    const bool precise = integer("passes") == 3;
    emulation::run(launch, [&] { precise ? score_kernel<3>(problem) : score_kernel<1>(problem); });
    out.write();
    return 0;
}
