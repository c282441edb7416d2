// The two ends of a channel: REQ ring (front end -> engine), OUT ring (engine -> front end), cancel table, doorbells.
// Each end belongs to one thread. Free of Python: the binding, the C++ tests and the benchmarks use these classes.
#pragma once
#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <stdexcept>

#include "tokring/clock.hpp"
#include "tokring/doorbell.hpp"
#include "tokring/frames.hpp"
#include "tokring/handshake.hpp"
#include "tokring/segment.hpp"
#include "tokring/stats.hpp"

namespace tokring {

inline constexpr uint64_t kMaxPrefetchBytes = 16384;

struct ChannelOptions {
  bool crc = false;    // stamp CRC32C into every frame written (readers check it whenever it is there)
  bool debug = false;  // refuse release() while views of frames live
};

// What both ends share: the segment, the doorbells and the counters. `Atomics` as everywhere.
template <class Atomics>
class ChannelEnd {
 public:
  ChannelEnd(std::shared_ptr<Segment> segment, int wake_peer_fd, int wake_me_fd, ChannelOptions options)
      : segment_(std::move(segment)),
        wake_peer_fd_(dup_fd(wake_peer_fd)),
        wake_me_fd_(dup_fd(wake_me_fd)),
        options_(options),
        generation_(segment_->header().connection_generation),
        num_stream_slots_(segment_->shape().num_stream_slots) {
    survive_broken_doorbells();
  }

  // Throws HandleDead after close() and in a forked child.
  void check_usable() const {
    if (!segment_) [[unlikely]]
      throw HandleDead("the channel is closed: a new connection has a new channel");
    segment_->fork().check();
  }

  const std::shared_ptr<Segment>& segment() const { return segment_; }
  const ChannelOptions& options() const { return options_; }
  uint64_t connection_generation() const { return generation_; }
  uint32_t num_stream_slots() const { return num_stream_slots_; }

  void drain_doorbell() {
    check_usable();
    tokring::drain_doorbell(wake_me_fd_.get());
  }

  // Where this end counts: a block of a stats page (which must outlive the channel's use), or nullptr for its own
  // memory. The page's counters go on from what they are.
  void count_in(uint64_t* block) {
    counters_ = block != nullptr ? block : own_counters_.data();
    set_relaxed<Atomics>(&counters_[kWord_connection_generation], generation_);
  }
  const uint64_t* counters() const { return counters_; }

 protected:
  static OwnedFd dup_fd(int fd) {
    OwnedFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (copy.get() < 0) throw AttachError("doorbell descriptor " + std::to_string(fd) + ": " + errno_text(errno));
    int flags = fcntl(copy.get(), F_GETFL);
    if (fcntl(copy.get(), F_SETFL, flags | O_NONBLOCK) != 0)
      throw AttachError("O_NONBLOCK on a doorbell: " + errno_text(errno));
    return copy;
  }

  void count(ChannelWord word, uint64_t amount = 1) { add_relaxed<Atomics>(&counters_[word], amount); }
  void set(ChannelWord word, uint64_t value) { set_relaxed<Atomics>(&counters_[word], value); }

  // One frame arrived: its records, and its hop from publish to here.
  void count_received(const FrameHeader& header, uint64_t now) {
    count(kWord_received_frames);
    count(kWord_received_records, header.count);
    uint64_t hop = now > header.publish_ns ? now - header.publish_ns : 0;
    count(kWord_hop_sum, hop);
    uint32_t bucket = bucket_of(kBounds_hop_seconds, kHopBuckets - 1, static_cast<double>(hop) * 1e-9);
    add_relaxed<Atomics>(&counters_[kWord_hop_sum + 1 + bucket], 1);
  }

  void count_published(bool owed) { count(owed ? kWord_doorbells_sent : kWord_doorbells_suppressed); }

  void wake_peer() { ring_doorbell(wake_peer_fd_.get()); }

  void say_state(uint64_t* word, PeerState state) {
    // SYNC POINT: peer state (release: pairs with the acquire in peer_closed)
    Atomics::template store<std::memory_order_release>(word, static_cast<uint64_t>(state), Site::kPeerState);
  }
  bool says_closed(const uint64_t* word) const {
    // SYNC POINT: peer state (acquire: pairs with the release in say_state)
    uint64_t state = Atomics::template load<std::memory_order_acquire>(word, Site::kPeerState);
    return state == static_cast<uint64_t>(PeerState::CLOSED);
  }

