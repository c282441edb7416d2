// Attention's input of a token: heads normed (Qwen3, Gemma 3), queries and keys rotated, keys and values cached.
// A warp takes one head of one token. A lane holds quads: two neighbours in the first half of the rotated dimensions
// and their partners in the second half; dimensions that don't rotate are paired half against half too.
// -DELEMENT=Bf16|F16 -DCACHED=ELEMENT|Int8|Fp8.
// Versions: 1  float arithmetic; a quantized vector gets its own scale, largest magnitude / largest code.
#include "block.cuh"
#include "elements.cuh"

constexpr int kMaxQuads = 2;  // a lane; head_dim 256

struct HeadShape {
  int head_dim, rotary_dim;
};

struct Quad {
  float x[4];  // elements 2 * first, 2 * first + 1, 2 * second, 2 * second + 1 of the head
  int first, second;
  bool exists, rotates;
};

DEVICE Quad quad_at(int index, HeadShape shape) {
  const int rotated = shape.rotary_dim / 4, kept = (shape.head_dim - shape.rotary_dim) / 4;
  Quad quad = {};
  quad.exists = index < rotated + kept;
  quad.rotates = index < rotated;
  quad.first = quad.rotates ? index : rotated + index;
  quad.second = quad.first + (quad.rotates ? rotated : kept);
  return quad;
}

struct Head {
  Quad quads[kMaxQuads];

  DEVICE void load(const ELEMENT* head, HeadShape shape) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(head);
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++) {
      Quad& quad = quads[i] = quad_at(lane() + 32 * i, shape);
      if (!quad.exists) continue;
      const uint32_t low = words[quad.first], high = words[quad.second];
      quad.x[0] = low_half<ELEMENT>(low), quad.x[1] = high_half<ELEMENT>(low);
      quad.x[2] = low_half<ELEMENT>(high), quad.x[3] = high_half<ELEMENT>(high);
    }
  }

  DEVICE void normalize(const float* weight, int head_dim, float epsilon, float weight_offset) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) squares += quads[i].x[e] * quads[i].x[e];
    const float scale = 1.0f / sqrtf(warp_sum(squares) / float(head_dim) + epsilon);
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++) {
      Quad& quad = quads[i];
      if (!quad.exists) continue;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int element = 2 * (e < 2 ? quad.first : quad.second) + (e & 1);
        quad.x[e] *= scale * (weight[element] + weight_offset);
      }
    }
  }

  // cosine, sine: the token's rows of the tables
  DEVICE void rotate(const float* cosine, const float* sine) {
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++) {
      Quad& quad = quads[i];
      if (!quad.exists || !quad.rotates) continue;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float c = cosine[2 * quad.first + e], s = sine[2 * quad.first + e], a = quad.x[e], b = quad.x[e + 2];
        quad.x[e] = a * c - b * s;
        quad.x[e + 2] = b * c + a * s;
      }
    }
  }

  DEVICE void store(ELEMENT* head) const {
    uint32_t* words = reinterpret_cast<uint32_t*>(head);
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++) {
      const Quad& quad = quads[i];
      if (!quad.exists) continue;
      words[quad.first] = pack<ELEMENT>(quad.x[0], quad.x[1]);
      words[quad.second] = pack<ELEMENT>(quad.x[2], quad.x[3]);
    }
  }

  template <class Code>
  DEVICE void store_quantized(Code* head, float* scale) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) largest = fmaxf(largest, fabsf(quads[i].x[e]));
    largest = warp_max(largest);
    const float inverse = largest > 0.0f ? Code::kLargest / largest : 0.0f;
    uint16_t* pairs = reinterpret_cast<uint16_t*>(head);
#pragma unroll
    for (int i = 0; i < kMaxQuads; i++) {
      const Quad& quad = quads[i];
      if (!quad.exists) continue;
      pairs[quad.first] = Code::pack_pair(quad.x[0] * inverse, quad.x[1] * inverse);
      pairs[quad.second] = Code::pack_pair(quad.x[2] * inverse, quad.x[3] * inverse);
    }
    if (lane() == 0) *scale = largest / Code::kLargest;
  }
};

// Codes of a quantized cache.
struct Int8 {
  static constexpr float kLargest = 127.0f;
  static DEVICE uint16_t pack_pair(float low, float high) {
    return uint16_t((uint32_t(int(rintf(low))) & 0xff) | (uint32_t(int(rintf(high))) & 0xff) << 8);
  }
  uint8_t bits;
};
struct Fp8 {
  static constexpr float kLargest = 448.0f;
  static DEVICE uint16_t pack_pair(float low, float high) { return pack_e4m3(low, high); }
  uint8_t bits;
};

DEVICE void cache_head(const Head& head, ELEMENT* cache, float*, int64_t vector, int head_dim) {
  head.store(cache + vector * head_dim);
}
template <class Code>
DEVICE void cache_head(const Head& head, Code* cache, float* scales, int64_t vector, int head_dim) {
  head.store_quantized(cache + vector * head_dim, scales + vector);
}

// qkv: ELEMENT[T, num_heads + 2 num_kv_heads, head_dim]; query: ELEMENT[T, num_heads, head_dim]; caches: CACHED
// [., num_kv_heads, 16, head_dim]; scales: float[., num_kv_heads, 16], null where CACHED is ELEMENT; cosine, sine:
// float[., rotary_dim / 2]; norms: float[head_dim] or null. Slot -1 caches nothing. A warp a head: grid over all heads.
KERNEL(rope_kv, 128)
(ELEMENT* query, const ELEMENT* qkv, CACHED* key_cache, CACHED* value_cache, float* key_scale, float* value_scale,
 const float* cosine, const float* sine, const int* positions, const int* slot_mapping, const float* query_norm,
 const float* key_norm, int num_tokens, int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int qkv_stride,
 float epsilon, float weight_offset) {
  const HeadShape shape = {head_dim, rotary_dim};
  const int heads_of_token = num_heads + 2 * num_kv_heads;
  const int64_t item = int64_t(blockIdx.x) * num_warps() + warp();
  const int token = int(item / heads_of_token), index = int(item % heads_of_token);
  if (token >= num_tokens) return;
  const int slot = slot_mapping[token];
  const bool is_query = index < num_heads, is_value = index >= num_heads + num_kv_heads;
  if (!is_query && slot < 0) return;
  Head head;
  head.load(qkv + int64_t(token) * qkv_stride + index * head_dim, shape);
  if (!is_value) {
    const float* norm = is_query ? query_norm : key_norm;
    if (norm) head.normalize(norm, head_dim, epsilon, weight_offset);
    const int64_t row = int64_t(positions[token]) * (rotary_dim / 2);
    head.rotate(cosine + row, sine + row);
  }
  if (is_query) return head.store(query + (int64_t(token) * num_heads + index) * head_dim);
  const int kv_head = (index - num_heads) % num_kv_heads;
  const int64_t block = slot / kKvBlockTokens, offset = slot % kKvBlockTokens;
  const int64_t vector = (block * num_kv_heads + kv_head) * kKvBlockTokens + offset;
  cache_head(head, is_value ? value_cache : key_cache, is_value ? value_scale : key_scale, vector, head_dim);
}
KERNEL_EXPORT(rope_kv)
