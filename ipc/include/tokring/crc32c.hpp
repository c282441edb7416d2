// CRC-32C (Castagnoli) of a frame, a debugging aid: shared memory does not flip bits, bugs do.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tokring {

namespace detail {
constexpr std::array<uint32_t, 256> crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78U : 0);
    table[i] = crc;
  }
  return table;
}
inline constexpr auto kCrc32cTable = crc32c_table();

inline uint32_t crc32c_portable(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kCrc32cTable[(crc ^ data[i]) & 0xff];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline uint32_t crc32c_sse42(uint32_t crc, const uint8_t* data, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes, ++data) crc = __builtin_ia32_crc32qi(crc, *data);
  return crc;
}
#endif
}  // namespace detail

inline uint32_t crc32c(const void* data, size_t bytes) {
  const auto* start = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42) return ~detail::crc32c_sse42(~0U, start, bytes);
#endif
  return ~detail::crc32c_portable(~0U, start, bytes);
}

}  // namespace tokring