  void forget_segment() {
    segment_.reset();
    wake_peer_fd_ = OwnedFd();
    wake_me_fd_ = OwnedFd();
  }

  // This connection.
  std::shared_ptr<Segment> segment_;
  OwnedFd wake_peer_fd_;
  OwnedFd wake_me_fd_;
  ChannelOptions options_;
  uint64_t generation_;
  uint32_t num_stream_slots_;
  std::array<uint64_t, kChannelWords> own_counters_{};
  uint64_t* counters_ = own_counters_.data();
};

// ---------------------------------------------------------------------------------------------------------------
template <class Atomics = StdAtomics>
class FrontEndEnd : public ChannelEnd<Atomics> {
 public:
  using Base = ChannelEnd<Atomics>;

  FrontEndEnd(std::shared_ptr<Segment> segment, int req_doorbell_fd, int out_doorbell_fd, ChannelOptions options)
      : Base(std::move(segment), req_doorbell_fd, out_doorbell_fd, options),
        req_(this->segment_->req()),
        out_(this->segment_->out()) {
    count_in(nullptr);
    this->say_state(&this->segment_->control()->frontend_state, PeerState::ATTACHED);
    // Unconditional on attach: a peer killed between publish and doorbell must not leave us asleep.
    this->wake_peer();
  }

  void count_in(uint64_t* block) {
    Base::count_in(block);
    this->set(kWord_sent_capacity, req_.bytes());
    this->set(kWord_received_capacity, out_.bytes());
    this->set(kWord_sent_position, req_.position());
    this->set(kWord_received_position, out_.position());
  }

  uint64_t max_request_bytes() const { return max_frame_bytes(req_.bytes()); }

  // Commits one request; the engine sees it after publish(). False: the ring is full. A frame above
  // max_request_bytes() must not come here.
  bool submit(RequestRecord record, std::span<const int32_t> ids, std::span<const std::byte> extensions) {
    uint64_t length = request_frame_bytes(ids.size(), extensions.size());
    std::byte* frame = req_.claim(length);
    if (frame == nullptr) {
      this->count(kWord_sent_full);
      return false;
    }
    record.num_ids = static_cast<uint32_t>(ids.size());
    record.extension_bytes = static_cast<uint32_t>(extensions.size());
    std::byte* next = frame + sizeof(FrameHeader);
    std::memcpy(next, &record, sizeof record);
    next += sizeof record;
    if (!ids.empty()) std::memcpy(next, ids.data(), ids.size_bytes());
    next = frame + round_up(static_cast<uint64_t>(next - frame) + ids.size_bytes(), 8);
    if (!extensions.empty()) std::memcpy(next, extensions.data(), extensions.size());
    FrameHeader header{};
    header.length = static_cast<uint32_t>(length);
    header.type = static_cast<uint16_t>(FrameType::REQUEST);
    header.count = 1;
    req_.commit(header, now_ns(), this->options_.crc);
    this->count(kWord_sent_frames);
    this->count(kWord_sent_records);
    return true;
  }

  // Shows the engine everything committed, and wakes it if it sleeps.
  void publish() {
    if (!req_.has_unpublished()) return;
    bool owed = req_.publish();
    if (owed) this->wake_peer();
    this->count_published(owed);
    this->set(kWord_sent_position, req_.position());
  }

  // Asks the engine to end (slot, generation) and everything older in that slot. Idempotent, never full.
  void cancel(uint32_t stream_slot, uint32_t slot_generation) {
    SegmentControl* words = this->segment_->control();
    uint32_t* word = this->segment_->cancel_table() + stream_slot;
    // SYNC POINT: request is cancelled (release: pairs with the acquire in EngineEnd::cancelled)
    Atomics::template store<std::memory_order_release>(word, slot_generation, Site::kCancelWord);
    // SYNC POINT: cancel is counted (seq_cst: the load of `wake_at` below must not pass it; pairs with the load in
    // EngineEnd::arm)
    Atomics::template exchange<std::memory_order_seq_cst>(&words->cancel_count, ++cancel_count_, Site::kCancelCount);
    bool owed = req_.reader_sleeps();
    if (owed) {
      this->wake_peer();
      this->count(kWord_doorbells_sent);
    }
    this->count(kWord_cancels_sent);
  }

  // The next OUT frame, checked. Throws PeerCorrupt.
  std::optional<OutFrame> poll() {
    if (!req_.corruption().empty()) throw PeerCorrupt(req_.corruption());
    RingFrame frame;
    if (!out_.poll(frame)) return std::nullopt;
    OutFrame parsed = parse_out_frame(frame, this->num_stream_slots_);
    this->count_received(parsed.header, now_ns());
    return parsed;
  }

