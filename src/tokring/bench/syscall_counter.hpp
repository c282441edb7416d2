// Counts the system calls of two child processes, all threads, by ptrace. Timings of a traced run mean nothing; a count
// is exact. Not counted: sched_yield and clock_gettime, which only the benchmark's own waiting calls.
#pragma once
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace tokring::bench {

class SyscallCounter {
 public:
  // `pids`: two processes in the process group of the first, still single-threaded. They may run once this returns.
  explicit SyscallCounter(std::array<pid_t, 2> pids) : group_(pids[0]) {
    for (size_t side = 0; side < 2; ++side) seize(pids[side], side);
  }

  // Follows both until they exit. counting[side] != 0 while calls are to be counted.
  std::array<uint64_t, 2> run(const std::array<uint64_t*, 2>& counting) {
    std::array<uint64_t, 2> counts{};
    while (!side_of_.empty()) {
      int status = 0;
      pid_t thread = waitpid(-group_, &status, __WALL);
      if (thread < 0 && errno == EINTR) continue;
      if (thread < 0) break;
      if (WIFEXITED(status) || WIFSIGNALED(status)) {
        side_of_.erase(thread);
      } else {
        on_stop(thread, status, counting, counts);
      }
    }
    return counts;
  }

 private:
  void seize(pid_t pid, size_t side) {
    const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SEIZE, pid, 0, options) != 0 || ptrace(PTRACE_INTERRUPT, pid, 0, 0) != 0) {
      throw std::runtime_error(std::string("ptrace is not allowed here: ") + std::strerror(errno));
    }
    side_of_[pid] = side;
  }

  void on_stop(pid_t thread, int status, const std::array<uint64_t*, 2>& counting, std::array<uint64_t, 2>& counts) {
    int signal = WSTOPSIG(status);
    const int event = status >> 16;
    if (event == PTRACE_EVENT_CLONE) {
      unsigned long child = 0;
      ptrace(PTRACE_GETEVENTMSG, thread, 0, &child);
      side_of_[static_cast<pid_t>(child)] = side_of_[thread];
    }
    if (signal == (SIGTRAP | 0x80)) count(thread, counting, counts);
    if (signal == (SIGTRAP | 0x80) || event != 0) signal = 0;
    ptrace(PTRACE_SYSCALL, thread, 0, signal);
  }

  void count(pid_t thread, const std::array<uint64_t*, 2>& counting, std::array<uint64_t, 2>& counts) {
    __ptrace_syscall_info info{};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof info, &info) <= 0) return;
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY) return;
    if (info.entry.nr == SYS_sched_yield || info.entry.nr == SYS_clock_gettime) return;
    auto side = side_of_.find(thread);
    if (side == side_of_.end()) return;
    if (std::atomic_ref(*counting[side->second]).load(std::memory_order_relaxed) != 0) ++counts[side->second];
  }

  pid_t group_;
  std::map<pid_t, size_t> side_of_;  // by thread id
};

}  // namespace tokring::bench
