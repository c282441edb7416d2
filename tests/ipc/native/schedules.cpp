// The ring and the channel under the deterministic scheduler of weak_memory.hpp: many schedules, exhaustive and
// random, of the real code; then the same code with one operation weakened or left out, which must be caught.
//
//   schedules sound N          N random schedules a scenario and all with few deviations; status 1 if one fails
//   schedules mutants N        each mutant must fail within as many; status 1 if one survives
#include <fcntl.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

#include "tokring/channel.hpp"
#include "weak_memory.hpp"

using namespace tokring;
using weak_memory::Choices;
using weak_memory::ExhaustiveChoices;
using weak_memory::Mutation;
using weak_memory::RandomChoices;
using weak_memory::World;
using Policy = weak_memory::Atomics;

namespace {

struct Pipe {
  int read_end, write_end;
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) std::abort();
    read_end = ends[0];
    write_end = ends[1];
  }
};

World& world() { return World::current(); }

// ---- scenario 1: frames through a ring of four lines; writer and reader meet full and empty ----

constexpr uint64_t kLine = 64;
constexpr uint64_t kRingBytes = 4 * kLine;
constexpr uint64_t kFrames = 6;

struct RingScenario {
  uint64_t write_position = 0, read_position = 0, wake_at = kAwake;
  alignas(64) std::array<std::byte, 2 * kRingBytes> data{};
  Pipe doorbell;
  uint64_t frames_per_publish = 1, frames_per_release = 1;
  uint64_t doorbells = 0, arms = 0;

  std::string run(Choices& choices, const Mutation& mutation) {
    write_position = read_position = doorbells = arms = 0;
    wake_at = kAwake;
    drain_doorbell(doorbell.read_end);
    world().begin(choices, mutation);
    RingMemory memory{&write_position, &read_position, &wake_at, data.data(), kRingBytes};
    RingWriter<Policy> writer(memory);
    RingReader<Policy> reader(memory);
    std::string failure = world().run({[&] { write(writer); }, [&] { read(reader); }});
    if (failure.empty() && doorbells > arms) failure = "more doorbells than sleeps";
    return failure;
  }

  void write(RingWriter<Policy>& writer) {
    for (uint64_t i = 0; i < kFrames; ++i) {
      std::byte* frame;
      while ((frame = writer.claim(kLine)) == nullptr) world().wait_for_news();
      for (uint64_t word = 4; word < 8; ++word) std::memcpy(frame + 8 * word, &i, 8);
      FrameHeader header{};
      header.length = kLine;
      writer.commit(header, 1, false);
      if ((i + 1) % frames_per_publish == 0 || i + 1 == kFrames) publish(writer);
    }
  }

  void publish(RingWriter<Policy>& writer) {
    if (!writer.publish()) return;
    ++doorbells;
    ring_doorbell(doorbell.write_end);
  }

  void read(RingReader<Policy>& reader) {
    for (uint64_t got = 0; got < kFrames;) {
      RingFrame frame;
      bool found = false;
      try {
        found = reader.poll(frame);
      } catch (const PeerCorrupt& error) {
        world().fail(error.what());
      }
      if (found) {
        check(frame, got);
        if (++got % frames_per_release == 0) reader.release();
        continue;
      }
      reader.release();
      ++arms;
      if (reader.arm()) {
        world().sleep_on(doorbell.read_end);
        drain_doorbell(doorbell.read_end);
      }
    }
  }

  static void check(const RingFrame& frame, uint64_t expected) {
    Policy::reading(frame.address, kLine);
    for (uint64_t word = 4; word < 8; ++word) {
      uint64_t found;
      std::memcpy(&found, frame.address + 8 * word, 8);
      if (found != expected) world().fail("a frame is torn, lost or out of order");
    }
  }
};

// ---- scenario 2: a request, its cancel, its end, over both rings of a channel; both sides sleep ----

struct ChannelScenario {
  std::shared_ptr<Segment> segment =
      Segment::create(SegmentShape::rounded(1 << 16, 1 << 16, 8), 0, static_cast<uint32_t>(getpid()), 0);
  Pipe req, out;

  std::string run(Choices& choices, const Mutation& mutation) {
    std::memset(segment->control(), 0, sizeof(SegmentControl));
    segment->control()->req_wake_at = segment->control()->out_wake_at = kAwake;
    std::memset(segment->cancel_table(), 0, 32);
    world().begin(choices, mutation);
    EngineEnd<Policy> engine(segment, req.read_end, out.write_end, {});
    FrontEndEnd<Policy> front_end(segment, req.write_end, out.read_end, {});
    // The attach doorbells would hide a lost one.
    drain_doorbell(req.read_end);
    drain_doorbell(out.read_end);
    return world().run({[&] { serve(engine); }, [&] { ask(front_end); }});
  }

  void serve(EngineEnd<Policy>& engine) {
    bool running = false, ended = false;
    const uint32_t slot = 3, generation = 1;
    while (!ended) {
      if (auto request = engine.poll_request()) {
        engine.release_requests();
        running = request->record.stream_slot == slot;
      }
      bool cancelled = false;
      if (running) engine.cancelled(std::span(&slot, 1), std::span(&generation, 1), &cancelled);
      if (cancelled) {
        end_request(engine, slot, generation);
        ended = true;
      } else if (engine.arm()) {
        world().sleep_on(req.read_end);
        engine.drain_doorbell();
      }
    }
  }

