// Panels of linear layers in plain integer loops and vectors, for levels without VNNI. Included inside a level's
// namespace.
// Versions:
//   1  integer dot products of a block of 32 in the compiler's vectors, float accumulation over the blocks in order.
//      bf16: pairs split into float32 vectors, 1 to 4 panels x up to 4 rows a time.
//   (kernels_avx512_vnni.cpp holds 2, by dpbusd and dpbf16: the same integers and the same order, so the quantized
//   kernels give the same bits wherever there is an FMA.)

inline float magnitude_of(const float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kQuantBlock; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return std::bit_cast<float>(largest);
}

// Integers of one block at `steps` either side of zero; returns their sum.
inline int32_t round_block(const float* x, float inverse, int32_t* out) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to nearest even
  int32_t sum = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    out[i] = static_cast<int32_t>((x[i] * inverse + kMagic) - kMagic);
    sum += out[i];
  }
  return sum;
}

// Whole blocks to integers; `put(at, whole)` keeps those of the inputs from `at` on.
template <class Put>
inline void quantize_blocks(const float* x, int64_t k, const QuantizedRow& out, Put&& put) {
  const float steps = out.is_fine ? 127.0f * 128.0f : 127.0f;
  for (int64_t block = 0; block < k / kQuantBlock; ++block) {
    const int64_t at = block * kQuantBlock;
    const float magnitude = magnitude_of(x + at);
    int32_t whole[kQuantBlock];
    if (!(magnitude <= std::numeric_limits<float>::max())) {  // NaN or infinity: the whole row must show it
      std::fill_n(whole, kQuantBlock, 0);
      out.scale[block] = out.sum[block] = std::numeric_limits<float>::quiet_NaN();
    } else {
      // Below this a block's inverse scale would overflow; such activations are zero for any purpose.
      const bool tiny = magnitude < 1e-30f;
      const int32_t total = round_block(x + at, tiny ? 0.0f : steps / magnitude, whole);
      out.scale[block] = tiny ? 0.0f : magnitude / steps;
      out.sum[block] = out.scale[block] * static_cast<float>(total);
    }
    put(at, whole);
  }
}

inline void quantize_row(const float* x, int64_t k, const QuantizedRow& out) {
  if (!out.is_fine) {
    return quantize_blocks(x, k, out, [&](int64_t at, const int32_t* whole) {
      for (int i = 0; i < kQuantBlock; ++i) out.high[at + i] = static_cast<int8_t>(whole[i]);
    });
  }
  quantize_blocks(x, k, out, [&](int64_t at, const int32_t* whole) {
    for (int i = 0; i < kQuantBlock; ++i) {
      const int32_t upper = (whole[i] + 64) >> 7;
      out.high[at + i] = static_cast<int8_t>(upper);
      out.low[at + i] = static_cast<int8_t>(whole[i] - upper * 128);
    }
  });
}

inline void widen_half(const uint8_t* from, float* to) {
  for (int i = 0; i < kPanel; ++i) {
    _Float16 value;
    std::memcpy(&value, from + 2 * i, 2);
    to[i] = static_cast<float>(value);
  }
}

// dots[i] += 4 inputs x output i, for one 64-byte run of weights: byte 4 * i + j belongs to output i, input j
inline void dot_run(const uint8_t* weights, const int8_t* x, int32_t* dots) {
  for (int i = 0; i < kPanel; ++i) {
    int32_t sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<int32_t>(weights[4 * i + j]) * static_cast<int32_t>(x[j]);
    dots[i] += sum;
  }
}

inline void dot_block(const uint8_t* weights, const QuantizedRows& x, int64_t row, int64_t block, float* dots) {
  int32_t high[kPanel] = {}, low[kPanel] = {};
  const int64_t at = row * x.k + block * kQuantBlock;
  for (int run = 0; run < 8; ++run) {
    dot_run(weights + 64 * run, x.high + at + 4 * run, high);
    if (x.is_fine) dot_run(weights + 64 * run, x.low + at + 4 * run, low);
  }
  const int32_t factor = x.is_fine ? 128 : 1;
  for (int i = 0; i < kPanel; ++i) dots[i] = static_cast<float>(high[i] * factor + low[i]);
}

// out += scale * x.scale * dots + minimum * x.sum, for the panel's 16 outputs
inline void add_block(const float* scale, const float* minimum, const float* dots, float x_scale, float x_sum,
                      float* out) {
  for (int i = 0; i < kPanel; i += kWidth) {
    const Vec scaled = fma(mul(load(scale + i), set1(x_scale)), load(dots + i), load(out + i));
    store(out + i, fma(load(minimum + i), set1(x_sum), scaled));
  }
}

// Unpacks each block once for all rows. `Unpack` fills scale[16], minimum[16] and 512 weight bytes from a block.
template <class Unpack>
inline void quantized_panels(const uint8_t* panels, int64_t num_panels, int64_t block_bytes, const QuantizedRows& x,
                             float* out, int64_t out_stride, Unpack&& unpack) {
  const int64_t num_blocks = x.k / kQuantBlock;
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    for (int64_t row = 0; row < x.rows; ++row) std::fill_n(out + row * out_stride + panel * kPanel, kPanel, 0.0f);
    for (int64_t block = 0; block < num_blocks; ++block) {
      float scale[kPanel], minimum[kPanel], dots[kPanel];
      alignas(64) uint8_t weights[kPanel * kQuantBlock];
      unpack(panels + (panel * num_blocks + block) * block_bytes, scale, minimum, weights);
      for (int64_t row = 0; row < x.rows; ++row) {
        dot_block(weights, x, row, block, dots);
        add_block(scale, minimum, dots, x.scale[row * num_blocks + block], x.sum[row * num_blocks + block],
                  out + row * out_stride + panel * kPanel);
      }
    }
  }
}

