#include "thread_pool.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace tokring::cpu {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Cores this process may use, less one for whoever shares the machine with us (the front end).
int default_num_threads() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return std::max(1, CPU_COUNT(&allowed) - 1);
}

// Waits until `word` differs from `old`: spins for spin_us, then sleeps in the kernel.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t old, int spin_us) {
  if (spin_us > 0) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
    do {
      for (int i = 0; i < 64; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < end);
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  static ThreadPool pool;
  return pool;
}

ThreadPool::ThreadPool() : num_threads_(default_num_threads()) {}

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::set_num_threads(int num_threads, int worker_nice) {
  std::lock_guard guard(caller_);
  stop_workers();
  worker_nice_ = worker_nice;
  num_threads_.store(std::max(1, num_threads), std::memory_order_relaxed);
}

void ThreadPool::start_workers() {
  const int wanted = num_threads() - 1;
  workers_.reserve(wanted);
  while (static_cast<int>(workers_.size()) < wanted) {
    const uint32_t seen = job_.load(std::memory_order_relaxed);
    workers_.emplace_back([this, seen, worker = static_cast<int>(workers_.size())] { work(worker, seen); });
  }
}

void ThreadPool::stop_workers() {
  if (workers_.empty()) return;
  stopping_.store(true, std::memory_order_relaxed);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stopping_.store(false, std::memory_order_relaxed);
}

void ThreadPool::run_shared(int64_t num_tasks, void (*call)(void*, int64_t), void* context, int limit) {
  std::lock_guard guard(caller_);
  start_workers();
  const int helpers = static_cast<int>(workers_.size());
  call_ = call;
  context_ = context;
  num_helpers_.store(limit > 0 ? std::min(helpers, limit - 1) : helpers, std::memory_order_relaxed);
  unfinished_.store(static_cast<uint32_t>(num_tasks), std::memory_order_relaxed);
  // SYNC POINT: the job is visible (acquire: take_task)
  untaken_.store(static_cast<uint32_t>(num_tasks), std::memory_order_release);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  take_tasks();
  // Only tasks are waited for, not workers: one that wakes late finds nothing untaken and touches nothing.
  // SYNC POINT: the tasks' results are visible (release: the countdown in take_tasks)
  for (uint32_t left = unfinished_.load(std::memory_order_acquire); left != 0;
       left = unfinished_.load(std::memory_order_acquire)) {
    wait_for_change(unfinished_, left, spin_us_.load(std::memory_order_relaxed));
  }
}

void ThreadPool::work(int worker, uint32_t seen) {
  if (worker_nice_ != 0) {
    // Linux keeps a nice value per thread; failing to lower our own priority is no reason to stop.
    (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), worker_nice_);
  }
  for (;;) {
    wait_for_change(job_, seen, spin_us_.load(std::memory_order_relaxed));
    seen = job_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (worker < num_helpers_.load(std::memory_order_relaxed)) take_tasks();
  }
}

// While we hold a taken task its job can't end, so the job's fields are stable.
bool ThreadPool::take_task(uint32_t& index) {
  uint32_t left = untaken_.load(std::memory_order_acquire);
  while (left != 0) {
    if (untaken_.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) {
      index = left - 1;
      return true;
    }
  }
  return false;
}

void ThreadPool::take_tasks() {
  uint32_t index = 0;
  while (take_task(index)) {
    call_(context_, index);
    // SYNC POINT: this task's results are visible (acquire: the wait in run_shared)
    if (unfinished_.fetch_sub(1, std::memory_order_release) == 1) unfinished_.notify_one();
  }
}

}  // namespace tokring::cpu
