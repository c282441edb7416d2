// UTF-8 from pieces that may end anywhere: one U+FFFD for each maximal subpart of what is broken (Unicode 3.9, D93b).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tokring::token_path {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

inline size_t ascii_prefix(const char* text, size_t size) {
  size_t i = 0;
  for (uint64_t word; i + 8 <= size; i += 8) {
    std::memcpy(&word, text + i, 8);
    if (word & 0x8080808080808080ULL) break;
  }
  while (i < size && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

// Number of characters of valid UTF-8.
inline uint64_t count_characters(std::string_view text) {
  uint64_t count = 0;
  for (char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

// How a sequence continues after its lead byte: number of continuation bytes, and what the first of them may be.
struct Utf8Lead {
  int num_continuations;  // -1: not a lead byte
  unsigned char low, high;
};

inline Utf8Lead utf8_lead(unsigned char byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {1, 0x80, 0xBF};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {2, 0x80, 0xBF};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  if (byte >= 0xF1 && byte <= 0xF3) return {3, 0x80, 0xBF};
  return {-1, 0, 0};
}

// Appends the text of `bytes` to `out`; returns how many bytes were used: an unfinished character at the end is not.
inline size_t append_lossy(std::string_view bytes, std::string& out) {
  const char* text = bytes.data();
  size_t size = bytes.size();
  size_t i = 0;
  while (i < size) {
    if (size_t run = ascii_prefix(text + i, size - i)) {
      out.append(text + i, run);
      i += run;
      continue;
    }
    Utf8Lead lead = utf8_lead(static_cast<unsigned char>(text[i]));
    size_t k = 1;  // bytes of the sequence that hold together
    for (; lead.num_continuations > 0 && k <= static_cast<size_t>(lead.num_continuations) && i + k < size; ++k) {
      auto byte = static_cast<unsigned char>(text[i + k]);
      if (k == 1 ? (byte < lead.low || byte > lead.high) : (byte & 0xC0) != 0x80) break;
    }
    if (lead.num_continuations > 0 && k == static_cast<size_t>(lead.num_continuations) + 1) {
      out.append(text + i, k);
    } else if (lead.num_continuations > 0 && i + k == size) {
      return i;
    } else {
      out.append(kReplacement);
    }
    i += k;
  }
  return i;
}

class Utf8Decoder {
 public:
  void feed(std::string_view bytes, std::string& out) {
    if (num_held_ == 0) {
      hold(bytes.substr(append_lossy(bytes, out)));
      return;
    }
    joined_.assign(held_, num_held_).append(bytes);
    hold(std::string_view(joined_).substr(append_lossy(joined_, out)));
  }
  void flush(std::string& out) {
    if (num_held_ != 0) out.append(kReplacement);
    num_held_ = 0;
  }
  bool is_holding() const { return num_held_ != 0; }

 private:
  void hold(std::string_view rest) {
    num_held_ = static_cast<uint8_t>(rest.size());
    std::copy(rest.begin(), rest.end(), held_);
  }

  char held_[4] = {};  // at most three bytes of an unfinished character
  uint8_t num_held_ = 0;
  std::string joined_;
};

}  // namespace tokring::token_path
