// A memory with C++'s weak orders and a scheduler, both deterministic: threads are coroutines of one OS thread, every
// atomic operation is a point where another one may run, and every load may return any store that the orders in force
// allow. After the idea of folly's DeterministicSchedule and BufferedAtomic.
//
// Each word keeps the history of its stores; each thread has a view: per word the oldest store it may still read, and
// a vector clock. A release store carries the view of its thread, an acquire load takes it over. A seq_cst load reads
// no store older than the word's last seq_cst store. Bytes of frames are checked with the vector clocks: an access
// that does not happen after the other side's is a data race. Stores take effect in program order, which is complete
// for words with one writer; what a delayed load could see is seen as a race on the bytes instead.
#pragma once
#include <sys/ioctl.h>
#include <ucontext.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tokring/atomics.hpp"

namespace weak_memory {

using tokring::Site;

constexpr size_t kThreads = 2;
constexpr size_t kMaxWords = 24;
constexpr size_t kStackBytes = 256 * 1024;
constexpr int kMaxSteps = 5000;

// ---- what a schedule is made of: a sequence of choices ----

class Choices {
 public:
  virtual ~Choices() = default;
  // 0 to count - 1. 0 means: go on with the same thread, or read the newest store.
  virtual size_t pick(size_t count) = 0;
  virtual bool may_deviate() const = 0;
};

class RandomChoices : public Choices {
 public:
  explicit RandomChoices(uint64_t seed) : random_(seed), stay_(random_() % 4) {}
  size_t pick(size_t count) override {
    uint64_t number = random_();
    return number % 4 < stay_ ? 0 : (number >> 8) % count;  // some schedules switch rarely, some at every step
  }
  bool may_deviate() const override { return true; }

 private:
  std::mt19937_64 random_;
  uint64_t stay_;
};

// Depth-first over all schedules with at most `max_deviations` choices other than 0.
class ExhaustiveChoices : public Choices {
 public:
  explicit ExhaustiveChoices(size_t max_deviations) : max_deviations_(max_deviations) {}

  size_t pick(size_t count) override {
    if (next_ == path_.size()) path_.push_back({0, count});
    size_t chosen = path_[next_++].first;
    deviations_ += chosen != 0;
    return chosen;
  }
  bool may_deviate() const override { return deviations_ < max_deviations_; }

  // The next schedule; false: that was all.
  bool advance() {
    next_ = 0;
    deviations_ = 0;
    while (!path_.empty() && path_.back().first + 1 == path_.back().second) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().first;
    return true;
  }

 private:
  size_t max_deviations_;
  size_t deviations_ = 0;
  size_t next_ = 0;
  std::vector<std::pair<size_t, size_t>> path_;  // choice, out of how many
};

// ---- one place of the protocol, broken on purpose ----

struct Mutation {
  Site site{};
  std::memory_order order = std::memory_order_seq_cst;
  bool skip = false;  // the operation is left out: a store stores nothing, a load returns `skipped_value`
  bool active = false;
};

// ---- memory and threads of one schedule ----

class World {
 public:
  static World& current() {
    static World world;
    return world;
  }

  void begin(Choices& choices, const Mutation& mutation) {
    choices_ = &choices;
    mutation_ = mutation;
    histories_.clear();
    word_of_.clear();
    lines_.clear();
    failure_.clear();
    steps_ = 0;
    num_stores_ = 0;
    running_ = kThreads;
    for (Thread& thread : threads_) thread.restart();
  }

  // Runs both bodies to their end. "" or what went wrong.
  const std::string& run(const std::array<std::function<void()>, kThreads>& bodies) {
    for (size_t i = 0; i < kThreads; ++i) threads_[i].body = &bodies[i];
    for (size_t i = 0; i < kThreads; ++i) prepare(i);
    running_ = choices_->may_deviate() ? choices_->pick(kThreads) : 0;
    swapcontext(&main_, &threads_[running_].context);
    running_ = kThreads;
    return failure_;
  }

  void fail(const std::string& what) {
    if (failure_.empty()) failure_ = what;
    if (running_ == kThreads) return;
    swapcontext(&threads_[running_].context, &main_);  // never comes back
  }

  // Sleeps until a byte is in the pipe `fd`; who sleeps for ever has missed a wake-up.
  void sleep_on(int fd) {
    Thread& me = threads_[running_];
    me.doorbell_fd = fd;
    ++sleeps;
    switch_away();
    me.doorbell_fd = -1;
  }

  // Waits for any store of the other thread, and then sees it: staleness is finite.
  void wait_for_news() {
    Thread& me = threads_[running_];
    me.waits_for_news = me.known_stores == num_stores_;
    if (me.waits_for_news) switch_away();
    me.known_stores = num_stores_;
    me.reads_newest = true;
  }

