// Two processes on a channel, killed. A supervisor joins a front end and an engine anew after every death, as the
// protocol says: new segment, new pipes, new socket; the survivor drains the old ring first.
//
//   torture SECONDS SEED   SIGKILL or SIGSTOP of either side or both at random instants
//   torture points         _exit at every place where the code touches a shared word, before and after it, with the
//                          peer awake or asleep, reading or letting the rings fill up
//
// Checked: every request and every token arrives whole, once, in order; after a death the survivor has seen all that
// was published and nothing else; nobody sleeps for ever (there is no recheck by time in here). Status 1 if not.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>

#include "tokring/channel.hpp"

using namespace tokring;

namespace {

constexpr uint32_t kSlots = 64;
constexpr uint32_t kOutstanding = 32;
constexpr int kStuckMs = 15000;
constexpr int kCrashed = 77;

// ---- where a process is to die ----

struct CrashPoint {
  Site site{};
  bool after = false;
  bool at_written = false;  // instead: a frame is written and committed, but not published
  int countdown = 0;        // 0: never
};
CrashPoint crash_point;

struct Policy {
  static void pass(Site site, bool after) {
    if (crash_point.countdown == 0 || crash_point.at_written) return;
    if (site == crash_point.site && after == crash_point.after && --crash_point.countdown == 0) _exit(kCrashed);
  }
  template <std::memory_order kOrder, class T>
  static T load(const T* word, Site site) {
    pass(site, false);
    T value = StdAtomics::load<kOrder>(word, site);
    pass(site, true);
    return value;
  }
  template <std::memory_order kOrder, class T>
  static void store(T* word, T value, Site site) {
    pass(site, false);
    StdAtomics::store<kOrder>(word, value, site);
    pass(site, true);
  }
  template <std::memory_order kOrder, class T>
  static T exchange(T* word, T value, Site site) {
    pass(site, false);
    T old = StdAtomics::exchange<kOrder>(word, value, site);
    pass(site, true);
    return old;
  }
  static void wrote(const void*, size_t) {
    if (crash_point.countdown != 0 && crash_point.at_written && --crash_point.countdown == 0) _exit(kCrashed);
  }
  static void reading(const void*, size_t) {}
};

// ---- what all processes see ----

enum Role { kFrontEnd, kEngine };
constexpr const char* kRoleNames[] = {"front end", "engine"};

struct Shared {
  std::atomic<uint64_t> checked[2];             // by role: requests or answers received and found right
  std::atomic<uint64_t> committed[2];           // by role, this connection: written, perhaps published
  std::atomic<uint64_t> published[2];           // by role, this connection: certainly published
  std::atomic<uint64_t> counted_generation[2];  // the connection that the two above belong to
  std::atomic<uint64_t> attached;
  std::atomic<bool> bad;
};
Shared* shared;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "torture: %s\n", what.c_str());
  shared->bad = true;
  _exit(1);
}

// How the side that is not to die behaves.
struct Behaviour {
  bool reads = true;   // false: lets its ring fill up until the peer is dead
  bool sleeps = true;  // false: polls
};

struct Wiring {
  OwnedFd control, req_doorbell, out_doorbell;
  Behaviour behaviour;
};

// What the n-th request of a connection holds, and the n-th token.
int32_t value_of(uint64_t generation, uint64_t index) {
  uint64_t mixed = (generation ^ (index * 0x9e3779b97f4a7c15ULL)) * 0xbf58476d1ce4e5b9ULL;
  return static_cast<int32_t>(mixed >> 33);
}
uint32_t length_of(uint64_t generation, uint64_t index) {
  uint32_t random = static_cast<uint32_t>(value_of(generation, ~index));
  return random % 4 == 0 ? random % 3000 : random % 40;
}