  void release() {
    out_.release();
    this->set(kWord_received_position, out_.position());
  }

  bool arm() {
    bool may_sleep = out_.arm();
    if (may_sleep) this->count(kWord_sleeps);
    return may_sleep;
  }

  uint64_t position() const { return out_.position(); }
  uint64_t req_free_bytes() { return req_.free_bytes(); }
  bool peer_closed() const { return this->says_closed(&this->segment_->control()->engine_state); }

  void close() {
    if (!this->segment_) return;
    if (!this->segment_->fork().in_child()) {
      this->say_state(&this->segment_->control()->frontend_state, PeerState::CLOSED);
      this->wake_peer();
    }
    this->forget_segment();
  }

 private:
  RingWriter<Atomics> req_;
  RingReader<Atomics> out_;
  uint64_t cancel_count_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------

// Columns of one step as the engine holds them. All spans of one group have equal lengths.
struct StepColumns {
  std::span<const uint32_t> stream_slot;
  std::span<const uint32_t> slot_generation;
  std::span<const int32_t> token_id;     // one per row, or sum(num_tokens)
  std::span<const uint32_t> num_tokens;  // empty: one each
  std::span<const FinishRecord> finish;
  std::span<const uint32_t> logprob_token_index;  // ascending
  std::span<const int32_t> logprob_rank;
  std::span<const float> logprob;
  std::span<const int32_t> top_id;  // [rows, width]
  std::span<const float> top_logprob;
  uint32_t logprobs_width = 0;
};

// Columns of prompt positions [start, start + rank.size()) of one request.
struct PromptLogprobColumns {
  uint32_t stream_slot, slot_generation, start, width;
  std::span<const int32_t> rank;
  std::span<const float> logprob;
  std::span<const int32_t> top_id;
  std::span<const float> top_logprob;
};

template <class Atomics = StdAtomics>
class EngineEnd : public ChannelEnd<Atomics> {
 public:
  using Base = ChannelEnd<Atomics>;

  EngineEnd(std::shared_ptr<Segment> segment, int req_doorbell_fd, int out_doorbell_fd, ChannelOptions options)
      : Base(std::move(segment), out_doorbell_fd, req_doorbell_fd, options),
        req_(this->segment_->req()),
        out_(this->segment_->out()) {
    count_in(nullptr);
    this->say_state(&this->segment_->control()->engine_state, PeerState::ATTACHED);
    this->wake_peer();  // unconditional on attach, as above
  }

  void count_in(uint64_t* block) {
    Base::count_in(block);
    this->set(kWord_sent_capacity, out_.bytes());
    this->set(kWord_received_capacity, req_.bytes());
    this->set(kWord_sent_position, out_.position());
    this->set(kWord_received_position, req_.position());
  }

  uint64_t max_step_bytes() const { return max_frame_bytes(out_.bytes()); }

  // The next request, copied whole and then checked. Throws PeerCorrupt.
  std::optional<RequestFrame> poll_request() {
    if (!out_.corruption().empty()) throw PeerCorrupt(out_.corruption());
    RingFrame frame;
    if (!req_.poll(frame)) return std::nullopt;
    RequestFrame request = copy_request_frame(frame, this->num_stream_slots_);
    this->count_received(frame.header, now_ns());
    return request;
  }

  void release_requests() {
    req_.release();
    this->set(kWord_received_position, req_.position());
  }

  // Whether anything was cancelled since the last call; if not, only requests received since can be cancelled ones.
  bool new_cancels() {
    note_cancels();
    const bool news = cancels_seen_ != cancels_told_;
    cancels_told_ = cancels_seen_;
    return news;
  }

  // out[i] = row i was cancelled. A slot out of range counts as cancelled.
  void cancelled(std::span<const uint32_t> stream_slots, std::span<const uint32_t> generations, bool* out) {
    note_cancels();
    const uint32_t* table = this->segment_->cancel_table();
    for (size_t i = 0; i < stream_slots.size(); ++i) {
      if (stream_slots[i] >= this->num_stream_slots_) {
        out[i] = true;
        continue;
      }
      // SYNC POINT: request is cancelled (acquire: pairs with the release in FrontEndEnd::cancel)
      out[i] = Atomics::template load<std::memory_order_acquire>(table + stream_slots[i], Site::kCancelRead) >=
               generations[i];
    }
  }

