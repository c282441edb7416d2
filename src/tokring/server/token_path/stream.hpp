// Stream: the text side of one choice of one request, from token ids to text that may be shown.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "json.hpp"
#include "logprob_renderer.hpp"
#include "step_frame.hpp"
#include "stop_matcher.hpp"
#include "token_table.hpp"
#include "utf8.hpp"

namespace tokring::token_path {

class Connection;

enum class Field : uint8_t {
  kLiteral = 0,
  kText = 1,
  kLogprobs = 2,
  kTokenIds = 3,
  kCompletionTokens = 4,
  kTotalTokens = 5
};

struct TemplatePart {
  Field field;
  std::string literal;  // of kLiteral
};

enum class StreamMode : uint8_t { kCollect, kDelta, kSend };

// The arguments of TokenPath.open(), documented in interface.py.
struct StreamOptions {
  StreamMode mode = StreamMode::kCollect;
  std::vector<TemplatePart> chunk_template;
  std::vector<std::string> stop;
  bool include_stop = false;
  uint64_t min_tokens = 0;
  bool skip_special = true;
  std::vector<int32_t> hidden_ids;
  LogprobStyle logprob_style = LogprobStyle::kNone;
  uint32_t num_logprobs = 0;
  bool tokens_as_ids = false;
  uint64_t text_offset = 0;
  bool return_token_ids = false;
  uint64_t stream_interval = 1;
  uint64_t num_prompt_tokens = 0;
  uint64_t arrival_ns = 0;
  bool strip_leading_space = false;
};

class Stream {
 public:
  Stream(const TokenTable& table, TokenFragments& fragments, uint32_t generation, StreamOptions options)
      : generation(generation),
        options(std::move(options)),
        table_(table),
        matcher_(std::move(this->options.stop), this->options.include_stop),
        renderer_(fragments, this->options.logprob_style, this->options.tokens_as_ids),
        names_tokens_(this->options.return_token_ids || renderer_.is_on()),
        keeps_tokens_(names_tokens_ || this->options.mode != StreamMode::kSend ||
                      std::any_of(this->options.chunk_template.begin(), this->options.chunk_template.end(),
                                  [](const TemplatePart& part) { return part.field == Field::kTokenIds; })),
        strips_space_(this->options.strip_leading_space) {}

  // Counts a token, decodes it and releases what no stop string can claim any more.
  void feed(int32_t token_id, const LogprobRow* row) {
    token_ids.push_back(token_id);
    uint64_t num_chars_before = num_chars_;
    bool is_silent =
        std::find(options.hidden_ids.begin(), options.hidden_ids.end(), token_id) != options.hidden_ids.end() ||
        (options.skip_special && table_.is_special(token_id));
    if (!is_silent) accept([&](std::string& out) { utf8_.feed(table_.bytes(token_id), out); });
    if (keeps_tokens_) keep(token_id, num_chars_before, row);
  }

  // The finish row: releases everything, unless a stop string or a cancel ended the text before.
  void end(const FinishRecord& record) {
    finish = record;
    if (!is_dropping()) accept([&](std::string& out) { utf8_.flush(out); });
    if (!is_dropping()) {
      size_t before = text_.size();
      matcher_.flush(text_);
      num_released_bytes_ += text_.size() - before;
    }
    release_tokens();
  }

  bool is_dropping() const { return is_cancelled || matcher_.matched() != nullptr; }
  const std::string* stop() const { return matcher_.matched(); }
  uint64_t num_released_bytes() const { return num_released_bytes_; }

  // Something to send, and enough of it for the stream's interval.
  bool has_news() const {
    if (text_.empty() && !(names_tokens_ && num_ready_tokens_ != 0)) return false;
    if (num_tokens_reported_ == 0 || finish || is_dropping()) return true;
    return token_ids.size() - num_tokens_reported_ >= options.stream_interval;
  }

  size_t num_ready_bytes() const {
    size_t pairs = renderer_.is_on() ? 1 + options.num_logprobs : 0;
    return text_.size() + num_ready_tokens_ * pairs * sizeof(TopLogprob);
  }

  // Appends the JSON of the next event by the stream's template; takes what is ready.
  void render(std::string& out) {
    for (const TemplatePart& part : options.chunk_template) {
      switch (part.field) {
        case Field::kLiteral:
          out.append(part.literal);
          break;
        case Field::kText:
          append_escaped(text_, out);
          break;
        case Field::kLogprobs:
          render_logprobs(out);
          break;
        case Field::kTokenIds:
          render_token_ids(out);
          break;
        case Field::kCompletionTokens:
          append_integer(token_ids.size(), out);
          break;
        case Field::kTotalTokens:
          append_integer(options.num_prompt_tokens + token_ids.size(), out);
          break;
      }
    }
    discard();
  }

