// What the emulated programs share: arguments as name=value, arrays as raw bytes on standard input and output.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "emulation.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace driver {

inline std::map<std::string, std::string> arguments;

inline double number(const char* name) {
    const auto entry = arguments.find(name);
    emulation::require(entry != arguments.end(), name);
    return std::atof(entry->second.c_str());
}

inline int integer(const char* name) { return static_cast<int>(number(name)); }

// Of exactly this size, so that AddressSanitizer knows its ends; every byte 0xff, a NaN as float.
template <typename T>
struct Array {
    explicit Array(std::size_t size)
        : count(size), data(static_cast<T*>(std::aligned_alloc(16, (size * sizeof(T) + 15) / 16 * 16))) {
        std::memset(static_cast<void*>(data), 0xff, size * sizeof(T));
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(data + size, (size * sizeof(T) + 15) / 16 * 16 - size * sizeof(T));
#endif
    }
    ~Array() { std::free(data); }
    Array(const Array&) = delete;

    void read() { emulation::require(std::fread(data, sizeof(T), count, stdin) == count, "input too short"); }
    void write() const { emulation::require(std::fwrite(data, sizeof(T), count, stdout) == count, "output failed"); }

    std::size_t count;
    T* data;
};

inline void read_arguments(int count, char** values) {
    for (int k = 1; k < count; ++k) {
        const std::string text = values[k];
        arguments[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    }
    emulation::use_schedule(static_cast<emulation::Schedule>(integer("schedule")),
                            static_cast<std::uint64_t>(number("seed")));
}

}  // namespace driver
