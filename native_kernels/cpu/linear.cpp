#include "linear.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

// Zeroed, page aligned, in huge pages where the kernel gives them; kernels prefetch past the end, hence the slack.
uint8_t* map_bytes(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  (void)madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<uint8_t*>(memory);
}

int64_t bytes_per_panel(WeightKind kind, int64_t k) {
  switch (kind) {
    case WeightKind::f32:
      return kPanel * k * 4;
    case WeightKind::bf16:
      return kPanel * k * 2;
    case WeightKind::q8_0:
      return k / kQuantBlock * kQ8BlockBytes;
    case WeightKind::q4_0:
    case WeightKind::q4_1:
      break;
  }
  return k / kQuantBlock * kQ4BlockBytes;
}

float half_to_float(const uint8_t* p) {
  _Float16 value;
  std::memcpy(&value, p, 2);
  return static_cast<float>(value);
}

void store_half(uint8_t* p, float x) {
  const auto value = static_cast<_Float16>(x);
  std::memcpy(p, &value, 2);
}

// GGUF's 4-bit blocks: fp16 scale, (Q4_1: fp16 minimum,) then 16 bytes: low nibbles are inputs 0-15, high 16-31.
void pack_q4_block(const uint8_t* block, bool has_minimum, int output, uint8_t* to) {
  std::memcpy(to + 2 * output, block, 2);
  const uint8_t* nibbles = block + (has_minimum ? 4 : 2);
  if (has_minimum) {
    std::memcpy(to + 2 * kPanel + 2 * output, block + 2, 2);
  } else {
    store_half(to + 2 * kPanel + 2 * output, -8.0f * half_to_float(block));  // Q4_0 counts from -8: exact in fp16
  }
  for (int input = 0; input < kQuantBlock; ++input) {
    const int nibble = input < 16 ? nibbles[input] & 15 : nibbles[input - 16] >> 4;
    // Run of 64 bytes: inputs 8r to 8r + 3 in the low nibbles, 8r + 4 to 8r + 7 in the high ones.
    uint8_t& byte = to[4 * kPanel + 64 * (input / 8) + 4 * output + input % 4];
    byte = static_cast<uint8_t>(byte | nibble << (input % 8 < 4 ? 0 : 4));
  }
}

// GGUF's Q8_0: fp16 scale, 32 signed bytes; stored + 128, since dpbusd wants unsigned weights.
void pack_q8_block(const uint8_t* block, int output, uint8_t* to) {
  std::memcpy(to + 2 * output, block, 2);
  for (int input = 0; input < kQuantBlock; ++input) {
    to[2 * kPanel + 64 * (input / 4) + 4 * output + input % 4] = static_cast<uint8_t>(block[2 + input] ^ 0x80u);
  }
}

void pack_row(WeightKind kind, const uint8_t* row, int64_t k, int output, uint8_t* panel) {
  if (kind == WeightKind::f32) {
    for (int64_t input = 0; input < k; ++input) {
      std::memcpy(panel + (input * kPanel + output) * 4, row + 4 * input, 4);
    }
    return;
  }
  if (kind == WeightKind::bf16) {
    for (int64_t input = 0; input < k; ++input) {
      std::memcpy(panel + ((input / 2 * kPanel + output) * 2 + input % 2) * 2, row + 2 * input, 2);
    }
    return;
  }
  const int64_t block_bytes = PackedLinear::row_bytes(kind, kQuantBlock);
  for (int64_t block = 0; block < k / kQuantBlock; ++block) {
    const uint8_t* from = row + block * block_bytes;
    if (kind == WeightKind::q8_0) {
      pack_q8_block(from, output, panel + block * kQ8BlockBytes);
    } else {
      pack_q4_block(from, kind == WeightKind::q4_1, output, panel + block * kQ4BlockBytes);
    }
  }
}

}  // namespace

void PackedLinear::Unmap::operator()(uint8_t* memory) const { munmap(memory, bytes); }

int64_t PackedLinear::row_bytes(WeightKind kind, int64_t k) {
  switch (kind) {
    case WeightKind::f32:
      return 4 * k;
    case WeightKind::bf16:
      return 2 * k;
    case WeightKind::q4_0:
      return k / kQuantBlock * 18;
    case WeightKind::q4_1:
      return k / kQuantBlock * 20;
    case WeightKind::q8_0:
      break;
  }
  return k / kQuantBlock * 34;
}

