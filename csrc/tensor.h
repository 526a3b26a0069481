// The border between Python and the kernels: torch tensors come in as views of their memory, and results go out as torch tensors.
//
// A bound function takes `const Tensor&`. At its top it says what it needs of each: `rows(x, "x")`, `vector<double>(t, "t", n)`,
// `optional(gate, "gate")`. These check the device, the dtype and the strides, and name the argument where it does not fit. Relations
// between shapes follow, then `Result<float> y(shape)`, which is allocated here, and `compute(numbers, run)`. No header of torch is
// included and nothing of torch is linked: memory is read and handed over by DLPack.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "rows.h"

namespace geoflow {

namespace py = pybind11;

// An argument that compiled code does not serve, though torch may: its device, its dtype, its strides, or no memory of its own. In Python it
// is `_C.NotServed`, a ValueError.
struct NotServed : std::runtime_error {
    using runtime_error::runtime_error;
};

// What `connect` was given; see geoflow_fast/ops/extension.py.
struct Torch {
    PyObject* tensor = nullptr;            // the class
    const dlpack::Exchange* exchange = nullptr;  // null where torch has none
    PyObject *to_dlpack = nullptr, *from_dlpack = nullptr;  // the way without it
    PyObject* usable_threads = nullptr;
    std::int64_t alone = 0;                // numbers up to which the calling thread works alone
};
inline Torch torch;

inline void connect(py::object tensor, py::object exchange, py::object to_dlpack, py::object from_dlpack, py::object usable_threads,
                    std::int64_t alone) {
    const dlpack::Exchange* table = nullptr;
    if (PyCapsule_IsValid(exchange.ptr(), "dlpack_exchange_api")) {
        auto* header = static_cast<const dlpack::ExchangeHeader*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
        while (header && header->version.major != 1) header = header->previous;  // the newest is the first
        table = reinterpret_cast<const dlpack::Exchange*>(header);
    }
    // Never given back: the process may end while a tensor is on its way.
    torch = {tensor.release().ptr(), table, to_dlpack.release().ptr(), from_dlpack.release().ptr(), usable_threads.release().ptr(), alone};
}

template <class T>
constexpr dlpack::Type type_of() {
    const auto code = std::is_same_v<T, bool>            ? dlpack::kBool
                      : std::is_floating_point_v<T>      ? dlpack::kFloat
                      : std::is_signed_v<T>              ? dlpack::kInt
                                                         : dlpack::kUint;
    return {code, 8 * sizeof(T), 1};
}

inline std::string name_of(const dlpack::Type& type) {
    constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
    if (type.code == dlpack::kBool) return "torch.bool";
    return "torch." + std::string(type.code < 6 ? kNames[type.code] : "dtype") + std::to_string(type.bits);
}

inline std::string text_of(const std::int64_t* shape, int dimensions) {
    std::string text = "(";
    for (int k = 0; k < dimensions; ++k) text += (k ? ", " : "") + std::to_string(shape[k]);
    return text + (dimensions == 1 ? ",)" : ")");
}

// A tensor that a call borrows, or None.
class Tensor {
  public:
    Tensor() = default;
    explicit Tensor(PyObject* object) : object_(object) {}
    Tensor(Tensor&& other) noexcept { *this = std::move(other); }
    Tensor& operator=(Tensor&& other) noexcept {
        object_ = other.object_;
        std::swap(managed_, other.managed_);
        std::swap(capsule_, other.capsule_);
        view_ = other.view_;
        return *this;
    }
    ~Tensor() {
        if (managed_) managed_->deleter(managed_);
        Py_XDECREF(capsule_);
    }

    bool is_none() const { return object_ == Py_None; }

    // The memory of a tensor on a device of this type; an error that names the argument if there is none.
    const dlpack::View& view(const char* name, std::int32_t device = dlpack::kCpu) const {
        if (!view_) take(name);
        if (view_->device.type != device) throw NotServed(std::string(name) + " is on another device than the kernels read");
        std::int64_t numbers = 1;
        for (int k = 0; k < view_->dimensions; ++k) numbers *= view_->shape[k];
        // Wrappers without a storage come with a null pointer and no error.
        if (numbers && !view_->data) throw NotServed(std::string(name) + " is a tensor without memory of its own");
        return *view_;
    }

    template <class T>
    const dlpack::View& view_as(const char* name) const {
        const dlpack::View& seen = view(name);
        constexpr dlpack::Type wanted = type_of<T>();
        if (seen.type.code != wanted.code || seen.type.bits != wanted.bits || seen.type.lanes != 1)
            throw NotServed(std::string(name) + " is " + name_of(seen.type) + ", expected " + name_of(wanted));
        return seen;
    }

