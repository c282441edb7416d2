// The SPSC byte ring: frames of whole 64-byte lines in a data area that is mapped twice back to back, so that every
// frame is contiguous. One publish per step; nothing to repair after a SIGKILL of either side at any instruction.
//
// Event index: `wake_at` holds the position at which the reader went to sleep (kAwake: it polls). The writer rings the
// doorbell iff its publish crosses it: old position <= wake_at < new position. Each word has one writer.
//
// Invalid use: two threads on one side of a ring; a claim of more than max_frame_bytes(); reading a frame after
// release(). No locks, no waiting in here: how to wait is the caller's policy.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "tokring/atomics.hpp"
#include "tokring/crc32c.hpp"
#include "tokring/errors.hpp"
#include "tokring/layout.hpp"

namespace tokring {

// One ring's words and bytes inside a mapped segment.
struct RingMemory {
  uint64_t* write_position;
  uint64_t* read_position;
  uint64_t* wake_at;
  std::byte* data;  // mapped twice: [data, data + 2 * bytes)
  uint64_t bytes;   // a power of two
};

inline constexpr uint64_t kReaderPrefetchBytes = 4096;

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr uint64_t max_frame_bytes(uint64_t ring_bytes) { return ring_bytes / kMaxFrameFraction; }

inline std::string hex(uint64_t value) {
  char text[19];
  return {text,
          static_cast<size_t>(std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value)))};
}

template <class Atomics = StdAtomics>
class RingWriter {
 public:
  explicit RingWriter(const RingMemory& ring) : ring_(ring) {}

  // Contiguous space for one frame of `length` bytes (a multiple of 64), or nullptr when the ring is full.
  std::byte* claim(uint64_t length) {
    if (!has_space(length)) return nullptr;
    return ring_.data + (position_ & (ring_.bytes - 1));
  }

  // Ends the claimed frame: stamps its header. The reader sees nothing before publish().
  void commit(const FrameHeader& shape, uint64_t now, bool with_crc) {
    std::byte* frame = ring_.data + (position_ & (ring_.bytes - 1));
    FrameHeader header = shape;
    header.position = position_;
    header.publish_ns = now;
    header.crc32c = 0;
    if (with_crc) header.flags |= static_cast<uint16_t>(FrameFlag::HAS_CRC);
    std::memcpy(frame, &header, sizeof header);
    if (with_crc) {
      header.crc32c = crc32c(frame, header.length);
      std::memcpy(frame, &header, sizeof header);
    }
    Atomics::wrote(frame, header.length);
    position_ += header.length;
  }

  // Makes every committed frame visible at once. True: the reader sleeps and this publish crossed its wake_at, so the
  // caller owes it one doorbell.
  bool publish() {
    // SYNC POINT: frame is visible (seq_cst: the load of `wake_at` below must not pass it)
    uint64_t old =
        Atomics::template exchange<std::memory_order_seq_cst>(ring_.write_position, position_, Site::kPublish);
    // SYNC POINT: reader is asleep (pairs with the exchange in arm(); seq_cst on both sides: at least one sees the
    // other)
    uint64_t wake_at = Atomics::template load<std::memory_order_seq_cst>(ring_.wake_at, Site::kPublishWakeAt);
    published_ = position_;
    return old <= wake_at && wake_at < position_;
  }

  bool has_unpublished() const { return published_ != position_; }

  // True: the reader sleeps, at whatever position. For news outside the ring (the cancel table).
  bool reader_sleeps() const {
    return Atomics::template load<std::memory_order_seq_cst>(ring_.wake_at, Site::kCancelWakeAt) != kAwake;
  }

  // Looks at the reader's line only if the last known position is not enough.
  bool has_space(uint64_t bytes) {
    if (bytes <= free_cached()) return true;
    refresh_read_position();
    return bytes <= free_cached();
  }

  uint64_t free_bytes() {
    refresh_read_position();
    return corruption_.empty() ? free_cached() : 0;
  }

  // Not empty: the reader wrote an impossible position. Nothing here throws for that: the owner tells it at its next
  // poll(), its one place to learn that the peer is corrupt.
  const std::string& corruption() const { return corruption_; }

  // Asks for the lines of the next frame in exclusive state, off the critical path: its stores then don't miss.
  void prefetch_next(uint64_t length) const {
    const std::byte* next = ring_.data + (position_ & (ring_.bytes - 1));
    for (uint64_t offset = 0; offset < length; offset += 64) prefetch_for_write(next + offset);
  }

  uint64_t position() const { return position_; }
  uint64_t bytes() const { return ring_.bytes; }

 private:
  uint64_t free_cached() const { return ring_.bytes - (position_ - cached_read_position_); }

  void refresh_read_position() {
    // SYNC POINT: bytes are free again (acquire: pairs with the release in RingReader::release)
    uint64_t read = Atomics::template load<std::memory_order_acquire>(ring_.read_position, Site::kSpace);
    if (read < cached_read_position_ || read > position_) {
      corruption_ = "the reader's position " + hex(read) + " is outside [" + hex(cached_read_position_) + ", " +
                    hex(position_) + "]: closing the channel";
      return;
    }
    cached_read_position_ = read;
  }

  static void prefetch_for_write(const std::byte* line) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*line));
#else
    __builtin_prefetch(line, 1);
