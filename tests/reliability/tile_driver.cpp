// Prints the sizes of all tiles of csrc/cpu for caches of the sizes that it is given:
//   tile_driver <bytes of L1> <bytes of L2> <bytes of L3>
#include <cstdio>
#include <cstdlib>

#include "cpu/gemm_bfloat16.h"
// Its kernels are not called, but the size of its panels is asked for. One of its constants has a name that gemm_rows.h has too.
#define kFewColumns kFewCodeColumns
#include "cpu/search_codes.cpp"

namespace geoflow {

Caches given{};
const Caches& caches() { return given; }
void* take_scratch(std::size_t) { return nullptr; }
void give_scratch(void*, std::size_t) {}

}  // namespace geoflow

int main(int, char** arguments) {
    geoflow::given = {std::atoll(arguments[1]), std::atoll(arguments[2]), std::atoll(arguments[3])};
    const auto print = [](const char* name, std::int64_t size) { std::printf("%s %lld\n", name, static_cast<long long>(size)); };
    print("depth_block", depth_block());
    print("column_block", column_block(1024));
    print("panel_rows", panel_rows(1024));
    print("depth_pairs", depth_pairs());
    print("pair_panel_rows", pair_panel_rows(1152));
    print("search_panel", search_panel(1024 * sizeof(float)));
    print("code_panel", code_panel(1024));
    return 0;
}
