// What is done to logits before a token is sampled: penalties, bias, bans, masks; and their maxima.
// Versions: 1  a block takes 4,096 logits of a row: rows in blockIdx.x, parts of a row in blockIdx.y.
#include "logits.cuh"

constexpr int kPartLogits = 4096;
constexpr int kTail = 64;  // latest tokens of a sequence that bans look at

// Calls visit(id) for this thread's ids of the block's part of a row.
template <class Visit>
DEVICE void for_part(int vocab_size, Visit visit) {
  const int start = int(blockIdx.y) * kPartLogits, stop = min(start + kPartLogits, vocab_size);
  for (int id = start + thread(); id < stop; id += int(blockDim.x)) visit(id);
}

// ---- penalties ----
// Word of a token: 1 = seen in the prompt, + 2 for every time in the output.

// One block an entry: zeroes its row of counts, then counts.
KERNEL(count_history, 1024)
(uint32_t* counts, const int* slots, const int* token_ids, int stride, const int* num_prompt, const int* num_tokens,
 int vocab_size) {
  const int entry = blockIdx.x, slot = slots[entry];
  if (slot < 0) return;
  uint32_t* const row = counts + int64_t(slot) * vocab_size;
  for (int id = thread(); id < vocab_size; id += int(blockDim.x)) row[id] = 0;
  block_barrier();
  const int* ids = token_ids + int64_t(entry) * stride;
  for (int i = thread(); i < num_tokens[entry]; i += int(blockDim.x)) {
    const int id = ids[i];
    if (id < 0 || id >= vocab_size) continue;
    if (i < num_prompt[entry])
      atomic_or(&row[id], 1u);
    else
      atomic_add(&row[id], 2u);
  }
}
KERNEL_EXPORT(count_history)

// Behind `sample`: lanes with a slot count their token, if they have drawn one, and put it behind their tail.
// lengths: tokens before it, 0: the lane rests. tails: [num_slots, kTail], position p of a sequence at p % kTail.
KERNEL(note_sampled, 256)
(uint32_t* counts, int* tails, const int* slots, const int* lengths, const int* sampled, int num_lanes,
 int vocab_size) {
  const int lane = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (lane >= num_lanes || slots[lane] < 0 || lengths[lane] <= 0) return;
  const int id = sampled[lane];
  if (id < 0 || id >= vocab_size) return;
  counts[int64_t(slots[lane]) * vocab_size + id] += 2;
  tails[slots[lane] * kTail + lengths[lane] % kTail] = id;
}
KERNEL_EXPORT(note_sampled)

// Roundings as in the CPU kernel: the same bits.
KERNEL(apply_penalties, 256)
(float* logits, const uint32_t* counts, const int* slots, const float* repetition, const float* presence,
 const float* frequency, const int* rows, int vocab_size) {
  const int request = rows ? rows[blockIdx.x] : int(blockIdx.x);
  if (request < 0 || slots[request] < 0) return;
  const uint32_t* const seen = counts + int64_t(slots[request]) * vocab_size;
  float* const row = logits + int64_t(blockIdx.x) * vocab_size;
  const float factor = repetition[request];
  if (factor == 1.0f && presence[request] == 0.0f && frequency[request] == 0.0f) return;
  for_part(vocab_size, [&](int id) {
    const uint32_t word = seen[id];
    if (word == 0) return;
    float logit = row[id] > 0.0f ? divide_rounded(row[id], factor) : multiply_rounded(row[id], factor);
    if (word >= 2) {
      logit = add_rounded(logit, -multiply_rounded(frequency[request], float(word / 2)));
      logit = add_rounded(logit, -presence[request]);
    }
    row[id] = logit;
  });
}
KERNEL_EXPORT(apply_penalties)

// ---- bias, bans, masks: by lane ----

// The logits row of a lane, -1 for none; rows may be null: row = lane.
DEVICE int row_of(int lane, const int* rows, int num_lanes, int num_rows) {
  if (lane < 0 || lane >= num_lanes) return -1;
  const int row = rows ? rows[lane] : lane;
  return row < num_rows ? row : -1;
}