#endif
  }

  // This connection, private to the writer: nothing in the segment is ever read back but read_position and wake_at.
  RingMemory ring_;
  uint64_t position_ = 0;
  uint64_t published_ = 0;
  uint64_t cached_read_position_ = 0;
  std::string corruption_;
};

// One frame as found by the reader: its header is a private copy, already checked; `address` lies in the ring.
struct RingFrame {
  const std::byte* address;
  FrameHeader header;
};

template <class Atomics = StdAtomics>
class RingReader {
 public:
  explicit RingReader(const RingMemory& ring) : ring_(ring) {}

  // The next published frame; false when there is none. Throws PeerCorrupt before a forged byte is used.
  bool poll(RingFrame& frame) {
    if (armed_) disarm();
    if (position_ == cached_write_position_ && !refresh_write_position()) return false;
    frame.address = ring_.data + (position_ & (ring_.bytes - 1));
    Atomics::reading(frame.address, sizeof(FrameHeader));
    std::memcpy(&frame.header, frame.address, sizeof(FrameHeader));
    check(frame);
    prefetch(frame);
    Atomics::reading(frame.address, frame.header.length);
    position_ += frame.header.length;
    return true;
  }

  // Everything polled so far may be overwritten.
  void release() {
    // SYNC POINT: bytes are free again (release: pairs with the acquire in RingWriter::refresh_read_position)
    Atomics::template store<std::memory_order_release>(ring_.read_position, position_, Site::kRelease);
  }

  // True: the ring is empty and the next publish will ring, the caller may sleep. False: there is work, stay awake.
  bool arm() {
    // SYNC POINT: reader is asleep (pairs with the load of `wake_at` in publish() and reader_sleeps())
    Atomics::template exchange<std::memory_order_seq_cst>(ring_.wake_at, position_, Site::kArm);
    armed_ = true;
    // A frame published between the last poll() and the exchange rings no doorbell: look again. What stands there is
    // checked by poll().
    if (position_ == load_write_position(Site::kArmRecheck)) return true;
    disarm();
    return false;
  }

  // The reader is awake: publishing costs the writer no doorbell. Orders nothing: arm() looks again before a sleep.
  void disarm() {
    Atomics::template store<std::memory_order_relaxed>(ring_.wake_at, kAwake, Site::kDisarm);
    armed_ = false;
  }

  uint64_t position() const { return position_; }
  uint64_t bytes() const { return ring_.bytes; }
  bool armed() const { return armed_; }

 private:
  uint64_t load_write_position(Site site) const {
    // SYNC POINT: frame is visible (pairs with the exchange in publish(); seq_cst for the recheck in arm())
    return Atomics::template load<std::memory_order_seq_cst>(ring_.write_position, site);
  }

  bool refresh_write_position() {
    uint64_t written = load_write_position(Site::kPoll);
    if (written < position_ || written - position_ > ring_.bytes || written % kFrameAlignment != 0) {
      throw PeerCorrupt("the writer's position " + hex(written) + " does not follow " + hex(position_) +
                        " in a ring of " + std::to_string(ring_.bytes) + " bytes: closing the channel");
    }
    cached_write_position_ = written;
    return written != position_;
  }

  // Asks for all lines of a frame at once: a reader's loop alone keeps few misses in flight.
  static void prefetch(const RingFrame& frame) {
    const uint64_t bytes = std::min<uint64_t>(frame.header.length, kReaderPrefetchBytes);
    for (uint64_t offset = 64; offset < bytes; offset += 64) __builtin_prefetch(frame.address + offset);
  }

  void check(const RingFrame& frame) const {
    const FrameHeader& header = frame.header;
    if (header.position != position_) {
      throw PeerCorrupt("frame at " + hex(position_) + " is stamped " + hex(header.position) + ": closing the channel");
    }
    if (header.length < kFrameAlignment || header.length % kFrameAlignment != 0 ||
        header.length > cached_write_position_ - position_ || header.length > max_frame_bytes(ring_.bytes)) {
      throw PeerCorrupt("frame at " + hex(position_) + " claims " + std::to_string(header.length) + " bytes of " +
                        std::to_string(cached_write_position_ - position_) + " published: closing the channel");
    }
    if (header.flags & static_cast<uint16_t>(FrameFlag::HAS_CRC)) check_crc(frame);
  }

  static void check_crc(const RingFrame& frame) {
    FrameHeader zeroed = frame.header;
    zeroed.crc32c = 0;
    uint32_t crc = crc32c_of_frame(zeroed, frame.address);
    if (crc != frame.header.crc32c) {
      throw PeerCorrupt("frame at " + hex(frame.header.position) + " has CRC32C " + hex(crc) + ", its header says " +
                        hex(frame.header.crc32c) + ": closing the channel");
    }
  }

  static uint32_t crc32c_of_frame(const FrameHeader& header, const std::byte* frame) {
    std::string bytes(reinterpret_cast<const char*>(frame), header.length);  // debug only, a copy is fine
    std::memcpy(bytes.data(), &header, sizeof header);
    return crc32c(bytes.data(), bytes.size());
  }

  // This connection, private to the reader.
  RingMemory ring_;
  uint64_t position_ = 0;
  uint64_t cached_write_position_ = 0;
  bool armed_ = false;
};

}  // namespace tokring
