// 8-lane vectors in AVX2 and FMA. Included only between target pragmas, by kernels_avx2.cpp.
#pragma once

namespace tokring::cpu::avx2 {

constexpr int kWidth = 8;
using Vec = __m256;

inline __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// NaN in b is kept.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
// x where !(x < limit) held for `tested`, else 0: NaN stays.
inline Vec zero_below(Vec x, Vec tested, Vec limit) {
  return _mm256_and_ps(x, _mm256_cmp_ps(tested, limit, _CMP_NLT_UQ));
}
// 2^n for integral n in [-126, 127].
inline Vec exp2_integral(Vec n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
// Whole vectors go unmasked: AMD's processors take 12 cycles for a masked store.
inline Vec load_n(const float* p, int64_t n) { return n == kWidth ? load(p) : _mm256_maskload_ps(p, first(n)); }
inline Vec widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline Vec load(const uint16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_n(const uint16_t* p, int64_t n) {
  alignas(16) uint16_t lane[8] = {};
  for (int64_t i = 0; i < n; ++i) lane[i] = p[i];
  return load(lane);
}

inline Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_n(const int8_t* p, int64_t n) {
  int8_t lane[8] = {};
  for (int64_t i = 0; i < n; ++i) lane[i] = p[i];
  return load(lane);
}

// The first and the second of each lane's two bfloat16 values.
struct Pair {
  Vec even;
  Vec odd;
};
inline Pair split(__m256i both) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Pair load_pairs(const uint16_t* p) { return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Pair set1_pair(const uint16_t* p) {
  using Both = int32_t __attribute__((may_alias, aligned(2)));
  return split(_mm256_set1_epi32(*reinterpret_cast<const Both*>(p)));
}

inline __m128i to_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i word = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(word), _mm256_extracti128_si256(word, 1));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store_n(float* p, Vec x, int64_t n) {
  if (n == kWidth) return store(p, x);
  _mm256_maskstore_ps(p, first(n), x);
}
inline void store(uint16_t* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x)); }
inline void store_n(uint16_t* p, Vec x, int64_t n) {
  alignas(16) uint16_t lane[8];
  store(lane, x);
  for (int64_t i = 0; i < n; ++i) p[i] = lane[i];
}

inline float reduce_add(Vec x) {
  alignas(32) float lane[8];
  _mm256_store_ps(lane, x);
  for (int half = 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}
inline float reduce_max(Vec x) {
  alignas(32) float lane[8];
  _mm256_store_ps(lane, x);
  float best = lane[0];
  for (int i = 1; i < 8; ++i) best = best < lane[i] ? lane[i] : best;
  return best;
}

// Lane i of the result is the sum of the 8 lanes of row i.
inline Vec sum_rows(const Vec* row) {
  const Vec low = _mm256_hadd_ps(_mm256_hadd_ps(row[0], row[1]), _mm256_hadd_ps(row[2], row[3]));
  const Vec high = _mm256_hadd_ps(_mm256_hadd_ps(row[4], row[5]), _mm256_hadd_ps(row[6], row[7]));
  return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// x in [0, 2^31), rounded to nearest even.
inline void store_rounded(uint32_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(x));
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

}  // namespace tokring::cpu::avx2
