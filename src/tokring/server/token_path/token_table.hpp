// Bytes of every token id, copied from the Python TokenTable.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tokring::token_path {

class TokenTable {
 public:
  // offsets has one element more than there are tokens; the caller has checked that it ascends up to data.size().
  TokenTable(std::string data, std::vector<uint32_t> offsets, std::vector<uint8_t> special)
      : data_(std::move(data)), offsets_(std::move(offsets)), special_(std::move(special)) {}

  size_t num_tokens() const { return special_.size(); }

  // Ids outside the vocabulary (padded embeddings, negative ones) have no bytes.
  std::string_view bytes(int32_t token_id) const {
    auto id = static_cast<uint32_t>(token_id);
    if (id >= special_.size()) return {};
    return std::string_view(data_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }
  bool is_special(int32_t token_id) const {
    auto id = static_cast<uint32_t>(token_id);
    return id < special_.size() && special_[id] != 0;
  }

 private:
  std::string data_;
  std::vector<uint32_t> offsets_;
  std::vector<uint8_t> special_;
};

}  // namespace tokring::token_path
