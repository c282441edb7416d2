// Split-KV decode attention over the block table: one query token a row, memory-bound. -DHEAD_TILES=1|2, and the
// defines of paged_attention.cuh.
//
// A warp takes every fourth KV block of its thread block's share. S^T = K Q^T and O^T = V^T P^T, so that cached rows
// are the long side of the tensor-core tiles and the 8 or 16 columns are query heads of one KV head. The order of dims
// and tokens inside a product is free; it is chosen so that a lane's fragments are runs of 16 bytes in the cache: no
// shared memory and no barrier in the loop, K needs no shuffle, V two byte permutes, P one 8 x 8 transpose.
//
// The share of a thread block is derived here from the sequence lengths, the same in every warp: a launch captured in a
// graph stays right when lengths change. The last thread block of a (row, KV head) to finish adds the splits up.
#include "paged_attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kHeads = HEAD_TILES * 8;  // query heads of a thread block, some maybe unused
constexpr int kSteps = kHeadDim / 16;   // tensor-core steps along a head
constexpr int kResident = HEAD_TILES == 2 || kHeadDim > 128 ? 2 : kHeadDim > 64 ? 3 : 4;  // thread blocks side by side
// A wide head leaves no registers for the next keys beside this block's values.
constexpr bool kKeysAhead = kRowBytes <= 256;

// A run: a row's elements that one of `kLanes` lanes loads, in pieces of 16 bytes and less, each piece side by side
// with the other lanes' ones.
template <int kLanes>
struct Run {
  static constexpr int kElements = kHeadDim / kLanes, kBytes = kElements * kKvBytes;
  uint32_t words[(kBytes + 3) / 4];

  template <int kStart = 0>
  DEVICE void load(const char* row, int lane) {
    if constexpr (kStart < kBytes) {
      constexpr int kPiece = piece_of(kBytes - kStart, 16);
      const char* piece = row + kStart * kLanes + lane * kPiece;
      if constexpr (kPiece == 16) {
        const uint4 v = load_streaming(piece);
        words[kStart / 4] = v.x, words[kStart / 4 + 1] = v.y, words[kStart / 4 + 2] = v.z, words[kStart / 4 + 3] = v.w;
      } else if constexpr (kPiece == 8) {
        const uint2 v = *reinterpret_cast<const uint2*>(piece);
        words[kStart / 4] = v.x, words[kStart / 4 + 1] = v.y;
      } else if constexpr (kPiece == 4) {
        words[kStart / 4] = *reinterpret_cast<const uint32_t*>(piece);
      } else {
        words[kStart / 4] = *reinterpret_cast<const uint16_t*>(piece);
      }
      load<kStart + kPiece>(row, lane);
    }
  }
  DEVICE void clear() {
#pragma unroll
    for (uint32_t& word : words) word = 0;
  }
  // Elements 2i and 2i + 1 as Element.
  DEVICE uint32_t pair(int i) const {
    if constexpr (!kQuantized) return words[i];
    const Pairs pairs = widen(words[i / 2]);
    return i % 2 ? pairs.second : pairs.first;
  }
  // The dim of element `e` of a lane's run.
  template <int kStart = 0>
  static DEVICE int dim(int lane, int e) {
    constexpr int kPiece = piece_of(kElements - kStart, 16 / kKvBytes);
    if constexpr (kStart + kPiece < kElements)
      if (e >= kStart + kPiece) return dim<kStart + kPiece>(lane, e);
    return kStart * kLanes + lane * kPiece + e - kStart;
  }
};
using KeyRun = Run<4>;    // of token lane / 4 (+ 8)
using ValueRun = Run<8>;  // of tokens 2 (lane % 4), + 1, + 8, + 9

// A row's visible KV blocks and its share of them that a thread block takes.
struct Share {
  int row, split, num_splits, length, first_visible, first_block, end_block;
};

DEVICE int first_visible_position(int length, int window) { return window > 0 ? max(0, length - window) : 0; }
DEVICE int num_visible_blocks(int length, int window) {
  return (length + kKvBlockTokens - 1) / kKvBlockTokens - first_visible_position(length, window) / kKvBlockTokens;
}

