// Stop strings by Aho and Corasick: the automaton's state is the longest suffix of the text that begins a stop string,
// so it says at once what has matched and what must still be held back.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tokring::token_path {

class StopMatcher {
 public:
  StopMatcher(std::vector<std::string> stops, bool include_stop) : stops_(std::move(stops)), include_(include_stop) {
    if (stops_.empty()) return;
    nodes_.emplace_back();
    root_.resize(256);
    for (size_t i = 0; i < stops_.size(); ++i) insert(static_cast<int32_t>(i));
    link();
  }

  bool has_stops() const { return !stops_.empty(); }
  const std::string* matched() const { return matched_ < 0 ? nullptr : &stops_[static_cast<size_t>(matched_)]; }

  // Appends to `out` what may be shown. The first complete match ends the text; unarmed, matches don't count.
  void feed(std::string_view text, bool armed, std::string& out) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (state_ == 0) {
        while (i < text.size() && root_[static_cast<unsigned char>(text[i])] == 0) ++i;
        if (i == text.size()) break;
      }
      state_ = next(state_, static_cast<unsigned char>(text[i]));
      int32_t stop = nodes_[state_].longest_stop;
      if (stop >= 0 && armed) {
        matched_ = stop;
        cut(text.substr(0, i + 1), out);
        return;
      }
    }
    show(text, nodes_[state_].num_held, out);
  }

  void flush(std::string& out) {
    out.append(held_);
    held_.clear();
  }

 private:
  struct Node {
    uint32_t first_child = 0, next_sibling = 0, fail = 0;
    uint32_t depth = 0;
    uint32_t num_held = 0;      // length of the longest suffix that is a proper prefix of a stop string
    int32_t longest_stop = -1;  // the longest stop string that ends here
    unsigned char byte = 0;
  };

  void insert(int32_t stop) {
    uint32_t at = 0;
    for (char c : stops_[static_cast<size_t>(stop)]) {
      auto byte = static_cast<unsigned char>(c);
      uint32_t child = find_child(at, byte);
      if (child == 0) {
        child = static_cast<uint32_t>(nodes_.size());
        Node node;
        node.byte = byte;
        node.depth = nodes_[at].depth + 1;
        node.next_sibling = nodes_[at].first_child;
        nodes_[at].first_child = child;
        nodes_.push_back(node);
      }
      at = child;
    }
    if (nodes_[at].longest_stop < 0) nodes_[at].longest_stop = stop;
  }

  // Breadth first: a node's suffix link leads to a node nearer to the root, done before.
  void link() {
    for (uint32_t child = nodes_[0].first_child; child != 0; child = nodes_[child].next_sibling) {
      root_[nodes_[child].byte] = child;
    }
    std::vector<uint32_t> order = {0};
    for (size_t i = 0; i < order.size(); ++i) {
      uint32_t parent = order[i];
      for (uint32_t child = nodes_[parent].first_child; child != 0; child = nodes_[child].next_sibling) {
        Node& node = nodes_[child];
        node.fail = parent == 0 ? 0 : next(nodes_[parent].fail, node.byte);
        const Node& suffix = nodes_[node.fail];
        if (node.longest_stop < 0) node.longest_stop = suffix.longest_stop;
        node.num_held = node.first_child != 0 ? node.depth : suffix.num_held;
        order.push_back(child);
      }
    }
  }

  uint32_t find_child(uint32_t parent, unsigned char byte) const {
    uint32_t child = nodes_[parent].first_child;
    while (child != 0 && nodes_[child].byte != byte) child = nodes_[child].next_sibling;
    return child;
  }

  uint32_t next(uint32_t state, unsigned char byte) const {
    for (; state != 0; state = nodes_[state].fail) {
      if (uint32_t child = find_child(state, byte)) return child;
    }
    return root_[byte];
  }

  void show(std::string_view text, size_t num_held, std::string& out) {
    if (num_held <= text.size()) {
      out.append(held_).append(text.substr(0, text.size() - num_held));
      held_.assign(text.substr(text.size() - num_held));
      return;
    }
    size_t from_held = held_.size() + text.size() - num_held;
    out.append(held_, 0, from_held);
    held_.erase(0, from_held);
    held_.append(text);
  }

  void cut(std::string_view text, std::string& out) {
    held_.append(text);
    out.append(held_, 0, include_ ? held_.size() : held_.size() - matched()->size());
    held_.clear();
  }

  std::vector<std::string> stops_;
  bool include_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> root_;  // [256] the root's children by byte; not inside: most streams have no stop strings
  uint32_t state_ = 0;
  int32_t matched_ = -1;
  std::string held_;
};

}  // namespace tokring::token_path
