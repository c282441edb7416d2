// Causal attention of runs of new tokens over the block table, cached prefixes included; compute-bound. The defines are
// those of paged_attention.cuh.
//
// Rows of a tile are (token, query head of the KV head's group) pairs packed token by token, so that short runs fill
// tiles too. Keys and values of kTile tokens come to shared memory two stages deep, 16-bit caches by asynchronous
// copies, 8-bit ones widened on the way (their scales multiply scores and weights, which keeps the widening exact).
// Versions: 1. 16 rows a warp, query in registers: at head dim 128 bound by shared memory. 2. (this) 32 rows a warp up
// to head dim 128, query from shared memory each time, half the matrix loads per product.
#include "paged_attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowTiles = kHeadDim <= 128 ? 2 : 1;  // of 16 rows, per warp
constexpr int kRows = kWarps * kRowTiles * 16;
constexpr int kTile = kHeadDim <= 128 ? 64 : 32;  // tokens of keys and values at a time
constexpr int kPart = 32;                         // of them whose scores a warp holds at once
constexpr int kSteps = kHeadDim / 16;
constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, in a row of 16-bit elements

// Where a row's chunk lies in shared memory. Eight rows of one chunk hit different banks: by an xor where a row is a
// multiple of 128 bytes, else because the padded row is an odd number of chunks.
constexpr bool kSwizzle = kChunks % 8 == 0;
constexpr int kStride = kSwizzle ? kHeadDim : kHeadDim + 8;  // elements
DEVICE int chunk_place(int row, int chunk) { return row * kStride + (kSwizzle ? chunk ^ (row & 7) : chunk) * 8; }

struct Stage {
  Element keys[kTile * kStride], values[kTile * kStride];
};
struct Shared {
  Element query[kRows * kStride];
  Stage stages[2];
  float key_scales[2][kTile], value_scales[2][kTile];
};

// The run of one sequence and its cache.
struct Sequence {
  const char *key_cache, *value_cache;
  const float *key_scale, *value_scale;
  const int* block_ids;
  int kv_heads, kv_head;
  int first, end;  // positions that some row of this tile sees
};

// Brings tokens [start, start + kTile) to a stage; those outside [first, end) become zeros with scale 0.
DEVICE void fill_stage(Shared& shared, int stage, const Sequence& sequence, int start) {
  constexpr int kCopies = kTile * kRowBytes / 16, kRowCopies = kRowBytes / 16;
  for (int i = int(threadIdx.x); i < kCopies; i += kThreads) {
    const int token = i / kRowCopies, part = i % kRowCopies, position = start + token;
    const bool valid = position >= sequence.first && position < sequence.end;
    const int block = valid ? sequence.block_ids[position / kKvBlockTokens] : 0;
    const int64_t slot =
        (int64_t(block) * sequence.kv_heads + sequence.kv_head) * kKvBlockTokens + position % kKvBlockTokens;
    const int64_t source = valid ? slot * kRowBytes + part * 16 : 0;
    if constexpr (!kQuantized) {
      const int place = chunk_place(token, part);
      copy_async(shared.stages[stage].keys + place, sequence.key_cache + source, valid);
      copy_async(shared.stages[stage].values + place, sequence.value_cache + source, valid);
    } else {
      auto bring = [&](Element* to, const char* cache) {
        uint4 bytes = make_uint4(0, 0, 0, 0);
        if (valid) bytes = load_16_bytes(cache + source);
        const Pairs p0 = widen(bytes.x), p1 = widen(bytes.y), p2 = widen(bytes.z), p3 = widen(bytes.w);
        store_16_bytes(to + chunk_place(token, 2 * part), make_uint4(p0.first, p0.second, p1.first, p1.second));
        store_16_bytes(to + chunk_place(token, 2 * part + 1), make_uint4(p2.first, p2.second, p3.first, p3.second));
      };
      bring(shared.stages[stage].keys, sequence.key_cache);
      bring(shared.stages[stage].values, sequence.value_cache);
      if (part == 0) {
        shared.key_scales[stage][token] = valid ? sequence.key_scale[slot] : 0.0f;
        shared.value_scales[stage][token] = valid ? sequence.value_scale[slot] : 0.0f;
      }
    }
  }
  close_copy_group();
}

