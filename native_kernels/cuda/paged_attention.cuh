// What decode and prefill share: where a lane's elements lie in a row of a KV block, and scores.
// -DHEAD_DIM=64|80|96|128|256 -DELEMENT=Bf16|F16 (query and output) -DKV_FORMAT=0|1|2 (ELEMENT, int8, fp8 e4m3).
// Caches: [num_blocks, kv_heads, 16, HEAD_DIM]; with 8-bit formats a float scale per vector: [num_blocks, kv_heads,
// 16].
#pragma once
#include "device.cuh"

using Element = ELEMENT;
constexpr int kHeadDim = HEAD_DIM;
constexpr bool kQuantized = KV_FORMAT != 0;
constexpr int kKvBytes = kQuantized ? 1 : 2;  // of one cached number
constexpr int kRowBytes = kHeadDim * kKvBytes;
constexpr int64_t kHeadBytes = int64_t(kKvBlockTokens) * kRowBytes;  // one head of one KV block
static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256);

// Four cached bytes as pairs of Element; 8-bit formats only.
DEVICE Pairs widen(uint32_t bytes) { return KV_FORMAT == 1 ? widen_int8<Element>(bytes) : widen_fp8<Element>(bytes); }

DEVICE constexpr int piece_of(int left, int most) {
  int piece = most;
  while (piece > left) piece /= 2;
  return piece;
}

// Scores in units of log2: exp2 of their differences is what softmax needs.
struct ScoreScale {
  float factor;    // without a cap: scale * log2(e); with one: 2 log2(e) * scale / cap
  float cap_log2;  // cap * log2(e); 0 = no cap
  DEVICE float operator()(float score) const {
    if (cap_log2 == 0.0f) return score * factor;
    // cap * tanh(x) with tanh(x) = 1 - 2 / (e^2x + 1)
    return cap_log2 * (1.0f - 2.0f * reciprocal_fast(exp2_fast(score * factor) + 1.0f));
  }
};
