// Two threads over one mapping, for the sanitizers: a front end and an engine exchange requests, steps and cancels and
// sleep on their doorbells. Every frame is checked; exit status 1 with a line on stderr if anything is wrong.
#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tokring/channel.hpp"

using namespace tokring;

namespace {

#ifdef RELAXED_PUBLISH
// A mutant that ThreadSanitizer must catch: the frame's bytes no longer happen before its position is seen.
struct Policy : StdAtomics {
  template <std::memory_order kOrder, class T>
  static T exchange(T* word, T value, Site site) noexcept {
    if (site == Site::kPublish) return StdAtomics::exchange<std::memory_order_relaxed>(word, value, site);
    return StdAtomics::exchange<kOrder>(word, value, site);
  }
};
#else
using Policy = StdAtomics;
#endif

constexpr uint32_t kSlots = 64;

struct Pipe {
  int read_end, write_end;
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) std::abort();
    read_end = ends[0];
    write_end = ends[1];
  }
};

void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// Every sleep must end by a doorbell.
void sleep_on(int fd) {
  pollfd entry{fd, POLLIN, 0};
  if (poll(&entry, 1, 10000) != 1) fail("a wake-up was lost");
}

// Echoes every request as a step of its ids, and acknowledges cancels, until `total` requests were answered.
void engine(EngineEnd<Policy>& end, int doorbell, uint32_t total) {
  for (uint32_t answered = 0; answered < total;) {
    auto request = end.poll_request();
    if (!request) {
      if (end.arm()) sleep_on(doorbell);
      end.drain_doorbell();
      continue;
    }
    end.release_requests();
    const uint32_t slot = request->record.stream_slot, generation = request->record.slot_generation;
    const uint32_t count = request->record.num_ids;
    const auto* ids = reinterpret_cast<const int32_t*>(request->bytes.data() + request->ids);
    std::vector<uint32_t> slots(count, slot), generations(count, generation);
    FinishRecord finish{};
    finish.stream_slot = slot;
    finish.slot_generation = generation;
    bool cancelled = false;
    end.cancelled(std::span(&slot, 1), std::span(&generation, 1), &cancelled);
    finish.reason = static_cast<uint16_t>(cancelled ? FinishReason::ABORT : FinishReason::STOP);
    StepColumns step;
    step.stream_slot = slots;
    step.slot_generation = generations;
    step.token_id = {ids, count};
    step.finish = {&finish, 1};
    while (!end.write_step(step)) std::this_thread::yield();
    end.publish();
    end.ring();
    ++answered;
  }
}

void check_answer(const OutFrame& frame, uint32_t expected) {
  if (frame.num_finished == 0) return;
  FinishRecord finish;
  std::memcpy(&finish, frame.address + frame.at.finish, sizeof finish);
  if (finish.slot_generation != expected + 1) fail("an answer is out of order");
}

void check_tokens(const OutFrame& frame, uint32_t& next_token) {
  const auto* tokens = reinterpret_cast<const int32_t*>(frame.address + frame.at.token_id);
  for (uint32_t i = 0; i < frame.num_token_ids; ++i) {
    if (tokens[i] != static_cast<int32_t>(next_token++)) fail("a token is lost or torn");
  }
}

void front_end(FrontEndEnd<Policy>& end, int doorbell, uint32_t total) {
  std::vector<int32_t> ids;
  uint32_t sent = 0, answered = 0, written_token = 0, read_token = 0;
  while (answered < total) {
    while (sent < total) {
      ids.resize(sent * 37 % 3000);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(written_token + i);
      RequestRecord record{};
      record.stream_slot = sent % kSlots;
      record.slot_generation = sent + 1;
      if (!end.submit(record, ids, {})) break;
      end.publish();
      written_token += static_cast<uint32_t>(ids.size());
      if (sent % 5 == 0) end.cancel(record.stream_slot, record.slot_generation);
      ++sent;
    }
    bool any = false;
    while (auto frame = end.poll()) {
      any = true;
      check_tokens(*frame, read_token);
      check_answer(*frame, answered);
      answered += frame->num_finished;
      end.release();
    }
    if (!any && answered < total && end.arm()) sleep_on(doorbell);
    end.drain_doorbell();
  }
}

}  // namespace

int main(int, char** arguments) {
  const uint32_t total = static_cast<uint32_t>(std::atoi(arguments[1]));
  auto shape = SegmentShape::rounded(1 << 16, 1 << 16, kSlots);
  auto segment = Segment::create(shape, 0, static_cast<uint32_t>(getpid()), 0);
  Pipe req, out;
  EngineEnd<Policy> engine_end(segment, req.read_end, out.write_end, {.crc = true});
  FrontEndEnd<Policy> front_end_end(segment, req.write_end, out.read_end, {.crc = true});
  std::thread engine_thread([&] { engine(engine_end, req.read_end, total); });
  front_end(front_end_end, out.read_end, total);
  engine_thread.join();
  front_end_end.close();
  engine_end.close();
  std::printf("%u\n", total);
}
