// Paged attention of a few query rows against one KV tile, written once over a level's Vec.
// Included inside a level's namespace.
//
// Versions:
//   1  scores of 4 tokens x up to 4 rows at a time: a query vector is loaded once per 4 keys, a key vector once per 4
//      rows (GQA rows and the tokens of a chunk share K and V); horizontal sums by a transposing tree. bf16 blocks are
//      widened to float32 once per block when more than one row group reads them.
//   2  int8 blocks: codes go through the same sums as they are; the scales of keys multiply the scores, those of values
//      the weights.
//   3  with 16 registers 3 rows instead of 4, and the few vectors that all sums share are loaded first: no sum lies in
//      memory. The same bits; 1.4 to 1.5 times as fast for the 30 rows of a chunk, 1.1 for decode.
//
// A row's arithmetic has one order, whatever rows surround it: dot products by lane, then the tree; sums by lane over
// the tile's blocks; values in position order. Hidden positions add an exact zero.

// Rows x tokens, and rows x vectors of values, whose sums fit the registers: 32 at AVX-512, else 16.
constexpr int kRowGroup = kWidth == 16 ? 4 : 3;
constexpr int kColumnGroup = 4;

template <int Rows, bool Tail, class T>
inline void score_block(const AttentionTile& tile, int row, const T* keys, float* scores) {
  const int dim = tile.head_dim;
  const int whole = dim / kWidth * kWidth;
  for (int base = 0; base < kBlockTokens; base += kWidth) {
    Vec dots[Rows][kWidth];
    for (int token = 0; token < kWidth; token += 4) {
      Vec sum[Rows][4];
      for (int r = 0; r < Rows; ++r) {
        for (int t = 0; t < 4; ++t) sum[r][t] = zero();
      }
      const T* key = keys + static_cast<int64_t>(base + token) * dim;
      const float* query = tile.query + static_cast<int64_t>(row) * tile.padded_dim;
      for (int d = 0; d < whole; d += kWidth) {
        Vec q[Rows];
        for (int r = 0; r < Rows; ++r) q[r] = load(query + static_cast<int64_t>(r) * tile.padded_dim + d);
        for (int t = 0; t < 4; ++t) {
          const Vec k = load(key + static_cast<int64_t>(t) * dim + d);
          for (int r = 0; r < Rows; ++r) sum[r][t] = fma(q[r], k, sum[r][t]);
        }
      }
      if constexpr (Tail) {
        for (int t = 0; t < 4; ++t) {
          const Vec k = load_n(key + static_cast<int64_t>(t) * dim + whole, dim - whole);
          for (int r = 0; r < Rows; ++r) {
            sum[r][t] = fma(load(query + static_cast<int64_t>(r) * tile.padded_dim + whole), k, sum[r][t]);
          }
        }
      }
      for (int r = 0; r < Rows; ++r) {
        for (int t = 0; t < 4; ++t) dots[r][token + t] = sum[r][t];
      }
    }
    for (int r = 0; r < Rows; ++r) {
      store(scores + static_cast<int64_t>(row + r) * kTileTokens + base, sum_rows(dots[r]));
    }
  }
}

template <int Rows, int Columns, bool Tail, class T>
inline void add_values(const AttentionTile& tile, int row, const T* values, int num_tokens, const float* weights,
                       int column) {
  const int dim = tile.head_dim;
  float* out = tile.accumulator + static_cast<int64_t>(row) * tile.padded_dim + column;
  Vec sum[Rows][Columns];
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) sum[r][c] = load(out + static_cast<int64_t>(r) * tile.padded_dim + c * kWidth);
  }
  for (int token = 0; token < num_tokens; ++token) {
    const T* value = values + static_cast<int64_t>(token) * dim + column;
    Vec weight[Rows];
    for (int r = 0; r < Rows; ++r) weight[r] = set1(weights[static_cast<int64_t>(row + r) * kTileTokens + token]);
    for (int c = 0; c < Columns; ++c) {
      const Vec v =
          Tail && c == Columns - 1 ? load_n(value + c * kWidth, dim - column - c * kWidth) : load(value + c * kWidth);
      for (int r = 0; r < Rows; ++r) sum[r][c] = fma(weight[r], v, sum[r][c]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) store(out + static_cast<int64_t>(r) * tile.padded_dim + c * kWidth, sum[r][c]);
  }
}

template <int Rows, class T>
inline void add_values(const AttentionTile& tile, int row, const T* values, int num_tokens, const float* weights) {
  const int dim = tile.head_dim;
  int column = 0;
  for (; column + kColumnGroup * kWidth <= dim; column += kColumnGroup * kWidth) {
    add_values<Rows, kColumnGroup, false>(tile, row, values, num_tokens, weights, column);
  }
  for (; column + kWidth <= dim; column += kWidth) {
    add_values<Rows, 1, false>(tile, row, values, num_tokens, weights, column);
  }
  if (column < dim) add_values<Rows, 1, true>(tile, row, values, num_tokens, weights, column);
}

