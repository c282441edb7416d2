// One token per row of logits. Weights are integers, round(2^30 * exp((logit - maximum) / temperature)), so sums are
// exact in any order and the token is the one that the CPU kernel and reference.sample give.
// Versions: 1  after row_maxima, which is all that a greedy row needs: one block of 1,024 threads a row.
#include "philox.cuh"
#include "select.cuh"

// exp(x) for x <= 0, operation by operation as in cpu/exp.inc.hpp: the same bits.
DEVICE float exp_nonpositive(float x) {
  const float lowest = -87.0f;
  if (!(x >= lowest)) return 0.0f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to nearest
  const float n = add_rounded(add_rounded(multiply_rounded(x, 1.44269504088896341f), magic), -magic);
  float r = add_rounded(x, -multiply_rounded(n, 0.693359375f));
  r = add_rounded(r, -multiply_rounded(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = add_rounded(multiply_rounded(p, r), 1.3981999507e-3f);
  p = add_rounded(multiply_rounded(p, r), 8.3334519073e-3f);
  p = add_rounded(multiply_rounded(p, r), 4.1665795894e-2f);
  p = add_rounded(multiply_rounded(p, r), 1.6666665459e-1f);
  p = add_rounded(multiply_rounded(p, r), 5.0000001201e-1f);
  p = add_rounded(add_rounded(multiply_rounded(p, multiply_rounded(r, r)), r), 1.0f);
  return multiply_rounded(p, float_of_bits(uint32_t(int(n) + 127) << 23));
}

// What a token weighs, before any cut by weight.
struct Weigher {
  float maximum, inverse_temperature;
  uint32_t lowest_key;  // of top-k

  DEVICE uint32_t operator()(float logit) const {
    if (order_key(logit) < lowest_key) return 0;
    const float x = multiply_rounded(add_rounded(logit, -maximum), inverse_temperature);
    return uint32_t(rintf(multiply_rounded(exp_nonpositive(x), 1073741824.0f)));
  }
};

struct SamplingScratch {
  Histogram histogram;
  uint64_t warp_sums[kMaxWarps];
  int token;
};

// Sums of the weights >= threshold in the stretches of ids [start, stop), one a warp, into `sums`; barrier included.
DEVICE void sum_stretches(const float* row, int start, int stop, const Weigher& weigh, uint32_t threshold,
                          uint64_t* sums) {
  const int length = (stop - start + num_warps() - 1) / num_warps();
  const int first = min(start + warp() * length, stop), end = min(first + length, stop);
  uint64_t sum = 0;
  walk(row, first, end, lane(), 32, [&](int, float logit) {
    const uint32_t weight = weigh(logit);
    sum += weight >= threshold ? weight : 0;
  });
  sum = warp_sum(sum);
  block_barrier();
  if (lane() == 0) sums[warp()] = sum;
  block_barrier();
}

DEVICE uint64_t total_of(const uint64_t* sums) { return warp_sum(lane() < num_warps() ? sums[lane()] : uint64_t(0)); }

// The first id, in order, at which the running sum of weights >= threshold exceeds `ticket`; `sums` are those of the
// whole row's stretches.
DEVICE int pick(const float* row, int n, const Weigher& weigh, uint32_t threshold, uint64_t ticket,
                SamplingScratch& scratch) {
  int start = 0, stop = n;
#pragma unroll 1
  while (stop - start > int(blockDim.x)) {
    if (stop - start < n) sum_stretches(row, start, stop, weigh, threshold, scratch.warp_sums);
    const int length = (stop - start + num_warps() - 1) / num_warps();
    int stretch = 0;
    while (ticket >= scratch.warp_sums[stretch]) ticket -= scratch.warp_sums[stretch++];
    start = min(start + stretch * length, stop);
    stop = min(start + length, stop);
  }
  const int id = start + thread();
  uint64_t weight = id < stop ? weigh(row[id]) : 0;
  if (weight < threshold) weight = 0;
  const uint64_t before = block_scan(weight, scratch.histogram.partial).before;
  if (before <= ticket && ticket < before + weight) scratch.token = id;
  block_barrier();
  return scratch.token;
}

DEVICE uint32_t min_p_threshold(float min_p) {
  if (!(min_p > 0.0f)) return 1;
  const double weight = ceil(double(min_p < 1.0f ? min_p : 1.0f) * 1073741824.0);
  return weight > 1.0 ? uint32_t(weight) : 1;
}

DEVICE uint64_t top_p_target(float top_p, uint64_t total) {
  const double wanted = ceil(double(top_p) * double(total));
  const uint64_t target = wanted > 1.0 ? uint64_t(wanted) : 1;
  return target < total ? target : total;
}

struct SamplingRow {
  float temperature, top_p, min_p;
  int top_k;
  uint64_t random;
};

DEVICE int sample_by_weight(const float* row, int n, const SamplingRow& p, float maximum, SamplingScratch& scratch) {
  Weigher weigh = {maximum, divide_rounded(1.0f, p.temperature), 0};
  if (p.top_k > 0 && p.top_k < n) {
    weigh.lowest_key = find_threshold<false>(row, n, uint64_t(p.top_k), scratch.histogram,
                                             [](int, float logit) { return order_key(logit); });
  }
  uint32_t threshold = min_p_threshold(p.min_p);
  sum_stretches(row, 0, n, weigh, threshold, scratch.warp_sums);
  uint64_t total = total_of(scratch.warp_sums);
  if (p.top_p < 1.0f) {
    threshold = find_threshold<true>(row, n, top_p_target(p.top_p, total), scratch.histogram, [&](int, float logit) {
      const uint32_t weight = weigh(logit);
      return weight >= threshold ? weight : 0;
    });
    sum_stretches(row, 0, n, weigh, threshold, scratch.warp_sums);
    total = total_of(scratch.warp_sums);
  }
  return pick(row, n, weigh, threshold, multiply_high(p.random, total), scratch);
}

KERNEL(sample, 1024)
(int* out_token, const float* logits, const PartMaximum* parts, const int* rows, const float* temperature,
 const int* top_k, const float* top_p, const float* min_p, const int64_t* seed, const uint32_t* choice,
 const int* position, uint32_t draw, int vocab_size) {
  SHARED_ARRAY(SamplingScratch, scratch, 1);
  const int request = rows ? rows[blockIdx.x] : int(blockIdx.x);
  if (request < 0) return;
  const PartMaximum maximum = row_maximum(parts + int64_t(blockIdx.x) * kRowParts);
  const bool finite = maximum.id >= 0 && is_finite(maximum.value);
  const bool greedy = !(temperature[request] >= 1e-5f) || top_k[request] == 1;
  const bool nothing_left = maximum.id >= 0 && maximum.value == minus_infinity();
  int token = finite ? maximum.id : nothing_left ? -2 : -1;
  if (finite && !greedy) {
    const SamplingRow row = {temperature[request], top_p[request], min_p[request], top_k[request],
                             random_bits(uint64_t(seed[request]), choice[request], uint64_t(position[request]), draw)};
    token = sample_by_weight(logits + int64_t(blockIdx.x) * vocab_size, vocab_size, row, maximum.value, scratch[0]);
  }
  if (thread() == 0) out_token[request] = token;
}
KERNEL_EXPORT(sample)