  template <class T>
  T load(const T* word, Site site, std::memory_order order) {
    if (site == Site::kStats || running_ == kThreads) return *word;
    step();
    weaken(site, order);
    size_t at = word_index(word);
    if (mutation_.active && mutation_.skip && mutation_.site == site)
      return static_cast<T>(threads_[running_].last_stored);
    return static_cast<T>(read(at, order));
  }

  template <class T>
  void store(T* word, T value, Site site, std::memory_order order) {
    if (site == Site::kStats || running_ == kThreads) {
      *word = value;
      return;
    }
    step();
    if (mutation_.active && mutation_.skip && mutation_.site == site) return;
    weaken(site, order);
    append(word_index(word), static_cast<uint64_t>(value), order, nullptr);
    *word = value;
  }

  template <class T>
  T exchange(T* word, T value, Site site, std::memory_order order) {
    if (running_ == kThreads) return std::exchange(*word, value);
    step();
    weaken(site, order);
    size_t at = word_index(word);
    // A read-modify-write reads the newest store, whatever its order.
    std::vector<Store>& history = histories_[at];
    const Store old = history.back();
    Thread& me = threads_[running_];
    me.view.oldest[at] = static_cast<uint32_t>(history.size() - 1);
    if (acquires(order)) me.view.join(old.view);
    append(at, static_cast<uint64_t>(value), order, &old.view);
    *word = value;
    return static_cast<T>(old.value);
  }

  void wrote(const void* start, size_t bytes) { touch(start, bytes, true); }
  void reading(const void* start, size_t bytes) { touch(start, bytes, false); }

  uint64_t sleeps = 0;  // over all schedules

 private:
  struct View {
    std::array<uint32_t, kMaxWords> oldest{};
    std::array<uint32_t, kThreads> clock{};
    void join(const View& other) {
      for (size_t i = 0; i < kMaxWords; ++i) oldest[i] = std::max(oldest[i], other.oldest[i]);
      for (size_t i = 0; i < kThreads; ++i) clock[i] = std::max(clock[i], other.clock[i]);
    }
  };
  struct Store {
    uint64_t value = 0;
    View view;  // what an acquire load of it takes over
    bool sequential = false;
  };
  struct Line {
    std::array<uint32_t, kThreads> read{}, written{};
  };
  struct Thread {
    ucontext_t context{};
    std::vector<char> stack = std::vector<char>(kStackBytes);
    const std::function<void()>* body = nullptr;
    View view;
    uint64_t last_stored = 0;
    int doorbell_fd = -1;
    size_t known_stores = 0;  // when it last waited for news
    bool waits_for_news = false, reads_newest = false, done = false;

    void restart() {
      view = View{};
      view.clock.fill(0);
      last_stored = 0;
      doorbell_fd = -1;
      known_stores = 0;
      waits_for_news = reads_newest = done = false;
    }
    bool may_run() const {
      if (done || waits_for_news) return false;
      if (doorbell_fd < 0) return true;
      int waiting = 0;
      ioctl(doorbell_fd, FIONREAD, &waiting);
      return waiting > 0;
    }
  };

  static bool acquires(std::memory_order order) {
    return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
           order == std::memory_order_seq_cst;
  }
  static bool releases(std::memory_order order) {
    return order == std::memory_order_release || order == std::memory_order_acq_rel ||
           order == std::memory_order_seq_cst;
  }

  void weaken(Site site, std::memory_order& order) const {
    if (mutation_.active && !mutation_.skip && mutation_.site == site) order = mutation_.order;
  }

  template <class T>
  size_t word_index(const T* word) {
    auto [entry, is_new] = word_of_.try_emplace(word, histories_.size());
    if (is_new) {
      if (histories_.size() == kMaxWords) std::abort();
      histories_.emplace_back();
      histories_.back().push_back({static_cast<uint64_t>(*word), View{}, true});
    }
    return entry->second;
  }

  uint64_t read(size_t at, std::memory_order order) {
    Thread& me = threads_[running_];
    const std::vector<Store>& history = histories_[at];
    size_t newest = history.size() - 1, oldest = me.view.oldest[at];
    if (order == std::memory_order_seq_cst) {
      size_t last = newest;
      while (last > oldest && !history[last].sequential) --last;
      oldest = last;
    }
    size_t chosen = newest;
    if (newest > oldest && !me.reads_newest && choices_->may_deviate()) chosen -= choices_->pick(newest - oldest + 1);
    me.reads_newest = false;
    me.view.oldest[at] = static_cast<uint32_t>(chosen);
    if (acquires(order)) me.view.join(history[chosen].view);
    return history[chosen].value;
  }

