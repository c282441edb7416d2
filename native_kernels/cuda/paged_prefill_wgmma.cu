// The same attention as paged_prefill.cu, its tested twin, for sm_90a: products of warpgroups. HEAD_DIM is 64, 128 or
// 256, KV_FORMAT 0; the arguments are the twin's, and everything that is not said here is as there.
//
// Two warpgroups take 64 rows each. Round j of the loop issues Q K(j + 1) and P V(j), then copies, and computes the
// first one's softmax while the second runs. So keys are brought one tile ahead of values, each into one of two
// buffers, by 16-byte copies that put them into the layout of matrix_descriptor and write zeros beyond the sequence's
// end. A tensor map (TMA) could not do the latter inside of a block, and would need an encoding by the driver for each
// cache.
#include "paged_attention.cuh"

constexpr int kGroups = 2, kGroupRows = 64, kGroupThreads = 128;
constexpr int kThreads = kGroups * kGroupThreads;
constexpr int kRows = kGroups * kGroupRows;
constexpr int kTile = kHeadDim <= 128 ? 128 : 64;  // tokens of keys and values at a time
constexpr int kPanels = kHeadDim / 64;             // of 64 elements, 128 bytes: rows of the swizzle pattern
constexpr int kChunks = kHeadDim / 8;              // of 16 bytes, in a row
static_assert(kHeadDim % 64 == 0 && !kQuantized);

// [panel][row][64], each row's 16-byte chunks permuted.
template <int kCount>
struct Panels {
  Element elements[kPanels * kCount * 64];
  DEVICE Element* at(int row, int chunk) {
    return elements + (chunk / 8 * kCount + row) * 64 + ((chunk ^ row) & 7) * 8;
  }
  // Rows from a multiple of 8 on x dimensions 16 step to 16 step + 15, k along the rows.
  DEVICE uint64_t along_rows(int row, int step) const {
    return matrix_descriptor(elements + (step / 4 * kCount + row) * 64 + step % 4 * 16, 1024);
  }
  // Rows 16 step to 16 step + 15, which are k, x all dimensions.
  DEVICE uint64_t across_rows(int step) const {
    return matrix_descriptor(elements + step * 16 * 64, 1024, kCount * 128);
  }
};
struct Shared {
  Panels<kRows> query;
  Panels<kTile> keys[2], values[2];
};
static_assert(sizeof(Panels<kRows>) % 1024 == 0 && sizeof(Panels<kTile>) % 1024 == 0);

// The run of one sequence and its cache.
struct Sequence {
  const int* block_ids;
  int kv_heads, kv_head;
  int first, end;  // positions that some row of this tile sees
};

// Brings tokens [start, start + kTile) of a cache; those outside [first, end) become zeros.
DEVICE void bring(Panels<kTile>& panels, const char* cache, const Sequence& sequence, int start) {
#pragma unroll
  for (int round = 0; round < kTile * kChunks / kThreads; round++) {
    const int i = round * kThreads + int(threadIdx.x), token = i / kChunks, chunk = i % kChunks;
    const int position = start + token;
    const bool valid = position >= sequence.first && position < sequence.end;
    const int block = valid ? sequence.block_ids[position / kKvBlockTokens] : 0;
    const int64_t head = (int64_t(block) * sequence.kv_heads + sequence.kv_head) * kHeadBytes;
    copy_async(panels.at(token, chunk), cache + head + position % kKvBlockTokens * kRowBytes + chunk * 16, valid);
  }
}
// All copies so far are there, for products too.
DEVICE void await_copies() {
  wait_copies<0>();
  fence_async_proxy();
  block_barrier();
}