bool is_gone(int control) {
  pollfd entry{control, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;  // nothing is ever sent after the handshake: readable means the end
}

void wait_for(int doorbell, int control, Role me) {
  pollfd entries[2] = {{control, POLLIN, 0}, {doorbell, POLLIN, 0}};
  int ready = poll(entries, doorbell < 0 ? 1 : 2, kStuckMs);
  if (ready == 0) fail(std::string("the ") + kRoleNames[me] + " was never woken up");
}

void check_drained(Role peer, uint64_t generation, uint64_t received) {
  // A peer that died before it began to count has written nothing.
  const bool counted = shared->counted_generation[peer] == generation;
  const uint64_t published = counted ? shared->published[peer].load() : 0;
  const uint64_t committed = counted ? shared->committed[peer].load() : 0;
  if (received < published || received > committed) {
    fail(std::string("of a dead ") + kRoleNames[peer] + " arrived " + std::to_string(received) + ", published were " +
         std::to_string(published) + ", committed " + std::to_string(committed));
  }
}

void begin_count(Role me, uint64_t generation) {
  shared->counted_generation[me] = 0;
  shared->committed[me] = 0;
  shared->published[me] = 0;
  shared->counted_generation[me] = generation;
}

// ---- the two sides, one connection each ----

class FrontEndSide {
 public:
  FrontEndSide(std::shared_ptr<Segment> segment, const Wiring& wiring)
      : wiring_(wiring),
        generation_(segment->header().connection_generation),
        end_(segment, wiring.req_doorbell.get(), wiring.out_doorbell.get(), {.crc = generation_ % 4 == 0}) {}

  void run() {
    for (;;) {
      const bool gone = is_gone(wiring_.control.get());  // before the last look into the ring
      bool busy = (wiring_.behaviour.reads || gone) && read();
      if (gone) break;
      busy = submit() || busy;
      if (busy) continue;
      if (!wiring_.behaviour.sleeps) {
        sched_yield();
      } else if (!wiring_.behaviour.reads) {
        wait_for(-1, wiring_.control.get(), kFrontEnd);
      } else if (end_.arm()) {
        wait_for(wiring_.out_doorbell.get(), wiring_.control.get(), kFrontEnd);
        end_.drain_doorbell();
      }
    }
    check_drained(kEngine, generation_, answered_);
    end_.close();
  }

 private:
  bool submit() {
    bool any = false;
    while (sent_ - answered_ < kOutstanding) {
      std::vector<int32_t> ids(length_of(generation_, sent_));
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = value_of(generation_, sent_ + i);
      RequestRecord record{};
      record.stream_slot = static_cast<uint32_t>(sent_ % kSlots);
      record.slot_generation = static_cast<uint32_t>(sent_ / kSlots + 1);
      shared->committed[kFrontEnd] = sent_ + 1;
      if (!end_.submit(record, ids, {})) break;
      ++sent_;
      if (sent_ % 3 != 0) end_.publish();  // sometimes two in one
      if (sent_ % 5 == 0) end_.cancel(record.stream_slot, record.slot_generation);
      any = true;
    }
    end_.publish();
    shared->published[kFrontEnd] = sent_;
    return any;
  }

  bool read() {
    bool any = false;
    while (auto frame = end_.poll()) {
      any = true;
      const auto* tokens = reinterpret_cast<const int32_t*>(frame->address + frame->at.token_id);
      for (uint32_t i = 0; i < frame->num_token_ids; ++i) {
        if (tokens[i] != value_of(generation_, next_token_++)) fail("a token is torn, lost or doubled");
      }
      for (uint32_t i = 0; i < frame->num_finished; ++i) check_finish(*frame, i);
      end_.release();
    }
    return any;
  }

  void check_finish(const OutFrame& frame, uint32_t index) {
    FinishRecord finish;
    std::memcpy(&finish, frame.address + frame.at.finish + index * sizeof finish, sizeof finish);
    if (finish.stream_slot != answered_ % kSlots || finish.slot_generation != answered_ / kSlots + 1) {
      fail("an answer is out of order");
    }
    ++answered_;
    ++shared->checked[kFrontEnd];
  }

  const Wiring& wiring_;
  uint64_t generation_;
  FrontEndEnd<Policy> end_;
  uint64_t sent_ = 0, answered_ = 0, next_token_ = 0;
};

class EngineSide {
 public:
  EngineSide(std::shared_ptr<Segment> segment, const Wiring& wiring)
      : wiring_(wiring),
        generation_(segment->header().connection_generation),
        end_(segment, wiring.req_doorbell.get(), wiring.out_doorbell.get(), {.crc = generation_ % 4 == 1}) {}

  void run() {
    for (;;) {
      const bool gone = is_gone(wiring_.control.get());
      bool busy = (wiring_.behaviour.reads || gone) && read();
      if (gone) break;
      busy = answer() || busy;
      if (busy) continue;
      if (!wiring_.behaviour.sleeps || answered_ < received_) {
        sched_yield();  // a reader that makes room does not ring
      } else if (!wiring_.behaviour.reads) {
        wait_for(-1, wiring_.control.get(), kEngine);
      } else if (end_.arm()) {
        wait_for(wiring_.req_doorbell.get(), wiring_.control.get(), kEngine);
        end_.drain_doorbell();
      }
    }
    check_drained(kFrontEnd, generation_, received_);
    end_.close();
  }

 private:
  bool read() {
    bool any = false;
    while (auto request = end_.poll_request()) {
      any = true;
      const RequestRecord& record = request->record;
      if (record.stream_slot != received_ % kSlots || record.num_ids != length_of(generation_, received_)) {
        fail("a request is lost or doubled");
      }
      const auto* ids = reinterpret_cast<const int32_t*>(request->bytes.data() + request->ids);
      for (uint32_t i = 0; i < record.num_ids; ++i) {
        if (ids[i] != value_of(generation_, received_ + i)) fail("a request is torn");
      }
      ++received_;
      ++shared->checked[kEngine];
      end_.release_requests();
    }
    return any;
  }

  bool answer() {
    bool any = false;
    while (answered_ < received_) {
      const uint32_t slot = static_cast<uint32_t>(answered_ % kSlots);
      const uint32_t slot_generation = static_cast<uint32_t>(answered_ / kSlots + 1);
      bool cancelled = false;
      end_.cancelled(std::span(&slot, 1), std::span(&slot_generation, 1), &cancelled);
      const uint32_t count = length_of(generation_, answered_) / 2;
      std::vector<uint32_t> slots(count, slot), generations(count, slot_generation);
      std::vector<int32_t> tokens(count);
      for (uint32_t i = 0; i < count; ++i) tokens[i] = value_of(generation_, next_token_ + i);
      FinishRecord finish{};
      finish.stream_slot = slot;
      finish.slot_generation = slot_generation;
      finish.reason = static_cast<uint16_t>(cancelled ? FinishReason::ABORT : FinishReason::STOP);
      StepColumns step;
      step.stream_slot = slots;
      step.slot_generation = generations;
      step.token_id = tokens;
      step.finish = {&finish, 1};
      shared->committed[kEngine] = answered_ + 1;
      if (!end_.write_step(step)) break;
      next_token_ += count;
      ++answered_;
      end_.publish();
      shared->published[kEngine] = answered_;
      end_.ring();
      any = true;
    }
    return any;
  }

  const Wiring& wiring_;
  uint64_t generation_;
  EngineEnd<Policy> end_;
  uint64_t received_ = 0, answered_ = 0, next_token_ = 0;
};

void live_one_connection(Role role, const Wiring& wiring) {
  try {
    std::shared_ptr<Segment> segment;
    try {
      const auto shape = SegmentShape::rounded(1 << 16, 1 << 16, kSlots);
      segment = role == kFrontEnd ? request_segment(wiring.control.get(), shape, 0, kStuckMs / 1000.0)
                                  : serve_segment(wiring.control.get(), 0, 1 << 20, kStuckMs / 1000.0).segment;
    } catch (const AttachError& error) {
      if (std::string(error.what()).find("timed out") != std::string::npos) fail(error.what());
      return;  // the peer died in the handshake
    }
    begin_count(role, segment->header().connection_generation);
    ++shared->attached;
    if (role == kFrontEnd) {
      FrontEndSide(segment, wiring).run();
    } else {
      EngineSide(segment, wiring).run();
    }
  } catch (const std::exception& error) {
    fail(std::string("the ") + kRoleNames[role] + " met: " + error.what());
  }
}

// ---- the supervisor ----

class Side {
 public:
  Side(Role role, const CrashPoint& point) : role_(role) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      crash_point = point;
      live(ends[1]);
    }
    link_ = OwnedFd(ends[0]);
    ::close(ends[1]);
  }
  Side(Side&& other) noexcept
      : role_(other.role_), pid_(std::exchange(other.pid_, -1)), link_(std::move(other.link_)) {}
  Side& operator=(Side&& other) noexcept {
    std::swap(role_, other.role_);
    std::swap(pid_, other.pid_);
    std::swap(link_, other.link_);
    return *this;
  }
  ~Side() {
    if (pid_ > 0) kill_and_reap();
  }

  void kill_and_reap() {
    ::kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return;
    std::fprintf(stderr, "torture: a %s had ended by itself (wait status %d)\n", kRoleNames[role_], status);
    shared->bad = true;
  }
  // True if it ended by itself within the time.
  bool ended(int timeout_ms, int& status) {
    for (int waited = 0; waited < timeout_ms; ++waited) {
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return true;
      }
      usleep(1000);
    }
    return false;
  }
  void signal(int number) const { ::kill(pid_, number); }

  void wire(int control, int req_doorbell, int out_doorbell, Behaviour behaviour) const {
    const int fds[3] = {control, req_doorbell, out_doorbell};
    iovec part{&behaviour, sizeof behaviour};
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof fds)] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof fds);
    std::memcpy(CMSG_DATA(item), fds, sizeof fds);
    if (sendmsg(link_.get(), &message, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET) std::abort();
  }

 private:
  [[noreturn]] void live(int link) const {
    for (;;) {
      Wiring wiring;
      iovec part{&wiring.behaviour, sizeof wiring.behaviour};
      alignas(cmsghdr) char room[CMSG_SPACE(3 * sizeof(int))];
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = room;
      message.msg_controllen = sizeof room;
      if (recvmsg(link, &message, MSG_CMSG_CLOEXEC) <= 0) _exit(0);
      int fds[3];
      std::memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fds);
      wiring.control = OwnedFd(fds[0]);
      wiring.req_doorbell = OwnedFd(fds[1]);
      wiring.out_doorbell = OwnedFd(fds[2]);
      live_one_connection(role_, wiring);
    }
  }

  Role role_;
  pid_t pid_;
  OwnedFd link_;
};