  // True: no request, no news in the cancel table, and the next of either rings: the caller may sleep.
  bool arm() {
    if (!req_.arm()) return false;
    if (note_cancels()) {
      req_.disarm();
      return false;
    }
    this->count(kWord_sleeps);
    return true;
  }

  // Space for a frame, or nullptr. `length` <= max_step_bytes(); one claim at a time; the claim counts from commit().
  std::byte* claim(uint64_t length) {
    std::byte* frame = out_.claim(length);
    if (frame == nullptr) this->count(kWord_sent_full);
    return frame;
  }

  void commit(const FrameHeader& header) {
    out_.commit(header, now_ns(), this->options_.crc);
    last_length_ = header.length;
    this->count(kWord_sent_frames);
    this->count(kWord_sent_records, header.count);
  }

  // Writes one step, over several frames with MORE if it takes more than a quarter of the ring. All or nothing:
  // false if there is no space now.
  bool write_step(const StepColumns& step) {
    const StepShape whole = whole_shape(step);
    const StepOffsets at = step_offsets(whole);
    if (at.length <= max_step_bytes()) {  // the usual case: one frame
      std::byte* frame = claim(at.length);
      if (frame != nullptr) fill_step(frame, step, StepCursor{}, whole, at, false);
      return frame != nullptr;
    }
    check_rows_fit(step);
    if (!out_.has_space(bytes_of_parts(step))) {
      this->count(kWord_sent_full);
      return false;
    }
    StepCursor cursor;
    while (!cursor.done(step)) write_step_part(step, cursor);
    return true;
  }

  bool write_ready(const ReadyRecord& record) {
    constexpr uint64_t length = round_up(sizeof(FrameHeader) + sizeof(ReadyRecord), kFrameAlignment);
    std::byte* frame = claim(length);
    if (frame == nullptr) return false;
    std::memcpy(frame + sizeof(FrameHeader), &record, sizeof record);
    FrameHeader header{};
    header.length = length;
    header.type = static_cast<uint16_t>(FrameType::READY);
    header.count = 1;
    commit(header);
    return true;
  }

  // As write_step: split with MORE, all or nothing.
  bool write_prompt_logprobs(const PromptLogprobColumns& columns) {
    const uint64_t fixed = sizeof(FrameHeader) + sizeof(PromptLogprobsRecord);
    const uint64_t per_row = 8 + 8ULL * columns.width;
    const uint64_t rows = columns.rank.size();
    const uint64_t rows_per_frame = (max_step_bytes() - fixed) / per_row;
    const uint64_t frames = rows == 0 ? 1 : (rows + rows_per_frame - 1) / rows_per_frame;
    if (!out_.has_space(frames * (fixed + kFrameAlignment) + rows * per_row)) {
      this->count(kWord_sent_full);
      return false;
    }
    for (uint64_t first = 0, part = 0; part < frames; ++part, first += rows_per_frame) {
      write_prompt_part(columns, first, std::min(rows_per_frame, rows - first), part + 1 < frames);
    }
    return true;
  }

  // Shows the front end everything committed: one exchange per step. ring() pays the doorbell if one is owed.
  void publish() {
    if (!out_.has_unpublished()) return;
    bool owed = out_.publish();
    doorbell_owed_ = doorbell_owed_ || owed;
    this->count_published(owed);
    this->set(kWord_sent_position, out_.position());
  }

  void ring() {
    if (doorbell_owed_) this->wake_peer();
    doorbell_owed_ = false;
    out_.prefetch_next(std::min<uint64_t>(last_length_, kMaxPrefetchBytes));
  }

  bool doorbell_owed() const { return doorbell_owed_; }
  uint64_t out_free_bytes() { return out_.free_bytes(); }
  bool peer_closed() const { return this->says_closed(&this->segment_->control()->frontend_state); }

  void close() {
    if (!this->segment_) return;
    if (!this->segment_->fork().in_child()) {
      this->say_state(&this->segment_->control()->engine_state, PeerState::CLOSED);
      this->wake_peer();
    }
    this->forget_segment();
  }

 private:
  // How far write_step has come.
  struct StepCursor {
    size_t row = 0, token = 0, finish = 0, logprob_row = 0;
    bool any = false;
    bool done(const StepColumns& step) const {
      return any && row == step.stream_slot.size() && finish == step.finish.size();
    }
  };

