// Quantized panels by AVX2's widening multiplies. Included inside namespace avx2, after linear.inc.hpp. Versions:
//   1  linear.inc.hpp: the compiler's vectors.
//   2  pmaddwd on 16-bit activations (15 bits in one pass) and weights widened to pairs of 16 bits; for 8-bit
//      activations and Q4 pmaddubsw, whose sums of a block stay below 2^15. 8 outputs in the lanes, so no horizontal
//      sum; a block was unpacked to the stack once for up to 32 rows.
//   3  up to 4 rows multiply as they unpack: nothing goes by way of memory, 1.5 times as fast.
//   4  both halves of a panel read a broadcast once at any number of rows: the float sums give up their registers;
//      weights are asked for ahead. 1.1 to 1.2 times as fast, a step at one row, from memory, 1.2 to 1.4 times.
//   Tried and left: blocks or panels unpacked once for 32 rows (version 2's way, with these tiles) gain nothing at 32
//   and halve the speed of one row; integer sums that start with a product instead of zero slow one row by a quarter.
//   Bound: on Zen 3 a pmaddwd and the paddd behind it run at 1.6 pairs a cycle (26 MAC), not at 2; the same tile in
//   plain assembly, with unpacking and a block's float additions, at 1.2, which is what this reaches.
// Integer sums are exact and the float additions are linear.inc.hpp's, in its order: so are the bits.

// A format unpacks group `index` of a block's weights, for outputs 8 * half and up, to kSteps / kGroups vectors; each
// meets 4 bytes of activations, broadcast.
struct Q4Pairs {
  static constexpr int64_t kBytes = kQ4BlockBytes;
  static constexpr int kGroups = 4, kSteps = 16;

  static void unpack(const uint8_t* block, int index, int half, __m256i* out) {
    const __m256i raw = load_bytes(block + 4 * kPanel + 64 * index + 32 * half);
    const __m256i nibble = _mm256_set1_epi16(15);
    out[0] = _mm256_and_si256(raw, nibble);  // inputs 0 and 2, then 1 and 3, 4 and 6, 5 and 7
    out[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 8), nibble);
    out[2] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
    out[3] = _mm256_srli_epi16(raw, 12);
  }
  static __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m256i multiply_add(__m256i weights, __m256i x, __m256i sum) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, x));
  }
  static __m256i finish(__m256i sum) { return sum; }
  static Vec minimum(const uint8_t* block, int half, Vec) { return widen_halves(block + 2 * kPanel + 16 * half); }
  static Vec widen_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

struct Q8Pairs {
  static constexpr int64_t kBytes = kQ8BlockBytes;
  static constexpr int kGroups = 8, kSteps = 16;

  static void unpack(const uint8_t* block, int index, int half, __m256i* out) {
    const __m256i raw = Q4Pairs::load_bytes(block + 2 * kPanel + 64 * index + 32 * half);
    out[0] = _mm256_and_si256(raw, _mm256_set1_epi16(255));
    out[1] = _mm256_srli_epi16(raw, 8);
  }
  static __m256i multiply_add(__m256i weights, __m256i x, __m256i sum) {
    return Q4Pairs::multiply_add(weights, x, sum);
  }
  static __m256i finish(__m256i sum) { return sum; }
  static Vec minimum(const uint8_t*, int, Vec scale) { return mul(scale, set1(-128.0f)); }
};

struct Q4Bytes {
  static constexpr int64_t kBytes = kQ4BlockBytes;
  static constexpr int kGroups = 4, kSteps = 8;

  static void unpack(const uint8_t* block, int index, int half, __m256i* out) {
    const __m256i raw = Q4Pairs::load_bytes(block + 4 * kPanel + 64 * index + 32 * half);
    out[0] = _mm256_and_si256(raw, _mm256_set1_epi8(15));
    out[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), _mm256_set1_epi8(15));
  }
  // 8 steps of at most 2 * 15 * 127 each: no saturation, no overflow
  static __m256i multiply_add(__m256i weights, __m256i x, __m256i sum) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x));
  }
  static __m256i finish(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
  static Vec minimum(const uint8_t* block, int half, Vec scale) { return Q4Pairs::minimum(block, half, scale); }
};

inline __m256i broadcast_step(const uint8_t* x) {
  using Quad = int32_t __attribute__((may_alias, aligned(1)));
  return _mm256_set1_epi32(*reinterpret_cast<const Quad*>(x));
}

inline Vec add_dots(Vec scale, Vec minimum, float x_scale, float x_sum, __m256i dots, Vec sum) {
  return fma(minimum, set1(x_sum), fma(mul(scale, set1(x_scale)), _mm256_cvtepi32_ps(dots), sum));
}

// Activations as a format's kernels want them.
struct StepRows {
  const uint8_t* x;
  int64_t row_bytes;
  const float* scale;  // of the first row, [k / 32] each
  const float* sum;
  int64_t num_blocks;

  StepRows from(int64_t row) const {
    return {x + row * row_bytes, row_bytes, scale + row * num_blocks, sum + row * num_blocks, num_blocks};
  }
};