// New sockets and pipes for one connection; the supervisor keeps none of them: a death is an EOF at once.
void join(const Side& front_end, const Side& engine, Behaviour front_end_behaviour, Behaviour engine_behaviour) {
  int control[2], req[2], out[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) != 0 || pipe2(req, O_CLOEXEC | O_NONBLOCK) != 0 ||
      pipe2(out, O_CLOEXEC | O_NONBLOCK) != 0) {
    std::abort();
  }
  front_end.wire(control[0], req[1], out[0], front_end_behaviour);
  engine.wire(control[1], req[0], out[1], engine_behaviour);
  for (int fd : {control[0], control[1], req[0], req[1], out[0], out[1]}) ::close(fd);
}

int torture(double seconds, uint64_t seed) {
  std::mt19937_64 random(seed);
  Side front_end(kFrontEnd, {}), engine(kEngine, {});
  join(front_end, engine, {}, {});
  uint64_t kills[2] = {}, stops = 0;
  const uint64_t end = deadline_after(seconds);
  while (now_ns() < end && !shared->bad) {
    usleep(static_cast<useconds_t>(random() % 4000));
    const uint64_t action = random() % 8;
    if (action < 2) {  // stopped for a moment, also between publish and doorbell
      const Side& stopped = action == 0 ? front_end : engine;
      stopped.signal(SIGSTOP);
      usleep(static_cast<useconds_t>(random() % 3000));
      stopped.signal(SIGCONT);
      ++stops;
      continue;
    }
    if (action != 2) {  // 2: both die
      (action % 2 == 0 ? engine : front_end) = Side(action % 2 == 0 ? kEngine : kFrontEnd, {});
      ++kills[action % 2 == 0 ? kEngine : kFrontEnd];
    } else {
      engine = Side(kEngine, {});
      front_end = Side(kFrontEnd, {});
      ++kills[kEngine], ++kills[kFrontEnd];
    }
    join(front_end, engine, {}, {});
  }
  std::printf("%llu engines and %llu front ends killed, %llu stopped, %llu attached, %llu requests, %llu answers: %s\n",
              static_cast<unsigned long long>(kills[kEngine]), static_cast<unsigned long long>(kills[kFrontEnd]),
              static_cast<unsigned long long>(stops), static_cast<unsigned long long>(shared->attached.load()),
              static_cast<unsigned long long>(shared->checked[kEngine].load()),
              static_cast<unsigned long long>(shared->checked[kFrontEnd].load()), shared->bad ? "BAD" : "sound");
  return shared->bad ? 1 : 0;
}

