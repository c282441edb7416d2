// Every std::atomic of tokring's shared memory is in this file: one policy class. The ring, the cancel table and the
// stats page are templates over it, so that the same code runs under a deterministic scheduler (part 2), which also
// weakens one `Site` at a time and must then find the bug.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tokring {

// One name per place where the protocol touches a shared word.
enum class Site : uint8_t {
  kPublish,        // writer: write_position.exchange
  kPublishWakeAt,  // writer: wake_at.load after publishing
  kSpace,          // writer: read_position.load
  kPoll,           // reader: write_position.load
  kRelease,        // reader: read_position.store
  kArm,            // reader: wake_at.exchange
  kArmRecheck,     // reader: write_position.load after arming
  kDisarm,         // reader: wake_at.store
  kCancelWord,     // front end: cancel[stream_slot].store
  kCancelCount,    // front end: cancel_count.exchange
  kCancelWakeAt,   // front end: wake_at.load after cancelling
  kCancelRead,     // engine: cancel[stream_slot].load
  kCancelRecheck,  // engine: cancel_count.load
  kPeerState,      // both: state words
  kStats,          // stats page words
};

struct StdAtomics {
  template <std::memory_order kOrder, class T>
  static T load(const T* word, Site) noexcept {
    static_assert(std::atomic_ref<T>::is_always_lock_free);
    return std::atomic_ref<T>(*const_cast<T*>(word)).load(kOrder);
  }
  template <std::memory_order kOrder, class T>
  static void store(T* word, T value, Site) noexcept {
    std::atomic_ref<T>(*word).store(value, kOrder);
  }
  template <std::memory_order kOrder, class T>
  static T exchange(T* word, T value, Site) noexcept {
    return std::atomic_ref<T>(*word).exchange(value, kOrder);
  }
  // Plain bytes of a frame were written / are about to be read: a race detector's hooks, nothing here.
  static void wrote(const void*, size_t) noexcept {}
  static void reading(const void*, size_t) noexcept {}
};

// A counter with one writer: no read-modify-write instruction needed.
template <class Atomics = StdAtomics>
inline void add_relaxed(uint64_t* word, uint64_t amount) noexcept {
  // Orders nothing: statistics only.
  uint64_t value = Atomics::template load<std::memory_order_relaxed>(word, Site::kStats);
  Atomics::template store<std::memory_order_relaxed>(word, value + amount, Site::kStats);
}
template <class Atomics = StdAtomics>
inline void set_relaxed(uint64_t* word, uint64_t value) noexcept {
  Atomics::template store<std::memory_order_relaxed>(word, value, Site::kStats);
}
template <class Atomics = StdAtomics>
inline uint64_t get_relaxed(const uint64_t* word) noexcept {
  return Atomics::template load<std::memory_order_relaxed>(word, Site::kStats);
}

}  // namespace tokring
