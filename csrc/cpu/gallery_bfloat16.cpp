// The gallery posterior from products in bfloat16, for processors with AVX512-BF16.
#if defined(__AVX512BF16__)
#include "cpu/gemm_bfloat16.h"
#include "cpu/gallery_tiles.h"

namespace {

struct RoundedProducts {
    static constexpr bool kExact = false;

    template <class... Arguments>
    static bool tiles(const Arguments&... arguments) {
        return bfloat16_tiles(arguments...);
    }
};

}  // namespace

namespace geoflow {

bool gallery_posterior_bfloat16(const GalleryParams& params, const GalleryStatistics& result) {
    return stream_posterior<RoundedProducts>(params, result);
}

}  // namespace geoflow

#endif  // __AVX512BF16__