// Shares are numbered through all rows; rows of length 0 have one, an empty one. row = -1: there is no share `item`.
DEVICE Share find_share(int item, const int* lengths, int num_rows, int window, int target_shares, int min_blocks) {
  const int lane = int(threadIdx.x) % kWarpSize;
  int total = 0;
  for (int row = lane; row < num_rows; row += kWarpSize) total += num_visible_blocks(lengths[row], window);
  total = warp_sum(total);
  const int share_blocks = max(min_blocks, (total + target_shares - 1) / target_shares);
  int before = 0;  // shares of earlier rows
  for (int base = 0; base < num_rows; base += kWarpSize) {
    const int length = base + lane < num_rows ? lengths[base + lane] : 0;
    const int blocks = num_visible_blocks(length, window);
    const int splits = base + lane < num_rows ? max(1, (blocks + share_blocks - 1) / share_blocks) : 0;
    int through = splits;  // shares of this row and the earlier ones
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = shuffle_up(through, distance);
      if (lane >= distance) through += other;
    }
    through += before;
    const uint32_t beyond = ballot(item < through);
    if (beyond) {
      const int owner = count_bits(~beyond & (beyond - 1));  // lowest lane
      Share share;
      share.row = base + owner;
      share.length = shuffle(length, owner);
      share.num_splits = shuffle(splits, owner);
      share.split = item - (shuffle(through, owner) - share.num_splits);
      share.first_visible = first_visible_position(share.length, window);
      const int row_blocks = num_visible_blocks(share.length, window);
      const int each = (row_blocks + share.num_splits - 1) / share.num_splits;
      const int row_start = share.first_visible / kKvBlockTokens;
      share.first_block = row_start + min(row_blocks, share.split * each);
      share.end_block = row_start + min(row_blocks, (share.split + 1) * each);
      return share;
    }
    before = shuffle(through, kWarpSize - 1);
  }
  return Share{-1, 0, 0, 0, 0, 0, 0};
}

// Online softmax of one warp: columns 2 (lane % 4) + e of head tile n.
struct Softmax {
  float max[HEAD_TILES][2], sum[HEAD_TILES][2];
  float out[HEAD_TILES][kSteps][4];  // O^T: fragments D, dims x heads
};

DEVICE void load_query(FragmentB (&query)[HEAD_TILES][kSteps], const Element* heads, int num_heads) {
  const int lane = int(threadIdx.x) % kWarpSize, r = lane / 4, c = lane % 4;
#pragma unroll
  for (int n = 0; n < HEAD_TILES; n++) {
    const int head = n * 8 + r;
    const Element* q = heads + (head < num_heads ? head : 0) * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; step++)
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int dim = KeyRun::dim(c, 4 * step + 2 * part);
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(q + dim);
        query[n][step].b[part] = head < num_heads ? pair : 0;
      }
  }
}

DEVICE void load_keys(KeyRun (&keys)[2], const char* block) {
  const int lane = int(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; half++) keys[half].load(block + (lane / 4 + 8 * half) * kRowBytes, lane % 4);
}

DEVICE int value_token(int i) { return 2 * (int(threadIdx.x) % 4) + i % 2 + 8 * (i / 2); }

