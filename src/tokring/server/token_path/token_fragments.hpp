// TokenFragments: what logprobs say of a token whatever its probability, rendered once per token id.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json.hpp"
#include "token_table.hpp"

namespace tokring::token_path {

// Views are good until the next call of of().
struct TokenFragment {
  std::string_view head;  // {"token":"..","logprob":
  std::string_view tail;  // ,"bytes":[..]
  std::string_view name;  // the quoted name within head
};

class TokenFragments {
 public:
  explicit TokenFragments(const TokenTable& table) : table_(table), places_(table.num_tokens() + 1) {}

  TokenFragment of(int32_t token_id) {
    auto id = static_cast<uint32_t>(token_id);
    Place& place = places_[id < table_.num_tokens() ? id : table_.num_tokens()];  // the last: ids without bytes
    if (place.num_head == 0) render(token_id, place);
    std::string_view head = std::string_view(arena_).substr(place.start, place.num_head);
    return {head, std::string_view(arena_).substr(place.start + place.num_head, place.num_tail),
            head.substr(kBeforeName.size(), head.size() - kBeforeName.size() - kAfterName.size())};
  }

 private:
  static constexpr std::string_view kBeforeName = "{\"token\":", kAfterName = ",\"logprob\":";

  struct Place {
    size_t start = 0;
    uint32_t num_head = 0, num_tail = 0;
  };

  void render(int32_t token_id, Place& place) {
    std::string_view bytes = table_.bytes(token_id);
    place.start = arena_.size();
    arena_.append(kBeforeName);
    append_quoted_lossy(bytes, arena_);
    arena_.append(kAfterName);
    place.num_head = static_cast<uint32_t>(arena_.size() - place.start);
    arena_.append(",\"bytes\":[");
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (i != 0) arena_.push_back(',');
      append_integer(static_cast<unsigned>(static_cast<unsigned char>(bytes[i])), arena_);
    }
    arena_.push_back(']');
    place.num_tail = static_cast<uint32_t>(arena_.size() - place.start - place.num_head);
  }

  const TokenTable& table_;
  std::string arena_;
  std::vector<Place> places_;
};

}  // namespace tokring::token_path
