// 16-lane vectors in AVX-512. Included only between target pragmas, by kernels_avx512.cpp.
#pragma once

namespace tokring::cpu::avx512 {

constexpr int kWidth = 16;
using Vec = __m512;

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// NaN in b is kept.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// x where !(x < limit) held for `tested`, else 0: NaN stays.
inline Vec zero_below(Vec x, Vec tested, Vec limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(tested, limit, _CMP_NLT_UQ), x);
}
// 2^n for integral n in [-126, 127].
inline Vec exp2_integral(Vec n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline Vec widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline Vec load(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_n(const uint16_t* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }

inline Vec widen_codes(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
inline Vec load(const int8_t* p) { return widen_codes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_n(const int8_t* p, int64_t n) { return widen_codes(_mm_maskz_loadu_epi8(first(n), p)); }

// The first and the second of each lane's two bfloat16 values.
struct Pair {
  Vec even;
  Vec odd;
};
inline Pair split(__m512i both) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Pair load_pairs(const uint16_t* p) { return split(_mm512_loadu_si512(p)); }
inline Pair set1_pair(const uint16_t* p) {
  using Both = int32_t __attribute__((may_alias, aligned(2)));
  return split(_mm512_set1_epi32(*reinterpret_cast<const Both*>(p)));
}

inline __m256i to_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store_n(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline void store(uint16_t* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store_n(uint16_t* p, Vec x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), to_bf16(x)); }

inline float reduce_add(Vec x) {
  alignas(64) float lane[16];
  _mm512_store_ps(lane, x);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }

// Lane i of the result is the sum of the 16 lanes of row i.
inline Vec sum_rows(const Vec* row) {
  Vec quad[4];
  for (int i = 0; i < 4; ++i) {
    const Vec* r = row + 4 * i;
    const __m512d ab = _mm512_castps_pd(add(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1])));
    const __m512d cd = _mm512_castps_pd(add(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3])));
    quad[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const Vec low = add(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  const Vec high = add(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// x in [0, 2^31), rounded to nearest even.
inline void store_rounded(uint32_t* p, Vec x) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(x)); }

// Copies the values in [low, high) to out; out may be values.
inline int64_t compact(const uint32_t* values, int64_t n, uint32_t low, uint32_t high, uint32_t* out) {
  const __m512i lowest = _mm512_set1_epi32(static_cast<int>(low));
  const __m512i span = _mm512_set1_epi32(static_cast<int>(high - low));
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kWidth) {
    const __mmask16 valid = n - i >= kWidth ? __mmask16{0xffff} : first(n - i);
    const __m512i x = _mm512_maskz_loadu_epi32(valid, values + i);
    const __mmask16 inside = _mm512_mask_cmplt_epu32_mask(valid, _mm512_sub_epi32(x, lowest), span);
    const __m512i packed = _mm512_maskz_compress_epi32(inside, x);
    const int count = __builtin_popcount(inside);
    _mm512_mask_storeu_epi32(out + kept, first(count), packed);
    kept += count;
  }
  return kept;
}

}  // namespace tokring::cpu::avx512
