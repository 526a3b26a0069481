// The shipped launchers on an emulated machine with two devices: every call works on the device it is given, leaves the
// current one as it was, and takes the kernel whose shared memory the device has. Where the driver is too old, the build
// says so. Arguments: schedule seed.
#include "cuda/runtime.cu"
#include "cuda/sinkhorn.cu"
#include "driver.h"

using namespace driver;
using namespace geoflow;

namespace {

constexpr int kRows = 5, kDim = 8;

// All launches of a coupling on device 1 while device 0 is current.
template <typename Entry>
void couple(std::int64_t cols, std::size_t shared, void (*expected)(cuda::SinkhornProblem, cuda::SinkhornWorkspace)) {
    emulation::largest_shared = shared;
    emulated_runtime::launched_on.clear();
    const bool half = sizeof(Entry) == 2;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    Array<cuda::Half> noise(kRows * kDim), data(size(cols * kDim));
    Array<Entry> matrix(size(kRows * cols));
    std::memset(static_cast<void*>(noise.data), 0, noise.count * sizeof(cuda::Half));
    std::memset(static_cast<void*>(data.data), 0, data.count * sizeof(cuda::Half));
    SinkhornParams params = {kRows, cols, kDim, kDim, 0.05f, 1e-3f, 2};
    const CudaMatrix scores = {matrix.data, cols, half};
    const CudaTarget target = {1, 0};
    const auto left_alone = [] { emulation::require(emulated_runtime::current_device == 0, "the current device leaks"); };
    sinkhorn_cuda_scores(params, {noise.data, noise.data, data.data, data.data}, scores, target);
    left_alone();
    Array<char> workspace(size(sinkhorn_cuda_workspace(params, scores, 1)));
    left_alone();
    Array<SinkhornStatus> status(1);
    sinkhorn_cuda_solve(params, scores, 0, workspace.data, status.data, target);
    left_alone();
    emulation::require(emulated_runtime::last_cooperative == reinterpret_cast<const void*>(expected), "another kernel");
    emulation::require(status.data->converged == 1, "equal costs need no iterations");
    Array<std::int64_t> index(kRows);
    Array<double> f(kRows), g(size(cols)), uniform(kRows);
    Array<float> row_mass(kRows);
    std::memset(uniform.data, 0, kRows * sizeof(double));
    sinkhorn_cuda_result(params, scores, workspace.data,
                         {index.data, f.data, g.data, row_mass.data, 3.0f}, target);
    left_alone();
    sinkhorn_cuda_sample(params, scores, workspace.data, row_mass.data, uniform.data, index.data, target);
    left_alone();
    for (const int device : emulated_runtime::launched_on) emulation::require(device == 1, "launched elsewhere");
    emulation::require(emulated_runtime::launched_on.size() == 4u, "another number of launches");
    try {
        params.max_iter = 1;
        sinkhorn_cuda_solve(params, {matrix.data, 3, half}, 0, workspace.data, status.data, target);
        emulation::require(false, "an impossible stride was accepted");
    } catch (const std::invalid_argument&) {
        left_alone();
    }
}

// What the build says about a driver that serves this release of CUDA.
std::string status_with(int driver_version) {
    emulated_runtime::driver_version = driver_version;
    return cuda_status();
}

void check_drivers() {
    emulation::require(status_with(0) == "no CUDA driver", "a missing driver is not named");
    emulation::require(status_with(12080) ==
                           "the driver serves CUDA 12.8, and this build needs 13.0; update the driver, or reinstall "
                           "geoflow_fast with the nvcc of a toolkit that the driver serves",
                       "a driver that is too old is not named, or no remedy is");
    emulation::require(status_with(13010).empty(), "a newer driver is refused");
}

}  // namespace

int main(int argument_count, char** argument_values) {
    read_arguments(argument_count, argument_values);
    check_drivers();
    constexpr std::size_t kDesktop = 99 << 10, kSmall = 64 << 10;
    couple<float>(8192, kDesktop, cuda::sinkhorn_kernel<4, float>);
    couple<cuda::Half>(8192, kDesktop, cuda::sinkhorn_kernel<4, cuda::Half>);
    couple<float>(2000, kDesktop, cuda::sinkhorn_kernel<1, float>);
    couple<float>(2052, kDesktop, cuda::sinkhorn_kernel<2, float>);
    couple<cuda::Half>(8196, kDesktop, cuda::sinkhorn_wide_kernel<cuda::Half>);
    emulation::largest_shared = kSmall;
    emulation::require(kernel_for<float>(8192, kSmall).kernel == &cuda::sinkhorn_wide_kernel<float>,
                       "a device with too little shared memory was given the kernel that needs more");
    emulation::require(kernel_for<float>(4096, kSmall).kernel == &cuda::sinkhorn_kernel<2, float>,
                       "a row that fits was read twice");
    return 0;
}
