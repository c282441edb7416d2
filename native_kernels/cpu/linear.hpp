// Linear layers on packed weights: y = x W^T.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernel_table.hpp"

namespace tokring::cpu {

// Rows of GGUF blocks as they lie in the file, or plain bfloat16 or float32 rows.
enum class WeightKind { f32, bf16, q4_0, q4_1, q8_0 };

// What activations are rounded to for a kind of weight.
enum class InputForm { f32, bf16, integers };

// A weight matrix [n][k] in panels of 16 outputs, the layout the kernels read front to back. Immutable once packed.
class PackedLinear {
 public:
  // rows: n rows of k inputs in `kind`'s own layout. k is a multiple of input_multiple(kind); n is padded to 16 inside.
  PackedLinear(WeightKind kind, const uint8_t* rows, int64_t n, int64_t k);

  int64_t outputs() const { return n_; }
  int64_t inputs() const { return k_; }
  int64_t bytes() const { return num_panels() * panel_bytes_; }
  int64_t num_panels() const { return (n_ + kPanel - 1) / kPanel; }
  InputForm input_form() const {
    if (kind_ == WeightKind::f32) return InputForm::f32;
    return kind_ == WeightKind::bf16 ? InputForm::bf16 : InputForm::integers;
  }

  static int64_t input_multiple(WeightKind kind) { return kind == WeightKind::f32 ? 1 : kQuantBlock; }

  // Bytes of one row in the layout that the constructor reads.
  static int64_t row_bytes(WeightKind kind, int64_t k);

 private:
  friend class LinearInput;
  struct Unmap {
    size_t bytes;
    void operator()(uint8_t* memory) const;
  };

  WeightKind kind_;
  int64_t n_;
  int64_t k_;
  int64_t panel_bytes_;
  std::unique_ptr<uint8_t, Unmap> memory_;
};

// Activation rows made ready once for the layers that share them (q, k, v; gate, up). Grows, never shrinks.
class LinearInput {
 public:
  // 15-bit activations cost a second integer pass and round 128 times finer than 8-bit ones.
  explicit LinearInput(bool fine = true) : fine_(fine) {}

  void reserve(int64_t rows, int64_t k);
  // Prepares row `row` of `rows` x `k`. Rows may be set by several threads at once.
  void set_row(const KernelTable& table, int64_t row, const float* x, int64_t k, InputForm form);
  // out[row * out_stride + i] for the outputs of panels [first_panel, end_panel), rows [0, rows)
  void apply(const KernelTable& table, const PackedLinear& weight, int64_t rows, int64_t first_panel, int64_t end_panel,
             float* out, int64_t out_stride) const;

 private:
  void panels(const KernelTable& table, const PackedLinear& weight, int64_t rows, int64_t first, int64_t end,
              float* out, int64_t out_stride) const;

  bool fine_;
  int64_t capacity_rows_ = 0;
  int64_t capacity_k_ = 0;
  std::unique_ptr<int8_t[]> high_, low_;
  std::unique_ptr<int16_t[]> wide_;
  std::unique_ptr<float[]> scale_, sum_;
  std::unique_ptr<uint16_t[]> bf16_;
  std::unique_ptr<float[]> f32_;
};

// y[rows][n] = x[rows][k] W^T over the pool's threads.
void apply_linear(const PackedLinear& weight, const float* x, int64_t rows, int64_t x_stride, float* out,
                  int64_t out_stride, bool fine, int num_threads);

}  // namespace tokring::cpu
