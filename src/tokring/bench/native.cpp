// tokring.bench._native: native loops, waiting without the GIL, counting of system calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <sys/prctl.h>

#include "load_client.hpp"
#include "loops.hpp"
#include "stream_load.hpp"
#include "syscall_counter.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tokring::bench {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = Array<uint64_t>;

template <class T>
std::vector<T> copied(const Array<const T>& column) {
  return {column.data(), column.data() + column.size()};
}

StepSource step_source(const Array<const uint32_t>& stream_slot, const Array<const uint32_t>& slot_generation,
                       const Array<const int32_t>& token_id, const Array<const uint32_t>& token_index,
                       const Array<const int32_t>& rank, const Array<const float>& logprob,
                       const Array<const int32_t>& top_id, const Array<const float>& top_logprob) {
  StepSource source;
  source.stream_slot = copied<uint32_t>(stream_slot);
  source.slot_generation = copied<uint32_t>(slot_generation);
  source.token_id = copied<int32_t>(token_id);
  source.token_index = copied<uint32_t>(token_index);
  source.rank = copied<int32_t>(rank);
  source.logprob = copied<float>(logprob);
  source.top_id = copied<int32_t>(top_id);
  source.top_logprob = copied<float>(top_logprob);
  source.width = source.rank.empty() ? 0 : static_cast<uint32_t>(source.top_id.size() / source.rank.size());
  return source;
}

Track track_of(const Words& stamps, const Words& acked, uint64_t last, bool closed, uint64_t gap_ns) {
  if (stamps.size() < last || acked.size() == 0) throw nb::value_error("fewer stamps than steps");
  return {{stamps.data(), stamps.size()}, acked.data(), closed, gap_ns};
}

void bind_loops(nb::module_& module) {
  nb::class_<StepSource>(module, "StepSource")
      .def_static("of", &step_source, "stream_slot"_a, "slot_generation"_a, "token_id"_a, "token_index"_a, "rank"_a,
                  "logprob"_a, "top_id"_a, "top_logprob"_a);
  nb::class_<RingWriterLoop>(module, "RingWriterLoop")
      .def(nb::init<int, int, int, StepSource>(), "control_fd"_a, "req_doorbell_fd"_a, "out_doorbell_fd"_a, "source"_a)
      .def(
          "run",
          [](RingWriterLoop& self, Words sent, Words acked, uint64_t first, uint64_t last, bool closed,
             uint64_t gap_ns) {
            nb::gil_scoped_release unlocked;
            self.run(track_of(sent, acked, last, closed, gap_ns), first, last);
          },
          "sent"_a, "acked"_a, "first"_a, "last"_a, "closed"_a, "gap_ns"_a)
      .def_prop_ro("doorbells_sent", &RingWriterLoop::doorbells_sent)
      .def_prop_ro("doorbells_suppressed", &RingWriterLoop::doorbells_suppressed);
  nb::class_<RingReaderLoop>(module, "RingReaderLoop")
      .def(
          "__init__",
          [](RingReaderLoop* self, int control, int req_doorbell, int out_doorbell, uint64_t out_bytes) {
            SegmentShape shape = SegmentShape::rounded(1 << 20, out_bytes, 2048);
            new (self) RingReaderLoop(control, req_doorbell, out_doorbell, shape);
          },
          "control_fd"_a, "req_doorbell_fd"_a, "out_doorbell_fd"_a, "out_bytes"_a)
      .def(
          "run",
          [](RingReaderLoop& self, Words delivered, Words acked, uint64_t first, uint64_t last) {
            nb::gil_scoped_release unlocked;
            return self.run(track_of(delivered, acked, last, true, 0), first, last);
          },
          "delivered"_a, "acked"_a, "first"_a, "last"_a);
  nb::class_<CopyLoop>(module, "CopyLoop")
      .def(
          "__init__",
          [](CopyLoop* self, Array<uint8_t> area, Words published, uint64_t bytes) {
            new (self) CopyLoop({reinterpret_cast<std::byte*>(area.data()), area.size()}, published.data(), bytes);
          },
          "area"_a, "published"_a, "bytes"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "write",
          [](CopyLoop& self, Words sent, Words acked, uint64_t first, uint64_t last, uint64_t gap_ns) {
            nb::gil_scoped_release unlocked;
            self.write(track_of(sent, acked, last, true, gap_ns), first, last);
          },
          "sent"_a, "acked"_a, "first"_a, "last"_a, "gap_ns"_a)
      .def(
          "read",
          [](CopyLoop& self, Words delivered, Words acked, uint64_t first, uint64_t last) {
            nb::gil_scoped_release unlocked;
            self.read(track_of(delivered, acked, last, true, 0), first, last);
          },
          "delivered"_a, "acked"_a, "first"_a, "last"_a);
}

void bind_waiting(nb::module_& module) {
  module.def(
      "yield_until",
      [](Words word, uint64_t value) {
        nb::gil_scoped_release unlocked;
        return yield_until(word.data(), value);
      },
      "word"_a, "value"_a);
  module.def(
      "yield_for",
      [](uint64_t ns) {
        nb::gil_scoped_release unlocked;
        return yield_for(ns);
      },
      "ns"_a);
  module.def(
      "sleep_for",
      [](uint64_t ns) {
        nb::gil_scoped_release unlocked;
        return sleep_for(ns);
      },
      "ns"_a);
  module.def("die_with_parent", [] { prctl(PR_SET_PDEATHSIG, SIGKILL); });
  module.def(
      "acknowledge",
      [](Words word, uint64_t value) { std::atomic_ref(*word.data()).store(value, std::memory_order_release); },
      "word"_a, "value"_a);
}

void bind_syscall_counter(nb::module_& module) {
  nb::class_<SyscallCounter>(module, "SyscallCounter")
      .def(
          "__init__",
          [](SyscallCounter* self, int writer, int reader) {
            new (self) SyscallCounter({writer, reader});
          },
          "writer_pid"_a, "reader_pid"_a)
      .def(
          "run",
          [](SyscallCounter& self, Words writer_counting, Words reader_counting) {
            nb::gil_scoped_release unlocked;
            std::array<uint64_t, 2> counts = self.run({writer_counting.data(), reader_counting.data()});
            return std::pair(counts[0], counts[1]);
          },
          "writer_counting"_a, "reader_counting"_a);
}

}  // namespace
}  // namespace tokring::bench

NB_MODULE(_native, module) {
  tokring::bench::bind_loops(module);
  tokring::bench::bind_waiting(module);
  tokring::bench::bind_syscall_counter(module);
  tokring::bench::bind_stream_load(module);
  tokring::bench::bind_load_client(module);
}
