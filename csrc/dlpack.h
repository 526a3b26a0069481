// The part of DLPack that tensors cross by: structs of the ABI of major version 1, and the exchange table that torch has since 2.10. They are
// declared here, since no header of torch is included and the DLPack of distributions is older than the table.
#pragma once
#include <cstdint>

namespace geoflow::dlpack {

struct Version {
    std::uint32_t major, minor;
};
struct Device {
    std::int32_t type, id;
};
struct Type {
    std::uint8_t code, bits;
    std::uint16_t lanes;
};
enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : std::uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct View {
    void* data;
    Device device;
    std::int32_t dimensions;
    Type type;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements; null for a tensor without gaps
    std::uint64_t byte_offset;
};

// A tensor with its owner, as capsules named "dltensor" hold it.
struct Managed {
    View view;
    void* context;
    void (*deleter)(Managed*);
};

// The same as the exchange table hands it over.
struct ManagedVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedVersioned*);
    std::uint64_t flags;
    View view;
};

struct ExchangeHeader {
    Version version;
    ExchangeHeader* previous;  // a table of an earlier version, or null
};

struct Exchange {
    ExchangeHeader header;
    int (*allocate)(View* like, ManagedVersioned** out, void* context, void (*set_error)(void*, const char*, const char*));
    int (*from_python)(void* object, ManagedVersioned** out);
    int (*to_python)(ManagedVersioned* tensor, void** out);
    int (*view)(void* object, View* out);
    int (*stream)(std::int32_t device_type, std::int32_t device, void** out);
};

static_assert(sizeof(View) == 48 && sizeof(Managed) == 64 && sizeof(ManagedVersioned) == 80 && sizeof(Exchange) == 56,
              "the ABI of DLPack 1 on a machine of 64 bits");

}  // namespace geoflow::dlpack
