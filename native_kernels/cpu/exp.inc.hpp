// exp(x) for x <= 0, within 2 ulp (Cephes' polynomial and reduction). Only multiplications and additions, no FMA, and
// built with -ffp-contract=off: the same bits on every level and in reference.py.
// Included inside a level's namespace.

inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = set1(-87.0f);
  const Vec clamped = max(lowest, x);
  const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding and taking it away rounds to nearest
  const Vec n = sub(add(mul(clamped, set1(1.44269504088896341f)), magic), magic);
  Vec r = sub(clamped, mul(n, set1(0.693359375f)));
  r = sub(r, mul(n, set1(-2.12194440e-4f)));
  Vec p = set1(1.9875691500e-4f);
  p = add(mul(p, r), set1(1.3981999507e-3f));
  p = add(mul(p, r), set1(8.3334519073e-3f));
  p = add(mul(p, r), set1(4.1665795894e-2f));
  p = add(mul(p, r), set1(1.6666665459e-1f));
  p = add(mul(p, r), set1(5.0000001201e-1f));
  p = add(add(mul(p, mul(r, r)), r), set1(1.0f));
  return zero_below(mul(p, exp2_integral(n)), x, lowest);
}