  private:
    void take(const char* name) const {
        if (!PyObject_TypeCheck(object_, reinterpret_cast<PyTypeObject*>(torch.tensor)))
            throw py::type_error(std::string(name) + " must be a torch.Tensor, not " + Py_TYPE(object_)->tp_name);
        if (torch.exchange) {
            if (torch.exchange->from_python(object_, &managed_) == 0) {
                view_ = &managed_->view;
                return;
            }
            managed_ = nullptr;
        } else {
            capsule_ = PyObject_CallOneArg(torch.to_dlpack, object_);
            if (capsule_) {
                view_ = &static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule_, "dltensor"))->view;
                return;
            }
        }
        PyErr_Clear();  // its message is a backtrace of C++
        throw NotServed(std::string(name) + " is a tensor without memory of its own");
    }

    PyObject* object_ = nullptr;
    mutable dlpack::ManagedVersioned* managed_ = nullptr;
    mutable PyObject* capsule_ = nullptr;
    mutable const dlpack::View* view_ = nullptr;
};

inline std::int64_t stride_of(const dlpack::View& view, int dimension) {
    if (view.strides) return view.strides[dimension];
    std::int64_t stride = 1;
    for (int k = dimension + 1; k < view.dimensions; ++k) stride *= view.shape[k];
    return stride;
}

template <class T>
T* data_of(const dlpack::View& view) {
    return reinterpret_cast<T*>(static_cast<char*>(view.data) + view.byte_offset);
}

// A tensor [..., width] as rows of unit stride; `data` is null where it was left out.
template <class T>
struct Rows {
    T* data = nullptr;
    std::int64_t count = 0, width = 0, stride = 0;

    explicit operator bool() const { return data != nullptr; }
    operator RowsView() const { return {reinterpret_cast<float*>(const_cast<std::remove_const_t<T>*>(data)), stride}; }
};

template <class T>
Rows<const T> rows_of(const dlpack::View& view, const char* name) {
    if (view.dimensions < 1) throw py::value_error(std::string(name) + " must have at least one dimension");
    const int last = view.dimensions - 1;
    const std::int64_t width = view.shape[last];
    if (width > 1 && stride_of(view, last) != 1) throw NotServed(std::string(name) + " must be dense along its last dimension");
    std::int64_t count = 1, stride = width;
    bool first = true;
    for (int k = last - 1; k >= 0; --k) {
        if (view.shape[k] != 1) {
            if (first) {
                stride = stride_of(view, k);
                first = false;
            } else if (stride_of(view, k) != stride * count && count) {
                throw NotServed(std::string(name) + " must have its rows at equal distances");
            }
        }
        count *= view.shape[k];
    }
    return {data_of<const T>(view), count, width, stride};
}

template <class T = float>
Rows<const T> rows(const Tensor& x, const char* name) {
    return rows_of<T>(x.view_as<T>(name), name);
}

// The same, or null rows for None.
template <class T = float>
Rows<const T> optional(const Tensor& x, const char* name) {
    return x.is_none() ? Rows<const T>{} : rows<T>(x, name);
}

// A matrix [count, width] without gaps.
template <class T = float>
Rows<const T> dense(const Tensor& x, const char* name) {
    const Rows<const T> seen = rows<T>(x, name);
    if (seen.count > 1 && seen.stride != seen.width) throw NotServed(std::string(name) + " must be contiguous");
    return seen;
}

// `count` numbers without gaps, [count].
template <class T>
const T* vector(const Tensor& x, const char* name, std::int64_t count) {
    const dlpack::View& view = x.view_as<T>(name);
    if (view.dimensions != 1 || view.shape[0] != count)
        throw py::value_error(std::string(name) + " must be [" + std::to_string(count) + "], got " + text_of(view.shape, view.dimensions));
    if (count > 1 && stride_of(view, 0) != 1) throw NotServed(std::string(name) + " must be contiguous");
    return data_of<const T>(view);
}

template <class T>
const T* optional_vector(const Tensor& x, const char* name, std::int64_t count) {
    return x.is_none() ? nullptr : vector<T>(x, name, count);
}

// `count` float32 numbers at any distance from each other, as rows of one number.
inline RowsView column(const Tensor& x, const char* name, std::int64_t count) {
    const dlpack::View& view = x.view_as<float>(name);
    if (view.dimensions != 1 || view.shape[0] != count)
        throw py::value_error(std::string(name) + " must be [" + std::to_string(count) + "], got " + text_of(view.shape, view.dimensions));
    return {data_of<float>(view), stride_of(view, 0)};
}

// Refuses another shape than that of `like`.
inline void check_shape(const Tensor& x, const char* name, const Tensor& like, const char* like_name) {
    const dlpack::View &seen = x.view(name), &wanted = like.view(like_name);
    if (seen.dimensions == wanted.dimensions && std::equal(seen.shape, seen.shape + seen.dimensions, wanted.shape)) return;
    throw py::value_error(std::string(name) + " must have the shape " + text_of(wanted.shape, wanted.dimensions) + " of " + like_name +
                          ", got " + text_of(seen.shape, seen.dimensions));
}