  // True if a cancel arrived since the last look. seq_cst: pairs with the exchange in FrontEndEnd::cancel.
  bool note_cancels() {
    const uint64_t* word = &this->segment_->control()->cancel_count;
    // SYNC POINT: cancel is counted (seq_cst: after the exchange in RingReader::arm)
    uint64_t count = Atomics::template load<std::memory_order_seq_cst>(word, Site::kCancelRecheck);
    bool news = count != cancels_seen_;
    cancels_seen_ = count;
    return news;
  }

  static uint64_t logprob_row_bytes(const StepColumns& step) { return 12 + 8ULL * step.logprobs_width; }

  // Throws std::length_error if one row alone would take more than half of a frame.
  void check_rows_fit(const StepColumns& step) const {
    uint64_t most = step.num_tokens.empty() ? 1 : *std::max_element(step.num_tokens.begin(), step.num_tokens.end());
    uint64_t bytes = 12 + most * (4 + logprob_row_bytes(step)) + kStepOverheadBytes;
    if (bytes > max_step_bytes() / 2) {
      throw std::length_error("a row of " + std::to_string(most) + " tokens takes " + std::to_string(bytes) +
                              " bytes, the OUT ring allows " + std::to_string(max_step_bytes() / 2) +
                              ": make the OUT ring larger");
    }
  }

  static constexpr uint64_t kStepOverheadBytes =
      sizeof(FrameHeader) + 2 * (sizeof(SectionHeader) + 8) + kFrameAlignment;

  static StepShape whole_shape(const StepColumns& step) {
    StepShape shape;
    shape.num_rows = step.stream_slot.size();
    shape.num_token_ids = step.token_id.size();
    shape.multi_token = !step.num_tokens.empty();
    shape.num_finished = step.finish.size();
    shape.num_logprob_rows = step.logprob.size();
    shape.logprobs_width = step.logprobs_width;
    return shape;
  }

  // No less than what a step of several frames will take, headers and padding of every part included.
  uint64_t bytes_of_parts(const StepColumns& step) const {
    uint64_t payload = 8 * step.stream_slot.size() + 4 * step.num_tokens.size() + 4 * step.token_id.size() +
                       sizeof(FinishRecord) * step.finish.size() + logprob_row_bytes(step) * step.logprob.size();
    // A part is closed when the next row does not fit: it is at least half full, since a row is small beside it.
    uint64_t parts = payload / (max_step_bytes() / 2) + 2;
    return payload + parts * kStepOverheadBytes;
  }

  // Takes as many rows as fit into one frame, then finish records if all rows are out.
  void write_step_part(const StepColumns& step, StepCursor& cursor) {
    const StepCursor from = cursor;
    StepShape shape;
    shape.multi_token = !step.num_tokens.empty();
    shape.logprobs_width = step.logprobs_width;
    while (cursor.row < step.stream_slot.size()) {
      StepShape grown = shape;
      StepCursor next = cursor;
      take_row(step, next, grown);
      if (step_offsets(grown).length > max_step_bytes()) break;
      shape = grown;
      cursor = next;
      if (whole_rest_fits(step, cursor, shape)) break;
    }
    if (cursor.row == step.stream_slot.size()) take_finishes(step, cursor, shape);
    cursor.any = true;
    write_part(step, from, shape, !cursor.done(step));
  }

  static void take_row(const StepColumns& step, StepCursor& cursor, StepShape& shape) {
    size_t tokens = step.num_tokens.empty() ? 1 : step.num_tokens[cursor.row];
    cursor.row += 1;
    cursor.token += tokens;
    shape.num_rows += 1;
    shape.num_token_ids += tokens;
    while (cursor.logprob_row < step.logprob.size() && step.logprob_token_index[cursor.logprob_row] < cursor.token) {
      cursor.logprob_row += 1;
      shape.num_logprob_rows += 1;
    }
  }

  // In the last part: no need to walk row by row.
  bool whole_rest_fits(const StepColumns& step, StepCursor& cursor, StepShape& shape) const {
    StepShape all = shape;
    all.num_rows += step.stream_slot.size() - cursor.row;
    all.num_token_ids += step.token_id.size() - cursor.token;
    all.num_logprob_rows += step.logprob.size() - cursor.logprob_row;
    all.num_finished = step.finish.size() - cursor.finish;
    if (step_offsets(all).length > max_step_bytes()) return false;
    all.num_finished = 0;  // taken by take_finishes
    shape = all;
    cursor.row = step.stream_slot.size();
    cursor.token = step.token_id.size();
    cursor.logprob_row = step.logprob.size();
    return true;
  }

