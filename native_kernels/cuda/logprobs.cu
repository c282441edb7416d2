// Log-softmax of the chosen token and of the k likeliest, with ranks: reported to clients, so ties are broken by id.
// Versions: 1  one block of 1,024 threads an entry; the k-th largest by select.cuh, the few above it ordered by
// counting.
#include "select.cuh"

constexpr int kMaxTop = 32;

struct Candidate {
  uint32_t key;
  int id;
  float logit;
};
DEVICE bool precedes(const Candidate& a, const Candidate& b) { return a.key != b.key ? a.key > b.key : a.id < b.id; }

struct LogprobsScratch {
  Histogram histogram;
  float sums[kMaxWarps];
  uint64_t ranks[kMaxWarps];
  Candidate above[kMaxTop], level[kMaxTop];  // beyond the k-th largest logit, and equal to it
  uint32_t num_above, num_level;
};

// The likeliest k ids into top_id and top_logprob; k <= n.
DEVICE void write_top(const float* row, int n, int k, float log_sum, float maximum, int* top_id, float* top_logprob,
                      LogprobsScratch& s) {
  const uint32_t cut =
      find_threshold<false>(row, n, uint64_t(k), s.histogram, [](int, float logit) { return order_key(logit); });
  int last_level_id = n;
#pragma unroll 1
  for (;;) {
    block_barrier();
    if (thread() == 0) s.num_above = s.num_level = 0;
    block_barrier();
    walk(row, 0, n, thread(), int(blockDim.x), [&](int id, float logit) {
      const uint32_t key = order_key(logit);
      if (key < cut || (key == cut && id > last_level_id)) return;
      const uint32_t place = atomic_add(key > cut ? &s.num_above : &s.num_level, 1u);
      if (place < kMaxTop) (key > cut ? s.above : s.level)[place] = Candidate{key, id, logit};
    });
    block_barrier();
    if (s.num_level <= kMaxTop) break;
    // Too many ties to order: only the lowest ids of them that are needed.
    const uint64_t needed = uint64_t(k) - s.num_above;
    last_level_id = int(~find_threshold<false>(row, n, needed, s.histogram, [&](int id, float logit) {
      return order_key(logit) == cut ? ~uint32_t(id) : 0u;
    }));
  }
  const int num_above = int(s.num_above), num_all = num_above + int(s.num_level);
  auto candidate = [&](int i) -> const Candidate& { return i < num_above ? s.above[i] : s.level[i - num_above]; };
  if (thread() < num_all) {
    const Candidate mine = candidate(thread());
    int place = 0;
    for (int i = 0; i < num_all; i++) place += precedes(candidate(i), mine) ? 1 : 0;
    if (place < k) {
      top_id[place] = mine.id;
      top_logprob[place] = (mine.logit - maximum) - log_sum;
    }
  }
}

KERNEL(logprobs, 1024)
(float* out_logprob, int* out_rank, int* out_top_id, float* out_top_logprob, const float* logits,
 const PartMaximum* parts, const int* chosen, const int* entries, int k, int vocab_size) {
  SHARED_ARRAY(LogprobsScratch, scratch, 1);
  LogprobsScratch& s = scratch[0];
  const int entry = blockIdx.x, logits_row = entries ? entries[entry] : entry;
  if (logits_row < 0) return;
  const float* const row = logits + int64_t(logits_row) * vocab_size;
  const PartMaximum maximum = row_maximum(parts + int64_t(entry) * kRowParts);
  const int id = chosen[entry];
  const bool finite = maximum.id >= 0 && is_finite(maximum.value), has_choice = finite && id >= 0 && id < vocab_size;
  int* const top_id = out_top_id + int64_t(entry) * k;
  float* const top_logprob = out_top_logprob + int64_t(entry) * k;
  const float nan = float_of_bits(0x7fc00000u);
  if (!finite) {
    if (thread() < k) top_id[thread()] = -1, top_logprob[thread()] = nan;
    if (thread() == 0) out_logprob[entry] = nan, out_rank[entry] = 0;
    return;
  }
  const float chosen_logit = has_choice ? row[id] : maximum.value;
  float sum = 0.0f;
  uint32_t better = 0;
  walk(row, 0, vocab_size, thread(), int(blockDim.x), [&](int i, float logit) {
    sum += expf(logit - maximum.value);
    better += logit > chosen_logit || (logit == chosen_logit && i < id) ? 1 : 0;
  });
  const float log_sum = logf(block_sum(sum, s.sums));
  const uint64_t rank = 1 + block_sum(uint64_t(better), s.ranks);
  if (thread() == 0) {
    out_logprob[entry] = has_choice ? (chosen_logit - maximum.value) - log_sum : nan;
    out_rank[entry] = has_choice ? int(rank) : 0;
  }
  if (k > 0) write_top(row, vocab_size, k, log_sum, maximum.value, top_id, top_logprob, s);
}
KERNEL_EXPORT(logprobs)
