// Residual add and RMSNorm in one pass over a token, one block a token. -DELEMENT=Bf16 or F16.
#include "device.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// residual += x, rounded to ELEMENT (x null: nothing is added); out = residual / rms(residual) * weight.
// out, residual, x: [num_tokens, width] ELEMENT, contiguous; weight: float[width]; width: a multiple of 8.
// out may be x. Grid: num_tokens.
KERNEL(residual_rms_norm, kThreads)
(ELEMENT* out, ELEMENT* residual, const ELEMENT* x, const float* weight, int width, float epsilon) {
  SHARED_ARRAY(float, warp_sums, kWarps);
  const int64_t start = int64_t(blockIdx.x) * width;
  float squares = 0.0f;
  for (int i = int(threadIdx.x) * 8; i < width; i += kThreads * 8) {
    uint4 words = load_16_bytes(residual + start + i);
    uint32_t* pairs = &words.x;
    if (x) {
      const uint4 added = load_16_bytes(x + start + i);
      const uint32_t* added_pairs = &added.x;
#pragma unroll
      for (int j = 0; j < 4; j++)
        pairs[j] = pack<ELEMENT>(low_half<ELEMENT>(pairs[j]) + low_half<ELEMENT>(added_pairs[j]),
                                 high_half<ELEMENT>(pairs[j]) + high_half<ELEMENT>(added_pairs[j]));
      store_16_bytes(residual + start + i, words);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float low = low_half<ELEMENT>(pairs[j]), high = high_half<ELEMENT>(pairs[j]);
      squares += low * low + high * high;
    }
  }
  squares = warp_sum(squares);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = squares;
  block_barrier();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) sum += warp_sums[warp];
  const float scale = reciprocal_sqrt(sum / float(width) + epsilon);
  for (int i = int(threadIdx.x) * 8; i < width; i += kThreads * 8) {
    const uint4 words = load_16_bytes(residual + start + i);
    const uint32_t* pairs = &words.x;
    uint4 normed;
    uint32_t* normed_pairs = &normed.x;
#pragma unroll
    for (int j = 0; j < 4; j++)
      normed_pairs[j] = pack<ELEMENT>(low_half<ELEMENT>(pairs[j]) * scale * weight[i + 2 * j],
                                      high_half<ELEMENT>(pairs[j]) * scale * weight[i + 2 * j + 1]);
    store_16_bytes(out + start + i, normed);
  }
}
KERNEL_EXPORT(residual_rms_norm)
