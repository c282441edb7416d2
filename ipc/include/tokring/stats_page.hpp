// A mapped stats page: counters, gauges and histograms that any process may read while one process writes them.
#pragma once
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "tokring/atomics.hpp"
#include "tokring/clock.hpp"
#include "tokring/errors.hpp"
#include "tokring/fork_guard.hpp"
#include "tokring/segment.hpp"
#include "tokring/stats.hpp"

namespace tokring {

class StatsMap {
 public:
  // Maps the page behind `fd` (kept by the caller). A writer fills the header of a fresh page, else continues it: the
  // counters stay, the gauges restart at 0. Throws AttachError naming both sides.
  StatsMap(int fd, uint32_t role, uint32_t index, bool writable) : writable_(writable) {
    struct stat status {};
    if (fstat(fd, &status) != 0) throw AttachError("fstat of the stats page failed: " + errno_text(errno));
    if (static_cast<uint64_t>(status.st_size) != kStatsPageBytes) {
      throw AttachError("the stats page has " + std::to_string(status.st_size) + " bytes, this installation's have " +
                        std::to_string(kStatsPageBytes) + ": it belongs to another version of tokring");
    }
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* mapped = mmap(nullptr, kStatsPageBytes, protection, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (mapped == MAP_FAILED) throw AttachError("mapping the stats page failed: " + errno_text(errno));
    base_ = static_cast<std::byte*>(mapped);
    try {
      madvise(base_, kStatsPageBytes, MADV_DONTFORK);
      writable ? take_over(role, index) : check_header();
    } catch (...) {
      munmap(base_, kStatsPageBytes);
      throw;
    }
  }
  StatsMap(const StatsMap&) = delete;
  StatsMap& operator=(const StatsMap&) = delete;
  ~StatsMap() {
    if (!fork_.in_child()) munmap(base_, kStatsPageBytes);
  }

  StatsHeader header() const {
    fork_.check();
    StatsHeader header;
    std::memcpy(&header, base_, sizeof header);
    return header;
  }
  bool writable() const { return writable_; }

  uint64_t* words() const {
    fork_.check();
    return reinterpret_cast<uint64_t*>(base_ + kStatsHeaderBytes);
  }
  uint64_t* writable_words() const {
    if (!writable_) throw HandleDead("this stats page is attached read-only: only its own process writes it");
    return words();
  }
  uint64_t* channel(uint32_t peer) const { return words() + channel_word(peer); }

  uint64_t get(StatIndex stat) const { return get_relaxed(words() + stat_word(stat)); }

  // One observation: its bucket and the sum, in the row's unit. Negative and NaN count as 0.
  void observe(const StatRow& row, uint32_t instance, double value) const {
    uint64_t* words = writable_words() + row.first_word + instance * row.words;
    double checked = value > 0 ? value : 0;
    add_relaxed(words, static_cast<uint64_t>(checked * row.scale + 0.5));
    add_relaxed(words + 1 + bucket_of(row.bounds, row.num_bounds, checked), 1);
  }

 private:
  void take_over(uint32_t role, uint32_t index) {
    StatsHeader header;
    std::memcpy(&header, base_, sizeof header);
    if (header.magic != 0) {
      check_header();
      if (header.role != role || header.index != index) {
        throw AttachError("the stats page belongs to role " + std::to_string(header.role) + " index " +
                          std::to_string(header.index) + ", this process is role " + std::to_string(role) + " index " +
                          std::to_string(index));
      }
      reset_gauges();
    }
    uint32_t pid = static_cast<uint32_t>(getpid());
    header = StatsHeader{.magic = 0,
                         .stats_version = kStatsVersion,
                         .role = role,
                         .stats_hash = kStatsHash,
                         .page_bytes = kStatsPageBytes,
                         .index = index,
                         .pid = pid,
                         .process_start_time = process_start_time(pid)};
    std::memcpy(base_ + 8, reinterpret_cast<std::byte*>(&header) + 8, sizeof header - 8);
    // SYNC POINT: page is ready (the magic is written last; release, pairs with the acquire in check_header)
    StdAtomics::store<std::memory_order_release>(reinterpret_cast<uint64_t*>(base_), kStatsMagic, Site::kStats);
    set_relaxed(words() + stat_word(StatIndex::process_start_ns), now_ns());
  }

  void reset_gauges() {
    for (const StatRow& row : kStatsTable) {
      if (row.kind == 'g') set_relaxed(words() + row.first_word, 0);
    }
    for (uint32_t peer = 0; peer < kMaxPeers; ++peer) {
      for (ChannelWord word : {kWord_connection_generation, kWord_sent_position, kWord_received_position}) {
        set_relaxed(channel(peer) + word, 0);
      }
    }
  }

  void check_header() const {
    // SYNC POINT: page is ready (acquire: pairs with the release in take_over)
    auto* magic = reinterpret_cast<const uint64_t*>(base_);
    if (StdAtomics::load<std::memory_order_acquire>(magic, Site::kStats) != kStatsMagic) {
      throw AttachError("the stats page is not (yet) one of tokring's: its magic is " + hex(*magic));
    }
    StatsHeader found = header();
    if (found.stats_version != kStatsVersion || found.stats_hash != kStatsHash) {
      throw AttachError("the stats page of pid " + std::to_string(found.pid) + " has version " +
                        std::to_string(found.stats_version) + ", hash " + hex(found.stats_hash) +
                        "; this process has version " + std::to_string(kStatsVersion) + ", hash " + hex(kStatsHash) +
                        ": both must come from one installation of tokring");
    }
  }

  ForkGuard fork_;
  std::byte* base_;
  bool writable_;
};

}  // namespace tokring
