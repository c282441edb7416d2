// json_shape(): how much a JSON text is made of, counted before anything is built from it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <string_view>

namespace tokring::token_path {

struct JsonShape {
  size_t depth = 0;       // of nesting, at most
  size_t containers = 0;  // lists and objects
  size_t strings = 0;     // keys too
  size_t commas = 0;
};

// One pass over any bytes; of text that is no JSON the counts mean nothing, but bound what a parser can build of it.
inline JsonShape json_shape(std::string_view text) {
  JsonShape shape;
  size_t depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    switch (text[i]) {
      case '[':
      case '{':
        ++shape.containers;
        shape.depth = std::max(shape.depth, ++depth);
        break;
      case ']':
      case '}':
        if (depth > 0) --depth;
        break;
      case ',':
        ++shape.commas;
        break;
      case '"':
        ++shape.strings;
        for (++i; i < text.size() && text[i] != '"'; ++i) {
          if (text[i] == '\\') ++i;
        }
        break;
      default:
        break;
    }
  }
  return shape;
}

}  // namespace tokring::token_path
