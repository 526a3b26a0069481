// Runs the one translated kernel that it is linked with, on memory that standard input describes.
// Arguments: schedule seed grid_x grid_y grid_z shared together (all blocks alive at once).
// In: number of parameter bytes, these, number of regions; of each its bytes, its alignment, its elements' bytes (a byte
// each, 1 where it belongs to a tensor) and its contents; number of pointers; of each its place among the parameters, its
// region and its offset there. All numbers are uint64. Out: the contents of all regions.
#include "driver.h"
#include "machine.h"

namespace ptx {
extern const unsigned kernel_threads;
void kernel_entry(const u8* parameters);
}  // namespace ptx

using namespace driver;
using ptx::u64;
using ptx::u8;

namespace {

u64 read_number() {
    Array<u64> number(1);
    number.read();
    return *number.data;
}

// Contents of exactly the size that the kernel may touch, at an address as aligned as the tensor's, and no more.
struct Memory {
    Memory(u64 bytes, u64 offset) : owned(bytes), room(bytes + offset), contents(room.data + offset) {
        owned.read();
        emulation::require(std::fread(contents, 1, bytes, stdin) == bytes, "input too short");
    }
    Array<u8> owned, room;
    u8* contents;
};

}  // namespace

int main(int argument_count, char** argument_values) {
    read_arguments(argument_count, argument_values);
    emulation::largest_shared = 163 << 10;  // sm_80, which the kernels were compiled for
    Array<u8> parameters(read_number());
    parameters.read();
    std::vector<Memory*> memory;
    const u64 regions = read_number();
    for (u64 k = 0; k < regions; ++k) {
        const u64 bytes = read_number(), offset = read_number();
        memory.push_back(new Memory(bytes, offset));
        const u64 begin = reinterpret_cast<u64>(memory.back()->contents);
        ptx::regions.push_back({begin, begin + bytes, memory.back()->owned.data});
    }
    const u64 pointers = read_number();
    for (u64 k = 0; k < pointers; ++k) {
        const u64 place = read_number(), region = read_number(), offset = read_number();
        const u64 address = ptx::regions[region].begin + offset;
        std::memcpy(parameters.data + place, &address, sizeof address);
    }
    ptx::grid = {static_cast<unsigned>(integer("grid_y")), static_cast<unsigned>(integer("grid_z"))};
    const int blocks = integer("grid_x") * integer("grid_y") * integer("grid_z");
    const emulation::Launch launch = {blocks, static_cast<int>(ptx::kernel_threads),
                                      static_cast<std::size_t>(integer("shared")), integer("together") != 0};
    const u8* const given = parameters.data;
    emulation::run(launch, [given] { ptx::kernel_entry(given); });
    for (std::size_t k = 0; k < memory.size(); ++k) {
        const std::size_t bytes = ptx::regions[k].end - ptx::regions[k].begin;
        emulation::require(std::fwrite(memory[k]->contents, 1, bytes, stdout) == bytes, "output failed");
    }
    return 0;
}
