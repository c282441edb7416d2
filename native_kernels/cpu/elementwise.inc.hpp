// RMSNorm, RoPE, SiLU*mul and conversions of one row. Included inside a level's namespace.
// Versions: 1  one pass per op in float32 vectors; sums by lane, then a fixed tree.

template <class Function>
inline void by_vector(int64_t n, Function&& function) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) function(i, static_cast<int64_t>(kWidth));
  if (i < n) function(i, n - i);
}

inline void narrow_row(const float* in, uint16_t* out, int64_t n) {
  by_vector(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        if (count == kWidth) return store(out + i, load(in + i));
        store_n(out + i, load_n(in + i, count), count);
      });
}

inline void divide_row(const float* in, float divisor, float* out, int64_t n) {
  by_vector(
      n, [&](int64_t i, int64_t count)
             __attribute__((always_inline)) { store_n(out + i, div(load_n(in + i, count), set1(divisor)), count); });
}

inline void rms_norm_row(const float* in, const float* weight, float epsilon, float* out, int64_t n) {
  Vec squares = zero();
  by_vector(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec x = load_n(in + i, count);
        squares = fma(x, x, squares);
      });
  const float scale = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(n) + epsilon);
  by_vector(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        store_n(out + i, mul(mul(load_n(in + i, count), set1(scale)), load_n(weight + i, count)), count);
      });
}

inline void rotate_row(float* x, const float* cosine, const float* sine, int64_t half) {
  by_vector(
      half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec a = load_n(x + i, count);
        const Vec b = load_n(x + half + i, count);
        const Vec c = load_n(cosine + i, count);
        const Vec s = load_n(sine + i, count);
        store_n(x + i, sub(mul(a, c), mul(b, s)), count);
        store_n(x + half + i, add(mul(b, c), mul(a, s)), count);
      });
}

inline void silu_mul_row(const float* gate, const float* up, float* out, int64_t n) {
  by_vector(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec g = load_n(gate + i, count);
        // sigmoid by exp(-|g|), which can't overflow: e / (1 + e) for g < 0, 1 / (1 + e) for g >= 0
        const Vec e = exp_nonpositive(min(g, sub(zero(), g)));
        const Vec numerator = exp_nonpositive(min(g, zero()));
        const Vec sigmoid = div(numerator, add(set1(1.0f), e));
        store_n(out + i, mul(mul(g, sigmoid), load_n(up + i, count)), count);
      });
}
