// Scans of one row of logits or weights. Included inside a level's namespace. The plain loops over integers are left to
// the compiler, which vectorises them for the level.
// Versions: 1  whole-row scans, 4 accumulators; compaction by compress-store on AVX-512, branch-free elsewhere.

inline RowMaximum maximum_of_row(const float* row, int64_t n) {
  Vec best[4];
  for (Vec& lane : best) lane = set1(-std::numeric_limits<float>::infinity());
  uint32_t largest_magnitude = 0;
  int64_t i = 0;
  constexpr int64_t kChunk = 4 * kWidth;
  for (; i + kChunk <= n; i += kChunk) {
    for (int v = 0; v < 4; ++v) best[v] = max(load(row + i + v * kWidth), best[v]);
  }
  float value = reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < n; ++i) value = row[i] > value ? row[i] : value;
  for (i = 0; i < n; ++i)
    largest_magnitude = std::max(largest_magnitude, std::bit_cast<uint32_t>(row[i]) & 0x7fffffffu);
  return {value, largest_magnitude > 0x7f800000u};
}

inline int64_t find_value(const float* row, int64_t n, float value) {
  constexpr int64_t kChunk = 256;
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    int hits = 0;
    for (int64_t j = 0; j < kChunk; ++j) hits += row[i + j] == value;
    if (hits != 0) break;
  }
  for (; i < n; ++i) {
    if (row[i] == value) return i;
  }
  return n;
}

inline int64_t count_above(const float* row, int64_t n, float value) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += row[i] > value;
  return count;
}

inline double sum_exp(const float* row, int64_t n, float maximum) {
  constexpr int64_t kChunk = 64 * kWidth;  // float32 sums stay short; the chunks add up in double
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t stop = std::min(n, start + kChunk);
    Vec sum = zero();
    int64_t i = start;
    for (; i + kWidth <= stop; i += kWidth) sum = add(sum, exp_nonpositive(sub(load(row + i), set1(maximum))));
    float lane[kWidth] = {};
    if (i < stop) {
      store(lane, exp_nonpositive(sub(load_n(row + i, stop - i), set1(maximum))));
      for (int64_t j = 0; j < stop - i; ++j) total += lane[j];
    }
    total += reduce_add(sum);
  }
  return total;
}

inline void weigh_row(const float* row, int64_t n, float maximum, float inverse_temperature, uint32_t* out) {
  auto weights = [&](Vec logits) {
    const Vec x = mul(sub(logits, set1(maximum)), set1(inverse_temperature));
    return mul(exp_nonpositive(x), set1(1073741824.0f));
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_rounded(out + i, weights(load(row + i)));
  if (i < n) {
    uint32_t lane[kWidth];
    store_rounded(lane, weights(load_n(row + i, n - i)));
    std::copy_n(lane, n - i, out + i);
  }
}

inline void order_row(const float* row, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(row[i] + 0.0f);  // -0 and 0 are ties
    out[i] = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  }
}

inline Measure measure(const uint32_t* values, int64_t n, uint32_t at_least) {
  Measure total{0, 0};
  for (int64_t start = 0; start < n; start += 1 << 16) {
    const int64_t stop = std::min<int64_t>(n, start + (1 << 16));
    uint32_t count = 0;
    uint64_t sum = 0;
    for (int64_t i = start; i < stop; ++i) {
      count += values[i] >= at_least ? 1u : 0u;
      sum += values[i] >= at_least ? values[i] : 0u;
    }
    total.count += count;
    total.sum += sum;
  }
  return total;
}

inline void drop_below(const uint32_t* keys, uint32_t at_least, uint32_t* weights, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weights[i] = keys[i] >= at_least ? weights[i] : 0u;
}
