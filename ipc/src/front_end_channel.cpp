// FrontEndChannel and Frame for Python.
#include "out_views.hpp"

namespace tokring::binding {

namespace {

// ---- Frame: what poll() returns ----

struct Frame {
  OutFrame parsed;
  std::shared_ptr<OutViews> views;

  const OutViews& live() const {
    if (parsed.header.position < views->released) {
      throw HandleDead("this frame was released: its bytes may be overwritten; copy columns before release()");
    }
    return *views;
  }
  bool is(FrameType type) const { return parsed.header.type == static_cast<uint16_t>(type); }
  void expect_step() const {
    if (!is(FrameType::STEP)) {
      throw nb::type_error(("frame of type " + std::to_string(parsed.header.type) + " has no step columns").c_str());
    }
  }
  nb::object column(uint64_t offset) const {
    expect_step();
    return live().u32(parsed.address, offset, parsed.header.count);
  }
};

uintptr_t frame_address(const Frame& frame) {
  frame.live();
  return reinterpret_cast<uintptr_t>(frame.parsed.address);
}

nb::object frame_num_tokens(const Frame& frame) {
  frame.expect_step();
  if (!has_flag(frame.parsed.header.flags, FrameFlag::MULTI_TOKEN)) return nb::none();
  return frame.column(frame.parsed.at.num_tokens);
}

nb::object frame_token_id(const Frame& frame) {
  frame.expect_step();
  return frame.live().i32(frame.parsed.address, frame.parsed.at.token_id, frame.parsed.num_token_ids);
}

nb::object frame_finish(const Frame& frame) {
  frame.expect_step();
  const OutFrame& parsed = frame.parsed;
  return frame.live().records(parsed.address, parsed.at.finish, parsed.num_finished, "FinishRecord",
                              sizeof(FinishRecord));
}

nb::object frame_logprobs(const Frame& frame) {
  frame.expect_step();
  if (frame.parsed.logprobs.count == 0) return nb::none();
  return logprob_columns(frame.live(), frame.parsed.address, frame.parsed.logprobs, true);
}

// All at once: one call instead of a property each.
nb::object frame_columns(const Frame& frame) {
  frame.expect_step();
  const OutViews& views = frame.live();
  const OutFrame& parsed = frame.parsed;
  const std::byte* start = parsed.address;
  nb::object ids = nb::make_tuple(views.u32(start, parsed.at.stream_slot, parsed.header.count),
                                  views.u32(start, parsed.at.slot_generation, parsed.header.count),
                                  views.i32(start, parsed.at.token_id, parsed.num_token_ids));
  return parsed.logprobs.count == 0 ? ids : nb::object(ids + logprob_columns(views, start, parsed.logprobs, true));
}

template <class T>
PyObject* number(T value) {
  if constexpr (std::is_floating_point_v<T>) return PyFloat_FromDouble(value);
  return PyLong_FromLong(value);
}

// Values [first, first + count) of a column as a Python list.
template <class T>
nb::object list_of(const std::byte* column, size_t first, size_t count) {
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; list.is_valid() && i < count; ++i) {
    T value;
    std::memcpy(&value, column + (first + i) * sizeof value, sizeof value);
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), number(value));
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return list;
}

// (rank, logprob, [top ids], [top logprobs]) of one logprob row, into `row` from `item` on.
void set_logprobs(PyObject* row, Py_ssize_t item, const Frame& frame, size_t index) {
  const std::byte* start = frame.parsed.address;
  const LogprobOffsets& at = frame.parsed.logprobs.at;
  const size_t width = frame.parsed.logprobs.width;
  int32_t rank;
  float logprob;
  std::memcpy(&rank, start + at.rank + 4 * index, sizeof rank);
  std::memcpy(&logprob, start + at.logprob + 4 * index, sizeof logprob);
  PyTuple_SET_ITEM(row, item, number(rank));
  PyTuple_SET_ITEM(row, item + 1, number(logprob));
  PyTuple_SET_ITEM(row, item + 2, list_of<int32_t>(start + at.top_id, width * index, width).release().ptr());
  PyTuple_SET_ITEM(row, item + 3, list_of<float>(start + at.top_logprob, width * index, width).release().ptr());
}

uint32_t word_at(const std::byte* column, size_t index) {
  uint32_t word;
  std::memcpy(&word, column + 4 * index, sizeof word);
  return word;
}