// out: Element[num_rows, kv_heads * group, HEAD_DIM]; query: the same shape. partial: float[grid.x, kv_heads * group,
// HEAD_DIM], partial_lse: float[grid.x, kv_heads * group]; counters: int[num_rows, grid.y], zero before the first
// launch and again after each. block_table: int[num_rows, table_width]; lengths: int[num_rows]; a row of length 0 gives
// zeros. Grid: (num_rows + target_shares, kv_heads * ceil(group / kHeads)). Dynamic shared memory: kWarps * kHeads *
// (HEAD_DIM + 6) floats.
KERNEL(paged_decode, kThreads, kResident)
(Element* out, float* partial, float* partial_lse, int* counters, const Element* query, const char* key_cache,
 const char* value_cache, const float* key_scale, const float* value_scale, const int* block_table, const int* lengths,
 int num_rows, int table_width, int kv_heads, int group, int target_shares, int min_blocks, int window, float factor,
 float cap_log2) {
  const int item = int(blockIdx.x);
  const Share share = find_share(item, lengths, num_rows, window, target_shares, min_blocks);
  if (share.row < 0) return;
  const int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize, r = lane / 4, c = lane % 4;
  const int tiles = (group + kHeads - 1) / kHeads;
  const int kv_head = int(blockIdx.y) / tiles, first_head = int(blockIdx.y) % tiles * kHeads;
  const int num_heads = min(group - first_head, kHeads), all_heads = kv_heads * group;
  const int64_t first_row = int64_t(share.row) * all_heads + kv_head * group + first_head;  // of query and out
  const int* block_ids = block_table + int64_t(share.row) * table_width;
  const ScoreScale scale{factor, cap_log2};

  FragmentB q[HEAD_TILES][kSteps];
  load_query(q, query + first_row * kHeadDim, num_heads);
  Softmax softmax;
#pragma unroll
  for (int n = 0; n < HEAD_TILES; n++) {
    softmax.max[n][0] = softmax.max[n][1] = -infinity();
    softmax.sum[n][0] = softmax.sum[n][1] = 0.0f;
#pragma unroll
    for (int j = 0; j < kSteps; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) softmax.out[n][j][e] = 0.0f;
  }

  // Block ids come 32 at a time, one a lane; `ahead` counts those used up.
  int block = share.first_block + warp, ids = 0, ahead = 0;
  auto fetch_ids = [&](int first) {
    const int mine = first + lane * kWarps;
    ids = mine < share.end_block ? block_ids[mine] : 0;
  };
  auto place = [&](int id) { return int64_t(id) * kv_heads + kv_head; };  // in units of one head of one block
  KeyRun keys[2];
  if (block < share.end_block) {
    fetch_ids(block);
    if (kKeysAhead) load_keys(keys, key_cache + place(shuffle(ids, 0)) * kHeadBytes);
  }
  for (; block < share.end_block; block += kWarps) {
    const int64_t here = place(shuffle(ids, ahead));
    if (!kKeysAhead) load_keys(keys, key_cache + here * kHeadBytes);
    ValueRun values[4];
#pragma unroll
    for (int i = 0; i < 4; i++) values[i].load(value_cache + here * kHeadBytes + value_token(i) * kRowBytes, r);
    float key_scales[2] = {1.0f, 1.0f}, value_scales[2] = {1.0f, 1.0f};  // of tokens r and r + 8
    if (kQuantized) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        key_scales[half] = key_scale[here * kKvBlockTokens + r + 8 * half];
        value_scales[half] = value_scale[here * kKvBlockTokens + r + 8 * half];
      }
    }

    float scores[HEAD_TILES][4];  // tokens r, r, r + 8, r + 8 x heads 2c, 2c + 1, 2c, 2c + 1
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) scores[n][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const FragmentA k{
          {keys[0].pair(2 * step), keys[1].pair(2 * step), keys[0].pair(2 * step + 1), keys[1].pair(2 * step + 1)}};
#pragma unroll
      for (int n = 0; n < HEAD_TILES; n++) multiply_accumulate<Element>(scores[n], k, q[n][step]);
    }
    if (++ahead == kWarpSize) {
      fetch_ids(block + kWarps);
      ahead = 0;
    }
    if (kKeysAhead) {
      const int next = shuffle(ids, ahead);
      if (block + kWarps < share.end_block) load_keys(keys, key_cache + place(next) * kHeadBytes);
    }

#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) scores[n][e] = scale(scores[n][e] * key_scales[e / 2]);
    const int position = block * kKvBlockTokens;
    if (position + kKvBlockTokens > share.length || position < share.first_visible) {
      // Slots that the row does not own may hold anything, NaN too: their weight is 0 and so is what it multiplies.
      auto hidden = [&](int token) {
        return position + token >= share.length || position + token < share.first_visible;
      };
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (hidden(r + 8 * half)) {
          value_scales[half] = 0.0f;
#pragma unroll
          for (int n = 0; n < HEAD_TILES; n++) scores[n][2 * half] = scores[n][2 * half + 1] = -infinity();
        }
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (hidden(value_token(i))) values[i].clear();
    }

    FragmentB weights[HEAD_TILES];
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
      float decay[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float most = fmaxf(scores[n][e], scores[n][e + 2]);
#pragma unroll
        for (int mask = 4; mask < kWarpSize; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
        most = fmaxf(most, softmax.max[n][e]);
        decay[e] = exp2_fast(softmax.max[n][e] - most);
        softmax.max[n][e] = most;
        scores[n][e] = exp2_fast(scores[n][e] - most);
        scores[n][e + 2] = exp2_fast(scores[n][e + 2] - most);
        softmax.sum[n][e] = softmax.sum[n][e] * decay[e] + scores[n][e] + scores[n][e + 2];
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
        weights[n].b[half] = transpose_8x8(
            pack<Element>(scores[n][2 * half] * value_scales[half], scores[n][2 * half + 1] * value_scales[half]));
#pragma unroll
      for (int j = 0; j < kSteps; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) softmax.out[n][j][e] *= decay[e % 2];
    }
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = values[i].pair(j);
      const FragmentA v{{permute_bytes(w[0], w[1], 0x5410), permute_bytes(w[0], w[1], 0x7632),
                         permute_bytes(w[2], w[3], 0x5410), permute_bytes(w[2], w[3], 0x7632)}};
#pragma unroll
      for (int n = 0; n < HEAD_TILES; n++) multiply_accumulate<Element>(softmax.out[n][j], v, weights[n]);
    }
  }

  // Add up the warps.
  DYNAMIC_SHARED(float, shared);
  constexpr int kStride = kHeadDim + 4;
  float* const outs = shared;                              // [kWarps][kHeads][kStride]
  float* const maxima = outs + kWarps * kHeads * kStride;  // [kWarps][kHeads]
  float* const sums = maxima + kWarps * kHeads;            // [kWarps][kHeads]
