// Exact search: the items with the largest inner products, free of any framework.
#pragma once
#include <cstdint>

#include "cpu/cpu_features.h"
#include "rows.h"

namespace geoflow {

struct SearchParams {
    const float* queries;     // [queries, dim]
    const void* gallery;      // [items, dim]
    Storage storage;
    std::int64_t queries_count, items, dim, top_k;  // top_k is at most items
    int threads;
    bool (*keep_going)();     // asked now and then by the calling thread; false ends the call
};

// Largest score first, equal scores by index: the same for any number of threads and beside any other queries.
struct SearchResult {
    float* score;             // [queries, top_k]
    std::int64_t* index;      // [queries, top_k]
};

// Bytes between the codes of two rows.
constexpr std::int64_t code_stride(std::int64_t dim) { return (dim + 63) / 64 * 64; }

// Rows after a fixed orthogonal rotation, in bytes. With c the code less 128, R the rotation and g a row,
// |R g - scale c| <= error, in which what rounding did to R g is included.
struct RowCodes {
    std::uint8_t* code;       // [items, code_stride(dim)], 128 past the end
    float* scale;             // [items]
    float* error;             // [items]
};

// Inner products in integers bound every score; the items that the bounds do not exclude are scored in single precision.
struct CodeParams {
    RowCodes rows;
    float largest_norm;       // of a row of the gallery
    std::int64_t most_kept;   // candidates of a query beyond which bounds do not pay
    std::int64_t* kept;       // [queries]: how many items were scored; -1 where there were too many, and nothing was found
};

// The passes, compiled once per target.
struct SearchKernels {
    bool (*search)(const SearchParams& params, const SearchResult& result);
    // Fills the codes of params.items rows and returns their largest norm.
    float (*encode)(const SearchParams& params, const RowCodes& rows);
};

GEOFLOW_DECLARE_KERNELS(SearchKernels, search_kernels)

// `search` by codes: only where has_avx512_vnni(). Returns false when interrupted.
bool search_codes(const SearchParams& params, const CodeParams& codes, const SearchResult& result);

}  // namespace geoflow
