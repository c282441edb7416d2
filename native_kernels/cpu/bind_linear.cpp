// Python class PackedLinear.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <new>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "linear.hpp"

namespace tokring::cpu {
namespace {

WeightKind parse_kind(const std::string& name) {
  if (name == "F32") return WeightKind::f32;
  if (name == "BF16") return WeightKind::bf16;
  if (name == "Q4_0") return WeightKind::q4_0;
  if (name == "Q4_1") return WeightKind::q4_1;
  if (name == "Q8_0") return WeightKind::q8_0;
  throw nb::value_error(("unknown weight kind '" + name + "': use F32, BF16, Q4_0, Q4_1 or Q8_0").c_str());
}

void construct(PackedLinear* self, const std::string& kind_name, const Input& rows, int64_t k) {
  const WeightKind kind = parse_kind(kind_name);
  const int64_t multiple = PackedLinear::input_multiple(kind);
  require(k > 0 && k % multiple == 0,
          "k must be a multiple of " + std::to_string(multiple) + ", but is " + std::to_string(k));
  if (kind == WeightKind::f32) {
    expect(rows, "rows", {Type::f32}, {kAny, k});
  } else if (kind == WeightKind::bf16) {
    expect(rows, "rows", {Type::bf16}, {kAny, k});
  } else {
    expect(rows, "rows", {Type::u8}, {kAny, PackedLinear::row_bytes(kind, k)});
  }
  require(size(rows, 0) > 0, "rows must not be empty");
  nb::gil_scoped_release released;
  new (self) PackedLinear(kind, data<uint8_t>(rows), size(rows, 0), k);
}

void apply(const PackedLinear& self, const Input& x, const Output& out, int activation_bits, int num_threads) {
  expect(x, "x", {Type::f32}, {kAny, self.inputs()}, 1);
  expect(out, "out", {Type::f32}, {size(x, 0), self.outputs()}, 1);
  require(activation_bits == 8 || activation_bits == 15, "activation_bits must be 8 or 15");
  nb::gil_scoped_release released;
  apply_linear(self, data<float>(x), size(x, 0), x.stride(0), data<float>(out), out.stride(0), activation_bits == 15,
               num_threads);
}

}  // namespace

void bind_linear(nb::module_& module) {
  using nb::arg;
  nb::class_<PackedLinear>(module, "PackedLinear")
      .def("__init__", construct, arg("kind"), arg("rows").noconvert(), arg("k"))
      .def("apply", apply, arg("x").noconvert(), arg("out").noconvert(), arg("activation_bits"), arg("num_threads"))
      .def_prop_ro("outputs", &PackedLinear::outputs)
      .def_prop_ro("inputs", &PackedLinear::inputs)
      .def_prop_ro("num_bytes", &PackedLinear::bytes);
}

}  // namespace tokring::cpu