// Calls function(std::integral_constant<int, group size>, first row) until all rows are covered.
template <class Function>
inline void by_row_group(int rows, Function&& function) {
  int row = 0;
  for (; row + kRowGroup <= rows; row += kRowGroup) {
    if (kRowGroup == 3 && rows - row == 4) break;  // two pairs are faster than three and one
    function(std::integral_constant<int, kRowGroup>{}, row);
  }
  switch (rows - row) {
    case 4:
      function(std::integral_constant<int, 2>{}, row);
      return function(std::integral_constant<int, 2>{}, row + 2);
    case 3:
      return function(std::integral_constant<int, 3>{}, row);
    case 2:
      return function(std::integral_constant<int, 2>{}, row);
    case 1:
      return function(std::integral_constant<int, 1>{}, row);
    default:
      return;
  }
}

template <class T>
inline void score_rows(const AttentionTile& tile, const T* keys, float* scores) {
  by_row_group(
      tile.rows, [&](auto group, int row) __attribute__((always_inline)) {
        if (tile.head_dim % kWidth == 0) {
          score_block<group.value, false>(tile, row, keys, scores);
        } else {
          score_block<group.value, true>(tile, row, keys, scores);
        }
      });
}

template <class T>
inline void add_rows(const AttentionTile& tile, const T* values, int num_tokens, const float* weights) {
  by_row_group(
      tile.rows, [&](auto group, int row) __attribute__((always_inline)) {
        add_values<group.value>(tile, row, values, num_tokens, weights);
      });
}

template <class T>
inline void widen_row(const T* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(in + i));
  if (i < n) store_n(out + i, load_n(in + i, n - i), n - i);
}

// The block's keys or values, widened when several row groups will read them.
template <class Use>
inline void with_block(const AttentionTile& tile, const void* cache, int64_t block, int num_tokens, Use&& use) {
  const int64_t offset = static_cast<int64_t>(tile.block_ids[block]) * tile.block_stride;
  const auto widen_or = [&](const auto* narrow_block) __attribute__((always_inline)) {
    if (tile.rows <= 4) return use(narrow_block);
    widen_row(narrow_block, tile.widened, static_cast<int64_t>(num_tokens) * tile.head_dim);
    use(static_cast<const float*>(tile.widened));
  };
  switch (tile.cache_type) {
    case CacheType::f32:
      return use(static_cast<const float*>(cache) + offset);
    case CacheType::bf16:
      return widen_or(static_cast<const uint16_t*>(cache) + offset);
    case CacheType::int8:
      return widen_or(static_cast<const int8_t*>(cache) + offset);
  }
}

// Blocks lie anywhere in memory: the hardware's prefetcher starts anew at each, so the next one is asked for here.
inline void prefetch_block(const AttentionTile& tile, const void* cache, int64_t block) {
  const int64_t element = element_bytes(tile.cache_type);
  const char* bytes = static_cast<const char*>(cache) + tile.block_ids[block] * tile.block_stride * element;
  for (int64_t i = 0; i < kBlockTokens * tile.head_dim * element; i += 64) __builtin_prefetch(bytes + i);
}

// tanh within 1e-7 absolute, which is all that cap * tanh(x / cap) needs.
inline Vec cap_scores(Vec x, float cap) {
  const Vec scaled = div(x, set1(cap));
  const Vec magnitude = max(scaled, sub(zero(), scaled));
  const Vec e = exp_nonpositive(mul(magnitude, set1(-2.0f)));
  const Vec positive = mul(div(sub(set1(1.0f), e), add(set1(1.0f), e)), set1(cap));
  // sign(x) without a select: x / |x| would be NaN at 0, where `positive` is 0 anyway
  const Vec sign = max(set1(-1.0f), min(set1(1.0f), mul(scaled, set1(1e30f))));
  return mul(positive, sign);
}

// What the scores and the weights of the tile's tokens are multiplied by, where the cache has a scale per vector.
struct TileScales {
  alignas(64) float score[kTileTokens];  // the softmax's scale included
  alignas(64) float weight[kTileTokens];
};

inline void gather_scales(const AttentionTile& tile, int begin, int end, TileScales& scales) {
  for (int block = begin; block < end; ++block) {
    const int64_t from = tile.block_ids[tile.tile_start / kBlockTokens + block] * tile.scale_stride;
    for (int i = 0; i < kBlockTokens; i += kWidth) {
      const int at = block * kBlockTokens + i;
      store(scales.score + at, mul(load(tile.key_scale + from + i), set1(tile.scale)));
      store(scales.weight + at, load(tile.value_scale + from + i));
    }
  }
}

