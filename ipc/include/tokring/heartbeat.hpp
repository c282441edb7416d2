// A native thread that says once a second that its process lives, and counts how long others have been silent.
// It counts its own ticks instead of comparing clocks: while the whole machine was suspended nobody hung.
#pragma once
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "tokring/stats_page.hpp"

namespace tokring {

class Heartbeat {
 public:
  // Another process's page, as seen from this one. `*_ticks` are words read by other threads.
  struct Watched {
    std::shared_ptr<StatsMap> page;
    uint64_t last_heartbeat = 0;
    uint64_t last_step_started = 0;
    uint64_t silent_ticks = 0;
    uint64_t step_ticks = 0;
  };

  Heartbeat(std::shared_ptr<StatsMap> page, double interval_s)
      : page_(std::move(page)), interval_(std::chrono::duration<double>(interval_s)) {
    page_->writable_words();  // throws for a read-only page
    beat();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat() { stop(); }

  void start() {
    fork_.check();
    if (thread_.joinable()) return;
    stopping_ = false;
    // Signals must find the main thread, or a blocking call there would not be interrupted.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "heartbeat");
  }

  // Idempotent. In a forked child there is no such thread to wait for.
  void stop() {
    if (!thread_.joinable()) return;
    if (fork_.in_child()) {
      thread_.detach();
      return;
    }
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // Starts counting the silence of another page; the returned object lives as long as this.
  const Watched* watch(std::shared_ptr<StatsMap> page) {
    std::lock_guard lock(mutex_);
    Watched& entry = watched_.emplace_back();
    entry.page = std::move(page);
    entry.last_heartbeat = entry.page->get(StatIndex::heartbeat_ticks);
    return &entry;
  }

  double seconds(const uint64_t* ticks) const { return static_cast<double>(get_relaxed(ticks)) * interval_.count(); }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, interval_, [this] { return stopping_; })) {
      beat();
      for (Watched& entry : watched_) look_at(entry);
    }
  }

  void beat() {
    uint64_t* words = page_->words();
    set_relaxed(words + stat_word(StatIndex::heartbeat_ns), now_ns());
    add_relaxed(words + stat_word(StatIndex::heartbeat_ticks), 1);
  }

  static void look_at(Watched& entry) {
    uint64_t heartbeat = entry.page->get(StatIndex::heartbeat_ticks);
    set_relaxed(&entry.silent_ticks, heartbeat == entry.last_heartbeat ? entry.silent_ticks + 1 : 0);
    entry.last_heartbeat = heartbeat;
    uint64_t step_started = entry.page->get(StatIndex::step_started_ns);
    bool same_step = step_started != 0 && step_started == entry.last_step_started;
    set_relaxed(&entry.step_ticks, same_step ? entry.step_ticks + 1 : 0);
    entry.last_step_started = step_started;
  }

  ForkGuard fork_;
  std::shared_ptr<StatsMap> page_;
  std::chrono::duration<double> interval_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::list<Watched> watched_;
  std::thread thread_;
};

}  // namespace tokring
