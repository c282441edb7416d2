// What stands inside frames: sizes and offsets for the writer, validated views for the reader.
// A reader works on a private copy of the frame's header and checks every count, offset and slot before a column is
// used. OUT columns are read in place: a consumer that indexes by their values must bound what it reads itself.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "tokring/layout.hpp"
#include "tokring/ring.hpp"

namespace tokring {

constexpr bool has_flag(uint16_t flags, FrameFlag flag) { return (flags & static_cast<uint16_t>(flag)) != 0; }

// ---- STEP frames: shape -> offsets (bytes from the frame's start; 0 = absent) ----

struct StepShape {
  uint64_t num_rows = 0;
  uint64_t num_token_ids = 0;  // == num_rows unless multi_token
  bool multi_token = false;
  uint64_t num_finished = 0;
  uint64_t num_logprob_rows = 0;
  uint64_t logprobs_width = 0;
};

struct LogprobOffsets {
  uint64_t token_index = 0, rank = 0, logprob = 0, top_id = 0, top_logprob = 0, end = 0;
};

// Columns of a logprobs section that begins at `start`.
constexpr LogprobOffsets logprob_offsets(uint64_t start, uint64_t rows, uint64_t width, bool with_token_index) {
  LogprobOffsets at;
  at.token_index = start;
  at.rank = start + (with_token_index ? 4 * rows : 0);
  at.logprob = at.rank + 4 * rows;
  at.top_id = at.logprob + 4 * rows;
  at.top_logprob = at.top_id + 4 * rows * width;
  at.end = at.top_logprob + 4 * rows * width;
  return at;
}

struct StepOffsets {
  uint64_t stream_slot = 0, slot_generation = 0, num_tokens = 0, token_id = 0;
  uint64_t finish_header = 0, finish = 0;
  uint64_t logprobs_header = 0;
  LogprobOffsets logprobs;
  uint64_t end = 0;     // of what is used
  uint64_t length = 0;  // of the frame, a multiple of 64
};

constexpr StepOffsets step_offsets(const StepShape& shape) {
  StepOffsets at;
  at.stream_slot = sizeof(FrameHeader);
  at.slot_generation = at.stream_slot + 4 * shape.num_rows;
  uint64_t next = at.slot_generation + 4 * shape.num_rows;
  if (shape.multi_token) {
    at.num_tokens = next;
    next += 4 * shape.num_rows;
  }
  at.token_id = next;
  next += 4 * shape.num_token_ids;
  if (shape.num_finished > 0) {
    at.finish_header = round_up(next, 8);
    at.finish = at.finish_header + sizeof(SectionHeader);
    next = at.finish + sizeof(FinishRecord) * shape.num_finished;
  }
  if (shape.num_logprob_rows > 0) {
    at.logprobs_header = round_up(next, 8);
    at.logprobs =
        logprob_offsets(at.logprobs_header + sizeof(SectionHeader), shape.num_logprob_rows, shape.logprobs_width, true);
    next = at.logprobs.end;
  }
  at.end = next;
  at.length = round_up(next, kFrameAlignment);
  return at;
}

constexpr bool has_sections(const StepShape& shape) { return shape.num_finished > 0 || shape.num_logprob_rows > 0; }

inline FrameHeader step_header(const StepShape& shape, const StepOffsets& at) {
  FrameHeader header{};
  header.length = static_cast<uint32_t>(at.length);
  header.type = static_cast<uint16_t>(FrameType::STEP);
  header.count = static_cast<uint32_t>(shape.num_rows);
  if (shape.multi_token) header.flags |= static_cast<uint16_t>(FrameFlag::MULTI_TOKEN);
  if (has_sections(shape)) header.flags |= static_cast<uint16_t>(FrameFlag::HAS_SECTIONS);
  return header;
}

// Writes the section headers and the zero bytes behind the last column. The columns themselves are the caller's.
inline void write_step_sections(std::byte* frame, const StepShape& shape, const StepOffsets& at) {
  auto put = [frame](uint64_t offset, SectionKind kind, uint64_t width, uint64_t count, uint64_t bytes) {
    SectionHeader header{static_cast<uint16_t>(kind), static_cast<uint16_t>(width), static_cast<uint32_t>(count),
                         static_cast<uint32_t>(round_up(bytes, 8)), 0};
    std::memcpy(frame + offset, &header, sizeof header);
  };
  if (shape.num_finished > 0) {
    put(at.finish_header, SectionKind::FINISH, 0, shape.num_finished, sizeof(FinishRecord) * shape.num_finished);
  }
  if (shape.num_logprob_rows > 0) {
    put(at.logprobs_header, SectionKind::LOGPROBS, shape.logprobs_width, shape.num_logprob_rows,
        at.logprobs.end - at.logprobs.token_index);
  }
  std::memset(frame + at.end, 0, at.length - at.end);
}

// ---- OUT frames, reader's side ----

struct LogprobsView {
  uint32_t count = 0, width = 0;
  LogprobOffsets at;
};

// A checked STEP, READY or PROMPT_LOGPROBS frame. Offsets are from the frame's start, 0 = absent.
struct OutFrame {
  const std::byte* address = nullptr;
  FrameHeader header{};
  StepOffsets at;
  uint32_t num_token_ids = 0;
  uint32_t num_finished = 0;
  LogprobsView logprobs;
  PromptLogprobsRecord prompt{};  // of a PROMPT_LOGPROBS frame
};

namespace detail {

[[noreturn]] inline void corrupt(const FrameHeader& header, const std::string& what) {
  throw PeerCorrupt("frame at " + hex(header.position) + ": " + what + ": closing the channel");
}

inline const uint32_t* u32_column(const std::byte* frame, uint64_t offset) {
  return reinterpret_cast<const uint32_t*>(frame + offset);
}

inline uint32_t largest(const uint32_t* column, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) most = std::max(most, column[i]);
  return most;
}

// Whether every element is below `bound`. None exceeds the OR of all, which costs one instruction a vector on any
// x86-64 (an unsigned maximum takes several without SSE4.1), and says it all where the bound is a power of two.
inline bool all_below(const uint32_t* column, size_t count, uint32_t bound) {
  uint32_t bits = 0;
  for (size_t i = 0; i < count; ++i) bits |= column[i];
  return bits < bound || largest(column, count) < bound;
}

inline uint64_t sum(const uint32_t* column, size_t count) {
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) total += column[i];
  return total;
}