  static void end_request(EngineEnd<Policy>& engine, uint32_t slot, uint32_t generation) {
    FinishRecord finish{};
    finish.stream_slot = slot;
    finish.slot_generation = generation;
    finish.reason = static_cast<uint16_t>(FinishReason::ABORT);
    StepColumns step;
    step.finish = {&finish, 1};
    if (!engine.write_step(step)) world().fail("an empty OUT ring is full");
    engine.publish();
    engine.ring();
  }

  void ask(FrontEndEnd<Policy>& front_end) {
    RequestRecord record{};
    record.stream_slot = 3;
    record.slot_generation = 1;
    int32_t id = 7;
    if (!front_end.submit(record, {&id, 1}, {})) world().fail("an empty REQ ring is full");
    front_end.publish();
    front_end.cancel(3, 1);
    for (bool ended = false; !ended;) {
      auto frame = front_end.poll();
      if (frame) {
        ended = frame->num_finished == 1;
        front_end.release();
      } else if (front_end.arm()) {
        world().sleep_on(out.read_end);
        front_end.drain_doorbell();
      }
    }
  }
};

// ---- many schedules ----

struct Result {
  std::string failure;
  uint64_t schedules = 0;
};

template <class Scenario>
Result search(Scenario& scenario, const Mutation& mutation, uint64_t random_schedules, size_t max_deviations) {
  Result result;
  ExhaustiveChoices exhaustive(max_deviations);
  do {
    ++result.schedules;
    result.failure = scenario.run(exhaustive, mutation);
    if (!result.failure.empty()) return result;
  } while (exhaustive.advance());
  for (uint64_t seed = 0; seed < random_schedules; ++seed) {
    RandomChoices random(seed);
    ++result.schedules;
    result.failure = scenario.run(random, mutation);
    if (!result.failure.empty()) {
      result.failure += " (seed " + std::to_string(seed) + ")";
      return result;
    }
  }
  return result;
}

Result search_all(const Mutation& mutation, uint64_t random_schedules) {
  static RingScenario ring;
  static ChannelScenario channel;
  Result total;
  for (uint64_t per_publish : {1, 2}) {
    ring.frames_per_publish = per_publish;
    ring.frames_per_release = 3 - per_publish;
    Result result = search(ring, mutation, random_schedules, 3);
    total.schedules += result.schedules;
    total.failure = result.failure;
    if (!total.failure.empty()) return total;
  }
  Result result = search(channel, mutation, random_schedules, 4);
  total.schedules += result.schedules;
  total.failure = result.failure;
  return total;
}

struct NamedMutation {
  const char* name;
  Site site;
  std::memory_order order;
  bool skip;
};

constexpr NamedMutation kMutants[] = {
    {"publish relaxed", Site::kPublish, std::memory_order_relaxed, false},
    {"publish without StoreLoad", Site::kPublish, std::memory_order_acq_rel, false},
    {"wake_at read relaxed after publish", Site::kPublishWakeAt, std::memory_order_relaxed, false},
    {"wake_at read acquire after publish", Site::kPublishWakeAt, std::memory_order_acquire, false},
    {"write_position read relaxed", Site::kPoll, std::memory_order_relaxed, false},
    {"read_position read relaxed", Site::kSpace, std::memory_order_relaxed, false},
    {"read_position released relaxed", Site::kRelease, std::memory_order_relaxed, false},
    {"arm without StoreLoad", Site::kArm, std::memory_order_acq_rel, false},
    {"recheck relaxed", Site::kArmRecheck, std::memory_order_relaxed, false},
    {"recheck acquire", Site::kArmRecheck, std::memory_order_acquire, false},
    {"no recheck after arming", Site::kArmRecheck, std::memory_order_seq_cst, true},
    {"no release", Site::kRelease, std::memory_order_seq_cst, true},
    {"cancel counted without StoreLoad", Site::kCancelCount, std::memory_order_acq_rel, false},
    {"wake_at read acquire after cancel", Site::kCancelWakeAt, std::memory_order_acquire, false},
    {"cancels rechecked acquire", Site::kCancelRecheck, std::memory_order_acquire, false},
    {"cancel not stored", Site::kCancelWord, std::memory_order_seq_cst, true},
};

int check_mutants(uint64_t random_schedules) {
  int survivors = 0;
  for (const NamedMutation& mutant : kMutants) {
    Result result = search_all({mutant.site, mutant.order, mutant.skip, true}, random_schedules);
    survivors += result.failure.empty();
    std::printf("%-36s %s after %llu schedules%s%s\n", mutant.name, result.failure.empty() ? "SURVIVES" : "caught",
                static_cast<unsigned long long>(result.schedules), result.failure.empty() ? "" : ": ",
                result.failure.c_str());
  }
  return survivors == 0 ? 0 : 1;
}

int check_sound(uint64_t random_schedules) {
  Result result = search_all({}, random_schedules);
  std::printf("%llu schedules, %llu sleeps: %s\n", static_cast<unsigned long long>(result.schedules),
              static_cast<unsigned long long>(world().sleeps),
              result.failure.empty() ? "sound" : result.failure.c_str());
  return result.failure.empty() ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  uint64_t random_schedules = std::strtoull(arguments[2], nullptr, 10);
  return std::string_view(arguments[1]) == "mutants" ? check_mutants(random_schedules) : check_sound(random_schedules);
}
