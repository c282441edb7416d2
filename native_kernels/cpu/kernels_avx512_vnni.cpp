// Panels of linear layers by VNNI (dpbusd) and AVX512-BF16 (dpbf16). Versions: 1 is linear.inc.hpp;
//   2  16 outputs in the lanes, so no horizontal sum; a block is unpacked once for up to 8 rows, whose sums stay in
//      registers over the whole k; bf16: 4 panels x up to 4 rows a time.
// A row's sum has one order, whatever the rows beside it.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernel_table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi,bmi2,popcnt")

// GCC 12 warns of its own intrinsics' deliberately undefined operands (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace tokring::cpu::avx512_vnni {

KernelTable improve(KernelTable table);

namespace {

#include "tiles.inc.hpp"

constexpr int kMaxTile = 8;               // rows whose sums are held in registers
constexpr int64_t kPrefetchBytes = 2560;  // ahead in the weights: about 0.1 us of reading

// What a block of weights unpacks to.
struct Block {
  __m512 scale;
  __m512 minimum;
  __m512i weights[8];  // run r: input 4 * r + j of output i in byte 4 * i + j
};

inline void prefetch(const uint8_t* block, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(block + kPrefetchBytes + i), _MM_HINT_T0);
  }
}

inline __m512 load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

struct Q4 {
  static constexpr int64_t kBytes = kQ4BlockBytes;
  static Block unpack(const uint8_t* p) {
    Block block;
    block.scale = load_half(p);
    block.minimum = load_half(p + 2 * kPanel);
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int run = 0; run < 4; ++run) {
      const __m512i both = _mm512_loadu_si512(p + 4 * kPanel + 64 * run);
      block.weights[2 * run] = _mm512_and_si512(both, nibble);
      block.weights[2 * run + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    return block;
  }
};

struct Q8 {
  static constexpr int64_t kBytes = kQ8BlockBytes;
  static Block unpack(const uint8_t* p) {
    Block block;
    block.scale = load_half(p);
    block.minimum = _mm512_mul_ps(block.scale, _mm512_set1_ps(-128.0f));
    for (int run = 0; run < 8; ++run) block.weights[run] = _mm512_loadu_si512(p + 2 * kPanel + 64 * run);
    return block;
  }
};

// Four inputs, to every lane. Read straight from memory: by way of a general register it would cost a shuffle.
inline __m512i four_inputs(const int8_t* x) {
  using Quad = int32_t __attribute__((may_alias, aligned(1)));
  return _mm512_set1_epi32(*reinterpret_cast<const Quad*>(x));
}

// start + the integer dot products of 32 inputs with the block's 16 outputs.
inline __m512i dot(const Block& block, const int8_t* x, __m512i start) {
  __m512i even = start, odd = _mm512_setzero_si512();
  for (int run = 0; run < 8; run += 2) {
    even = _mm512_dpbusd_epi32(even, block.weights[run], four_inputs(x + 4 * run));
    odd = _mm512_dpbusd_epi32(odd, block.weights[run + 1], four_inputs(x + 4 * run + 4));
  }
  return _mm512_add_epi32(even, odd);
}

template <class Format, int Rows, bool Low>
inline void quantized_tile(const uint8_t* panel, const QuantizedRows& x, int64_t first_row, float* out,
                           int64_t out_stride) {
  const int64_t num_blocks = x.k / kQuantBlock;
  __m512 sum[Rows];
  for (int r = 0; r < Rows; ++r) sum[r] = _mm512_setzero_ps();
  for (int64_t i = 0; i < num_blocks; ++i) {
    prefetch(panel + i * Format::kBytes, Format::kBytes);
    const Block block = Format::unpack(panel + i * Format::kBytes);
    for (int r = 0; r < Rows; ++r) {
      const int64_t row = first_row + r;
      __m512i dots = dot(block, x.high + row * x.k + i * kQuantBlock, _mm512_setzero_si512());
      if constexpr (Low) dots = dot(block, x.low + row * x.k + i * kQuantBlock, _mm512_slli_epi32(dots, 7));
      const __m512 scale = _mm512_mul_ps(block.scale, _mm512_set1_ps(x.scale[row * num_blocks + i]));
      sum[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots), sum[r]);
      sum[r] = _mm512_fmadd_ps(block.minimum, _mm512_set1_ps(x.sum[row * num_blocks + i]), sum[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(out + (first_row + r) * out_stride, sum[r]);
}

template <class Format>
void quantized_panels(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out,
                      int64_t out_stride) {
  const int64_t panel_bytes = x.k / kQuantBlock * Format::kBytes;
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    const uint8_t* weights = panels + panel * panel_bytes;
    float* to = out + panel * kPanel;
    by_tile<kMaxTile>(x.rows, [&](auto tile, int64_t row) {
      if (x.is_fine) {
        quantized_tile<Format, tile.value, true>(weights, x, row, to, out_stride);
      } else {
        quantized_tile<Format, tile.value, false>(weights, x, row, to, out_stride);
      }
    });
  }
}

template <int Panels, int Rows>
inline void bf16_tile(const uint16_t* panels, const uint16_t* x, int64_t k, float* out, int64_t out_stride) {
  __m512 sum[Panels][Rows];
  for (int p = 0; p < Panels; ++p) {
    for (int r = 0; r < Rows; ++r) sum[p][r] = _mm512_setzero_ps();
  }
  const int64_t panel_size = kPanel * k;
  for (int64_t pair = 0; pair < k / 2; ++pair) {
    __m512bh input[Rows];
    for (int r = 0; r < Rows; ++r) {
      int32_t both;
      __builtin_memcpy(&both, x + r * k + 2 * pair, sizeof both);
      input[r] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
    }
    for (int p = 0; p < Panels; ++p) {
      const uint16_t* weights = panels + p * panel_size + pair * 2 * kPanel;
      _mm_prefetch(reinterpret_cast<const char*>(weights + 512), _MM_HINT_T0);
      const auto weight = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights));
      for (int r = 0; r < Rows; ++r) sum[p][r] = _mm512_dpbf16_ps(sum[p][r], weight, input[r]);
    }
  }
  for (int p = 0; p < Panels; ++p) {
    for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(out + r * out_stride + p * kPanel, sum[p][r]);
  }
}

void panels_bf16(const uint16_t* panels, int64_t num_panels, const uint16_t* x, int64_t rows, int64_t k, float* out,
                 int64_t out_stride) {
  by_tile<4>(num_panels, [&](auto panel_tile, int64_t panel) {
    by_tile<4>(rows, [&](auto row_tile, int64_t row) {
      bf16_tile<panel_tile.value, row_tile.value>(panels + panel * kPanel * k, x + row * k, k,
                                                  out + row * out_stride + panel * kPanel, out_stride);
    });
  });
}

}  // namespace

KernelTable improve(KernelTable table) {
  table.level = Level::avx512_vnni;
  table.panels_q4 = quantized_panels<Q4>;
  table.panels_q8 = quantized_panels<Q8>;
  table.panels_bf16 = panels_bf16;
  return table;
}

}  // namespace tokring::cpu::avx512_vnni
#endif
