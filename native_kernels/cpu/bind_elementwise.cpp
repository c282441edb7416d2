// Python: rms_norm, silu_mul and rope.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "kernel_table.hpp"
#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

// A float32 row of the input, widened into `memory` if need be.
const float* as_f32(const KernelTable& table, const void* row, bool bf16, std::vector<float>& memory, int64_t n) {
  if (!bf16) return static_cast<const float*>(row);
  if (memory.size() < static_cast<size_t>(n)) memory.resize(static_cast<size_t>(n));
  table.widen(static_cast<const uint16_t*>(row), memory.data(), n);
  return memory.data();
}

// Runs row(index, in, out) on float32 rows, converting to the output's type.
template <class Row>
void by_row(int64_t num_rows, const Output& out, int64_t width, int num_threads, Row&& row) {
  const KernelTable& table = kernels();
  constexpr int64_t kRowsPerTask = 8;
  ThreadPool::instance().run((num_rows + kRowsPerTask - 1) / kRowsPerTask,
                             [&](int64_t task) {
                               thread_local std::vector<float> memory;
                               if (memory.size() < static_cast<size_t>(width))
                                 memory.resize(static_cast<size_t>(width));
                               for (int64_t i = task * kRowsPerTask; i < std::min(num_rows, (task + 1) * kRowsPerTask);
                                    ++i) {
                                 void* to = element(out.data(), is_bf16(out), i * out.stride(0));
                                 row(table, i, is_bf16(out) ? memory.data() : static_cast<float*>(to));
                                 if (is_bf16(out)) table.narrow(memory.data(), static_cast<uint16_t*>(to), width);
                               }
                             },
                             num_threads);
}

void rms_norm(const Input& x, const Input& weight, float epsilon, const Output& out, int num_threads) {
  expect(x, "x", kFloats, {kAny, kAny}, 1);
  const int64_t rows = size(x, 0), width = size(x, 1);
  expect(weight, "weight", {Type::f32}, {width});
  expect(out, "out", kFloats, {rows, width}, 1);
  nb::gil_scoped_release released;
  by_row(rows, out, width, num_threads, [&](const KernelTable& table, int64_t i, float* to) {
    thread_local std::vector<float> memory;
    const float* from = as_f32(table, element(x.data(), is_bf16(x), i * x.stride(0)), is_bf16(x), memory, width);
    table.rms_norm(from, data<float>(weight), epsilon, to, width);
  });
}

void silu_mul(const Input& gate_up, const Output& out, int num_threads) {
  expect(gate_up, "gate_up", kFloats, {kAny, kAny}, 1);
  const int64_t rows = size(gate_up, 0), width = size(gate_up, 1) / 2;
  require(size(gate_up, 1) % 2 == 0, "gate_up must have an even number of columns: gate, then up");
  expect(out, "out", kFloats, {rows, width}, 1);
  nb::gil_scoped_release released;
  by_row(rows, out, width, num_threads, [&](const KernelTable& table, int64_t i, float* to) {
    thread_local std::vector<float> memory;
    const bool bf16 = is_bf16(gate_up);
    const float* from = as_f32(table, element(gate_up.data(), bf16, i * gate_up.stride(0)), bf16, memory, 2 * width);
    table.silu_mul(from, from + width, to, width);
  });
}

void rope(const Output& x, const Input& cosine, const Input& sine, const Input& positions) {
  expect(x, "x", kFloats, {kAny, kAny, kAny}, 2);
  const int64_t num_tokens = size(x, 0), num_heads = size(x, 1), dim = size(x, 2);
  expect(cosine, "cosine", {Type::f32}, {kAny, kAny});
  const int64_t num_positions = size(cosine, 0), half = size(cosine, 1);
  expect(sine, "sine", {Type::f32}, {num_positions, half});
  require(2 * half <= dim,
          "cosine has " + std::to_string(half) + " columns, more than half of head_dim " + std::to_string(dim));
  expect(positions, "positions", {Type::i32, Type::i64}, {num_tokens});
  auto position = [&](int64_t token) -> int64_t {
    return holds(positions, Type::i32) ? data<int32_t>(positions)[token] : data<int64_t>(positions)[token];
  };
  for (int64_t token = 0; token < num_tokens; ++token) {
    require(position(token) >= 0 && position(token) < num_positions,
            numbered("positions", token) + " is " + std::to_string(position(token)) + ", beyond the tables' " +
                std::to_string(num_positions) + " rows");
  }
  nb::gil_scoped_release released;
  const KernelTable& table = kernels();
  std::vector<float> memory(static_cast<size_t>(2 * half));
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float* c = data<float>(cosine) + position(token) * half;
    const float* s = data<float>(sine) + position(token) * half;
    for (int64_t head = 0; head < num_heads; ++head) {
      void* row = element(x.data(), is_bf16(x), token * x.stride(0) + head * dim);
      if (!is_bf16(x)) {
        table.rotate(static_cast<float*>(row), c, s, half);
        continue;
      }
      table.widen(static_cast<const uint16_t*>(row), memory.data(), 2 * half);
      table.rotate(memory.data(), c, s, half);
      table.narrow(memory.data(), static_cast<uint16_t*>(row), 2 * half);
    }
  }
}

}  // namespace

void bind_elementwise(nb::module_& module) {
  using nb::arg;
  module.def("rms_norm", rms_norm, arg("x").noconvert(), arg("weight").noconvert(), arg("epsilon"),
             arg("out").noconvert(), arg("num_threads"));
  module.def("silu_mul", silu_mul, arg("gate_up").noconvert(), arg("out").noconvert(), arg("num_threads"));
  module.def("rope", rope, arg("x").noconvert(), arg("cosine").noconvert(), arg("sine").noconvert(),
             arg("positions").noconvert());
}

}  // namespace tokring::cpu
