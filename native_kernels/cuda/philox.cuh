// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), the numbers of cpu/philox.hpp.
#pragma once
#include "device.cuh"

// 64 random bits of one draw: the key is the seed, the counter is (position, choice, draw).
DEVICE uint64_t random_bits(uint64_t seed, uint32_t choice, uint64_t position, uint32_t draw) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = choice, c3 = draw;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b), c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return uint64_t(c1) << 32 | c0;
}