inline void check_slots(const OutFrame& frame, const uint32_t* slots, size_t count, uint32_t num_stream_slots) {
  if (count > 0 && !all_below(slots, count, num_stream_slots)) {
    corrupt(frame.header,
            "stream slot " + std::to_string(largest(slots, count)) + " of " + std::to_string(num_stream_slots));
  }
}

inline void parse_finish(OutFrame& frame, const SectionHeader& section, uint64_t start, uint32_t num_stream_slots) {
  if (section.bytes != sizeof(FinishRecord) * section.count) corrupt(frame.header, "finish section of a wrong size");
  frame.at.finish = start;
  frame.num_finished = section.count;
  for (uint32_t i = 0; i < section.count; ++i) {
    FinishRecord record;
    std::memcpy(&record, frame.address + start + i * sizeof record, sizeof record);
    check_slots(frame, &record.stream_slot, 1, num_stream_slots);
    if (record.reason == 0 || record.reason > static_cast<uint16_t>(FinishReason::REPETITION)) {
      corrupt(frame.header, "finish reason " + std::to_string(record.reason));
    }
  }
}

inline void check_width(const FrameHeader& header, uint32_t width) {
  if (width > kMaxLogprobs) corrupt(header, "logprobs of width " + std::to_string(width));
}

inline void parse_logprobs(OutFrame& frame, const SectionHeader& section, uint64_t start) {
  check_width(frame.header, section.width);
  frame.logprobs = {section.count, section.width, logprob_offsets(start, section.count, section.width, true)};
  if (section.bytes != round_up(frame.logprobs.at.end - start, 8))
    corrupt(frame.header, "logprobs section of a wrong size");
  const uint32_t* index = u32_column(frame.address, start);
  if (section.count > 0 && !all_below(index, section.count, frame.num_token_ids)) {
    corrupt(frame.header, "logprobs of a token that is not in the frame");
  }
}