// ---- every crash point ----

struct NamedSite {
  const char* name;
  Site site;
  bool of_front_end, of_engine;
};
constexpr NamedSite kSites[] = {
    {"publish", Site::kPublish, true, true},
    {"wake_at after publish", Site::kPublishWakeAt, true, true},
    {"space", Site::kSpace, true, true},
    {"poll", Site::kPoll, true, true},
    {"release", Site::kRelease, true, true},
    {"arm", Site::kArm, true, true},
    {"recheck", Site::kArmRecheck, true, true},
    {"disarm", Site::kDisarm, true, true},
    {"state", Site::kPeerState, true, true},
    {"cancel", Site::kCancelWord, true, false},
    {"cancel count", Site::kCancelCount, true, false},
    {"wake_at after cancel", Site::kCancelWakeAt, true, false},
    {"cancel read", Site::kCancelRead, false, true},
    {"cancel recheck", Site::kCancelRecheck, false, true},
};

// One victim dies at the point (or is killed if it never gets there); a new one must then get on with the survivor.
bool crash_once(Role victim_role, const Side& survivor, const CrashPoint& point, Behaviour behaviour) {
  auto join_to = [&](const Side& victim, Behaviour of_survivor) {
    if (victim_role == kFrontEnd) {
      join(victim, survivor, {}, of_survivor);
    } else {
      join(survivor, victim, of_survivor, {});
    }
  };
  bool reached = false;
  {
    Side victim(victim_role, point);
    join_to(victim, behaviour);
    int status = 0;
    if (victim.ended(80, status)) {
      reached = WIFEXITED(status) && WEXITSTATUS(status) == kCrashed;
      if (!reached) shared->bad = true;
    }
  }
  const uint64_t requests = shared->checked[kEngine], answers = shared->checked[kFrontEnd];
  Side successor(victim_role, {});
  join_to(successor, {});
  const uint64_t deadline = deadline_after(kStuckMs / 1000.0);
  while (!shared->bad && (shared->checked[kEngine] < requests + 100 || shared->checked[kFrontEnd] < answers + 100)) {
    if (now_ns() > deadline) fail("no progress after a crash");
    usleep(200);
  }
  return reached;
}

