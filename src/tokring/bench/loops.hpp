// Both sides of the native (L0) measurements: whole loops without Python, so that nothing but the transport is timed.
// Stamps are CLOCK_MONOTONIC nanoseconds, one word a step; `acked` counts the steps the reader is done with.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "tokring/channel.hpp"

namespace tokring::bench {

inline constexpr uint64_t kPatienceNs = 30'000'000'000;  // a peer that is silent for so long is dead

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline void spin_for(uint64_t ns) {
  for (uint64_t end = now_ns() + ns; now_ns() < end;) relax();
}

// Waits for `word` >= `value` without a syscall.
inline void poll_until(uint64_t* word, uint64_t value) {
  for (uint64_t spins = 1; std::atomic_ref(*word).load(std::memory_order_acquire) < value; ++spins) {
    relax();
    if (spins % (1 << 24) == 0) sched_yield();
  }
}

inline uint64_t thread_cpu_ns() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

// Waits until `done(now)`, but lets this process's own threads (a transport's I/O thread, say) have the core.
// Returns the CPU time that this thread spent waiting.
template <class Done>
uint64_t yield_while_not(Done done) {
  const uint64_t start = thread_cpu_ns();
  while (!done(now_ns())) {
    for (int i = 0; i < 16; ++i) relax();
    sched_yield();
  }
  return thread_cpu_ns() - start;
}

// Throws if nothing happens for kPatienceNs.
inline uint64_t yield_until(uint64_t* word, uint64_t value) {
  const uint64_t deadline = now_ns() + kPatienceNs;
  return yield_while_not([=](uint64_t now) {
    if (now > deadline) throw std::runtime_error("the other side of the benchmark is silent");
    return std::atomic_ref(*word).load(std::memory_order_acquire) >= value;
  });
}

inline uint64_t yield_for(uint64_t ns) {
  return yield_while_not([end = now_ns() + ns](uint64_t now) { return now >= end; });
}

// As above, off the core.
inline uint64_t sleep_for(uint64_t ns) {
  const uint64_t start = thread_cpu_ns();
  timespec left{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
  }
  return thread_cpu_ns() - start;
}

// What a loop needs of the board that both processes map.
struct Track {
  std::span<uint64_t> stamps;  // sent or delivered, one a step
  uint64_t* acked;
  bool closed;      // a step is sent when the one before is acknowledged
  uint64_t gap_ns;  // between acknowledgement and the next step: time in which prefetched lines arrive
};

// Eight sums side by side: one alone would wait for its additions, not for the bytes.
inline __attribute__((always_inline)) uint64_t sum_words_lanes(const std::byte* bytes, size_t length) {
  const auto* words = reinterpret_cast<const uint64_t*>(bytes);
  const size_t count = length / 8;
  uint64_t sums[8] = {};
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  }
  for (; i < count; ++i) sums[0] += words[i];
  return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline uint64_t sum_words_avx2(const std::byte* bytes, size_t length) {
  return sum_words_lanes(bytes, length);
}
#endif

// Reads as wide as the memcpy of the bound, for which the C library picks AVX2 at run time.
inline uint64_t sum_words(const std::byte* bytes, size_t length) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return sum_words_avx2(bytes, length);
#endif
  return sum_words_lanes(bytes, length);
}

// One step's columns, owned.
struct StepSource {
  std::vector<uint32_t> stream_slot, slot_generation, token_index;
  std::vector<int32_t> token_id, rank, top_id;
  std::vector<float> logprob, top_logprob;
  uint32_t width = 0;

  StepColumns columns() const {
    StepColumns step;
    step.stream_slot = stream_slot;
    step.slot_generation = slot_generation;
    step.token_id = token_id;
    step.logprob_token_index = token_index;
    step.logprob_rank = rank;
    step.logprob = logprob;
    step.top_id = top_id;
    step.top_logprob = top_logprob;
    step.logprobs_width = width;
    return step;
  }
};

class RingWriterLoop {
 public:
  RingWriterLoop(int control, int req_doorbell, int out_doorbell, StepSource source)
      : source_(std::move(source)),
        end_(serve_segment(control, 0, 1ULL << 30, 30.0).segment, req_doorbell, out_doorbell, ChannelOptions{}) {}

