// The choice of an instruction set, and of the tables of kernels that are compiled for it.
#include <cstdlib>
#include <mutex>
#include <new>
#if defined(__linux__)
#include <unistd.h>
#endif

#include "cpu/cpu_features.h"
#include "cpu/sinkhorn_cpu.h"
#include "gallery.h"
#include "interpolant.h"
#include "network.h"
#include "noise.h"
#include "search.h"
#include "solver.h"

// A program may link the baseline alone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(GEOFLOW_BASELINE_ONLY)
#include <cpuid.h>
#define GEOFLOW_HAS_TARGETS 1
#else
#define GEOFLOW_HAS_TARGETS 0
#endif

namespace geoflow {
namespace {

const char* name_of(Isa isa) {
#if defined(__aarch64__)
    (void)isa;
    return "neon";
#else
    constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512vnni", "avx512bf16"};
    return kNames[static_cast<int>(isa)];
#endif
}

Isa best_isa() {
#if GEOFLOW_HAS_TARGETS
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    const bool vnni = __builtin_cpu_supports("avx512vnni"), bf16 = __builtin_cpu_supports("avx512bf16");
    return !avx2 ? Isa::baseline : !avx512 ? Isa::avx2 : !vnni ? Isa::avx512 : !bf16 ? Isa::avx512vnni : Isa::avx512bf16;
#else
    return Isa::baseline;
#endif
}

struct Choice {
    Isa isa;
    std::string problem;
};

const Choice& choice() {
    static const Choice made = [] {
        const Isa best = best_isa();
        const char* const wish = std::getenv("GEOFLOW_ISA");
        if (wish == nullptr || *wish == '\0') return Choice{best, ""};
        std::string names;
        for (int k = 0; k <= static_cast<int>(best); ++k) {
            const Isa one = static_cast<Isa>(k);
            if (name_of(one) == std::string(wish)) return Choice{one, ""};
            names += (k ? ", " : "") + std::string(name_of(one));
        }
        return Choice{best, "GEOFLOW_ISA=" + std::string(wish) + ": this processor can run " + names};
    }();
    return made;
}

#if GEOFLOW_HAS_TARGETS
template <class Table>
const Table& choose(const Table& (&baseline)(), const Table& (&avx2)(), const Table& (&avx512)()) {
    return isa() >= Isa::avx512 ? avx512() : isa() >= Isa::avx2 ? avx2() : baseline();
}
#endif

#if defined(__linux__) && defined(_SC_LEVEL1_DCACHE_SIZE)
std::int64_t cache_bytes(int name, std::int64_t otherwise) {
    const long bytes = sysconf(name);
    return bytes > 0 ? bytes : otherwise;
}
#endif

struct Block {
    void* memory;
    std::size_t bytes;
};

// Blocks that wait for their next use.
struct Pool {
    static constexpr std::size_t kMostBytes = 64 << 20;
    std::mutex mutex;
    std::vector<Block> blocks;
    std::size_t bytes = 0;
};

Pool& pool() {
    static Pool* const made = new Pool;  // never destroyed: threads may give memory back while the process ends
    return *made;
}

}  // namespace

void* take_scratch(std::size_t bytes) {
    {
        const std::lock_guard<std::mutex> lock(pool().mutex);
        std::vector<Block>& blocks = pool().blocks;
        for (std::size_t k = 0; k < blocks.size(); ++k) {
            if (blocks[k].bytes != bytes) continue;
            void* const memory = blocks[k].memory;
            blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(k));
            pool().bytes -= bytes;
            return memory;
        }
    }
    void* const memory = std::aligned_alloc(1 << 12, bytes);
    if (!memory) throw std::bad_alloc();
    return memory;
}

void give_scratch(void* memory, std::size_t bytes) {
    std::vector<Block> released;
    {
        const std::lock_guard<std::mutex> lock(pool().mutex);
        std::vector<Block>& blocks = pool().blocks;
        blocks.push_back({memory, bytes});
        pool().bytes += bytes;
        while (pool().bytes > Pool::kMostBytes) {  // the oldest goes first
            released.push_back(blocks.front());
            pool().bytes -= blocks.front().bytes;
            blocks.erase(blocks.begin());
        }
    }
    for (const Block& block : released) std::free(block.memory);
}

Isa isa() { return choice().isa; }
std::string isa_name() { return name_of(isa()); }
std::string isa_problem() { return choice().problem; }

bool mkl_is_narrow() {
#if GEOFLOW_HAS_TARGETS
    constexpr unsigned kZen5 = 0x1a;  // the first family with AVX-512 units of 512 bits, but for some mobile ones; MKL takes AVX2 on all of AMD's
    unsigned version = 0, b = 0, c = 0, d = 0;
    if (isa() < Isa::avx512 || !__builtin_cpu_is("amd") || !__get_cpuid(1, &version, &b, &c, &d)) return false;
    return ((version >> 8) & 0xf) + ((version >> 20) & 0xff) >= kZen5;
#else
    return false;
#endif
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (int k = 0; k <= static_cast<int>(best_isa()); ++k) names.emplace_back(name_of(static_cast<Isa>(k)));
    return names;
}

const Caches& caches() {
    static const Caches found = [] {
        constexpr Caches usual{32 << 10, 512 << 10, 8 << 20};
#if defined(__linux__) && defined(_SC_LEVEL1_DCACHE_SIZE)
        return Caches{cache_bytes(_SC_LEVEL1_DCACHE_SIZE, usual.first), cache_bytes(_SC_LEVEL2_CACHE_SIZE, usual.second),
                      cache_bytes(_SC_LEVEL3_CACHE_SIZE, usual.shared)};
#else
        return usual;
#endif
    }();
    return found;
}

#if GEOFLOW_HAS_TARGETS
#define GEOFLOW_CHOOSE(Table, family) \
    const Table& family() { return choose(family##_baseline, family##_avx2, family##_avx512); }
#else
#define GEOFLOW_CHOOSE(Table, family) \
    const Table& family() { return family##_baseline(); }
#endif

GEOFLOW_CHOOSE(GalleryKernels, gallery_kernels)
GEOFLOW_CHOOSE(InterpolantKernels, interpolant_kernels)
GEOFLOW_CHOOSE(NetworkKernels, network_kernels)
GEOFLOW_CHOOSE(NoiseKernels, noise_kernels)
GEOFLOW_CHOOSE(SearchKernels, search_kernels)
GEOFLOW_CHOOSE(SolverKernels, solver_kernels)
GEOFLOW_CHOOSE(CpuSolver, cpu_solver)

IterationReport ot_solve(const OtProblem& problem, const OtSettings& settings, const OtResult& result) {
    const RoundedKernels* rounded = nullptr;
#if GEOFLOW_HAS_TARGETS
    if (has_avx512_bf16()) rounded = &rounded_kernels();
#endif
    return cpu_solver().solve(problem, settings, rounded, result);
}

template <>
std::int64_t masked_interpolant(const InterpolantParams<float>& params) {
    return interpolant_kernels().single_precision(params);
}

template <>
std::int64_t masked_interpolant(const InterpolantParams<double>& params) {
    return interpolant_kernels().double_precision(params);
}

bool gallery_posterior(const GalleryParams& params, const GalleryStatistics& result) {
#if GEOFLOW_HAS_TARGETS
    if (params.bfloat16) return gallery_posterior_bfloat16(params, result);
#endif
    return gallery_kernels().posterior(params, result);
}

bool gallery_scores(const GalleryParams& params, float* scores) { return gallery_kernels().scores(params, scores); }

}  // namespace geoflow
