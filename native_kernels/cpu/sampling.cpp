// Sampling without sorting the vocabulary. Versions:
//   1  weights are integers, round(2^30 * exp((logit - max) / temperature)), so sums are exact in any order: the
//   sampled
//      token is the same on every instruction set, for any thread count, and in reference.py. The cut of top-k and
//      top-p is a threshold found by bisection over the values, the candidates compacted as the bracket shrinks.
#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_table.hpp"
#include "philox.hpp"

namespace tokring::cpu {
namespace {

constexpr float kGreedyTemperature = 1e-5f;  // vLLM's _SAMPLING_EPS
constexpr uint32_t kHeaviest = 1u << 30;     // weight of the likeliest token

struct Scratch {
  std::vector<uint32_t> weights, keys, candidates;
  std::vector<uint32_t> counts;  // all zero between calls
};

Scratch& scratch() {
  thread_local Scratch memory;
  return memory;
}

uint32_t* at_least(std::vector<uint32_t>& words, int64_t n) {
  if (words.size() < static_cast<size_t>(n)) words.resize(static_cast<size_t>(n));
  return words.data();
}

uint64_t count_of(const Measure& measure) { return measure.count; }
uint64_t sum_of(const Measure& measure) { return measure.sum; }

// The largest threshold in [low, high) such that Amount(values >= threshold) >= target.
// Needs: target >= 1, met at low, and no value >= high.
template <uint64_t (*Amount)(const Measure&)>
uint32_t find_threshold(const KernelTable& table, const uint32_t* values, int64_t n, uint64_t target, uint32_t low,
                        uint32_t high) {
  uint32_t* candidates = at_least(scratch().candidates, n);
  uint64_t above = 0;  // amount of the values >= high that candidates no longer hold
  Measure at_low = table.measure(values, n, low);
  Measure at_high{0, 0};
  while (high - low > 1) {
    if (at_low.count == at_high.count) break;
    const uint32_t middle = low + (high - low) / 2;
    const Measure at_middle = table.measure(values, n, middle);
    if (above + Amount(at_middle) >= target) {
      low = middle;
      at_low = at_middle;
    } else {
      high = middle;
      at_high = at_middle;
    }
    if ((at_low.count - at_high.count) * 4 <= static_cast<uint64_t>(n)) {
      n = table.compact(values, n, low, high, candidates);
      values = candidates;
      above += Amount(at_high);
      at_low = table.measure(values, n, low);
      at_high = {0, 0};
    }
  }
  return low;
}

// The first id, in order, at which the running sum of weights >= threshold exceeds `ticket`.
int32_t pick(const KernelTable& table, const uint32_t* weights, int64_t n, uint32_t threshold, uint64_t ticket) {
  constexpr int64_t kChunk = 2048;
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t length = std::min(kChunk, n - start);
    const uint64_t sum = table.measure(weights + start, length, threshold).sum;
    if (ticket >= sum) {
      ticket -= sum;
      continue;
    }
    for (int64_t id = start;; ++id) {
      if (weights[id] < threshold) continue;
      if (ticket < weights[id]) return static_cast<int32_t>(id);
      ticket -= weights[id];
    }
  }
  return -1;  // not reached: ticket is below the total
}

uint32_t min_p_threshold(float min_p) {
  if (!(min_p > 0.0f)) return 1;
  const double weight = std::ceil(static_cast<double>(std::min(min_p, 1.0f)) * kHeaviest);
  return std::max<uint32_t>(1, static_cast<uint32_t>(weight));
}

void apply_top_k(const KernelTable& table, const float* logits, int64_t n, int32_t top_k, uint32_t* weights) {
  uint32_t* keys = at_least(scratch().keys, n);
  table.order(logits, n, keys);
  const uint32_t highest = std::numeric_limits<uint32_t>::max();  // above the key of +inf
  const uint32_t cut = find_threshold<count_of>(table, keys, n, static_cast<uint64_t>(top_k), 0, highest);
  table.drop_below(keys, cut, weights, n);
}

}  // namespace