// Finish reasons by row: the finish list is sorted into the rows that it names; what has no row is left out.
std::vector<uint16_t> finish_reasons(const OutFrame& frame) {
  std::vector<uint16_t> reasons(frame.num_finished > 0 ? frame.header.count : 0);
  for (uint32_t i = 0; i < frame.num_finished; ++i) {
    FinishRecord record;
    std::memcpy(&record, frame.address + frame.at.finish + i * sizeof record, sizeof record);
    for (uint32_t row = 0; row < frame.header.count; ++row) {
      if (word_at(frame.address + frame.at.stream_slot, row) == record.stream_slot) reasons[row] = record.reason;
    }
  }
  return reasons;
}

// One tuple per row; one more group of four per token that has logprobs.
nb::list frame_rows(const Frame& frame) {
  frame.expect_step();
  frame.live();
  const OutFrame& parsed = frame.parsed;
  const std::vector<uint16_t> reasons = finish_reasons(parsed);
  const bool multi = has_flag(parsed.header.flags, FrameFlag::MULTI_TOKEN);
  nb::list rows = nb::steal<nb::list>(PyList_New(parsed.header.count));
  size_t token = 0, logprob = 0;
  for (uint32_t i = 0; i < parsed.header.count; ++i) {
    const size_t tokens =
        multi ? std::min<size_t>(word_at(parsed.address + parsed.at.num_tokens, i), parsed.num_token_ids - token) : 1;
    size_t end = logprob;
    while (end < parsed.logprobs.count &&
           word_at(parsed.address + parsed.logprobs.at.token_index, end) < token + tokens)
      ++end;
    PyObject* row = PyTuple_New(static_cast<Py_ssize_t>(3 + 4 * (end - logprob)));
    if (row == nullptr) throw nb::python_error();
    PyList_SET_ITEM(rows.ptr(), i, row);
    PyTuple_SET_ITEM(row, 0, PyLong_FromUnsignedLong(word_at(parsed.address + parsed.at.stream_slot, i)));
    PyTuple_SET_ITEM(row, 1, list_of<int32_t>(parsed.address + parsed.at.token_id, token, tokens).release().ptr());
    PyTuple_SET_ITEM(row, 2, reasons.empty() || reasons[i] == 0 ? Py_NewRef(Py_None) : PyLong_FromLong(reasons[i]));
    for (Py_ssize_t item = 3; logprob < end; ++logprob, item += 4) set_logprobs(row, item, frame, logprob);
    token += tokens;
  }
  return rows;
}

// A private copy of the record that follows the frame header.
nb::object first_record(const Frame& frame, std::string_view structure, size_t record_bytes) {
  nb::object records = frame.live().records(frame.parsed.address, sizeof(FrameHeader), 1, structure, record_bytes);
  return nb::object(records[0]).attr("copy")();
}

nb::object frame_ready(const Frame& frame) {
  if (!frame.is(FrameType::READY)) return nb::none();
  return first_record(frame, "ReadyRecord", sizeof(ReadyRecord));
}

nb::object frame_prompt_logprobs(const Frame& frame) {
  if (!frame.is(FrameType::PROMPT_LOGPROBS)) return nb::none();
  nb::object record = first_record(frame, "PromptLogprobsRecord", sizeof(PromptLogprobsRecord));
  nb::object columns = logprob_columns(frame.live(), frame.parsed.address, frame.parsed.logprobs, false);
  return nb::make_tuple(record) + columns;
}

void bind_frame(nb::module_& module) {
  nb::class_<Frame>(module, "Frame")
      .def_prop_ro("type", [](const Frame& f) { return f.parsed.header.type; })
      .def_prop_ro("flags", [](const Frame& f) { return f.parsed.header.flags; })
      .def_prop_ro("count", [](const Frame& f) { return f.parsed.header.count; })
      .def_prop_ro("length", [](const Frame& f) { return f.parsed.header.length; })
      .def_prop_ro("position", [](const Frame& f) { return f.parsed.header.position; })
      .def_prop_ro("publish_ns", [](const Frame& f) { return f.parsed.header.publish_ns; })
      .def_prop_ro("num_token_ids", [](const Frame& f) { return f.parsed.num_token_ids; })
      .def_prop_ro("num_finished", [](const Frame& f) { return f.parsed.num_finished; })
      .def_prop_ro("address", &frame_address)
      .def_prop_ro("data", [](const Frame& f) { return f.live().u8(f.parsed.address, 0, f.parsed.header.length); })
      .def_prop_ro("stream_slot", [](const Frame& f) { return f.column(f.parsed.at.stream_slot); })
      .def_prop_ro("slot_generation", [](const Frame& f) { return f.column(f.parsed.at.slot_generation); })
      .def_prop_ro("num_tokens", &frame_num_tokens)
      .def_prop_ro("token_id", &frame_token_id)
      .def_prop_ro("finish", &frame_finish)
      .def_prop_ro("logprobs", &frame_logprobs)
      .def("columns", &frame_columns)
      .def("rows", &frame_rows)
      .def_prop_ro("ready", &frame_ready)
      .def_prop_ro("prompt_logprobs", &frame_prompt_logprobs);
}

