// What each instruction-set level provides: plain functions on raw rows. Shapes are checked by the callers.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace tokring::cpu {

constexpr int kBlockTokens = 16;  // tokens of one KV block
constexpr int kTileTokens = 256;  // tokens of one KV tile: the unit of the softmax merge, at fixed positions
constexpr int kMaxRows = 64;      // query rows of one attention unit
constexpr int kTileBlocks = kTileTokens / kBlockTokens;

// How keys and values are kept. int8: codes, with one float32 scale per cached vector; value = scale * code.
enum class CacheType { f32, bf16, int8 };

inline int64_t element_bytes(CacheType type) { return type == CacheType::f32 ? 4 : type == CacheType::bf16 ? 2 : 1; }

// Query rows that share one KV head, against one KV tile.
struct AttentionTile {
  const float* query;  // [rows][padded_dim], zero padded
  int rows;
  int head_dim;
  int padded_dim;         // head_dim rounded up to 16
  const void* key_cache;  // of this KV head, block 0
  const void* value_cache;
  CacheType cache_type;
  const float* key_scale;  // int8: [.][kBlockTokens] of this KV head, block 0
  const float* value_scale;
  int64_t block_stride;          // elements from one block to the next
  int64_t scale_stride;          // the same of the scales
  const int32_t* block_ids;      // logical block -> block id, of this sequence
  int64_t tile_start;            // position of the tile's first token
  const int64_t* first_visible;  // [rows] positions, inclusive
  const int64_t* last_visible;   // [rows]
  float scale;
  float soft_cap;  // 0 = none
  float* scores;   // scratch [rows][kTileTokens]
  float* widened;  // scratch [kBlockTokens][padded_dim]
  // Result: softmax over the tile, not normalised. sum 0 = nothing visible in the tile.
  float* maximum;      // [rows]
  float* sum;          // [rows]
  float* accumulator;  // [rows][padded_dim]
};

// Weights of a linear layer lie in panels of 16 outputs; activations go in as whole rows.
constexpr int kPanel = 16;
constexpr int kQuantBlock = 32;                             // inputs that share a scale
constexpr int64_t kQ4BlockBytes = 2 * kPanel * 2 + 4 * 64;  // fp16 scale[16], fp16 minimum[16], nibbles
constexpr int64_t kQ8BlockBytes = kPanel * 2 + 8 * 64;      // fp16 scale[16], bytes

// One activation row as integers q of 15 bits or 8: x = scale * q. A level fills what its panel kernels read.
struct QuantizedRow {
  bool is_fine;   // 15 bits
  int8_t* high;   // [k]: q, or (q + 64) >> 7 where it is fine
  int8_t* low;    // [k]: what is left, q = 128 * high + low, where it is fine
  int16_t* wide;  // [k]: q, the middle two of each four inputs exchanged
  float* scale;   // [k / 32]
  float* sum;     // [k / 32]: the sum of the block's x
};

// The same of several rows, [rows][k] and [rows][k / 32].
struct QuantizedRows {
  bool is_fine;
  const int8_t* high;
  const int8_t* low;
  const int16_t* wide;
  const float* scale;
  const float* sum;
  int64_t rows;
  int64_t k;
};

struct Measure {
  uint64_t count;
  uint64_t sum;
};

struct RowMaximum {
  float value;  // -inf if the row holds nothing above it
  bool has_nan;
};

struct KernelTable {
  Level level;

  void (*attend)(const AttentionTile& tile);
  // state := state merged with partial; both are one row {maximum, sum, accumulator[dim]}.
  void (*merge)(float* maximum, float* sum, float* accumulator, float other_maximum, float other_sum,
                const float* other_accumulator, int padded_dim);
  void (*widen)(const uint16_t* in, float* out, int64_t n);
  void (*narrow)(const float* in, uint16_t* out, int64_t n);
  // One vector to int8 codes and their scale, max|x| / 127; a NaN or infinity in it makes the scale NaN.
  float (*quantize_kv)(const float* in, int8_t* out, int64_t n);
  void (*divide)(const float* in, float divisor, float* out, int64_t n);

  // out = in * rsqrt(mean(in^2) + epsilon) * weight, in float32
  void (*rms_norm)(const float* in, const float* weight, float epsilon, float* out, int64_t n);
  // Rotates the pairs (x[i], x[i + half]) by the angles of cosine/sine[half].
  void (*rotate)(float* x, const float* cosine, const float* sine, int64_t half);
  // out = silu(gate) * up
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);

  void (*quantize)(const float* x, int64_t k, const QuantizedRow& out);
  // out[row * out_stride + 16 * panel + i] = dot product of the row with output i of the panel
  void (*panels_q4)(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out, int64_t out_stride);
  void (*panels_q8)(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out, int64_t out_stride);
  void (*panels_f32)(const float* panels, int64_t num_panels, const float* x, int64_t rows, int64_t k, float* out,
                     int64_t out_stride);
  void (*panels_bf16)(const uint16_t* panels, int64_t num_panels, const uint16_t* x, int64_t rows, int64_t k,
                      float* out, int64_t out_stride);

  RowMaximum (*maximum)(const float* row, int64_t n);
  int64_t (*find)(const float* row, int64_t n, float value);  // first index, or n
  int64_t (*count_above)(const float* row, int64_t n, float value);
  double (*sum_exp)(const float* row, int64_t n, float maximum);
  // out = round(2^30 * exp((row - maximum) * inverse_temperature)): the same integers on every level
  void (*weigh)(const float* row, int64_t n, float maximum, float inverse_temperature, uint32_t* out);
  // float -> uint32 that sorts alike
  void (*order)(const float* row, int64_t n, uint32_t* out);
  Measure (*measure)(const uint32_t* values, int64_t n, uint32_t at_least);
  // Copies the values in [low, high) to out, returns how many.
  int64_t (*compact)(const uint32_t* values, int64_t n, uint32_t low, uint32_t high, uint32_t* out);
  void (*drop_below)(const uint32_t* keys, uint32_t at_least, uint32_t* weights, int64_t n);
};

const KernelTable& kernels(Level level);
inline const KernelTable& kernels() { return kernels(active_level()); }

}  // namespace tokring::cpu