// Refuses what is no matrix [B, d] with d of at least `least`.
inline void check_matrix(const Tensor& x, const char* name, std::int64_t least) {
    const dlpack::View& seen = x.view(name);
    if (seen.dimensions == 2 && seen.shape[1] >= least) return;
    throw py::value_error(std::string(name) + " must be [B, d]" + (least > 1 ? " with d >= " + std::to_string(least) : "") + ", got " +
                          text_of(seen.shape, seen.dimensions));
}

// Whether results are filled with NaN before a kernel gets them, so that tests see what it leaves unwritten.
inline bool fill_results = false;

// A tensor to be: memory in one block with its description, which a torch.Tensor owns once it has left.
template <class T>
class Result {
  public:
    explicit Result(std::vector<std::int64_t> shape) : Result(shape.data(), static_cast<int>(shape.size())) {}
    Result(const std::int64_t* shape, int dimensions) {
        if (dimensions > kMost) throw py::value_error("tensors of more than 8 dimensions are not served");
        std::int64_t numbers = 1;
        for (int k = 0; k < dimensions; ++k) numbers *= shape[k];
        const std::size_t bytes = sizeof(Block) + static_cast<std::size_t>(numbers) * sizeof(T);
        void* const memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (!memory) throw std::bad_alloc();
        block_ = new (memory) Block{};
        std::int64_t step = 1;
        for (int k = dimensions - 1; k >= 0; --k) {
            block_->shape[k] = shape[k];
            block_->strides[k] = step;
            step *= shape[k] ? shape[k] : 1;
        }
        data_ = reinterpret_cast<T*>(block_ + 1);
        if (fill_results) std::memset(data_, 0xff, static_cast<std::size_t>(numbers) * sizeof(T));
        const dlpack::View view{data_, {dlpack::kCpu, 0}, dimensions, type_of<T>(), block_->shape, block_->strides, 0};
        if (torch.exchange)
            block_->versioned = {{1, 0}, block_, [](dlpack::ManagedVersioned* x) { std::free(x->context); }, 0, view};
        else
            block_->plain = {view, block_, [](dlpack::Managed* x) { std::free(x->context); }};
    }
    Result(Result&& other) noexcept : data_(other.data_), block_(std::exchange(other.block_, nullptr)) {}
    ~Result() { std::free(block_); }

    T* data() const { return data_; }

    // The result as rows of this width.
    Rows<T> rows(std::int64_t width) const { return {data_, 0, width, width}; }

    // The tensor, a new reference; null with a Python error.
    PyObject* release() {
        if (torch.exchange) {
            void* tensor = nullptr;  // the block is torch's, even if this fails
            return torch.exchange->to_python(&std::exchange(block_, nullptr)->versioned, &tensor) ? nullptr : static_cast<PyObject*>(tensor);
        }
        PyObject* const capsule = PyCapsule_New(&block_->plain, "dltensor", nullptr);
        if (!capsule) return nullptr;
        PyObject* const tensor = PyObject_CallOneArg(torch.from_dlpack, capsule);
        if (tensor) block_ = nullptr;
        Py_DECREF(capsule);
        return tensor;
    }

  private:
    static constexpr int kMost = 8;
    struct alignas(64) Block {
        union {
            dlpack::ManagedVersioned versioned;
            dlpack::Managed plain;
        };
        std::int64_t shape[kMost], strides[kMost];
    };
    T* data_;
    Block* block_;
};

// A result of the shape of `x`.
template <class T = float>
Result<T> result_like(const Tensor& x, const char* name) {
    const dlpack::View& view = x.view(name);
    return Result<T>(view.shape, view.dimensions);
}

// Threads for work on so many numbers. Small work stays in the calling thread: waking a team takes longer.
inline int threads_for(std::int64_t numbers) {
    if (numbers <= torch.alone) return 1;
    const py::object threads = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(torch.usable_threads));
    if (!threads) throw py::error_already_set();
    return threads.cast<int>();
}

// Runs a kernel; other Python threads run meanwhile if the work is worth a change of threads.
template <class Run>
void compute(std::int64_t numbers, const Run& run) {
    constexpr std::int64_t kLong = 1 << 14;
    if (numbers < kLong) {
        run();
        return;
    }
    py::gil_scoped_release release;
    run();
}

}  // namespace geoflow

namespace pybind11::detail {

template <>
struct type_caster<geoflow::Tensor> {
    PYBIND11_TYPE_CASTER(geoflow::Tensor, const_name("torch.Tensor | None"));

    // Anything passes here, where the argument's name is not known; `rows` and its like refuse it with the name.
    bool load(handle from, bool) {
        value = geoflow::Tensor(from.ptr());
        return true;
    }
};

template <class T>
struct type_caster<geoflow::Result<T>> {
    static constexpr auto name = const_name("torch.Tensor");
    static handle cast(geoflow::Result<T>&& result, return_value_policy, handle) {
        PyObject* const tensor = result.release();
        if (!tensor) throw error_already_set();
        return tensor;
    }
};

}  // namespace pybind11::detail