inline void parse_sections(OutFrame& frame, uint64_t offset, uint32_t num_stream_slots) {
  uint16_t last_kind = 0;
  for (offset = round_up(offset, 8); offset + sizeof(SectionHeader) <= frame.header.length;) {
    SectionHeader section;
    std::memcpy(&section, frame.address + offset, sizeof section);
    if (section.kind == 0) return;
    offset += sizeof section;
    if (section.kind <= last_kind) corrupt(frame.header, "sections out of order");
    if (section.bytes % 8 != 0 || section.bytes > frame.header.length - offset || section.count > section.bytes) {
      corrupt(frame.header, "section beyond the frame's end");
    }
    if (section.kind == static_cast<uint16_t>(SectionKind::FINISH)) {
      parse_finish(frame, section, offset, num_stream_slots);
    } else if (section.kind == static_cast<uint16_t>(SectionKind::LOGPROBS)) {
      parse_logprobs(frame, section, offset);
    } else {
      corrupt(frame.header, "section of unknown kind " + std::to_string(section.kind));
    }
    last_kind = section.kind;
    offset += section.bytes;
  }
}

inline void parse_step(OutFrame& frame, uint32_t num_stream_slots) {
  const uint64_t rows = frame.header.count, length = frame.header.length;
  StepShape shape{.num_rows = rows, .num_token_ids = rows};
  shape.multi_token = has_flag(frame.header.flags, FrameFlag::MULTI_TOKEN);
  if (step_offsets({.num_rows = rows, .multi_token = shape.multi_token}).token_id > length) {
    corrupt(frame.header, std::to_string(rows) + " rows in " + std::to_string(length) + " bytes");
  }
  if (shape.multi_token) {
    shape.num_token_ids = sum(u32_column(frame.address, step_offsets(shape).num_tokens), rows);
  }
  frame.at = step_offsets(shape);
  if (frame.at.end > length) {
    corrupt(frame.header, std::to_string(shape.num_token_ids) + " token ids in " + std::to_string(length) + " bytes");
  }
  frame.num_token_ids = static_cast<uint32_t>(shape.num_token_ids);
  check_slots(frame, u32_column(frame.address, frame.at.stream_slot), rows, num_stream_slots);
  if (has_flag(frame.header.flags, FrameFlag::HAS_SECTIONS)) parse_sections(frame, frame.at.end, num_stream_slots);
}

inline void parse_prompt_logprobs(OutFrame& frame, uint32_t num_stream_slots) {
  const uint64_t start = sizeof(FrameHeader) + sizeof(PromptLogprobsRecord);
  if (start > frame.header.length) corrupt(frame.header, "no room for its record");
  std::memcpy(&frame.prompt, frame.address + sizeof(FrameHeader), sizeof frame.prompt);
  check_slots(frame, &frame.prompt.stream_slot, 1, num_stream_slots);
  check_width(frame.header, frame.prompt.width);
  frame.logprobs = {frame.header.count, frame.prompt.width,
                    logprob_offsets(start, frame.header.count, frame.prompt.width, false)};
  if (frame.logprobs.at.end > frame.header.length) corrupt(frame.header, "prompt logprobs beyond the frame's end");
}

}  // namespace detail

