// Runs of 8 neighbouring elements between memory (128-bit accesses) and float registers.
#pragma once
#include "device.cuh"

template <class T>
DEVICE void load_8(const T* from, float (&x)[8]) {
  const uint4 v = load_16_bytes(from);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = low_half<T>(words[i]);
    x[2 * i + 1] = high_half<T>(words[i]);
  }
}
DEVICE void load_8(const float* from, float (&x)[8]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 v = load_16_bytes(from + 4 * half);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[4 * half + i] = float_of_bits(words[i]);
  }
}

template <class T>
DEVICE void store_8(T* to, const float (&x)[8]) {
  store_16_bytes(to, uint4{pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])});
}
DEVICE void store_8(float* to, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    store_16_bytes(to + i, uint4{float_bits(x[i]), float_bits(x[i + 1]), float_bits(x[i + 2]), float_bits(x[i + 3])});
  }
}
