// Shared by the binding's source files.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <span>
#include <string>
#include <string_view>

#include "numpy_arrays.hpp"
#include "tokring/channel.hpp"

namespace tokring::binding {

namespace nb = nanobind;
using namespace nb::literals;

template <class T>
using Column = ArrayArgument<T, 1>;
template <class T>
using Matrix = ArrayArgument<T, 2>;

template <class T, class Array>
std::span<const T> span_of(const Array& array) {
  return {array.data(), array.size()};
}

inline nb::str text(std::string_view value) { return nb::str(value.data(), value.size()); }

// numpy structured dtype of a struct in the field table, cached. Borrowed.
nb::handle struct_dtype(std::string_view structure);

// Any contiguous bytes-like object: bytes, a structured array, a np.void.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<size_t>(view_.len)};
  }

  // A copy of the one record in here. Raises ValueError if the size differs.
  template <class Record>
  Record record(const char* what) const {
    if (static_cast<size_t>(view_.len) != sizeof(Record)) {
      throw nb::value_error((std::string(what) + " has " + std::to_string(view_.len) + " bytes, needed one record of " +
                             std::to_string(sizeof(Record)))
                                .c_str());
    }
    Record record;
    std::memcpy(&record, view_.buf, sizeof record);
    return record;
  }

 private:
  Py_buffer view_{};
};

void bind_tables(nb::module_& module);
void bind_front_end_channel(nb::module_& module);
void bind_engine_channel(nb::module_& module);
void bind_request_limits(nb::module_& module);
void bind_stats(nb::module_& module);

}  // namespace tokring::binding