  // What take() hands out, read before discard().
  const std::string& ready_text() const { return text_; }
  std::vector<int32_t> ready_token_ids() const {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < num_ready_tokens_; ++i) ids.push_back(tokens_[i].token_id);
    return ids;
  }
  bool has_logprobs() const { return renderer_.is_on(); }
  void render_logprobs(std::string& out) const {
    if (!renderer_.is_on()) {
      out.append("null");
      return;
    }
    renderer_.render({tokens_.data(), num_ready_tokens_}, top_, out);
  }

  void discard() {
    text_.clear();
    size_t num_top = 0;
    for (size_t i = 0; i < num_ready_tokens_; ++i) num_top += tokens_[i].num_top;
    top_.erase(top_.begin(), top_.begin() + static_cast<ptrdiff_t>(num_top));
    tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<ptrdiff_t>(num_ready_tokens_));
    num_ready_tokens_ = 0;
    num_tokens_reported_ = token_ids.size();
  }

  // For the whole request.
  uint32_t generation;
  StreamOptions options;
  Connection* connection = nullptr;  // of kSend; null again once it is gone
  std::vector<int32_t> token_ids;
  uint64_t first_output_ns = 0;
  uint64_t last_publish_ns = 0;
  std::optional<FinishRecord> finish;
  bool is_cancelled = false;
  // Since the last take().
  bool is_delta_reported = false;

 private:
  // `decode` appends decoded text to the string it is given.
  template <class Decode>
  void accept(Decode decode) {
    if (!matcher_.has_stops() && !strips_space_) {
      size_t before = text_.size();
      decode(text_);
      count_decoded(std::string_view(text_).substr(before));
      num_released_bytes_ += text_.size() - before;
      return;
    }
    decoded_.clear();
    decode(decoded_);
    std::string_view text = decoded_;
    if (strips_space_ && !text.empty()) {
      if (text.front() == ' ') text.remove_prefix(1);
      strips_space_ = false;
    }
    count_decoded(text);
    size_t before = text_.size();
    if (matcher_.has_stops()) {
      matcher_.feed(text, token_ids.size() > options.min_tokens, text_);
    } else {
      text_.append(text);
    }
    num_released_bytes_ += text_.size() - before;
  }

  void count_decoded(std::string_view text) {
    num_bytes_ += text.size();
    if (renderer_.style() == LogprobStyle::kCompletions) num_chars_ += count_characters(text);
  }

  void keep(int32_t token_id, uint64_t num_chars_before, const LogprobRow* row) {
    // A token with an unfinished character waits for that character: one byte more than there is.
    NamedToken token = {num_bytes_ + utf8_.is_holding(), options.text_offset + num_chars_before, token_id,
                        kMissingLogprob, 0};
    if (row != nullptr && renderer_.is_on()) {
      token.logprob = row->logprob;
      for (size_t k = 0; k < row->top_id.size() && token.num_top < options.num_logprobs; ++k) {
        if (row->top_id[k] < 0) continue;
        top_.push_back({row->top_id[k], row->top_logprob[k]});
        ++token.num_top;
      }
    }
    tokens_.push_back(token);
    release_tokens();
  }

  void release_tokens() {
    uint64_t released = finish || matcher_.matched() ? std::numeric_limits<uint64_t>::max() : num_released_bytes_;
    while (num_ready_tokens_ < tokens_.size() && tokens_[num_ready_tokens_].text_end <= released) ++num_ready_tokens_;
  }

  void render_token_ids(std::string& out) const {
    out.push_back('[');
    for (size_t i = 0; i < num_ready_tokens_; ++i) {
      if (i != 0) out.push_back(',');
      append_integer(tokens_[i].token_id, out);
    }
    out.push_back(']');
  }

  // For the whole request.
  const TokenTable& table_;
  Utf8Decoder utf8_;
  StopMatcher matcher_;
  LogprobRenderer renderer_;
  bool names_tokens_;  // a token without text is news too
  bool keeps_tokens_;
  bool strips_space_;
  uint64_t num_chars_ = 0;  // decoded, held ones included; only counted for COMPLETIONS logprobs
  uint64_t num_bytes_ = 0;
  uint64_t num_released_bytes_ = 0;
  std::string decoded_;  // scratch
  // Since the last chunk or take().
  std::string text_;
  std::vector<NamedToken> tokens_;  // the first num_ready_tokens_ may be named, the others are held
  std::vector<TopLogprob> top_;
  size_t num_ready_tokens_ = 0;
  size_t num_tokens_reported_ = 0;
};

}  // namespace tokring::token_path