#pragma unroll
  for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = warp * kHeads + n * 8 + 2 * c + e;
      float sum = softmax.sum[n][e];
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
      if (r == 0) maxima[head] = softmax.max[n][e], sums[head] = sum;
#pragma unroll
      for (int j = 0; j < kSteps; j++) {
        float* const place = outs + head * kStride + ValueRun::dim(r, 2 * j);
        place[0] = softmax.out[n][j][e], place[1] = softmax.out[n][j][e + 2];
      }
    }
  block_barrier();
  const int64_t part_row = int64_t(item) * all_heads + kv_head * group + first_head;  // of partial
  for (int x = int(threadIdx.x); x < num_heads * (kHeadDim / 2); x += kThreads) {
    const int head = x / (kHeadDim / 2), dim = x % (kHeadDim / 2) * 2;
    float most = -infinity(), sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) most = fmaxf(most, maxima[w * kHeads + head]);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float max = maxima[w * kHeads + head];
      const float weight = max == -infinity() ? 0.0f : exp2_fast(max - most);  // a warp without a block: nothing
      const float* const o = outs + (w * kHeads + head) * kStride + dim;
      sum += weight * sums[w * kHeads + head], low += weight * o[0], high += weight * o[1];
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (share.num_splits == 1) {
      *reinterpret_cast<uint32_t*>(out + (first_row + head) * kHeadDim + dim) =
          pack<Element>(low * inverse, high * inverse);
    } else {
      float* const place = partial + (part_row + head) * kHeadDim + dim;
      place[0] = low * inverse, place[1] = high * inverse;
      if (dim == 0) partial_lse[part_row + head] = sum == 0.0f ? -infinity() : most + log2_fast(sum);
    }
  }
  if (share.num_splits == 1) return;

  // The last thread block to get here adds up the splits, in their order.
  SHARED_ARRAY(int, finished, 1);
  memory_fence();
  block_barrier();
  if (threadIdx.x == 0) {
    int* const counter = counters + int64_t(share.row) * gridDim.y + blockIdx.y;
    finished[0] = atomic_add(counter, 1) + 1;
    if (finished[0] == share.num_splits) *counter = 0;
  }
  block_barrier();
  if (finished[0] != share.num_splits) return;
  memory_fence();
  const int64_t parts = part_row - int64_t(share.split) * all_heads;
  for (int x = int(threadIdx.x); x < num_heads * (kHeadDim / 2); x += kThreads) {
    const int head = x / (kHeadDim / 2), dim = x % (kHeadDim / 2) * 2;
    float most = -infinity(), sum = 0.0f, low = 0.0f, high = 0.0f;
    for (int split = 0; split < share.num_splits; split++)
      most = fmaxf(most, load_coherent(partial_lse + parts + head + int64_t(split) * all_heads));
    for (int split = 0; split < share.num_splits; split++) {
      const int64_t part = parts + head + int64_t(split) * all_heads;
      const float lse = load_coherent(partial_lse + part);
      const float weight = lse == -infinity() ? 0.0f : exp2_fast(lse - most);
      const float* const o = partial + part * kHeadDim + dim;
      sum += weight, low += weight * load_coherent(o), high += weight * load_coherent(o + 1);
    }
    *reinterpret_cast<uint32_t*>(out + (first_row + head) * kHeadDim + dim) = pack<Element>(low / sum, high / sum);
  }
}
KERNEL_EXPORT(paged_decode)