inline void unpack_q4(const uint8_t* block, float* scale, float* minimum, uint8_t* weights) {
  widen_half(block, scale);
  widen_half(block + 2 * kPanel, minimum);
  const uint8_t* nibbles = block + 4 * kPanel;
  for (int run = 0; run < 4; ++run) {
    for (int i = 0; i < 64; ++i) {
      weights[128 * run + i] = nibbles[64 * run + i] & 15;
      weights[128 * run + 64 + i] = nibbles[64 * run + i] >> 4;
    }
  }
}

inline void unpack_q8(const uint8_t* block, float* scale, float* minimum, uint8_t* weights) {
  widen_half(block, scale);
  for (int i = 0; i < kPanel; ++i) minimum[i] = -128.0f * scale[i];
  std::copy_n(block + 2 * kPanel, kPanel * kQuantBlock, weights);
}

inline void panels_q4(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out,
                      int64_t out_stride) {
  quantized_panels(panels, num_panels, kQ4BlockBytes, x, out, out_stride, unpack_q4);
}

inline void panels_q8(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out,
                      int64_t out_stride) {
  quantized_panels(panels, num_panels, kQ8BlockBytes, x, out, out_stride, unpack_q8);
}

// kPanelVecs vectors are one panel's 16 outputs. The sum of an output runs over the inputs in order, whatever the tile:
// a row's bits are its own, and the same on every level that has an FMA.
constexpr int kPanelVecs = kPanel / kWidth;

template <int Panels, int Rows>
inline void f32_tile(const float* panels, const float* x, int64_t k, float* out, int64_t out_stride) {
  Vec sum[Panels * kPanelVecs][Rows];
  for (auto& of_vector : sum) std::fill_n(of_vector, Rows, zero());
  for (int64_t input = 0; input < k; ++input) {
    Vec value[Rows];
    for (int r = 0; r < Rows; ++r) value[r] = set1(x[r * k + input]);
    for (int p = 0; p < Panels; ++p) {
      for (int v = 0; v < kPanelVecs; ++v) {
        const Vec weight = load(panels + (p * k + input) * kPanel + v * kWidth);
        for (int r = 0; r < Rows; ++r) {
          sum[p * kPanelVecs + v][r] = fma(weight, value[r], sum[p * kPanelVecs + v][r]);
        }
      }
    }
  }
  for (int v = 0; v < Panels * kPanelVecs; ++v) {
    for (int r = 0; r < Rows; ++r) store(out + r * out_stride + v * kWidth, sum[v][r]);
  }
}

// Panel layout: [k][16].
inline void panels_f32(const float* panels, int64_t num_panels, const float* x, int64_t rows, int64_t k, float* out,
                       int64_t out_stride) {
  constexpr int kMostPanels = kWidth == kPanel ? 4 : 1;  // as many sums as there are registers for
  by_tile<kMostPanels>(num_panels, [&](auto panel_tile, int64_t panel) {
    by_tile<4>(rows, [&](auto row_tile, int64_t row) {
      f32_tile<panel_tile.value, row_tile.value>(panels + panel * kPanel * k, x + row * k, k,
                                                 out + row * out_stride + panel * kPanel, out_stride);
    });
  });
}

template <int Panels, int Rows>
inline void bf16_tile(const uint16_t* panels, const uint16_t* x, int64_t k, float* out, int64_t out_stride) {
  Vec sum[Panels * kPanelVecs][Rows];
  for (auto& of_vector : sum) std::fill_n(of_vector, Rows, zero());
  for (int64_t input = 0; input < k; input += 2) {
    Pair value[Rows];
    for (int r = 0; r < Rows; ++r) value[r] = set1_pair(x + r * k + input);
    for (int p = 0; p < Panels; ++p) {
      for (int v = 0; v < kPanelVecs; ++v) {
        const Pair weight = load_pairs(panels + (p * k + input) * kPanel + 2 * v * kWidth);
        Vec* sums = sum[p * kPanelVecs + v];
        for (int r = 0; r < Rows; ++r)
          sums[r] = fma(weight.odd, value[r].odd, fma(weight.even, value[r].even, sums[r]));
      }
    }
  }
  for (int v = 0; v < Panels * kPanelVecs; ++v) {
    for (int r = 0; r < Rows; ++r) store(out + r * out_stride + v * kWidth, sum[v][r]);
  }
}

// Panel layout: [k / 2][16][2], pairs of inputs by output.
inline void panels_bf16(const uint16_t* panels, int64_t num_panels, const uint16_t* x, int64_t rows, int64_t k,
                        float* out, int64_t out_stride) {
  by_tile<4>(num_panels, [&](auto panel_tile, int64_t panel) {
    by_tile<4>(rows, [&](auto row_tile, int64_t row) {
      // As many sums as there are registers for; a single row needs several panels to hide the latency of an FMA.
      constexpr int kMost = 8 / kPanelVecs / row_tile.value;
      constexpr int kPanels = panel_tile.value < kMost ? panel_tile.value : kMost;
      for (int64_t p = panel; p < panel + panel_tile.value; p += kPanels) {
        bf16_tile<kPanels, row_tile.value>(panels + p * kPanel * k, x + row * k, k, out + row * out_stride + p * kPanel,
                                           out_stride);
      }
    });
  });
}
