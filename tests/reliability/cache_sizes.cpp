// A library to preload: the system then says that the data caches have the sizes of GEOFLOW_TEST_CACHES="<L1> <L2> <L3>".
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

extern "C" long sysconf(int name) noexcept {
    long first = 0, second = 0, shared = 0;
    const char* const sizes = std::getenv("GEOFLOW_TEST_CACHES");
    const bool given = sizes != nullptr && std::sscanf(sizes, "%ld %ld %ld", &first, &second, &shared) == 3;
    if (given && name == _SC_LEVEL1_DCACHE_SIZE) return first;
    if (given && name == _SC_LEVEL2_CACHE_SIZE) return second;
    if (given && name == _SC_LEVEL3_CACHE_SIZE) return shared;
    static const auto original = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
    return original(name);
}
