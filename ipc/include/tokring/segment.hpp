// One channel's shared segment: a sealed memfd, reserved whole, its two data areas mapped twice back to back.
// [0] header | [1024] control words | [4096] cancel table | REQ data | OUT data
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "tokring/atomics.hpp"
#include "tokring/errors.hpp"
#include "tokring/field_table.hpp"
#include "tokring/fork_guard.hpp"
#include "tokring/layout.hpp"
#include "tokring/memory_limit.hpp"
#include "tokring/ring.hpp"

namespace tokring {

// A descriptor with one owner.
class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

inline std::string errno_text(int error) {
  return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
}

// Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat); 0 if unknown. Informational: tells a
// reused pid apart.
inline uint64_t process_start_time(uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  uint64_t start = 0;
  fields >> start;
  return start;
}

// Sizes and offsets of a segment; a pure function of what HELLO asked for.
struct SegmentShape {
  uint64_t req_bytes;
  uint64_t out_bytes;
  uint32_t num_stream_slots;

  static SegmentShape rounded(uint64_t req_bytes, uint64_t out_bytes, uint32_t num_stream_slots) {
    return {std::bit_ceil(std::max<uint64_t>(req_bytes, kMinRingBytes)),
            std::bit_ceil(std::max<uint64_t>(out_bytes, kMinRingBytes)), num_stream_slots};
  }
  uint64_t cancel_offset() const { return kSegmentHeaderBytes; }
  uint64_t req_offset() const { return round_up(cancel_offset() + 4ULL * num_stream_slots, kDataAlignment); }
  uint64_t out_offset() const { return req_offset() + req_bytes; }
  uint64_t total() const { return out_offset() + out_bytes; }

  // Throws AttachError on a size no segment can have.
  void check(uint64_t max_segment_bytes) const {
    bool powers = std::has_single_bit(req_bytes) && std::has_single_bit(out_bytes);
    if (!powers || std::min(req_bytes, out_bytes) < kMinRingBytes ||
        std::max(req_bytes, out_bytes) > max_segment_bytes || num_stream_slots == 0 ||
        num_stream_slots > kMaxStreamSlots || total() > max_segment_bytes) {
      throw AttachError("a segment with REQ " + std::to_string(req_bytes) + " bytes, OUT " + std::to_string(out_bytes) +
                        " bytes and " + std::to_string(num_stream_slots) + " stream slots is not possible: rings are " +
                        "powers of two of at least " + std::to_string(kMinRingBytes) + " bytes, slots 1 to " +
                        std::to_string(kMaxStreamSlots) + ", all together at most " +
                        std::to_string(max_segment_bytes) + " bytes");
    }
  }
};

// The mapping of one segment in one process. Unmapped by the destructor (not in a forked child, which has no mapping).
class Segment {
 public:
  // Engine side: a new memfd, reserved, sealed, with a filled header. Throws AttachError.
  static std::shared_ptr<Segment> create(const SegmentShape& shape, uint32_t engine_index, uint32_t frontend_pid,
                                         uint64_t frontend_start_time) {
    OwnedFd fd(memfd_create("tokring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd.get() < 0) throw AttachError("memfd_create failed: " + errno_text(errno));
    reserve(fd.get(), shape.total());
    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw AttachError("sealing the segment failed: " + errno_text(errno));
    }
    std::shared_ptr<Segment> segment(new Segment(std::move(fd), shape));
    segment->fill_header(engine_index, frontend_pid, frontend_start_time);
    return segment;
  }

  // Front-end side: maps what the engine sent and checks every word of its header against what was asked for.
  // Throws AttachError naming both sides.
  static std::shared_ptr<Segment> attach(OwnedFd fd, const SegmentShape& asked, uint64_t connection_generation,
                                         uint32_t engine_pid) {
    check_seals(fd.get());
    struct stat status {};
    if (fstat(fd.get(), &status) != 0) throw AttachError("fstat of the segment failed: " + errno_text(errno));
    if (static_cast<uint64_t>(status.st_size) != asked.total()) {
      throw AttachError("the engine's segment has " + std::to_string(status.st_size) +
                        " bytes, this front end asked for " + std::to_string(asked.total()) +
                        ": both must come from one installation of tokring");
    }
    std::shared_ptr<Segment> segment(new Segment(std::move(fd), asked));
    segment->check_header(connection_generation, engine_pid);
    return segment;
  }

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    if (!fork_.in_child()) munmap(base_, reserved_);
  }

  int fd() const { return fd_.get(); }
  const SegmentShape& shape() const { return shape_; }
  const SegmentHeader& header() const { return header_; }
  SegmentControl* control() const { return reinterpret_cast<SegmentControl*>(base_ + kSegmentControlOffset); }
  uint32_t* cancel_table() const { return reinterpret_cast<uint32_t*>(base_ + shape_.cancel_offset()); }
  const ForkGuard& fork() const { return fork_; }

  RingMemory req() const {
    SegmentControl* words = control();
    return {&words->req_write_position, &words->req_read_position, &words->req_wake_at, req_data_, shape_.req_bytes};
  }
  RingMemory out() const {
    SegmentControl* words = control();
    return {&words->out_write_position, &words->out_read_position, &words->out_wake_at, out_data_, shape_.out_bytes};
  }