constexpr int64_t kBytesAhead = 3072;  // about what memory delivers within its latency

// The 16 outputs of a panel for `Rows` rows. A block's integer sums take the registers; the rows' float sums lie in L1.
template <class Format, int Rows>
inline void madd_tile(const uint8_t* panel, const StepRows& rows, float* out, int64_t out_stride) {
  constexpr int kPerGroup = Format::kSteps / Format::kGroups;
  alignas(32) float sum[Rows][kPanel] = {};
  for (int64_t i = 0; i < rows.num_blocks; ++i) {
    const uint8_t* block = panel + i * Format::kBytes;
    const uint8_t* x = rows.x + i * (4 * Format::kSteps);
    // One row and few wait for memory; the hardware's prefetcher alone got half its rate.
    for (int64_t byte = 0; byte < Format::kBytes; byte += 64) __builtin_prefetch(block + kBytesAhead + byte);
    __m256i dots[Rows][2];
    for (auto& of_row : dots) std::fill_n(of_row, 2, _mm256_setzero_si256());
#pragma GCC unroll 8
    for (int group = 0; group < Format::kGroups; ++group) {
      __m256i weights[2][kPerGroup];
      Format::unpack(block, group, 0, weights[0]);
      Format::unpack(block, group, 1, weights[1]);
      for (int step = 0; step < kPerGroup; ++step) {
        for (int r = 0; r < Rows; ++r) {
          const __m256i input = broadcast_step(x + r * rows.row_bytes + 4 * (group * kPerGroup + step));
          for (int half = 0; half < 2; ++half) {
            dots[r][half] = Format::multiply_add(weights[half][step], input, dots[r][half]);
            // Or the compiler makes a tree of a block's sums, whose parts go to memory and back: half as fast.
            asm("" : "+x"(dots[r][half]));
          }
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const Vec scale = Q4Pairs::widen_halves(block + 16 * half);
      const Vec minimum = Format::minimum(block, half, scale);
      for (int r = 0; r < Rows; ++r) {
        const int64_t at = r * rows.num_blocks + i;
        const __m256i whole = Format::finish(dots[r][half]);
        store(sum[r] + 8 * half,
              add_dots(scale, minimum, rows.scale[at], rows.sum[at], whole, load(sum[r] + 8 * half)));
      }
    }
    asm volatile("" : : : "memory");  // or the sums take registers, and the dots go to memory
  }
  for (int r = 0; r < Rows; ++r) std::copy_n(sum[r], kPanel, out + r * out_stride);
}

constexpr int kMaxMaddRows = 4;
constexpr int64_t kRowsInCache = 32;  // rows that meet all panels of a task before the next ones do

template <class Format>
inline void madd_panels(const uint8_t* panels, int64_t num_panels, const StepRows& rows, int64_t num_rows, float* out,
                        int64_t out_stride) {
  for (int64_t first = 0; first < num_rows; first += kRowsInCache) {
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const uint8_t* weights = panels + panel * rows.num_blocks * Format::kBytes;
      by_tile<kMaxMaddRows>(std::min(kRowsInCache, num_rows - first), [&](auto tile, int64_t row) {
        float* to = out + (first + row) * out_stride + panel * kPanel;
        madd_tile<Format, tile.value>(weights, rows.from(first + row), to, out_stride);
      });
    }
  }
}

// 16 integers as 16 bits.
inline __m256i narrow_in_order(const int32_t* whole) {
  const auto* from = reinterpret_cast<const __m256i*>(whole);
  const __m256i by_lane = _mm256_packs_epi32(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
  return _mm256_permute4x64_epi64(by_lane, 0xd8);
}

inline void quantize_row_wide(const float* x, int64_t k, const QuantizedRow& out) {
  quantize_blocks(x, k, out, [&](int64_t at, const int32_t* whole) {
    const __m256i halves[] = {narrow_in_order(whole), narrow_in_order(whole + 16)};
    for (int half = 0; half < 2; ++half) {
      const __m256i exchanged = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(halves[half], 0xd8), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.wide + at + 16 * half), exchanged);
    }
    if (out.is_fine) return;
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(halves[0], halves[1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.high + at), bytes);
  });
}

inline void madd_panels_q4(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out,
                           int64_t out_stride) {
  const int64_t num_blocks = x.k / kQuantBlock;
  if (x.is_fine) {
    const StepRows rows{reinterpret_cast<const uint8_t*>(x.wide), 2 * x.k, x.scale, x.sum, num_blocks};
    return madd_panels<Q4Pairs>(panels, num_panels, rows, x.rows, out, out_stride);
  }
  const StepRows rows{reinterpret_cast<const uint8_t*>(x.high), x.k, x.scale, x.sum, num_blocks};
  madd_panels<Q4Bytes>(panels, num_panels, rows, x.rows, out, out_stride);
}

inline void madd_panels_q8(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out,
                           int64_t out_stride) {
  const StepRows rows{reinterpret_cast<const uint8_t*>(x.wide), 2 * x.k, x.scale, x.sum, x.k / kQuantBlock};
  madd_panels<Q8Pairs>(panels, num_panels, rows, x.rows, out, out_stride);
}