  // Sends the steps [first, last).
  void run(const Track& track, uint64_t first, uint64_t last) {
    const StepColumns step = source_.columns();
    for (uint64_t i = first; i < last; ++i) {
      track.stamps[i] = now_ns();
      while (!end_.write_step(step)) relax();
      end_.publish();
      end_.ring();
      if (track.closed) poll_until(track.acked, i + 1);
      if (track.gap_ns > 0) spin_for(track.gap_ns);
    }
  }

  uint64_t doorbells_sent() const { return end_.counters()[kWord_doorbells_sent]; }
  uint64_t doorbells_suppressed() const { return end_.counters()[kWord_doorbells_suppressed]; }

 private:
  StepSource source_;
  EngineEnd<> end_;
};

class RingReaderLoop {
 public:
  RingReaderLoop(int control, int req_doorbell, int out_doorbell, const SegmentShape& shape)
      : end_(request_segment(control, shape, 0, 30.0), req_doorbell, out_doorbell, ChannelOptions{}) {}

  // Reads every byte of the steps [first, last) behind their headers; returns the sum of their 64-bit words.
  uint64_t run(const Track& track, uint64_t first, uint64_t last) {
    uint64_t total = 0;
    for (uint64_t i = first; i < last; ++i) {
      std::optional<OutFrame> frame;
      while (!(frame = end_.poll())) relax();
      total += sum_words(frame->address + sizeof(FrameHeader), frame->header.length - sizeof(FrameHeader));
      end_.release();
      track.stamps[i] = now_ns();
      std::atomic_ref(*track.acked).store(i + 1, std::memory_order_release);
    }
    return total;
  }

 private:
  FrontEndEnd<> end_;
};

// The bound: `bytes` copied into shared memory, one word published, `bytes` copied out. Walks through `area` as a ring
// does. No bytes: one cache line there, the acknowledgement back, that is ping-pong.
class CopyLoop {
 public:
  CopyLoop(std::span<std::byte> area, uint64_t* published, uint64_t bytes)
      : area_(area),
        published_(published),
        private_(bytes, std::byte{7}),
        stride_(round_up(bytes + 1, kFrameAlignment)) {
    if (stride_ * 2 > area.size()) throw std::invalid_argument("the area is too small for the bytes to be copied");
    // Map every page in this process: the rings are populated too, and a fault costs microseconds.
    for (size_t at = 0; at < area.size(); at += 4096)
      std::atomic_ref(*reinterpret_cast<uint64_t*>(&area[at])).fetch_add(0);
  }

  void write(const Track& track, uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      track.stamps[i] = now_ns();
      std::memcpy(place(i), private_.data(), private_.size());
      std::atomic_ref(*published_).exchange(i + 1, std::memory_order_seq_cst);
      prefetch(place(i + 1));
      poll_until(track.acked, i + 1);
      if (track.gap_ns > 0) spin_for(track.gap_ns);
    }
  }

  void read(const Track& track, uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      poll_until(published_, i + 1);
      const std::byte* source = place(i);
      prefetch_for_read(source);
      std::memcpy(private_.data(), source, private_.size());
      asm volatile("" : : "r"(private_.data()) : "memory");
      track.stamps[i] = now_ns();
      std::atomic_ref(*track.acked).store(i + 1, std::memory_order_release);
    }
  }

 private:
  std::byte* place(uint64_t step) const { return area_.data() + step % (area_.size() / stride_) * stride_; }

  // The same hints as in RingReader.
  void prefetch_for_read(const std::byte* source) const {
    for (uint64_t offset = 0; offset < std::min<uint64_t>(private_.size(), kReaderPrefetchBytes); offset += 64)
      __builtin_prefetch(source + offset);
  }

  // The same hints as RingWriter::prefetch_next.
  void prefetch(const std::byte* next) const {
    for (uint64_t offset = 0; offset < std::min<uint64_t>(private_.size(), kMaxPrefetchBytes); offset += 64) {
#if defined(__x86_64__)
      asm volatile("prefetchw %0" : : "m"(next[offset]));
#else
      __builtin_prefetch(next + offset, 1);
#endif
    }
  }

  std::span<std::byte> area_;
  uint64_t* published_;
  std::vector<std::byte> private_;
  uint64_t stride_;
};

}  // namespace tokring::bench
