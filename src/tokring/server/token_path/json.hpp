// JSON as orjson writes it: strings escaped where JSON demands it, UTF-8 as it is; numbers as short as they can be.
#pragma once
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "utf8.hpp"

namespace tokring::token_path {

// 0: as it is; 'u': \u00XX; otherwise the letter after the backslash.
inline constexpr std::array<char, 256> kEscapes = [] {
  std::array<char, 256> escapes = {};
  for (size_t c = 0; c < 0x20; ++c) escapes[c] = 'u';
  escapes['\b'] = 'b', escapes['\t'] = 't', escapes['\n'] = 'n', escapes['\f'] = 'f', escapes['\r'] = 'r';
  escapes['"'] = '"', escapes['\\'] = '\\';
  return escapes;
}();

inline void append_escaped(std::string_view text, std::string& out) {
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    auto c = static_cast<unsigned char>(text[i]);
    if (kEscapes[c] == 0) continue;
    out.append(text.data() + start, i - start);
    start = i + 1;
    if (kEscapes[c] == 'u') {
      constexpr char kHex[] = "0123456789abcdef";
      const char escaped[] = {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]};
      out.append(escaped, sizeof escaped);
    } else {
      const char escaped[] = {'\\', kEscapes[c]};
      out.append(escaped, sizeof escaped);
    }
  }
  out.append(text.data() + start, text.size() - start);
}

// A string of bytes that may be broken UTF-8, with quotes.
inline void append_quoted_lossy(std::string_view bytes, std::string& out) {
  out.push_back('"');
  if (ascii_prefix(bytes.data(), bytes.size()) == bytes.size()) {
    append_escaped(bytes, out);
  } else {
    std::string text;
    if (append_lossy(bytes, text) != bytes.size()) text.append(kReplacement);
    append_escaped(text, out);
  }
  out.push_back('"');
}

template <class Integer>
inline void append_integer(Integer value, std::string& out) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

inline constexpr float kMissingLogprob = -9999.0F;

// Shortest digits that read back as the same float, always a JSON float. JSON has no infinity.
inline void append_logprob(float value, std::string& out) {
  if (!std::isfinite(value) || value < kMissingLogprob) value = kMissingLogprob;
  char digits[48];
  char* end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  std::string_view text(digits, static_cast<size_t>(end - digits));
  out.append(text);
  if (text.find_first_of(".e") == std::string_view::npos) out.append(".0");
}

}  // namespace tokring::token_path
