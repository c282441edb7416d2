// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random numbers without state.
#pragma once

#include <array>
#include <cstdint>

namespace tokring::cpu {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// 64 random bits of one draw: the key is the seed, the counter is (position, choice, draw).
inline uint64_t random_bits(uint64_t seed, uint32_t choice, uint64_t position, uint32_t draw) {
  const auto words = philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), choice, draw},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return uint64_t{words[1]} << 32 | words[0];
}

}  // namespace tokring::cpu
