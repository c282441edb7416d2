// The one clock of all shared times: CLOCK_MONOTONIC in nanoseconds (the same in every process of the machine).
#pragma once
#include <cstdint>
#include <ctime>

namespace tokring {

inline uint64_t now_ns() noexcept {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000ULL + static_cast<uint64_t>(time.tv_nsec);
}

}  // namespace tokring
