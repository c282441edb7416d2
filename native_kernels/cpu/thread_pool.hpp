// Persistent worker threads for the kernels: spin briefly for the next job, then sleep on a futex.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tokring::cpu {

// One pool per process. A job is `num_tasks` independent tasks; the calling thread works too. Which thread runs a
// task is left to chance, so a task's result must not depend on it: that keeps results equal for any thread count.
class ThreadPool {
 public:
  static ThreadPool& instance();

  // Threads that take part in a job, the caller included; >= 1. Ends or starts workers at the next job.
  void set_num_threads(int num_threads, int worker_nice = 0);
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // How long an idle worker spins before it sleeps; 0 = sleep at once.
  void set_spin_us(int spin_us) { spin_us_.store(spin_us, std::memory_order_relaxed); }

  // Runs task(index) for every index in [0, num_tasks), on at most `limit` threads (0 = all); returns when all are
  // done. `task` must not throw. Callers in several threads take turns.
  template <class Task>
  void run(int64_t num_tasks, Task&& task, int limit = 0) {
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || limit == 1 || num_threads() == 1) {
      for (int64_t index = 0; index < num_tasks; ++index) task(index);
      return;
    }
    auto call = [](void* context, int64_t index) { (*static_cast<std::remove_reference_t<Task>*>(context))(index); };
    run_shared(num_tasks, call, const_cast<void*>(static_cast<const void*>(&task)), limit);
  }

  ~ThreadPool();

 private:
  ThreadPool();
  void run_shared(int64_t num_tasks, void (*call)(void*, int64_t), void* context, int limit);
  void start_workers();
  void stop_workers();
  void work(int worker, uint32_t seen);
  bool take_task(uint32_t& index);
  void take_tasks();

  std::mutex caller_;  // one job at a time
  std::vector<std::thread> workers_;
  int worker_nice_ = 0;
  std::atomic<int> num_threads_{1};
  std::atomic<int> spin_us_{30};

  // The current job; written by the caller before `untaken_` is filled, read only by who has taken a task.
  void (*call_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  std::atomic<int> num_helpers_{0};
  alignas(128) std::atomic<uint32_t> job_{0};  // raised once a job: workers sleep on it
  std::atomic<bool> stopping_{false};
  alignas(128) std::atomic<uint32_t> untaken_{0};     // tasks nobody has taken yet
  alignas(128) std::atomic<uint32_t> unfinished_{0};  // tasks still to be completed: the caller sleeps on it
};

}  // namespace tokring::cpu