 private:
  Segment(OwnedFd fd, const SegmentShape& shape) : fd_(std::move(fd)), shape_(shape) {
    uint64_t head = shape.req_offset();
    reserved_ = head + 2 * shape.req_bytes + 2 * shape.out_bytes + kDataAlignment;
    void* range = mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) throw AttachError("reserving address space for the segment failed: " + errno_text(errno));
    base_ = static_cast<std::byte*>(range);
    auto* start = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uint64_t>(range), kDataAlignment));
    try {
      place(start, 0, head);
      req_data_ = place_twice(start + head, shape.req_offset(), shape.req_bytes);
      out_data_ = place_twice(req_data_ + 2 * shape.req_bytes, shape.out_offset(), shape.out_bytes);
    } catch (...) {
      munmap(range, reserved_);
      throw;
    }
    trim(static_cast<std::byte*>(range), start);
  }

  // Gives back the slack of the aligned reservation.
  void trim(std::byte* range, std::byte* start) {
    std::byte* end = out_data_ + 2 * shape_.out_bytes;
    std::byte* range_end = range + reserved_;
    if (start > range) munmap(range, static_cast<size_t>(start - range));
    if (range_end > end) munmap(end, static_cast<size_t>(range_end - end));
    base_ = start;
    reserved_ = static_cast<size_t>(end - start);
  }

  std::byte* place(std::byte* address, uint64_t offset, uint64_t bytes) {
    // MAP_POPULATE: a first touch costs microseconds per page and would show up in the first steps.
    int flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
    if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, fd_.get(), static_cast<off_t>(offset)) == MAP_FAILED) {
      throw AttachError("mapping the segment failed: " + errno_text(errno));
    }
    if (madvise(address, bytes, MADV_DONTFORK) != 0) throw AttachError("MADV_DONTFORK failed: " + errno_text(errno));
    return address;
  }

  std::byte* place_twice(std::byte* address, uint64_t offset, uint64_t bytes) {
    place(address, offset, bytes);
    place(address + bytes, offset, bytes);
    return address;
  }

  static void reserve(int fd, uint64_t bytes) {
    auto available = cgroup_memory_available();
    if (available && *available < bytes) {
      throw AttachError("the rings need " + std::to_string(bytes) + " bytes, the memory cgroup has " +
                        std::to_string(*available) + " left: raise its limit, or use smaller rings");
    }
    int error = 0;
    do {
      error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error != 0) {
      throw AttachError("reserving " + std::to_string(bytes) + " bytes for the rings failed: " + errno_text(error));
    }
  }

  static void check_seals(int fd) {
    int needed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & needed) != needed) {
      throw AttachError("the engine's segment is not a sealed memfd (seals " + hex(static_cast<uint32_t>(seals)) +
                        ", needed " + hex(static_cast<uint32_t>(needed)) + "): it could be truncated under us");
    }
  }

  void fill_header(uint32_t engine_index, uint32_t frontend_pid, uint64_t frontend_start_time) {
    SegmentControl* words = control();
    words->req_wake_at = kAwake;
    words->out_wake_at = kAwake;
    uint64_t generation = 0;
    while (generation == 0) {
      if (getrandom(&generation, sizeof generation, 0) != sizeof generation) generation = 0;
    }
    uint32_t pid = static_cast<uint32_t>(getpid());
    header_ = SegmentHeader{.magic = kSegmentMagic,
                            .layout_version = kLayoutVersion,
                            .header_bytes = kSegmentHeaderBytes,
                            .layout_hash = kLayoutHash,
                            .segment_bytes = shape_.total(),
                            .connection_generation = generation,
                            .req_offset = shape_.req_offset(),
                            .req_bytes = shape_.req_bytes,
                            .out_offset = shape_.out_offset(),
                            .out_bytes = shape_.out_bytes,
                            .cancel_offset = shape_.cancel_offset(),
                            .num_stream_slots = shape_.num_stream_slots,
                            .engine_index = engine_index,
                            .engine_pid = pid,
                            .frontend_pid = frontend_pid,
                            .engine_start_time = process_start_time(pid),
                            .frontend_start_time = frontend_start_time};
    std::memcpy(base_, &header_, sizeof header_);
  }

  void check_header(uint64_t connection_generation, uint32_t engine_pid) {
    std::memcpy(&header_, base_, sizeof header_);
    expect("magic", header_.magic, kSegmentMagic);
    expect("layout version", header_.layout_version, kLayoutVersion);
    expect("layout hash", header_.layout_hash, kLayoutHash);
    expect("header size", header_.header_bytes, kSegmentHeaderBytes);
    expect("segment size", header_.segment_bytes, shape_.total());
    expect("REQ offset", header_.req_offset, shape_.req_offset());
    expect("REQ size", header_.req_bytes, shape_.req_bytes);
    expect("OUT offset", header_.out_offset, shape_.out_offset());
    expect("OUT size", header_.out_bytes, shape_.out_bytes);
    expect("cancel table offset", header_.cancel_offset, shape_.cancel_offset());
    expect("number of stream slots", header_.num_stream_slots, shape_.num_stream_slots);
    expect("connection generation", header_.connection_generation, connection_generation);
    expect("engine pid", header_.engine_pid, engine_pid);
    expect("front end pid", header_.frontend_pid, static_cast<uint32_t>(getpid()));
  }

  static void expect(const char* what, uint64_t found, uint64_t needed) {
    if (found != needed) {
      throw AttachError(std::string("segment header: the engine wrote ") + what + " " + hex(found) +
                        ", this front end needs " + hex(needed) +
                        ": both must come from one installation of tokring; restart the server");
    }
  }

  OwnedFd fd_;
  SegmentShape shape_;
  SegmentHeader header_{};  // private copy: the shared one is never looked at again
  ForkGuard fork_;
  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
  std::byte* req_data_ = nullptr;
  std::byte* out_data_ = nullptr;
};

}  // namespace tokring