// ---- FrontEndChannel ----

struct FrontEndChannel {
  std::unique_ptr<FrontEndEnd<>> end;
  std::shared_ptr<OutViews> views;
  nb::object control;
  nb::object stats;  // keeps the counted page mapped
  int out_doorbell_fd;

  FrontEndEnd<>& usable() const {
    end->check_usable();
    return *end;
  }
};

void hello(nb::object control, uint64_t req_bytes, uint64_t out_bytes, uint32_t num_stream_slots, double timeout_s,
           uint32_t frontend_index) {
  SegmentShape shape = SegmentShape::rounded(req_bytes, out_bytes, num_stream_slots);
  int socket = fileno_of(control);
  nb::gil_scoped_release unlocked;
  say_hello(socket, shape, frontend_index, deadline_after(timeout_s));
}

std::unique_ptr<FrontEndChannel> connect(nb::object control, int req_doorbell_fd, int out_doorbell_fd,
                                         uint64_t req_bytes, uint64_t out_bytes, uint32_t num_stream_slots,
                                         double timeout_s, uint32_t frontend_index, bool has_said_hello, bool crc,
                                         bool debug) {
  SegmentShape shape = SegmentShape::rounded(req_bytes, out_bytes, num_stream_slots);
  int socket = fileno_of(control);
  std::shared_ptr<Segment> segment;
  {
    nb::gil_scoped_release unlocked;
    segment = has_said_hello ? receive_segment(socket, shape, deadline_after(timeout_s))
                             : request_segment(socket, shape, frontend_index, timeout_s);
  }
  auto channel = std::make_unique<FrontEndChannel>();
  channel->views = std::make_shared<OutViews>(segment, false);
  channel->end = std::make_unique<FrontEndEnd<>>(segment, req_doorbell_fd, out_doorbell_fd, ChannelOptions{crc, debug});
  channel->control = std::move(control);
  channel->out_doorbell_fd = out_doorbell_fd;
  return channel;
}

[[noreturn]] void bad_value(const std::string& what) { throw nb::value_error(what.c_str()); }

// Commits one request without publishing it; false = full. Raises ValueError if no frame or slot can hold it.
bool commit_request(FrontEndEnd<>& end, nb::handle record_object, const Column<int32_t>& ids,
                    nb::handle extensions_object) {
  RequestRecord record = Bytes(record_object).record<RequestRecord>("the request record");
  Bytes extensions(extensions_object);
  if (record.stream_slot >= end.num_stream_slots() || record.slot_generation == 0) {
    bad_value("stream slot " + std::to_string(record.stream_slot) + " generation " +
              std::to_string(record.slot_generation) + ": slots are below " + std::to_string(end.num_stream_slots()) +
              ", generations start at 1");
  }
  if (record.num_stop_ids > kNumInlineStopIds) bad_value("more than 8 inline stop ids: use the STOP_IDS extension");
  if (record.num_prior_output > ids.size()) bad_value("num_prior_output is larger than the number of ids");
  if (extensions.bytes().size() % 8 != 0) bad_value("extensions must come from encode_extensions()");
  uint64_t length = request_frame_bytes(ids.size(), extensions.bytes().size());
  if (length > end.max_request_bytes()) {
    bad_value("a request of " + std::to_string(length) + " bytes is larger than a quarter of the request ring (" +
              std::to_string(end.max_request_bytes()) + " bytes): make req_bytes larger");
  }
  return end.submit(record, span_of<int32_t>(ids), extensions.bytes());
}