  void take_finishes(const StepColumns& step, StepCursor& cursor, StepShape& shape) const {
    while (cursor.finish < step.finish.size()) {
      StepShape grown = shape;
      grown.num_finished += 1;
      if (step_offsets(grown).length > max_step_bytes()) return;
      shape = grown;
      cursor.finish += 1;
    }
  }

  void write_part(const StepColumns& step, const StepCursor& from, const StepShape& shape, bool more) {
    StepOffsets at = step_offsets(shape);
    std::byte* frame = claim(at.length);
    if (frame == nullptr) throw std::logic_error("write_step ran out of the space it had checked");
    fill_step(frame, step, from, shape, at, more);
  }

  // Copies the columns from `from` on, as many rows as `shape` has, and commits.
  void fill_step(std::byte* frame, const StepColumns& step, const StepCursor& from, const StepShape& shape,
                 const StepOffsets& at, bool more) {
    auto put = [frame](uint64_t offset, auto column, size_t first, size_t count) {
      if (count > 0) std::memcpy(frame + offset, column.data() + first, count * sizeof(column[0]));
    };
    put(at.stream_slot, step.stream_slot, from.row, shape.num_rows);
    put(at.slot_generation, step.slot_generation, from.row, shape.num_rows);
    if (shape.multi_token) put(at.num_tokens, step.num_tokens, from.row, shape.num_rows);
    put(at.token_id, step.token_id, from.token, shape.num_token_ids);
    put(at.finish, step.finish, from.finish, shape.num_finished);
    if (shape.num_logprob_rows > 0) put_logprobs(frame, step, from, shape, at.logprobs);
    write_step_sections(frame, shape, at);
    FrameHeader header = step_header(shape, at);
    if (more) header.flags |= static_cast<uint16_t>(FrameFlag::MORE);
    commit(header);
  }

  static void put_logprobs(std::byte* frame, const StepColumns& step, const StepCursor& from, const StepShape& shape,
                           const LogprobOffsets& at) {
    const size_t first = from.logprob_row, rows = shape.num_logprob_rows, width = shape.logprobs_width;
    auto* index = reinterpret_cast<uint32_t*>(frame + at.token_index);
    for (size_t i = 0; i < rows; ++i)
      index[i] = step.logprob_token_index[first + i] - static_cast<uint32_t>(from.token);
    std::memcpy(frame + at.rank, step.logprob_rank.data() + first, 4 * rows);
    std::memcpy(frame + at.logprob, step.logprob.data() + first, 4 * rows);
    if (width == 0) return;
    std::memcpy(frame + at.top_id, step.top_id.data() + first * width, 4 * rows * width);
    std::memcpy(frame + at.top_logprob, step.top_logprob.data() + first * width, 4 * rows * width);
  }

  void write_prompt_part(const PromptLogprobColumns& columns, uint64_t first, uint64_t rows, bool more) {
    const uint64_t width = columns.width;
    const LogprobOffsets at = logprob_offsets(sizeof(FrameHeader) + sizeof(PromptLogprobsRecord), rows, width, false);
    FrameHeader header{};
    header.length = static_cast<uint32_t>(round_up(at.end, kFrameAlignment));
    header.type = static_cast<uint16_t>(FrameType::PROMPT_LOGPROBS);
    header.count = static_cast<uint32_t>(rows);
    if (more) header.flags |= static_cast<uint16_t>(FrameFlag::MORE);
    std::byte* frame = claim(header.length);
    if (frame == nullptr) throw std::logic_error("write_prompt_logprobs ran out of the space it had checked");
    PromptLogprobsRecord record{columns.stream_slot, columns.slot_generation,
                                columns.start + static_cast<uint32_t>(first), columns.width};
    std::memcpy(frame + sizeof(FrameHeader), &record, sizeof record);
    auto put = [frame](uint64_t offset, auto column, size_t from, size_t count) {
      if (count > 0) std::memcpy(frame + offset, column.data() + from, count * sizeof(column[0]));
    };
    put(at.rank, columns.rank, first, rows);
    put(at.logprob, columns.logprob, first, rows);
    put(at.top_id, columns.top_id, first * width, rows * width);
    put(at.top_logprob, columns.top_logprob, first * width, rows * width);
    commit(header);
  }

  RingReader<Atomics> req_;
  RingWriter<Atomics> out_;
  uint64_t cancels_seen_ = 0;
  uint64_t cancels_told_ = 0;
  uint64_t last_length_ = 0;
  bool doorbell_owed_ = false;
};

}  // namespace tokring
