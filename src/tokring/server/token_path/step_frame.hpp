// StepFrame: a private copy of one STEP frame, every count and offset checked before a column is read.
#pragma once
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tokring/layout.hpp"

namespace tokring::token_path {

struct FrameFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LogprobRow {
  float logprob;
  std::span<const int32_t> top_id;  // best first; -1: unused
  std::span<const float> top_logprob;
};

class StepFrame {
 public:
  // Copies first: the engine could change the ring's bytes between a check and a use.
  void read(const void* address, size_t length, uint32_t num_stream_slots);

  uint64_t publish_ns() const { return publish_ns_; }
  size_t num_rows() const { return stream_slot_.size(); }
  uint32_t stream_slot(size_t row) const { return stream_slot_[row]; }
  uint32_t slot_generation(size_t row) const { return slot_generation_[row]; }
  size_t num_tokens(size_t row) const { return num_tokens_.empty() ? 1 : num_tokens_[row]; }
  int32_t token_id(size_t token) const { return token_id_[token]; }
  std::span<const FinishRecord> finish() const { return finish_; }
  bool has_logprobs(size_t token) const { return !logprob_row_.empty() && logprob_row_[token] >= 0; }
  LogprobRow logprobs(size_t token) const {
    auto row = static_cast<size_t>(logprob_row_[token]);
    return {logprob_[row], top_id_.subspan(row * width_, width_), top_logprob_.subspan(row * width_, width_)};
  }

 private:
  template <class T>
  std::span<const T> take(size_t count, size_t end);
  void read_sections();
  void read_logprobs(const SectionHeader& section, size_t end);
  void check_slots(uint32_t num_stream_slots) const;
  const std::byte* bytes() const { return reinterpret_cast<const std::byte*>(copy_.data()); }

  std::vector<uint64_t> copy_;
  size_t length_ = 0;
  size_t offset_ = 0;  // of the next column
  uint64_t publish_ns_ = 0;
  std::span<const uint32_t> stream_slot_, slot_generation_, num_tokens_;
  std::span<const int32_t> token_id_;
  std::span<const FinishRecord> finish_;
  size_t width_ = 0;
  std::span<const float> logprob_, top_logprob_;
  std::span<const int32_t> top_id_;
  std::vector<int32_t> logprob_row_;  // by token; empty without the section
};

template <class T>
std::span<const T> StepFrame::take(size_t count, size_t end) {
  if (count > (end - offset_) / sizeof(T)) {
    throw FrameFault("a column of " + std::to_string(count) + " elements does not fit into the " +
                     std::to_string(end - offset_) + " bytes left");
  }
  std::span<const T> column(reinterpret_cast<const T*>(bytes() + offset_), count);
  offset_ += count * sizeof(T);
  return column;
}

inline void StepFrame::read(const void* address, size_t length, uint32_t num_stream_slots) {
  if (length < sizeof(FrameHeader)) {
    throw FrameFault("frame of " + std::to_string(length) + " bytes is shorter than its header");
  }
  copy_.resize((length + 7) / 8);
  std::memcpy(copy_.data(), address, length);
  FrameHeader header;
  std::memcpy(&header, copy_.data(), sizeof header);
  if (header.length != length || header.type != static_cast<uint16_t>(FrameType::STEP)) {
    throw FrameFault("frame states type " + std::to_string(header.type) + ", " + std::to_string(header.length) +
                     " bytes; a STEP frame of " + std::to_string(length) + " bytes was expected");
  }
  length_ = length;
  offset_ = sizeof header;
  publish_ns_ = header.publish_ns;
  stream_slot_ = take<uint32_t>(header.count, length_);
  slot_generation_ = take<uint32_t>(header.count, length_);
  num_tokens_ = {};
  size_t num_tokens = header.count;
  if (header.flags & static_cast<uint16_t>(FrameFlag::MULTI_TOKEN)) {
    num_tokens_ = take<uint32_t>(header.count, length_);
    num_tokens = 0;
    for (uint32_t count : num_tokens_) num_tokens += count;
  }
  token_id_ = take<int32_t>(num_tokens, length_);
  finish_ = {};
  logprob_row_.clear();
  if (header.flags & static_cast<uint16_t>(FrameFlag::HAS_SECTIONS)) read_sections();
  check_slots(num_stream_slots);
}

inline void StepFrame::read_sections() {
  offset_ = (offset_ + 7) / 8 * 8;
  uint16_t last_kind = 0;
  while (offset_ + sizeof(SectionHeader) <= length_) {
    SectionHeader section;
    std::memcpy(&section, bytes() + offset_, sizeof section);
    if (section.kind == 0) return;
    offset_ += sizeof section;
    if (section.kind <= last_kind || section.kind > static_cast<uint16_t>(SectionKind::LOGPROBS) ||
        section.bytes % 8 != 0 || section.bytes > length_ - offset_) {
      throw FrameFault("section of kind " + std::to_string(section.kind) + " with " + std::to_string(section.bytes) +
                       " bytes at " + std::to_string(offset_) + " of " + std::to_string(length_));
    }
    last_kind = section.kind;
    size_t end = offset_ + section.bytes;
    if (section.kind == static_cast<uint16_t>(SectionKind::FINISH)) {
      finish_ = take<FinishRecord>(section.count, end);
    } else {
      read_logprobs(section, end);
    }
    offset_ = end;
  }
}

inline void StepFrame::read_logprobs(const SectionHeader& section, size_t end) {
  if (section.width > kMaxLogprobs) {
    throw FrameFault(std::to_string(section.width) + " logprobs a token, at most " + std::to_string(kMaxLogprobs) +
                     " are allowed");
  }
  width_ = section.width;
  size_t count = section.count;
  auto token_index = take<uint32_t>(count, end);
  take<int32_t>(count, end);  // rank: not shown to clients
  logprob_ = take<float>(count, end);
  top_id_ = take<int32_t>(count * width_, end);
  top_logprob_ = take<float>(count * width_, end);
  logprob_row_.assign(token_id_.size(), -1);
  for (size_t row = 0; row < count; ++row) {
    if (token_index[row] >= token_id_.size()) {
      throw FrameFault("logprobs of token " + std::to_string(token_index[row]) + " in a frame of " +
                       std::to_string(token_id_.size()) + " tokens");
    }
    logprob_row_[token_index[row]] = static_cast<int32_t>(row);
  }
}

inline void StepFrame::check_slots(uint32_t num_stream_slots) const {
  auto check = [&](uint32_t slot) {
    if (slot >= num_stream_slots) {
      throw FrameFault("stream slot " + std::to_string(slot) + " is not below " + std::to_string(num_stream_slots));
    }
  };
  for (uint32_t slot : stream_slot_) check(slot);
  for (const FinishRecord& record : finish_) check(record.stream_slot);
}

}  // namespace tokring::token_path
