// The AMX tile instructions in plain C++, so that kernels made of them are tested on any processor. Included inside an
// anonymous namespace, before linear_amx.inc.hpp. Semantics: Intel's instruction set reference, palette 1.

struct EmulatedTile {
  int rows = 0;
  int row_bytes = 0;
  uint8_t bytes[16][64] = {};

  template <class T>
  T get(int row, int index) const {
    T value;
    std::memcpy(&value, bytes[row] + static_cast<size_t>(index) * sizeof(T), sizeof value);
    return value;
  }
  template <class T>
  void put(int row, int index, T value) {
    std::memcpy(bytes[row] + static_cast<size_t>(index) * sizeof(T), &value, sizeof value);
  }
};

inline EmulatedTile& emulated_tile(int index) {
  thread_local EmulatedTile tiles[8];
  return tiles[index];
}

inline void tile_loadconfig(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  for (int i = 0; i < 8; ++i) {
    EmulatedTile fresh;
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    fresh.row_bytes = row_bytes;
    fresh.rows = bytes[48 + i];
    emulated_tile(i) = fresh;
  }
}

inline void tile_release() {
  for (int i = 0; i < 8; ++i) emulated_tile(i) = EmulatedTile{};
}

inline void tile_zero(int tile) { std::memset(emulated_tile(tile).bytes, 0, sizeof emulated_tile(tile).bytes); }

inline void tile_loadd(int tile, const void* from, int64_t stride) {
  EmulatedTile& to = emulated_tile(tile);
  tile_zero(tile);
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.bytes[row], static_cast<const uint8_t*>(from) + row * stride, static_cast<size_t>(to.row_bytes));
  }
}

inline void tile_stored(int tile, void* to, int64_t stride) {
  const EmulatedTile& from = emulated_tile(tile);
  for (int row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, from.bytes[row], static_cast<size_t>(from.row_bytes));
  }
}

// c += a b: signed bytes of a times unsigned bytes of b, by fours
inline void tile_dpbsud(int c, int a, int b) {
  EmulatedTile& sum = emulated_tile(c);
  const EmulatedTile &left = emulated_tile(a), &right = emulated_tile(b);
  for (int m = 0; m < sum.rows; ++m) {
    for (int k = 0; k < left.row_bytes / 4; ++k) {
      for (int n = 0; n < sum.row_bytes / 4; ++n) {
        int32_t dot = sum.get<int32_t>(m, n);
        for (int i = 0; i < 4; ++i) {
          dot += left.get<int8_t>(m, 4 * k + i) * static_cast<int32_t>(right.get<uint8_t>(k, 4 * n + i));
        }
        sum.put(m, n, dot);
      }
    }
  }
}

inline float flushed(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

inline float widened(uint16_t bits) { return flushed(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)); }

// c += a b in pairs of bfloat16: even and odd products have a sum each over the instruction; denormals are zero
inline void tile_dpbf16ps(int c, int a, int b) {
  EmulatedTile& sum = emulated_tile(c);
  const EmulatedTile &left = emulated_tile(a), &right = emulated_tile(b);
  for (int m = 0; m < sum.rows; ++m) {
    for (int n = 0; n < sum.row_bytes / 4; ++n) {
      float part[2] = {0.0f, 0.0f};
      for (int k = 0; k < left.row_bytes / 4; ++k) {
        for (int i = 0; i < 2; ++i) {
          part[i] = flushed(
              std::fma(widened(left.get<uint16_t>(m, 2 * k + i)), widened(right.get<uint16_t>(k, 2 * n + i)), part[i]));
        }
      }
      sum.put(m, n, flushed(flushed(sum.get<float>(m, n)) + flushed(part[0] + part[1])));
    }
  }
}