int visit_points() {
  uint64_t crashes = 0;
  for (Role victim : {kFrontEnd, kEngine}) {
    Side survivor(victim == kFrontEnd ? kEngine : kFrontEnd, {});
    auto visit = [&](const char* name, CrashPoint point) {
      int reached = 0, countdown = 1;
      for (Behaviour behaviour : {Behaviour{true, true}, {true, false}, {false, true}, {false, false}}) {
        point.countdown = countdown++;
        reached += crash_once(victim, survivor, point, behaviour);
      }
      crashes += reached;
      if (reached == 0) {
        std::fprintf(stderr, "the %s never reached '%s'\n", kRoleNames[victim], name);
        shared->bad = true;
      }
    };
    for (const NamedSite& site : kSites) {
      if (victim == kFrontEnd ? !site.of_front_end : !site.of_engine) continue;
      for (bool after : {false, true}) {
        if (!shared->bad) visit(site.name, {site.site, after, false, 0});
      }
    }
    if (!shared->bad) visit("frame written", {Site::kPublish, false, true, 0});
  }
  std::printf("%llu crashes: %s\n", static_cast<unsigned long long>(crashes), shared->bad ? "BAD" : "sound");
  return shared->bad ? 1 : 0;
}

}  // namespace

int main(int count, char** arguments) {
  shared =
      static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (count == 2 && std::string_view(arguments[1]) == "points") return visit_points();
  if (count == 3) return torture(std::atof(arguments[1]), std::strtoull(arguments[2], nullptr, 10));
  return 2;
}
