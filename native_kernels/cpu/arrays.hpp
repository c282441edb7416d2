// Checked access to arrays that come from Python: numpy, or anything that speaks DLPack (torch's CPU tensors).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace tokring::cpu {

namespace nb = nanobind;
using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

enum class Type { f32, bf16, i32, i64, u32, boolean, i8, u8 };

inline std::string type_name(nb::dlpack::dtype type) {
  const char* kind = "?";
  switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
    case nb::dlpack::dtype_code::Int:
      kind = "int";
      break;
    case nb::dlpack::dtype_code::UInt:
      kind = "uint";
      break;
    case nb::dlpack::dtype_code::Float:
      kind = "float";
      break;
    case nb::dlpack::dtype_code::Bfloat:
      kind = "bfloat";
      break;
    case nb::dlpack::dtype_code::Bool:
      return "bool";
    default:
      break;
  }
  return kind + std::to_string(type.bits);
}

inline const char* type_name(Type type) {
  switch (type) {
    case Type::f32:
      return "float32";
    case Type::bf16:
      return "uint16 (bfloat16 bits)";
    case Type::i32:
      return "int32";
    case Type::i64:
      return "int64";
    case Type::u32:
      return "uint32 or int32 (bits)";
    case Type::boolean:
      return "bool";
    case Type::i8:
      return "int8";
    case Type::u8:
      return "uint8";
  }
  return "?";
}

template <class Array>
bool holds(const Array& array, Type type) {
  const nb::dlpack::dtype have = array.dtype();
  switch (type) {
    case Type::f32:
      return have == nb::dtype<float>();
    case Type::bf16:
      return have == nb::dtype<uint16_t>() ||
             (have.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && have.bits == 16 && have.lanes == 1);
    case Type::i32:
      return have == nb::dtype<int32_t>();
    case Type::i64:
      return have == nb::dtype<int64_t>();
    case Type::u32:
      return have == nb::dtype<uint32_t>() || have == nb::dtype<int32_t>();
    case Type::boolean:
      return have == nb::dtype<bool>();
    case Type::i8:
      return have == nb::dtype<int8_t>();
    case Type::u8:
      return have == nb::dtype<uint8_t>();
  }
  return false;
}

constexpr int64_t kAny = -1;  // any size in an expected shape

inline std::string shape_text(const int64_t* shape, size_t ndim) {
  std::string text = "[";
  for (size_t i = 0; i < ndim; ++i) {
    if (i != 0) text += ", ";
    text += shape[i] == kAny ? "*" : std::to_string(shape[i]);
  }
  return text + "]";
}

// Throws ValueError naming the argument, what it must be and what it is, unless type and shape fit and the innermost
// `contiguous` dimensions lie without gaps (all of them by default).
template <class Array>
void expect(const Array& array, const char* name, std::initializer_list<Type> types,
            std::initializer_list<int64_t> shape, size_t contiguous = 8) {
  bool fits = array.ndim() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    const int64_t wanted = shape.begin()[i];
    fits = wanted == kAny || wanted == static_cast<int64_t>(array.shape(i));
  }
  bool typed = false;
  for (Type type : types) typed = typed || holds(array, type);
  if (!fits || !typed) {
    std::string wanted;
    for (Type type : types) wanted += (wanted.empty() ? "" : " or ") + std::string(type_name(type));
    std::vector<int64_t> have;
    for (size_t i = 0; i < array.ndim(); ++i) have.push_back(static_cast<int64_t>(array.shape(i)));
    throw nb::value_error((std::string(name) + " must be " + wanted + shape_text(shape.begin(), shape.size()) +
                           ", but is " + type_name(array.dtype()) + shape_text(have.data(), have.size()))
                              .c_str());
  }
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0 && array.ndim() - i <= contiguous;) {
    if (array.shape(i) != 1 && array.stride(i) != stride && array.size() != 0) {
      throw nb::value_error(
          (std::string(name) + " must be C-contiguous" +
           (contiguous < array.ndim() ? " in its last " + std::to_string(contiguous) + " dimensions" : ""))
              .c_str());
    }
    stride *= static_cast<int64_t>(array.shape(i));
  }
}

constexpr std::initializer_list<Type> kFloats{Type::f32, Type::bf16};

inline std::string numbered(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

// Address of an element of a float32 or bfloat16 array.
inline void* element(const void* base, bool bf16, int64_t index) {
  return const_cast<char*>(static_cast<const char*>(base)) + index * (bf16 ? 2 : 4);
}

inline void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

inline void require(bool condition, const std::string& message) {
  if (!condition) throw nb::value_error(message.c_str());
}

template <class T, class Array>
T* data(const Array& array) {
  return const_cast<T*>(static_cast<const T*>(static_cast<const void*>(array.data())));
}

template <class Array>
bool is_bf16(const Array& array) {
  return holds(array, Type::bf16);
}

template <class Array>
int64_t size(const Array& array, size_t dimension) {
  return static_cast<int64_t>(array.shape(dimension));
}

}  // namespace tokring::cpu