KERNEL(apply_bias, 256)
(float* logits, const int* lanes, const int* ids, const float* bias, const int* rows, int num_entries, int num_lanes,
 int num_rows, int vocab_size) {
  const int entry = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (entry >= num_entries) return;
  const int row = row_of(lanes[entry], rows, num_lanes, num_rows), id = ids[entry];
  if (row < 0 || id < 0 || id >= vocab_size) return;
  atomic_add(&logits[int64_t(row) * vocab_size + id], bias[entry]);
}
KERNEL_EXPORT(apply_bias)

// Word i ends the output of its lane where all its tokens but the last are the latest ones. tails as in note_sampled.
KERNEL(ban_words, 256)
(float* logits, const int* words, const int* word_starts, const int* lanes, const int* tails, const int* slots,
 const int* lengths, const int* rows, int num_words, int num_lanes, int num_rows, int vocab_size) {
  const int word = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (word >= num_words) return;
  const int lane = lanes[word], start = word_starts[word], length = word_starts[word + 1] - start - 1;
  const int row = row_of(lane, rows, num_lanes, num_rows);
  if (row < 0 || length < 0 || length > kTail || slots[lane] < 0 || lengths[lane] < length) return;
  const int* const tail = tails + slots[lane] * kTail;
  for (int i = 0; i < length; i++) {
    if (tail[(lengths[lane] - length + i) % kTail] != words[start + i]) return;
  }
  const int banned = words[start + length];
  if (banned >= 0 && banned < vocab_size) logits[int64_t(row) * vocab_size + banned] = minus_infinity();
}
KERNEL_EXPORT(ban_words)

KERNEL(apply_bitmask, 256)
(float* logits, const uint32_t* mask, const int* lanes, const int* rows, int mask_stride, int num_lanes, int num_rows,
 int vocab_size) {
  const int row = row_of(lanes ? lanes[blockIdx.x] : int(blockIdx.x), rows, num_lanes, num_rows);
  if (row < 0) return;
  const uint32_t* const words = mask + int64_t(blockIdx.x) * mask_stride;
  for_part(vocab_size, [&](int id) {
    if ((words[id / 32] >> (id % 32) & 1) == 0) logits[int64_t(row) * vocab_size + id] = minus_infinity();
  });
}
KERNEL_EXPORT(apply_bitmask)

// ---- maxima
// The largest logit of a row and the lowest id that has it, in parts by kRowParts blocks, so that few rows keep many
// multiprocessors busy: the first step of sampling and of logprobs.

// parts: [n, kRowParts]. Entry i is of logits row i, or with `gathers` of row rows[i]; rows may be null, a negative
// entry is skipped. Grid: n, kRowParts.
KERNEL(row_maxima, 256)(PartMaximum* parts, const float* logits, const int* rows, int gathers, int vocab_size) {
  SHARED_ARRAY(float, values, kMaxWarps);
  SHARED_ARRAY(int, ids, kMaxWarps);
  const int entry = int(blockIdx.x);
  if (rows && rows[entry] < 0) return;
  const int row = gathers ? rows[entry] : entry;
  const int length = (vocab_size + kRowParts - 1) / kRowParts, start = min(int(blockIdx.y) * length, vocab_size);
  PartMaximum best = {minus_infinity(), 0x7fffffff};
  walk(logits + int64_t(row) * vocab_size, start, min(start + length, vocab_size), thread(), int(blockDim.x),
       [&](int id, float logit) {
         best = larger(best, PartMaximum{logit, is_nan(logit) ? -1 : id});
       });
  best = warp_larger(best);
  if (lane() == 0) values[warp()] = best.value, ids[warp()] = best.id;
  block_barrier();
  if (warp() != 0) return;
  best = warp_larger(PartMaximum{values[lane() % num_warps()], ids[lane() % num_warps()]});
  if (lane() == 0) parts[int64_t(entry) * kRowParts + blockIdx.y] = best;
}
KERNEL_EXPORT(row_maxima)