PackedLinear::PackedLinear(WeightKind kind, const uint8_t* rows, int64_t n, int64_t k)
    : kind_(kind), n_(n), k_(k), panel_bytes_(bytes_per_panel(kind, k)), memory_(nullptr, Unmap{0}) {
  const auto bytes_mapped = static_cast<size_t>(bytes() + 4096);
  memory_ = {map_bytes(bytes_mapped), Unmap{bytes_mapped}};
  ThreadPool::instance().run(num_panels(), [&](int64_t panel) {
    for (int64_t i = panel * kPanel; i < std::min(n_, (panel + 1) * kPanel); ++i) {
      pack_row(kind_, rows + i * row_bytes(kind_, k_), k_, static_cast<int>(i % kPanel),
               memory_.get() + panel * panel_bytes_);
    }
  });
}

void LinearInput::reserve(int64_t rows, int64_t k) {
  if (rows <= capacity_rows_ && k <= capacity_k_) return;
  capacity_rows_ = std::max(rows, capacity_rows_);
  capacity_k_ = std::max(k, capacity_k_);
  const auto values = static_cast<size_t>(capacity_rows_ * capacity_k_);
  high_.reset(new int8_t[values]);
  low_.reset(new int8_t[values]);
  wide_.reset(new int16_t[values]);
  scale_.reset(new float[values / kQuantBlock + 1]);
  sum_.reset(new float[values / kQuantBlock + 1]);
  bf16_.reset(new uint16_t[values]);
  f32_.reset(new float[values]);
}

void LinearInput::set_row(const KernelTable& table, int64_t row, const float* x, int64_t k, InputForm form) {
  if (form == InputForm::f32) {
    std::copy_n(x, k, f32_.get() + row * k);
    return;
  }
  if (form == InputForm::bf16) return table.narrow(x, bf16_.get() + row * k, k);
  const int64_t at = row * k, block = row * (k / kQuantBlock);
  table.quantize(
      x, k, {fine_, high_.get() + at, low_.get() + at, wide_.get() + at, scale_.get() + block, sum_.get() + block});
}

void LinearInput::apply(const KernelTable& table, const PackedLinear& weight, int64_t rows, int64_t first_panel,
                        int64_t end_panel, float* out, int64_t out_stride) const {
  const int64_t whole = std::min(end_panel, weight.n_ / kPanel);
  if (first_panel < whole) panels(table, weight, rows, first_panel, whole, out + first_panel * kPanel, out_stride);
  if (end_panel == whole) return;
  // The last panel's padding must not be written: compute it aside.
  const std::unique_ptr<float[]> aside(new float[static_cast<size_t>(rows * kPanel)]);
  panels(table, weight, rows, whole, end_panel, aside.get(), kPanel);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(aside.get() + row * kPanel, weight.n_ - whole * kPanel, out + row * out_stride + whole * kPanel);
  }
}

void LinearInput::panels(const KernelTable& table, const PackedLinear& weight, int64_t rows, int64_t first, int64_t end,
                         float* out, int64_t out_stride) const {
  const uint8_t* from = weight.memory_.get() + first * weight.panel_bytes_;
  if (weight.input_form() == InputForm::f32) {
    return table.panels_f32(reinterpret_cast<const float*>(from), end - first, f32_.get(), rows, weight.k_, out,
                            out_stride);
  }
  if (weight.input_form() == InputForm::bf16) {
    return table.panels_bf16(reinterpret_cast<const uint16_t*>(from), end - first, bf16_.get(), rows, weight.k_, out,
                             out_stride);
  }
  const QuantizedRows x{fine_, high_.get(), low_.get(), wide_.get(), scale_.get(), sum_.get(), rows, weight.k_};
  const auto kernel = weight.kind_ == WeightKind::q8_0 ? table.panels_q8 : table.panels_q4;
  kernel(from, end - first, x, out, out_stride);
}

void apply_linear(const PackedLinear& weight, const float* x, int64_t rows, int64_t x_stride, float* out,
                  int64_t out_stride, bool fine, int num_threads) {
  const KernelTable& table = kernels();
  thread_local LinearInput fine_input(true), coarse_input(false);
  LinearInput& input = fine ? fine_input : coarse_input;
  input.reserve(rows, weight.inputs());
  for (int64_t row = 0; row < rows; ++row) {
    input.set_row(table, row, x + row * x_stride, weight.inputs(), weight.input_form());
  }
  constexpr int64_t kPanelsPerTask = 4;
  const int64_t num_panels = weight.num_panels();
  ThreadPool::instance().run((num_panels + kPanelsPerTask - 1) / kPanelsPerTask,
                             [&](int64_t task) {
                               input.apply(table, weight, rows, task * kPanelsPerTask,
                                           std::min(num_panels, (task + 1) * kPanelsPerTask), out, out_stride);
                             },
                             num_threads);
}

}  // namespace tokring::cpu
