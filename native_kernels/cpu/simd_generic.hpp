// 8-lane vectors in plain C++, for processors without AVX2 and other architectures. Included by kernels_generic.cpp.
#pragma once

namespace tokring::cpu::generic {

constexpr int kWidth = 8;
struct Vec {
  float lane[kWidth];
};

template <class Function>
inline Vec each(Function&& function) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out.lane[i] = function(i);
  return out;
}

inline Vec set1(float x) {
  return each([&](int) { return x; });
}
inline Vec zero() { return set1(0.0f); }
inline Vec add(Vec a, Vec b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec div(Vec a, Vec b) {
  return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
// NaN in b is kept.
inline Vec max(Vec a, Vec b) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec min(Vec a, Vec b) {
  return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// x where !(x < limit) held for `tested`, else 0: NaN stays.
inline Vec zero_below(Vec x, Vec tested, Vec limit) {
  return each([&](int i) { return tested.lane[i] < limit.lane[i] ? 0.0f : x.lane[i]; });
}
// 2^n for integral n in [-126, 127].
inline Vec exp2_integral(Vec n) {
  return each([&](int i) {
    // A NaN must not reach the conversion to int; the caller multiplies by a NaN anyway.
    const float power = n.lane[i] == n.lane[i] ? n.lane[i] : 0.0f;
    return std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(power) + 127) << 23);
  });
}

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
template <class T>
inline Vec load(const T* p) {
  return each([&](int i) { return widen(p[i]); });
}
template <class T>
inline Vec load_n(const T* p, int64_t n) {
  return each([&](int i) { return i < n ? widen(p[i]) : 0.0f; });
}

// The first and the second of each lane's two bfloat16 values.
struct Pair {
  Vec even;
  Vec odd;
};
inline Pair load_pairs(const uint16_t* p) {
  return {each([&](int i) { return widen(p[2 * i]); }), each([&](int i) { return widen(p[2 * i + 1]); })};
}
inline Pair set1_pair(const uint16_t* p) { return {set1(widen(p[0])), set1(widen(p[1]))}; }

inline void narrow(float* p, float x) { *p = x; }
inline void narrow(uint16_t* p, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = x != x ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  *p = static_cast<uint16_t>(rounded >> 16);
}
template <class T>
inline void store_n(T* p, Vec x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(p + i, x.lane[i]);
}
template <class T>
inline void store(T* p, Vec x) {
  store_n(p, x, kWidth);
}

inline float reduce_add(Vec x) {
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x.lane[i] += x.lane[i + half];
  }
  return x.lane[0];
}
inline float reduce_max(Vec x) {
  float best = x.lane[0];
  for (int i = 1; i < kWidth; ++i) best = best < x.lane[i] ? x.lane[i] : best;
  return best;
}

// Lane i of the result is the sum of the 8 lanes of row i.
inline Vec sum_rows(const Vec* row) {
  return each([&](int i) { return reduce_add(row[i]); });
}

// x in [0, 2^31), rounded to nearest even.
inline void store_rounded(uint32_t* p, Vec x) {
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint32_t>(std::nearbyint(x.lane[i]));
}

// Copies the values in [low, high) to out, which holds n and may be values.
inline int64_t compact(const uint32_t* values, int64_t n, uint32_t low, uint32_t high, uint32_t* out) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t value = values[i];
    out[kept] = value;
    kept += value - low < high - low ? 1 : 0;
  }
  return kept;
}

}  // namespace tokring::cpu::generic