KERNEL(paged_prefill_wgmma, kThreads)
(Element* out, const Element* query, const char* key_cache, const char* value_cache, const float*, const float*,
 const int* block_table, const int* query_starts, const int* lengths, int table_width, int kv_heads, int group,
 int window, float factor, float cap_log2) {
  const int b = int(blockIdx.z), kv_head = int(blockIdx.y), query_start = query_starts[b];
  const int num_tokens = query_starts[b + 1] - query_start, num_rows = num_tokens * group;
  const int tile = int(gridDim.x - 1 - blockIdx.x);  // those that see most come first
  if (tile * kRows >= num_rows) return;
  const int warpgroup = shuffle(int(threadIdx.x) / kGroupThreads, 0);  // the same in all lanes, which the compiler sees
  const int lane = int(threadIdx.x) % kWarpSize, r = lane / 4, c = lane % 4;
  const int first_row = tile * kRows + int(threadIdx.x) / kWarpSize * 16 + r;  // of this thread; the other is 8 below
  const int before = lengths[b] - num_tokens;                                  // positions before the run
  const int first_token = tile * kRows / group, last_token = (min(num_rows, (tile + 1) * kRows) - 1) / group;
  const Sequence sequence{block_table + int64_t(b) * table_width, kv_heads, kv_head,
                          window > 0 ? max(0, before + first_token + 1 - window) : 0, before + last_token + 1};
  const ScoreScale scale{factor, cap_log2};
  const uint32_t farthest = window > 0 ? uint32_t(window) : 0x80000000u;  // distances below it are seen
  DYNAMIC_SHARED(char, memory);
  Shared& shared = *static_cast<Shared*>(align_shared<1024>(memory));

  for (int i = int(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, packed = tile * kRows + row;
    const bool valid = packed < num_rows;
    const int64_t head = int64_t(query_start + packed / group) * kv_heads * group + kv_head * group + packed % group;
    copy_async(shared.query.at(row, chunk), query + (valid ? head * kHeadDim + chunk * 8 : 0), valid);
  }
  const int first_start = sequence.first / kTile * kTile;
  bring(shared.keys[0], key_cache, sequence, first_start);
  close_copy_group();
  await_copies();

  float scores[kTile / 2], outs[kHeadDim / 2];  // of rows r and r + 8: fragments of multiply_tiles
  float max[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f}, decay[2];
  FragmentA weights[kTile / 16];

  auto multiply_keys = [&](const Panels<kTile>& keys) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; step++)
      multiply_tiles<Element, kTile>(scores, shared.query.along_rows(warpgroup * kGroupRows, step),
                                     keys.along_rows(0, step), step > 0);
    warpgroup_commit();
  };
  auto multiply_values = [&](const Panels<kTile>& values, bool accumulates) {
#pragma unroll
    for (int step = 0; step < kTile / 16; step++)
      multiply_tiles<Element, kHeadDim>(outs, weights[step], values.across_rows(step), accumulates || step > 0);
    warpgroup_commit();
  };
  // Masks scores of the tokens from `start` on and makes weights of them, still as floats; sets max, sum and decay.
  auto soften = [&](int start) {
    const int seen = before - start;  // the position before the run, counted from the tile's first token
    const bool all_seen = kTile <= seen + first_token + 1 && (window == 0 || 0 > seen + last_token - window);
    const float unit = cap_log2 != 0.0f ? 1.0f : factor;  // scores * unit are in log2
    if (cap_log2 != 0.0f)
#pragma unroll
      for (int i = 0; i < kTile / 2; i++) scores[i] = scale(scores[i]);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (!all_seen) {
        const int position = seen + (first_row + 8 * e) / group;
#pragma unroll
        for (int n = 0; n < kTile / 8; n++)
#pragma unroll
          for (int x = 0; x < 2; x++)
            if (uint32_t(position - (n * 8 + 2 * c + x)) >= farthest) scores[4 * n + 2 * e + x] = -infinity();
      }
      float most = -infinity();
#pragma unroll
      for (int n = 0; n < kTile / 8; n++) most = fmaxf(most, fmaxf(scores[4 * n + 2 * e], scores[4 * n + 2 * e + 1]));
      most = fmaxf(most, shuffle_xor(most, 1));
      most = fmaxf(most, shuffle_xor(most, 2));
      most = fmaxf(most * unit, max[e]);
      const float base = most == -infinity() ? 0.0f : most;  // a row that has seen nothing yet
      decay[e] = exp2_fast(max[e] - base);
      max[e] = most;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < kTile / 8; n++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
          float& score = scores[4 * n + 2 * e + x];
          score = exp2_fast(score * unit - base);
          total += score;
        }
      sum[e] = sum[e] * decay[e] + total;
    }
  };
  auto pack_weights = [&] {
#pragma unroll
    for (int step = 0; step < kTile / 16; step++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        weights[step].a[i] = pack<Element>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
  };

  warpgroup_fence();
  multiply_keys(shared.keys[0]);
  bring(shared.values[0], value_cache, sequence, first_start);
  bring(shared.keys[1], key_cache, sequence, first_start + kTile);  // zeros where there is no second tile
  close_copy_group();
  warpgroup_wait<0>(scores);
  soften(first_start);
  pack_weights();

  int start = first_start, stage = 0;
#pragma unroll 1
  for (; start + kTile < sequence.end; start += kTile, stage ^= 1) {
    await_copies();  // all warps are done with the other values and with these keys
    pin_registers(outs);
    pin_registers(weights);
    warpgroup_fence();
    multiply_keys(shared.keys[stage ^ 1]);
    multiply_values(shared.values[stage], start > first_start);
    bring(shared.values[stage ^ 1], value_cache, sequence, start + kTile);
    bring(shared.keys[stage], key_cache, sequence, start + 2 * kTile);
    close_copy_group();
    warpgroup_wait<1>(scores);
    soften(start + kTile);
    warpgroup_wait<0>(outs);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i++) outs[i] *= decay[i / 2 % 2];
    pack_weights();
  }
  await_copies();
  pin_registers(outs);
  pin_registers(weights);
  warpgroup_fence();
  multiply_values(shared.values[stage], start > first_start);
  warpgroup_wait<0>(outs);

#pragma unroll
  for (int e = 0; e < 2; e++) {
    float total = sum[e];
    total += shuffle_xor(total, 1);
    total += shuffle_xor(total, 2);
    const float inverse = 1.0f / total;
    const int packed = first_row + 8 * e;
    if (packed >= num_rows) continue;
    const int64_t head = int64_t(query_start + packed / group) * kv_heads * group + kv_head * group + packed % group;
#pragma unroll
    for (int j = 0; j < kChunks; j++)
      *reinterpret_cast<uint32_t*>(out + head * kHeadDim + j * 8 + 2 * c) =
          pack<Element>(outs[4 * j + 2 * e] * inverse, outs[4 * j + 2 * e + 1] * inverse);
  }
}
KERNEL_EXPORT(paged_prefill_wgmma)
