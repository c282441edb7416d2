// Logprobs of one stream as the JSON that clients of the chat and completions routes expect.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "json.hpp"
#include "token_fragments.hpp"
#include "tokring/layout.hpp"

namespace tokring::token_path {

enum class LogprobStyle : uint8_t { kNone = 0, kChat = 1, kCompletions = 2 };

struct TopLogprob {
  int32_t token_id;
  float logprob;
};

// A token and what is said about it; its top entries are the next num_top ones of a list kept beside.
struct NamedToken {
  uint64_t text_end;     // byte position of decoded text that must be released before the token may be named
  uint64_t text_offset;  // characters before the token
  int32_t token_id;
  float logprob;
  uint32_t num_top;
};

class LogprobRenderer {
 public:
  LogprobRenderer(TokenFragments& fragments, LogprobStyle style, bool tokens_as_ids)
      : fragments_(fragments), style_(style), tokens_as_ids_(tokens_as_ids) {}

  bool is_on() const { return style_ != LogprobStyle::kNone; }
  LogprobStyle style() const { return style_; }

  // top: the entries of all tokens, one after another.
  void render(std::span<const NamedToken> tokens, std::span<const TopLogprob> top, std::string& out) const {
    if (style_ == LogprobStyle::kChat) {
      render_chat(tokens, top, out);
    } else {
      render_completions(tokens, top, out);
    }
  }

 private:
  void render_chat(std::span<const NamedToken> tokens, std::span<const TopLogprob> top, std::string& out) const {
    out.append("{\"content\":[");
    const TopLogprob* entry = top.data();
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i != 0) out.push_back(',');
      append_fields({tokens[i].token_id, tokens[i].logprob}, out);
      out.append(",\"top_logprobs\":[");
      for (uint32_t k = 0; k < tokens[i].num_top; ++k) {
        if (k != 0) out.push_back(',');
        append_fields(*entry++, out);
        out.push_back('}');
      }
      out.append("]}");
    }
    out.append("]}");
  }

  void render_completions(std::span<const NamedToken> tokens, std::span<const TopLogprob> top, std::string& out) const {
    auto column = [&](std::string_view name, auto append) {
      out.append(name);
      for (size_t i = 0; i < tokens.size(); ++i) {
        if (i != 0) out.push_back(',');
        append(tokens[i]);
      }
      out.push_back(']');
    };
    column("{\"text_offset\":[", [&](const NamedToken& token) { append_integer(token.text_offset, out); });
    column(",\"token_logprobs\":[", [&](const NamedToken& token) { append_logprob(token.logprob, out); });
    column(",\"tokens\":[", [&](const NamedToken& token) { append_name(token.token_id, out); });
    const TopLogprob* entry = top.data();
    column(",\"top_logprobs\":[", [&](const NamedToken& token) {
      append_top_object(token, {entry, token.num_top}, out);
      entry += token.num_top;
    });
    out.push_back('}');
  }

  // Leaves the object open.
  void append_fields(TopLogprob entry, std::string& out) const {
    TokenFragment fragment = fragments_.of(entry.token_id);
    if (tokens_as_ids_) {
      out.append("{\"token\":");
      append_name(entry.token_id, out);
      out.append(",\"logprob\":");
    } else {
      out.append(fragment.head);
    }
    append_logprob(entry.logprob, out);
    out.append(fragment.tail);
  }

  // {token: logprob}: the best ones, then the chosen one if missing. Of equal names the first stays.
  void append_top_object(const NamedToken& token, std::span<const TopLogprob> top, std::string& out) const {
    struct Key {
      size_t start, size;
    };
    Key keys[kMaxLogprobs + 1];
    size_t num_keys = 0;
    out.push_back('{');
    auto append = [&](TopLogprob entry) {
      size_t before = out.size();
      if (num_keys != 0) out.push_back(',');
      Key key = {out.size(), 0};
      append_name(entry.token_id, out);
      key.size = out.size() - key.start;
      std::string_view text(out);
      for (size_t k = 0; k < num_keys; ++k) {
        if (text.substr(keys[k].start, keys[k].size) == text.substr(key.start, key.size)) {
          out.resize(before);
          return;
        }
      }
      keys[num_keys++] = key;
      out.push_back(':');
      append_logprob(entry.logprob, out);
    };
    for (TopLogprob entry : top) append(entry);
    append({token.token_id, token.logprob});
    out.push_back('}');
  }

  void append_name(int32_t token_id, std::string& out) const {
    if (!tokens_as_ids_) {
      out.append(fragments_.of(token_id).name);
      return;
    }
    out.append("\"token_id:");
    append_integer(token_id, out);
    out.push_back('"');
  }

  TokenFragments& fragments_;
  LogprobStyle style_;
  bool tokens_as_ids_;
};

}  // namespace tokring::token_path
