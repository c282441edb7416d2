// numpy arrays in and out of the binding without a detour over DLPack, which is most of what a small call costs.
// numpy's headers are not needed: its C API is a table whose indices and whose array head are its ABI, the same in
// numpy 1 and 2 (pybind11 relies on both, too). What is not an exact numpy array of the right type is left to nanobind.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>

namespace tokring::binding {

namespace nb = nanobind;

// The head of PyArrayObject.
struct ArrayHead {
  PyObject_HEAD char* data;
  int num_dims;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* dtype;
  int flags;
};

enum ArrayFlag : int { kContiguous = 0x0001, kAligned = 0x0100, kWriteable = 0x0400 };

// numpy's own dtype objects, by the numbers that numpy gives its C types.
template <class T>
constexpr int kTypeNumber = -1;
template <>
inline constexpr int kTypeNumber<uint8_t> = 2;
template <>
inline constexpr int kTypeNumber<int32_t> = 5;
template <>
inline constexpr int kTypeNumber<uint32_t> = 6;
template <>
inline constexpr int kTypeNumber<float> = 11;
template <>
inline constexpr int kTypeNumber<double> = 12;

class NumpyApi {
 public:
  // Of this process, loaded at the first call. Throws nb::python_error without numpy.
  static const NumpyApi& get() {
    static const NumpyApi* api = new NumpyApi();  // never freed: numpy is not either
    return *api;
  }

  template <class T>
  bool is_array_of(nb::handle object, int num_dims) const {
    if (Py_TYPE(object.ptr()) != array_type_) return false;
    const auto* array = reinterpret_cast<const ArrayHead*>(object.ptr());
    constexpr int kUsable = kContiguous | kAligned;
    return array->num_dims == num_dims && array->dtype == dtype<T>() && (array->flags & kUsable) == kUsable;
  }

  // A C-contiguous array over `data`, which `owner` keeps alive.
  template <class T, size_t kDims>
  nb::object view(const T* data, std::array<Py_ssize_t, kDims> shape, nb::handle owner, bool writable) const {
    PyObject* type = Py_NewRef(dtype<T>());  // taken over by the new array, as is the reference to `owner`
    nb::object array =
        nb::steal(new_from_descr_(array_type_, type, static_cast<int>(kDims), shape.data(), nullptr,
                                  const_cast<T*>(data), kAligned | (writable ? kWriteable : 0), nullptr));
    if (!array.is_valid() || set_base_object_(array.ptr(), Py_NewRef(owner.ptr())) != 0) throw nb::python_error();
    return array;
  }

 private:
  using NewFromDescr = PyObject* (*)(PyTypeObject*, PyObject*, int, const Py_ssize_t*, const Py_ssize_t*, void*, int,
                                     PyObject*);
  using SetBaseObject = int (*)(PyObject*, PyObject*);
  using DescrFromType = PyObject* (*)(int);

  NumpyApi() {
    nb::object table_capsule = nb::module_::import_(module_name()).attr("_ARRAY_API");
    void** table = static_cast<void**>(PyCapsule_GetPointer(table_capsule.ptr(), nullptr));
    if (table == nullptr) throw nb::python_error();
    array_type_ = static_cast<PyTypeObject*>(table[2]);
    auto descr_from_type = reinterpret_cast<DescrFromType>(table[45]);
    new_from_descr_ = reinterpret_cast<NewFromDescr>(table[94]);
    set_base_object_ = reinterpret_cast<SetBaseObject>(table[282]);
    for (int number = 0; number < kNumTypes; ++number) dtypes_[number] = descr_from_type(number);
  }

  static const char* module_name() {
    const bool is_numpy_2 = nb::hasattr(nb::module_::import_("numpy"), "_core");
    return is_numpy_2 ? "numpy._core._multiarray_umath" : "numpy.core._multiarray_umath";
  }

  template <class T>
  PyObject* dtype() const {
    static_assert(kTypeNumber<T> >= 0 && kTypeNumber<T> < kNumTypes);
    return dtypes_[kTypeNumber<T>];
  }

  static constexpr int kNumTypes = 13;
  PyTypeObject* array_type_;
  NewFromDescr new_from_descr_;
  SetBaseObject set_base_object_;
  PyObject* dtypes_[kNumTypes];
};

// A C-contiguous array argument, borrowed for the call.
template <class T, int kDims>
class ArrayArgument {
 public:
  using Foreign = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

  ArrayArgument() = default;
  explicit ArrayArgument(const ArrayHead& array) : data_(reinterpret_cast<const T*>(array.data)) {
    for (int i = 0; i < kDims; ++i) shape_[i] = static_cast<size_t>(array.shape[i]);
  }
  explicit ArrayArgument(Foreign foreign) : foreign_(std::move(foreign)), data_(foreign_.data()) {
    for (int i = 0; i < kDims; ++i) shape_[i] = foreign_.shape(i);
  }

  const T* data() const { return data_; }
  size_t shape(int dim) const { return shape_[dim]; }
  size_t size() const {
    size_t product = 1;
    for (size_t length : shape_) product *= length;
    return product;
  }

 private:
  Foreign foreign_;
  const T* data_ = nullptr;
  std::array<size_t, kDims> shape_{};
};

}  // namespace tokring::binding

namespace nanobind::detail {

template <class T, int kDims>
struct type_caster<tokring::binding::ArrayArgument<T, kDims>> {
  using Argument = tokring::binding::ArrayArgument<T, kDims>;
  using Foreign = make_caster<typename Argument::Foreign>;
  NB_TYPE_CASTER(Argument, Foreign::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    if (tokring::binding::NumpyApi::get().is_array_of<T>(source, kDims)) {
      value = Argument(*reinterpret_cast<const tokring::binding::ArrayHead*>(source.ptr()));
      return true;
    }
    Foreign caster;
    if (!caster.from_python(source, flags, cleanup)) return false;
    value = Argument(std::move(caster.value));
    return true;
  }
};

}  // namespace nanobind::detail
