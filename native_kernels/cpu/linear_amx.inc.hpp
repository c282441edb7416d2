// Panels of linear layers by AMX tiles. Included inside an anonymous namespace in which tile_loadconfig, tile_release,
// tile_zero, tile_loadd, tile_stored, tile_dpbsud and tile_dpbf16ps are the instructions or their emulation. Versions:
//   1  quantized: a block of weights is unpacked once for up to 32 rows; its integer sums go by way of memory to the
//   float
//      additions of linear.inc.hpp, in its order: the bits are those of every other level with an FMA.
//      bf16: four tiles of sums at a time, 4 panels x 16 rows or 2 x 32; at any number of rows, since an AMX sum has
//      other bits than a dpbf16 one.

constexpr int kTileRows = 16;
constexpr int kRowsATime = 2 * kTileRows;

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

struct TileScope {
  explicit TileScope(const TileConfig& config) {
    // GCC 12 believes that the instruction reads 8 bytes, and would leave the others unwritten.
    asm volatile("" : : "r"(&config) : "memory");
    tile_loadconfig(&config);
  }
  ~TileScope() { tile_release(); }
};

inline TileConfig tile_config(int a_bytes, int b_rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_a = tile == 4 || tile == 5, is_b = tile >= 6;
    config.row_bytes[tile] = static_cast<uint16_t>(is_a ? a_bytes : 64);
    config.rows[tile] = static_cast<uint8_t>(is_b ? b_rows : kTileRows);
  }
  return config;
}

// Rows of activations in whole tiles: the last ones, where they are fewer than 16, are copied and padded with zeros.
template <class T>
class TiledRows {
 public:
  TiledRows(const T* rows, int64_t num_rows, int64_t k, std::vector<T>& padded) : rows_(rows), k_(k) {
    const int64_t rest = num_rows % kTileRows;
    num_whole_ = num_rows - rest;
    if (rest == 0) return;
    padded.assign(static_cast<size_t>(kTileRows * k), T{});
    std::copy_n(rows + num_whole_ * k, rest * k, padded.begin());
    padded_ = padded.data();
  }
  const T* tile(int64_t first_row) const { return first_row < num_whole_ ? rows_ + first_row * k_ : padded_; }

 private:
  const T* rows_;
  const T* padded_ = nullptr;
  int64_t k_;
  int64_t num_whole_;
};

struct UnpackedBlock {
  float scale[kPanel];
  float minimum[kPanel];
  alignas(64) uint8_t weights[kPanel * kQuantBlock];
};

inline void widen_halves(const uint8_t* from, float* to) {
  _Float16 halves[kPanel];
  std::memcpy(halves, from, sizeof halves);
  for (int i = 0; i < kPanel; ++i) to[i] = static_cast<float>(halves[i]);
}

struct Q4Block {
  static constexpr int64_t kBytes = kQ4BlockBytes;
  static void unpack(const uint8_t* block, UnpackedBlock& to) {
    widen_halves(block, to.scale);
    widen_halves(block + 2 * kPanel, to.minimum);
    for (int run = 0; run < 4; ++run) {
      const uint8_t* nibbles = block + 4 * kPanel + 64 * run;
      for (int i = 0; i < 64; ++i) to.weights[128 * run + i] = nibbles[i] & 15;
      for (int i = 0; i < 64; ++i) to.weights[128 * run + 64 + i] = nibbles[i] >> 4;
    }
  }
};

struct Q8Block {
  static constexpr int64_t kBytes = kQ8BlockBytes;
  static void unpack(const uint8_t* block, UnpackedBlock& to) {
    widen_halves(block, to.scale);
    for (int i = 0; i < kPanel; ++i) to.minimum[i] = -128.0f * to.scale[i];
    std::copy_n(block + 2 * kPanel, kPanel * kQuantBlock, to.weights);
  }
};

using Dots = int32_t[kTileRows][kPanel];

// sums += the block's share, for the rows of one tile
inline void add_block(const UnpackedBlock& block, const Dots& high, const Dots* low, const float* x_scale,
                      const float* x_sum, int64_t stride, int64_t rows, float* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int i = 0; i < kPanel; ++i) {
      const int32_t dot = low != nullptr ? high[row][i] * 128 + (*low)[row][i] : high[row][i];
      const float scaled =
          __builtin_fmaf(block.scale[i] * x_scale[row * stride], static_cast<float>(dot), sums[row * kPanel + i]);
      sums[row * kPanel + i] = __builtin_fmaf(block.minimum[i], x_sum[row * stride], scaled);
    }
  }
}

template <class Format>
void tile_panels(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out, int64_t out_stride) {
  thread_local std::vector<int8_t> padded_high, padded_low;
  const TiledRows<int8_t> high(x.high, x.rows, x.k, padded_high);
  const TiledRows<int8_t> low(x.is_fine ? x.low : x.high, x.rows, x.k, padded_low);
  const TileScope scope(tile_config(kQuantBlock, kQuantBlock / 4));
  const int64_t num_blocks = x.k / kQuantBlock;
  alignas(64) Dots high_dots, low_dots;
  alignas(64) float sums[kRowsATime * kPanel];
  UnpackedBlock block;
  for (int64_t first = 0; first < x.rows; first += kRowsATime) {
    const int64_t count = std::min<int64_t>(kRowsATime, x.rows - first);
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      std::fill_n(sums, kRowsATime * kPanel, 0.0f);
      for (int64_t i = 0; i < num_blocks; ++i) {
        Format::unpack(panels + (panel * num_blocks + i) * Format::kBytes, block);
        tile_loadd(6, block.weights, 64);
        for (int64_t row = 0; row < count; row += kTileRows) {
          tile_zero(0);
          tile_loadd(4, high.tile(first + row) + i * kQuantBlock, x.k);
          tile_dpbsud(0, 4, 6);
          if (x.is_fine) {
            tile_zero(1);
            tile_loadd(5, low.tile(first + row) + i * kQuantBlock, x.k);
            tile_dpbsud(1, 5, 6);
            tile_stored(1, low_dots, 64);
          }
          tile_stored(0, high_dots, 64);
          const int64_t at = (first + row) * num_blocks + i;
          add_block(block, high_dots, x.is_fine ? &low_dots : nullptr, x.scale + at, x.sum + at, num_blocks,
                    std::min<int64_t>(kTileRows, count - row), sums + row * kPanel);
        }
      }
      for (int64_t row = 0; row < count; ++row) {
        std::copy_n(sums + row * kPanel, kPanel, out + (first + row) * out_stride + panel * kPanel);
      }
    }
  }
}