bool submit(FrontEndChannel& self, nb::handle record, const Column<int32_t>& ids, nb::handle extensions) {
  FrontEndEnd<>& end = self.usable();
  if (!commit_request(end, record, ids, extensions)) return false;
  end.publish();
  return true;
}

size_t submit_many(FrontEndChannel& self, nb::iterable items) {
  FrontEndEnd<>& end = self.usable();
  struct PublishAtEnd {  // also when an item raises: what is committed must not wait for the next call
    FrontEndEnd<>& end;
    ~PublishAtEnd() { end.publish(); }
  } publish{end};
  size_t accepted = 0;
  for (nb::handle item : items) {
    nb::object ids = item[1];
    if (!commit_request(end, nb::object(item[0]), nb::cast<Column<int32_t>>(ids, false), nb::object(item[2]))) break;
    ++accepted;
  }
  return accepted;
}

nb::object poll(FrontEndChannel& self) {
  std::optional<OutFrame> frame = self.usable().poll();
  if (!frame) return nb::none();
  return nb::cast(Frame{*frame, self.views});
}

void release(FrontEndChannel& self) {
  FrontEndEnd<>& end = self.usable();
  if (end.options().debug && self.views->live() > 0) {
    throw HandleDead(std::to_string(self.views->live()) +
                     " views of frames are still referenced at release(): copy what must live longer");
  }
  self.views->released = end.position();
  end.release();
}

void cancel(FrontEndChannel& self, uint32_t stream_slot, uint32_t slot_generation) {
  FrontEndEnd<>& end = self.usable();
  if (stream_slot >= end.num_stream_slots()) throw nb::index_error("stream slot out of range");
  end.cancel(stream_slot, slot_generation);
}

}  // namespace

void bind_front_end_channel(nb::module_& module) {
  bind_frame(module);
  using Self = FrontEndChannel;
  nb::class_<Self>(module, "FrontEndChannel")
      .def_static("connect", &connect, "control"_a, "req_doorbell_fd"_a, "out_doorbell_fd"_a, nb::kw_only(),
                  "req_bytes"_a = 1 << 20, "out_bytes"_a = 4 << 20, "num_stream_slots"_a = 2048, "timeout_s"_a = 10.0,
                  "frontend_index"_a = 0, "has_said_hello"_a = false, "crc"_a = false, "debug"_a = false)
      .def_static("say_hello", &hello, "control"_a, nb::kw_only(), "req_bytes"_a = 1 << 20, "out_bytes"_a = 4 << 20,
                  "num_stream_slots"_a = 2048, "timeout_s"_a = 10.0, "frontend_index"_a = 0)
      .def_prop_ro("connection_generation", [](const Self& c) { return c.end->connection_generation(); })
      .def_prop_ro("num_stream_slots", [](const Self& c) { return c.end->num_stream_slots(); })
      .def_prop_ro("engine_pid", [](const Self& c) { return c.usable().segment()->header().engine_pid; })
      .def_prop_ro("engine_index", [](const Self& c) { return c.usable().segment()->header().engine_index; })
      .def_prop_ro("max_request_bytes", [](const Self& c) { return c.usable().max_request_bytes(); })
      .def_prop_ro("segment_fd", [](const Self& c) { return c.usable().segment()->fd(); })
      .def_prop_ro("peer_closed", [](const Self& c) { return c.usable().peer_closed(); })
      .def_prop_ro("closed", [](const Self& c) { return c.end->segment() == nullptr; })
      .def_prop_ro("counters", &counters_of<Self>)
      .def_ro("control", &Self::control)
      .def_ro("out_doorbell_fd", &Self::out_doorbell_fd)
      .def("submit", &submit, "record"_a, "ids"_a.noconvert(), "extensions"_a = nb::bytes("", 0))
      .def("submit_many", &submit_many, "items"_a)
      .def("cancel", &cancel, "stream_slot"_a, "slot_generation"_a)
      .def("poll", &poll)
      .def("release", &release)
      .def("arm", [](Self& c) { return c.usable().arm(); })
      .def("req_free_bytes", [](Self& c) { return c.usable().req_free_bytes(); })
      .def("drain_doorbell", [](Self& c) { c.usable().drain_doorbell(); })
      .def("count_in", &count_in<Self>, "page"_a, "peer"_a)
      .def("close", &close_channel<Self>)
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](Self& c, nb::args) { close_channel(c); });
}

}  // namespace tokring::binding
