// The cut of top-k and top-p without a sort: the largest threshold at or above which enough values lie, found digit by
// digit (11, 11 and 10 bits) from histograms in shared memory. Sums of integers: exact, whatever the order.
#pragma once
#include "logits.cuh"

constexpr int kDigits = 2048;

// Sums of up to 2^20 values of a digit fit: `low` and `middle` add up 11 and 10 bits of what is below the digit.
struct Histogram {
  uint32_t count[kDigits], low[kDigits], middle[kDigits];
  uint64_t partial[kMaxWarps];
  uint32_t digit;
  uint64_t above;
};

// The largest t such that the count (kSum: the sum) of values >= t is at least `target`, which the sum over all values
// must be. value_of(id, logit) is what is measured; zeros count as absent if kSum. Every thread of the block calls.
template <bool kSum, class ValueOf>
DEVICE uint32_t find_threshold(const float* row, int n, uint64_t target, Histogram& h, ValueOf value_of) {
  uint32_t prefix = 0;  // the threshold's digits found so far
  uint64_t above = 0;   // amount of the values beyond them
#pragma unroll 1
  for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
    const uint32_t mask = shift ? kDigits - 1 : 1023;
    const int next = shift ? 11 : 10;  // bits of this digit
    block_barrier();
    for (int i = thread(); i < kDigits; i += int(blockDim.x)) h.count[i] = h.low[i] = h.middle[i] = 0;
    block_barrier();
    walk(row, 0, n, thread(), int(blockDim.x), [&](int id, float logit) {
      const uint32_t value = value_of(id, logit), digit = value >> shift & mask;
      // Nothing is asked about digit 0: it is taken if no other is. That spares the crowd of unlikely tokens.
      if (digit == 0 || (shift != 21 && value >> (shift + next) != prefix)) return;
      atomic_add(&h.count[digit], 1u);
      if (!kSum || shift == 0) return;
      const uint32_t rest = value & ((1u << shift) - 1);
      atomic_add(&h.low[digit], rest & 2047);
      if (shift == 21) atomic_add(&h.middle[digit], rest >> 11);
    });
    block_barrier();
    // This thread's digits, from the highest down
    constexpr int kMine = 2;
    uint64_t amount[kMine], mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      const int digit = kDigits - 1 - (kMine * thread() + i);
      const uint64_t head = uint64_t((prefix << next | uint32_t(digit)) << shift);
      amount[i] = !kSum ? h.count[digit] : h.count[digit] * head + h.low[digit] + (uint64_t(h.middle[digit]) << 11);
      mine += amount[i];
    }
    const Scan scan = block_scan(mine, h.partial);
    uint64_t before = above + scan.before;
    if (before < target && before + mine >= target) {
      const int skipped = before + amount[0] >= target ? 0 : 1;
      h.digit = uint32_t(kDigits - 1 - (kMine * thread() + skipped));
      h.above = skipped ? before + amount[0] : before;
    } else if (thread() == 0 && above + scan.total < target) {
      h.digit = 0;
      h.above = above + scan.total;
    }
    block_barrier();
    prefix = prefix << next | h.digit;
    above = h.above;
  }
  return prefix;
}