// Scores of the blocks [begin, end) to weights; leaves maximum and sum of the row. `scales` null: there are none.
inline void soften_row(const AttentionTile& tile, const TileScales* scales, int row, int begin, int end) {
  float* scores = tile.scores + static_cast<int64_t>(row) * kTileTokens;
  const int64_t first_seen = tile.first_visible[row] - tile.tile_start;
  const int64_t last_seen = tile.last_visible[row] - tile.tile_start;
  Vec best = set1(-std::numeric_limits<float>::infinity());
  for (int i = begin * kBlockTokens; i < end * kBlockTokens; i += kWidth) {
    Vec score = mul(load(scores + i), scales != nullptr ? load(scales->score + i) : set1(tile.scale));
    if (tile.soft_cap > 0.0f) score = cap_scores(score, tile.soft_cap);
    store(scores + i, score);
    if (i < first_seen || i + kWidth - 1 > last_seen) {
      for (int lane = 0; lane < kWidth; ++lane) {
        if (i + lane < first_seen || i + lane > last_seen) scores[i + lane] = -std::numeric_limits<float>::infinity();
      }
      score = load(scores + i);
    }
    best = max(best, score);
  }
  const float maximum = reduce_max(best);
  const bool visible = first_seen < static_cast<int64_t>(end) * kBlockTokens && last_seen >= begin * kBlockTokens;
  Vec total = zero();
  for (int i = begin * kBlockTokens; i < end * kBlockTokens; i += kWidth) {
    const Vec weight = visible ? exp_nonpositive(sub(load(scores + i), set1(maximum))) : zero();
    store(scores + i, scales != nullptr ? mul(weight, load(scales->weight + i)) : weight);
    total = add(total, weight);
  }
  tile.maximum[row] = maximum;
  tile.sum[row] = reduce_add(total);
}

inline void attend(const AttentionTile& tile) {
  int64_t first_seen = tile.first_visible[0];
  int64_t last_seen = tile.last_visible[0];
  for (int row = 1; row < tile.rows; ++row) {
    first_seen = std::min(first_seen, tile.first_visible[row]);
    last_seen = std::max(last_seen, tile.last_visible[row]);
  }
  const int64_t from = std::max(first_seen, tile.tile_start) - tile.tile_start;
  const int64_t to = std::min<int64_t>(last_seen - tile.tile_start + 1, kTileTokens);
  const int begin = static_cast<int>(from / kBlockTokens);
  const int end = static_cast<int>((to + kBlockTokens - 1) / kBlockTokens);
  const int64_t first_block = tile.tile_start / kBlockTokens;
  prefetch_block(tile, tile.key_cache, first_block + begin);
  for (int block = begin; block < end; ++block) {
    if (block + 1 < end) prefetch_block(tile, tile.key_cache, first_block + block + 1);
    with_block(tile, tile.key_cache, first_block + block, kBlockTokens,
               [&](const auto* keys) { score_rows(tile, keys, tile.scores + block * kBlockTokens); });
  }
  prefetch_block(tile, tile.value_cache, first_block + begin);
  TileScales gathered;
  const TileScales* scales = tile.cache_type == CacheType::int8 ? &gathered : nullptr;
  if (scales != nullptr) gather_scales(tile, begin, end, gathered);
  for (int row = 0; row < tile.rows; ++row) soften_row(tile, scales, row, begin, end);
  std::fill_n(tile.accumulator, static_cast<int64_t>(tile.rows) * tile.padded_dim, 0.0f);
  for (int block = begin; block < end; ++block) {
    if (block + 1 < end) prefetch_block(tile, tile.value_cache, first_block + block + 1);
    // Cache slots after the last position may hold anything, NaN too: 0 * NaN must not reach the sum.
    const int num_tokens = static_cast<int>(std::min<int64_t>(kBlockTokens, to - block * kBlockTokens));
    with_block(tile, tile.value_cache, first_block + block, num_tokens,
               [&](const auto* values) { add_rows(tile, values, num_tokens, tile.scores + block * kBlockTokens); });
  }
}

inline void merge(float* maximum, float* sum, float* accumulator, float other_maximum, float other_sum,
                  const float* other_accumulator, int padded_dim) {
  if (other_sum == 0.0f) return;
  if (*sum == 0.0f) {
    *maximum = other_maximum;
    *sum = other_sum;
    std::copy_n(other_accumulator, padded_dim, accumulator);
    return;
  }
  const float top = std::max(*maximum, other_maximum);
  alignas(64) float factor[kWidth];
  store(factor, exp_nonpositive(sub(set1(*maximum), set1(top))));
  const float keep = factor[0];
  store(factor, exp_nonpositive(sub(set1(other_maximum), set1(top))));
  const float take = factor[0];
  *maximum = top;
  *sum = *sum * keep + other_sum * take;
  for (int d = 0; d < padded_dim; d += kWidth) {
    const Vec kept = mul(load(accumulator + d), set1(keep));
    store(accumulator + d, fma(load(other_accumulator + d), set1(take), kept));
  }
}
