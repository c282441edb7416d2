// Gated activations, gate_up[T, 2 * width] = [gate | up] to activation(gate) * up, and the way of logits from the
// matrix product to float, with Gemma's soft cap. -DELEMENT=Bf16|F16. Versions: 1  8 elements a thread, 128-bit
// accesses.
#include "elements.cuh"

// ---- gated activations

struct Silu {
  static DEVICE float apply(float x) { return x / (1.0f + expf(-x)); }
};
struct GeluTanh {
  static DEVICE float apply(float x) {
    const float sqrt_2_over_pi = 0.7978845608028654f;
    return 0.5f * x * (1.0f + tanhf(sqrt_2_over_pi * (x + 0.044715f * x * x * x)));
  }
};

template <class Activation>
DEVICE void gated(ELEMENT* out, const ELEMENT* gate_up, int width) {
  const int column = 8 * int(blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= width) return;
  const ELEMENT* row = gate_up + int64_t(blockIdx.x) * 2 * width;
  float gate[8], up[8];
  load_8(row + column, gate);
  load_8(row + width + column, up);
#pragma unroll
  for (int i = 0; i < 8; i++) gate[i] = Activation::apply(gate[i]) * up[i];
  store_8(out + int64_t(blockIdx.x) * width + column, gate);
}

// Grid: T, columns / 2048.
KERNEL(silu_mul, 256)(ELEMENT* out, const ELEMENT* gate_up, int width) { gated<Silu>(out, gate_up, width); }
KERNEL_EXPORT(silu_mul)
KERNEL(gelu_tanh_mul, 256)(ELEMENT* out, const ELEMENT* gate_up, int width) { gated<GeluTanh>(out, gate_up, width); }
KERNEL_EXPORT(gelu_tanh_mul)

// ---- logits

DEVICE float capped(float x, float soft_cap) { return soft_cap > 0.0f ? soft_cap * tanhf(x / soft_cap) : x; }

// logits: ELEMENT[count]; float ones may be capped in place. Grid: count / 2048.
template <class Logit>
DEVICE void cap(float* out, const Logit* logits, int64_t count, float soft_cap) {
  const int64_t first = 8 * (int64_t(blockIdx.x) * blockDim.x + threadIdx.x);
  if (first + 8 > count) {
    for (int64_t i = first; i < count; i++) out[i] = capped(to_float(logits[i]), soft_cap);
    return;
  }
  float x[8];
  load_8(logits + first, x);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = capped(x[i], soft_cap);
  store_8(out + first, x);
}

KERNEL(widen_logits, 256)(float* out, const ELEMENT* logits, int64_t count, float soft_cap) {
  cap(out, logits, count, soft_cap);
}
KERNEL_EXPORT(widen_logits)
KERNEL(cap_logits, 256)(float* out, const float* logits, int64_t count, float soft_cap) {
  cap(out, logits, count, soft_cap);
}
KERNEL_EXPORT(cap_logits)