// Throws PeerCorrupt. `num_stream_slots` bounds every slot in the frame.
inline OutFrame parse_out_frame(const RingFrame& source, uint32_t num_stream_slots) {
  OutFrame frame;
  frame.address = source.address;
  frame.header = source.header;
  switch (static_cast<FrameType>(source.header.type)) {
    case FrameType::STEP:
      detail::parse_step(frame, num_stream_slots);
      return frame;
    case FrameType::READY:
      if (source.header.length < sizeof(FrameHeader) + sizeof(ReadyRecord))
        detail::corrupt(source.header, "no room for READY");
      return frame;
    case FrameType::PROMPT_LOGPROBS:
      detail::parse_prompt_logprobs(frame, num_stream_slots);
      return frame;
    default:
      detail::corrupt(source.header, "unexpected type " + std::to_string(source.header.type));
  }
}

// ---- REQ frames ----

inline uint64_t request_frame_bytes(uint64_t num_ids, uint64_t extension_bytes) {
  return round_up(round_up(sizeof(FrameHeader) + sizeof(RequestRecord) + 4 * num_ids, 8) + round_up(extension_bytes, 8),
                  kFrameAlignment);
}

// A request in private memory: copied whole first, then checked. Offsets into `bytes`.
struct RequestFrame {
  std::vector<std::byte> bytes;
  RequestRecord record{};
  uint64_t ids = 0;
  uint64_t extensions = 0;
};

namespace detail {
inline void check_extensions(const FrameHeader& header, const RequestFrame& request) {
  const std::byte* start = request.bytes.data() + request.extensions;
  for (uint64_t offset = 0; offset < request.record.extension_bytes;) {
    ExtensionHeader extension;
    if (request.record.extension_bytes - offset < sizeof extension) corrupt(header, "half an extension header");
    std::memcpy(&extension, start + offset, sizeof extension);
    offset += sizeof extension;
    if (extension.kind == 0 || extension.kind > static_cast<uint16_t>(ExtensionKind::GRAMMAR_STRUCTURAL_TAG)) {
      corrupt(header, "extension of unknown kind " + std::to_string(extension.kind));
    }
    uint64_t padded = round_up(extension.bytes, 8);
    if (padded > request.record.extension_bytes - offset) corrupt(header, "extension beyond the frame's end");
    offset += padded;
  }
}
}  // namespace detail

// Throws PeerCorrupt. Checks structure only: what the numbers mean (vocabulary, lengths) is the engine's to judge.
inline RequestFrame copy_request_frame(const RingFrame& source, uint32_t num_stream_slots) {
  const FrameHeader& header = source.header;
  if (header.type != static_cast<uint16_t>(FrameType::REQUEST)) {
    detail::corrupt(header, "unexpected type " + std::to_string(header.type));
  }
  if (header.length < sizeof(FrameHeader) + sizeof(RequestRecord)) detail::corrupt(header, "no room for a request");
  RequestFrame request;
  request.bytes.assign(source.address, source.address + header.length);
  std::memcpy(&request.record, request.bytes.data() + sizeof(FrameHeader), sizeof request.record);
  const RequestRecord& record = request.record;
  request.ids = sizeof(FrameHeader) + sizeof(RequestRecord);
  request.extensions = round_up(request.ids + 4ULL * record.num_ids, 8);
  if (request.extensions + record.extension_bytes > header.length || record.extension_bytes % 8 != 0) {
    detail::corrupt(header, std::to_string(record.num_ids) + " ids and " + std::to_string(record.extension_bytes) +
                                " extension bytes in " + std::to_string(header.length) + " bytes");
  }
  if (record.stream_slot >= num_stream_slots)
    detail::corrupt(header, "stream slot " + std::to_string(record.stream_slot));
  if (record.slot_generation == 0) detail::corrupt(header, "slot generation 0");
  if (record.num_stop_ids > kNumInlineStopIds)
    detail::corrupt(header, std::to_string(record.num_stop_ids) + " inline stop ids");
  if (record.num_prior_output > record.num_ids) detail::corrupt(header, "more prior output than ids");
  detail::check_extensions(header, request);
  return request;
}

}  // namespace tokring