int32_t sample_row(const float* logits, int64_t vocab_size, const SamplingRow& row) {
  const KernelTable& table = kernels();
  const RowMaximum maximum = table.maximum(logits, vocab_size);
  if (maximum.has_nan || !std::isfinite(maximum.value)) return -1;
  if (!(row.temperature >= kGreedyTemperature) || row.top_k == 1) {
    return static_cast<int32_t>(table.find(logits, vocab_size, maximum.value));
  }
  uint32_t* weights = at_least(scratch().weights, vocab_size);
  table.weigh(logits, vocab_size, maximum.value, 1.0f / row.temperature, weights);
  if (row.top_k > 0 && row.top_k < vocab_size) apply_top_k(table, logits, vocab_size, row.top_k, weights);
  uint32_t threshold = min_p_threshold(row.min_p);
  uint64_t total = table.measure(weights, vocab_size, threshold).sum;
  if (row.top_p < 1.0f) {
    const double wanted = std::ceil(static_cast<double>(row.top_p) * static_cast<double>(total));
    const uint64_t target = std::clamp<uint64_t>(wanted > 1.0 ? static_cast<uint64_t>(wanted) : 1, 1, total);
    threshold = find_threshold<sum_of>(table, weights, vocab_size, target, threshold, kHeaviest + 1);
    total = table.measure(weights, vocab_size, threshold).sum;
  }
  const uint64_t bits = random_bits(row.seed, row.choice, row.position, row.draw);
  const auto ticket = static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * total) >> 64);
  return pick(table, weights, vocab_size, threshold, ticket);
}

void penalize_row(float* logits, int64_t vocab_size, const int32_t* ids, int64_t num_prompt, int64_t num_ids,
                  const Penalties& penalties) {
  std::vector<uint32_t>& counts = scratch().counts;
  if (counts.size() < static_cast<size_t>(vocab_size)) counts.resize(static_cast<size_t>(vocab_size), 0);
  // Word of an id: 1 = seen in the prompt, + 2 for every time in the output.
  auto valid = [&](int32_t id) { return id >= 0 && id < vocab_size; };
  for (int64_t i = 0; i < num_ids; ++i) {
    if (!valid(ids[i])) continue;
    uint32_t& word = counts[static_cast<size_t>(ids[i])];
    word = i < num_prompt ? word | 1u : word + 2u;
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    if (!valid(ids[i])) continue;
    uint32_t& word = counts[static_cast<size_t>(ids[i])];
    if (word == 0) continue;  // this id is done
    float logit = logits[ids[i]];
    logit = logit > 0.0f ? logit / penalties.repetition : logit * penalties.repetition;
    if (word >= 2u) {
      logit -= penalties.frequency * static_cast<float>(word / 2u);
      logit -= penalties.presence;
    }
    logits[ids[i]] = logit;
    word = 0;
  }
}

void mask_row(float* logits, int64_t vocab_size, const uint32_t* mask) {
  const float nothing = -std::numeric_limits<float>::infinity();
  for (int64_t start = 0; start < vocab_size; start += 32) {
    const uint32_t word = mask[start / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t length = std::min<int64_t>(32, vocab_size - start);
    for (int64_t i = 0; i < length; ++i) {
      if ((word >> i & 1u) == 0) logits[start + i] = nothing;
    }
  }
}

void logprobs_row(const float* logits, int64_t vocab_size, int32_t chosen, int64_t k, float* chosen_logprob,
                  int32_t* rank, int32_t* top_ids, float* top_logprobs) {
  const KernelTable& table = kernels();
  const RowMaximum maximum = table.maximum(logits, vocab_size);
  if (maximum.has_nan || !std::isfinite(maximum.value)) {
    *chosen_logprob = std::numeric_limits<float>::quiet_NaN();
    *rank = 0;
    std::fill_n(top_ids, k, -1);
    std::fill_n(top_logprobs, k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const double log_sum = std::log(table.sum_exp(logits, vocab_size, maximum.value)) + maximum.value;
  auto logprob = [&](int64_t id) { return static_cast<float>(logits[id] - log_sum); };
  *chosen_logprob = logprob(chosen);
  const float value = logits[chosen];
  *rank = static_cast<int32_t>(1 + table.count_above(logits, vocab_size, value) +
                               std::count(logits, logits + chosen, value));
  if (k == 0) return;
  uint32_t* keys = at_least(scratch().keys, vocab_size);
  table.order(logits, vocab_size, keys);
  const uint32_t cut = find_threshold<count_of>(table, keys, vocab_size, static_cast<uint64_t>(k), 0,
                                                std::numeric_limits<uint32_t>::max());
  std::vector<int32_t> ids;
  // Above the cut there are fewer than k; of those on it the lowest ids fill up.
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (keys[id] > cut) ids.push_back(static_cast<int32_t>(id));
  }
  for (int64_t id = 0; id < vocab_size && static_cast<int64_t>(ids.size()) < k; ++id) {
    if (keys[id] == cut) ids.push_back(static_cast<int32_t>(id));
  }
  std::sort(ids.begin(), ids.end(),
            [&](int32_t a, int32_t b) { return keys[a] != keys[b] ? keys[a] > keys[b] : a < b; });
  for (int64_t i = 0; i < k; ++i) {
    top_ids[i] = ids[static_cast<size_t>(i)];
    top_logprobs[i] = logprob(top_ids[i]);
  }
}

}  // namespace tokring::cpu