// What one accumulating tile computes: 16 rows of x against one panel.
struct Bf16Sum {
  const uint16_t* x;
  const uint16_t* panel;
  float* out;
  int64_t rows;  // that are written
};

inline void write_sum(const Bf16Sum& sum, const float* tile, int64_t out_stride) {
  for (int64_t row = 0; row < sum.rows; ++row) std::copy_n(tile + row * kPanel, kPanel, sum.out + row * out_stride);
}

// Tiles 0 to 3 are the sums of sum[0] to sum[3].
inline void zero_sums() {
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
}

inline void write_sums(const Bf16Sum (&sum)[4], int64_t out_stride) {
  alignas(64) float tiles[4][kTileRows * kPanel];
  tile_stored(0, tiles[0], 64);
  tile_stored(1, tiles[1], 64);
  tile_stored(2, tiles[2], 64);
  tile_stored(3, tiles[3], 64);
  for (int i = 0; i < 4; ++i) write_sum(sum[i], tiles[i], out_stride);
}

// 4 panels x 16 rows: sum[i] = rows against panel i
inline void four_panels(const Bf16Sum (&sum)[4], int64_t k, int64_t out_stride) {
  zero_sums();
  for (int64_t at = 0; at < k; at += 32) {
    tile_loadd(4, sum[0].x + at, 2 * k);
    tile_loadd(6, sum[0].panel + at * kPanel, 64);
    tile_dpbf16ps(0, 4, 6);
    tile_loadd(7, sum[1].panel + at * kPanel, 64);
    tile_dpbf16ps(1, 4, 7);
    tile_loadd(6, sum[2].panel + at * kPanel, 64);
    tile_dpbf16ps(2, 4, 6);
    tile_loadd(7, sum[3].panel + at * kPanel, 64);
    tile_dpbf16ps(3, 4, 7);
  }
  write_sums(sum, out_stride);
}

// 2 panels x 32 rows: sum[2 * i + j] = rows i against panel j
inline void two_by_two(const Bf16Sum (&sum)[4], int64_t k, int64_t out_stride) {
  zero_sums();
  for (int64_t at = 0; at < k; at += 32) {
    tile_loadd(4, sum[0].x + at, 2 * k);
    tile_loadd(5, sum[2].x + at, 2 * k);
    tile_loadd(6, sum[0].panel + at * kPanel, 64);
    tile_loadd(7, sum[1].panel + at * kPanel, 64);
    tile_dpbf16ps(0, 4, 6);
    tile_dpbf16ps(1, 4, 7);
    tile_dpbf16ps(2, 5, 6);
    tile_dpbf16ps(3, 5, 7);
  }
  write_sums(sum, out_stride);
}

inline void one_panel(const Bf16Sum& sum, int64_t k, int64_t out_stride) {
  alignas(64) float tile[kTileRows * kPanel];
  tile_zero(0);
  for (int64_t at = 0; at < k; at += 32) {
    tile_loadd(4, sum.x + at, 2 * k);
    tile_loadd(6, sum.panel + at * kPanel, 64);
    tile_dpbf16ps(0, 4, 6);
  }
  tile_stored(0, tile, 64);
  write_sum(sum, tile, out_stride);
}

inline void tile_panels_bf16(const uint16_t* panels, int64_t num_panels, const uint16_t* x, int64_t rows, int64_t k,
                             float* out, int64_t out_stride) {
  thread_local std::vector<uint16_t> padded;
  const TiledRows<uint16_t> tiled(x, rows, k, padded);
  const TileScope scope(tile_config(64, 16));
  const auto sum_of = [&](int64_t row, int64_t panel) {
    return Bf16Sum{tiled.tile(row), panels + panel * kPanel * k, out + row * out_stride + panel * kPanel,
                   std::min<int64_t>(kTileRows, rows - row)};
  };
  int64_t row = 0;
  for (; row + kTileRows < rows; row += kRowsATime) {
    const int64_t next = row + kTileRows;
    int64_t panel = 0;
    for (; panel + 2 <= num_panels; panel += 2) {
      two_by_two({sum_of(row, panel), sum_of(row, panel + 1), sum_of(next, panel), sum_of(next, panel + 1)}, k,
                 out_stride);
    }
    if (panel == num_panels) continue;
    one_panel(sum_of(row, panel), k, out_stride);
    one_panel(sum_of(next, panel), k, out_stride);
  }
  if (row >= rows) return;
  int64_t panel = 0;
  for (; panel + 4 <= num_panels; panel += 4) {
    four_panels({sum_of(row, panel), sum_of(row, panel + 1), sum_of(row, panel + 2), sum_of(row, panel + 3)}, k,
                out_stride);
  }
  for (; panel < num_panels; ++panel) one_panel(sum_of(row, panel), k, out_stride);
}