// out, query: Element[num_tokens, kv_heads * group, HEAD_DIM]; sequence b's tokens are query_starts[b] to
// query_starts[b + 1], the last of its lengths[b] positions. block_table: int[num_sequences, table_width].
// Grid: (ceil(longest run * group / kRows), kv_heads, num_sequences). Dynamic shared memory: sizeof(Shared).
KERNEL(paged_prefill, kThreads)
(Element* out, const Element* query, const char* key_cache, const char* value_cache, const float* key_scale,
 const float* value_scale, const int* block_table, const int* query_starts, const int* lengths, int table_width,
 int kv_heads, int group, int window, float factor, float cap_log2) {
  const int b = int(blockIdx.z), kv_head = int(blockIdx.y), query_start = query_starts[b];
  const int num_tokens = query_starts[b + 1] - query_start, num_rows = num_tokens * group;
  const int tile = int(gridDim.x - 1 - blockIdx.x);  // those that see most come first
  if (tile * kRows >= num_rows) return;
  const int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize, r = lane / 4, c = lane % 4;
  const int before = lengths[b] - num_tokens;  // positions before the run
  const int first_token = tile * kRows / group, last_token = (min(num_rows, (tile + 1) * kRows) - 1) / group;
  const Sequence sequence{key_cache,
                          value_cache,
                          key_scale,
                          value_scale,
                          block_table + int64_t(b) * table_width,
                          kv_heads,
                          kv_head,
                          window > 0 ? max(0, before + first_token + 1 - window) : 0,
                          before + last_token + 1};
  const ScoreScale scale{factor, cap_log2};
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;

  for (int i = int(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, packed = tile * kRows + row;
    const bool valid = packed < num_rows;
    const int64_t head = int64_t(query_start + packed / group) * kv_heads * group + kv_head * group + packed % group;
    copy_async(shared.query + chunk_place(row, chunk), query + (valid ? head * kHeadDim + chunk * 8 : 0), valid);
  }
  const int first_start = sequence.first / kTile * kTile;
  fill_stage(shared, 0, sequence, first_start);  // closes the query's group too

  float max[kRowTiles][2], sum[kRowTiles][2], outs[kRowTiles][kChunks][4];
#pragma unroll
  for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      max[m][e] = -infinity();
      sum[m][e] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kChunks; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) outs[m][j][e] = 0.0f;
  }
  // Fragment A of a row tile: rows lane % 16, chunks 2 step and 2 step + 1.
  auto load_query = [&](int m, int step) {
    return load_matrices<false>(shared.query +
                                chunk_place((warp * kRowTiles + m) * 16 + lane % 16, 2 * step + lane / 16));
  };

  for (int start = first_start, stage = 0; start < sequence.end; start += kTile, stage ^= 1) {
    if (start + kTile < sequence.end) {
      fill_stage(shared, stage ^ 1, sequence, start + kTile);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    block_barrier();
#pragma unroll 1
    for (int part = 0; part < kTile; part += kPart) {
      const Element* const keys = shared.stages[stage].keys + part * kStride;
      const Element* const values = shared.stages[stage].values + part * kStride;
      const float* const key_scales = shared.key_scales[stage] + part;
      const float* const value_scales = shared.value_scales[stage] + part;

      float scores[kRowTiles][kPart / 8][4];  // rows r, r, r + 8, r + 8 x tokens 8n + 2c, 8n + 2c + 1, the same again
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
#pragma unroll
        for (int n = 0; n < kPart / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) scores[m][n][e] = 0.0f;
#pragma unroll 2
      for (int step = 0; step < kSteps; step++) {
        FragmentA q[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) q[m] = load_query(m, step);
#pragma unroll
        for (int n = 0; n < kPart / 8; n += 2) {
          const int token = n * 8 + lane / 16 * 8 + lane % 8;
          const FragmentA k = load_matrices<false>(keys + chunk_place(token, 2 * step + lane / 8 % 2));
#pragma unroll
          for (int m = 0; m < kRowTiles; m++) {
            multiply_accumulate<Element>(scores[m][n], q[m], FragmentB{{k.a[0], k.a[1]}});
            multiply_accumulate<Element>(scores[m][n + 1], q[m], FragmentB{{k.a[2], k.a[3]}});
          }
        }
      }

      // Where every row sees every token of the part, nothing is masked.
      const int seen = before - start - part;  // the position before the run, counted from the part's first token
      const bool all_seen = kPart <= seen + first_token + 1 && (window == 0 || 0 > seen + last_token - window);
      if (kQuantized || cap_log2 != 0.0f || !all_seen) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int position = seen + (tile * kRows + (warp * kRowTiles + m) * 16 + r + 8 * e) / group;
#pragma unroll
            for (int n = 0; n < kPart / 8; n++)
#pragma unroll
              for (int x = 0; x < 2; x++) {
                const int token = n * 8 + 2 * c + x, distance = position - token;
                float& score = scores[m][n][2 * e + x];
                if (kQuantized) score *= key_scales[token];
                if (cap_log2 != 0.0f) score = scale(score);
                if (distance < 0 || (window > 0 && distance >= window)) score = -infinity();
              }
          }
      }

      const float unit = cap_log2 != 0.0f ? 1.0f : factor;  // scores * unit are in log2
      uint32_t weights[kRowTiles][kPart / 8][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        float decay[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float most = -infinity();
#pragma unroll
          for (int n = 0; n < kPart / 8; n++) most = fmaxf(most, fmaxf(scores[m][n][2 * e], scores[m][n][2 * e + 1]));
          most = fmaxf(most, shuffle_xor(most, 1));
          most = fmaxf(most, shuffle_xor(most, 2));
          most = fmaxf(most * unit, max[m][e]);
          const float base = most == -infinity() ? 0.0f : most;  // a row that has seen nothing yet
          decay[e] = exp2_fast(max[m][e] - base);
          max[m][e] = most;
          float total = 0.0f;
#pragma unroll
          for (int n = 0; n < kPart / 8; n++) {
            float low = exp2_fast(scores[m][n][2 * e] * unit - base);
            float high = exp2_fast(scores[m][n][2 * e + 1] * unit - base);
            total += low + high;
            if (kQuantized) {
              low *= value_scales[n * 8 + 2 * c];
              high *= value_scales[n * 8 + 2 * c + 1];
            }
            weights[m][n][e] = pack<Element>(low, high);
          }
          sum[m][e] = sum[m][e] * decay[e] + total;
        }
        // Maxima seldom rise after the first parts.
        if (ballot(decay[0] != 1.0f || decay[1] != 1.0f))
#pragma unroll
          for (int j = 0; j < kChunks; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) outs[m][j][e] *= decay[e / 2];
      }

#pragma unroll
      for (int k = 0; k < kPart / 16; k++)
#pragma unroll
        for (int j = 0; j < kChunks; j += 2) {
          const int token = k * 16 + lane % 16;
          const FragmentA v = load_matrices<true>(values + chunk_place(token, j + lane / 16));
#pragma unroll
          for (int m = 0; m < kRowTiles; m++) {
            const FragmentA p{
                {weights[m][2 * k][0], weights[m][2 * k][1], weights[m][2 * k + 1][0], weights[m][2 * k + 1][1]}};
            multiply_accumulate<Element>(outs[m][j], p, FragmentB{{v.a[0], v.a[1]}});
            multiply_accumulate<Element>(outs[m][j + 1], p, FragmentB{{v.a[2], v.a[3]}});
          }
        }
    }
    block_barrier();  // the stage may be filled again
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float total = sum[m][e];
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      const float inverse = 1.0f / total;
      const int packed = tile * kRows + (warp * kRowTiles + m) * 16 + r + 8 * e;
      if (packed >= num_rows) continue;
      const int64_t head = int64_t(query_start + packed / group) * kv_heads * group + kv_head * group + packed % group;
#pragma unroll
      for (int j = 0; j < kChunks; j++)
        *reinterpret_cast<uint32_t*>(out + head * kHeadDim + j * 8 + 2 * c) =
            pack<Element>(outs[m][j][2 * e] * inverse, outs[m][j][2 * e + 1] * inverse);
    }
}
KERNEL_EXPORT(paged_prefill)