  void append(size_t at, uint64_t value, std::memory_order order, const View* read_view) {
    Thread& me = threads_[running_];
    std::vector<Store>& history = histories_[at];
    me.view.oldest[at] = static_cast<uint32_t>(history.size());
    me.last_stored = value;
    ++me.view.clock[running_];
    Store made{value, View{}, order == std::memory_order_seq_cst};
    if (releases(order)) made.view = me.view;
    if (read_view != nullptr) made.view.join(*read_view);
    made.view.oldest[at] = static_cast<uint32_t>(history.size());
    history.push_back(made);
    ++num_stores_;
    for (Thread& thread : threads_) thread.waits_for_news &= &thread == &me;
  }

  void touch(const void* start, size_t bytes, bool writes) {
    if (running_ == kThreads) return;
    const View& view = threads_[running_].view;
    uintptr_t first = reinterpret_cast<uintptr_t>(start) / 64,
              last = (reinterpret_cast<uintptr_t>(start) + bytes - 1) / 64;
    for (uintptr_t line = first; line <= last; ++line) {
      Line& state = lines_[line];
      for (size_t other = 0; other < kThreads; ++other) {
        if (other == running_) continue;
        bool after_writes = state.written[other] <= view.clock[other];
        bool after_reads = state.read[other] <= view.clock[other];
        if (!after_writes) return fail(writes ? "race: written over a write" : "race: read before it is published");
        if (writes && !after_reads) return fail("race: overwritten while it may still be read");
      }
      // + 1: an access now happens before what the next release store carries.
      (writes ? state.written : state.read)[running_] = view.clock[running_] + 1;
    }
  }

  // Before every atomic operation: perhaps the other thread runs first.
  void step() {
    if (++steps_ > kMaxSteps) return fail("no end after so many steps");
    size_t runnable = 0, other = 0;
    for (size_t i = 0; i < kThreads; ++i) {
      if (i != running_ && threads_[i].may_run()) {
        ++runnable;
        other = i;
      }
    }
    if (runnable > 0 && choices_->may_deviate() && choices_->pick(2) == 1) go_to(other);
  }

  // The running thread can't go on.
  void switch_away() {
    size_t me = running_;
    for (size_t i = 0; i < kThreads; ++i) {
      size_t candidate = (me + 1 + i) % kThreads;  // the others first
      if (threads_[candidate].may_run()) {
        if (candidate != me) go_to(candidate);
        return;
      }
    }
    fail("everyone waits: a wake-up was lost");
  }

  void go_to(size_t next) {
    size_t me = std::exchange(running_, next);
    swapcontext(&threads_[me].context, &threads_[next].context);
  }

  void prepare(size_t index) {
    Thread& thread = threads_[index];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, &World::enter, 0);
  }

  static void enter() {
    World& world = current();
    Thread& me = world.threads_[world.running_];
    (*me.body)();
    me.done = true;
    for (Thread& thread : world.threads_) thread.waits_for_news = false;
    for (size_t i = 0; i < kThreads; ++i) {
      if (world.threads_[i].may_run()) world.go_to(i);
    }
    for (Thread& thread : world.threads_) {
      if (!thread.done) world.fail("someone sleeps for ever: a wake-up was lost");
    }
    swapcontext(&me.context, &world.main_);
  }

  // whole process
  ucontext_t main_{};
  std::array<Thread, kThreads> threads_;
  // this schedule
  Choices* choices_ = nullptr;
  Mutation mutation_;
  std::vector<std::vector<Store>> histories_;
  std::unordered_map<const void*, size_t> word_of_;
  std::unordered_map<uintptr_t, Line> lines_;
  std::string failure_;
  size_t running_ = kThreads;  // kThreads: outside of any
  int steps_ = 0;
  size_t num_stores_ = 0;
};

// The policy for RingWriter, RingReader, FrontEndEnd and EngineEnd.
struct Atomics {
  template <std::memory_order kOrder, class T>
  static T load(const T* word, Site site) {
    return World::current().load(word, site, kOrder);
  }
  template <std::memory_order kOrder, class T>
  static void store(T* word, T value, Site site) {
    World::current().store(word, value, site, kOrder);
  }
  template <std::memory_order kOrder, class T>
  static T exchange(T* word, T value, Site site) {
    return World::current().exchange(word, value, site, kOrder);
  }
  static void wrote(const void* start, size_t bytes) { World::current().wrote(start, bytes); }
  static void reading(const void* start, size_t bytes) { World::current().reading(start, bytes); }
};

}  // namespace weak_memory
