#include "sha256.hpp"

#include <bit>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tokring::cpu {
namespace {

constexpr std::size_t kBlockBytes = 64;
using State = std::array<uint32_t, 8>;

constexpr State kInitial{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(uint32_t word) {
  return std::endian::native == std::endian::little ? __builtin_bswap32(word) : word;
}

void compress_plain(State& state, const uint8_t* data, std::size_t num_blocks) {
  for (; num_blocks > 0; --num_blocks, data += kBlockBytes) {
    std::array<uint32_t, 64> words;
    std::memcpy(words.data(), data, kBlockBytes);
    for (int i = 0; i < 16; ++i) words[i] = big_endian(words[i]);
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = words[i - 15], b = words[i - 2];
      words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + words[i - 7] +
                 (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                             kRoundConstants[i] + words[i];
      const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const State mixed{a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += mixed[i];
  }
}

#if defined(__x86_64__)

// Needs SSE4.1 too, which every processor with SHA instructions has.
bool has_instructions() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}

__attribute__((target("sha,sse4.1"))) void compress_with_instructions(State& state, const uint8_t* data,
                                                                      std::size_t num_blocks) {
  const __m128i reverse = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  auto* words_of_state = reinterpret_cast<__m128i*>(state.data());
  __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words_of_state), 0xB1);
  __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words_of_state + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; num_blocks > 0; --num_blocks, data += kBlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // the last 16 words of the schedule
    for (int i = 0; i < 16; ++i) {
      __m128i& next = w[i & 3];
      if (i < 4) {
        next = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), reverse);
      } else {
        const __m128i before = w[(i + 3) & 3];
        next = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(i + 1) & 3]), _mm_alignr_epi8(before, w[(i + 2) & 3], 4));
        next = _mm_sha256msg2_epu32(next, before);
      }
      const __m128i* constants = reinterpret_cast<const __m128i*>(kRoundConstants.data()) + i;
      const __m128i sum = _mm_add_epi32(next, _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words_of_state, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words_of_state + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#else

bool has_instructions() { return false; }
void compress_with_instructions(State&, const uint8_t*, std::size_t) {}

#endif

}  // namespace

void sha256_chain(const Digest& previous, const uint8_t* data, int64_t num_blocks, int64_t width, Digest* digests,
                  bool use_instructions) {
  static const bool is_able = has_instructions();
  const auto compress = use_instructions && is_able ? compress_with_instructions : compress_plain;
  // The message: digest and data; then a 1 bit, zeros, and its length in bits as 8 bytes at the end of a block.
  const std::size_t length = sizeof(Digest) + static_cast<std::size_t>(width);
  std::vector<uint8_t> message((length + 9 + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
  message[length] = 0x80;
  for (int i = 0; i < 8; ++i) message[message.size() - 1 - i] = static_cast<uint8_t>(length * 8 >> 8 * i);
  const Digest* before = &previous;
  for (int64_t block = 0; block < num_blocks; ++block, data += width) {
    std::memcpy(message.data(), before, sizeof(Digest));
    std::memcpy(message.data() + sizeof(Digest), data, static_cast<std::size_t>(width));
    State state = kInitial;
    compress(state, message.data(), message.size() / kBlockBytes);
    for (uint32_t& word : state) word = big_endian(word);
    std::memcpy(&digests[block], state.data(), sizeof(Digest));
    before = &digests[block];
  }
}

}  // namespace tokring::cpu
