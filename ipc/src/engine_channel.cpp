// EngineChannel, Request and StepFrame for Python.
#include "out_views.hpp"

namespace tokring::binding {

namespace {

// ---- Request: one REQ frame in private memory ----

struct Request {
  RequestFrame frame;

  std::span<const int32_t> ids() const {
    return {reinterpret_cast<const int32_t*>(frame.bytes.data() + frame.ids), frame.record.num_ids};
  }
};

nb::object request_record(const Request& self) {
  auto* start = reinterpret_cast<const uint8_t*>(self.frame.bytes.data() + sizeof(FrameHeader));
  nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> bytes(start, {sizeof(RequestRecord)}, nb::find(&self));
  return nb::object(nb::cast(bytes).attr("view")(struct_dtype("RequestRecord"))[0]);
}

nb::bytes request_record_bytes(const Request& self) {
  return nb::bytes(self.frame.bytes.data() + sizeof(FrameHeader), sizeof(RequestRecord));
}

nb::object request_ids(const Request& self) {
  std::span<const int32_t> ids = self.ids();
  return NumpyApi::get().view<int32_t, 1>(ids.data(), {static_cast<Py_ssize_t>(ids.size())}, nb::find(&self), false);
}

nb::tuple request_id_range(const Request& self) {
  std::span<const int32_t> ids = self.ids();
  if (ids.empty()) return nb::make_tuple(0, 0);
  int32_t least = ids[0], most = ids[0];
  for (int32_t id : ids) {
    least = std::min(least, id);
    most = std::max(most, id);
  }
  return nb::make_tuple(least, most);
}

nb::list request_extensions(const Request& self) {
  nb::list items;
  const std::byte* start = self.frame.bytes.data() + self.frame.extensions;
  for (uint64_t offset = 0; offset < self.frame.record.extension_bytes;) {
    ExtensionHeader header;
    std::memcpy(&header, start + offset, sizeof header);
    offset += sizeof header;
    items.append(nb::make_tuple(header.kind, nb::bytes(start + offset, header.bytes)));
    offset += round_up(header.bytes, 8);
  }
  return items;
}

void bind_request(nb::module_& module) {
  nb::class_<Request>(module, "Request")
      .def_prop_ro("stream_slot", [](const Request& r) { return r.frame.record.stream_slot; })
      .def_prop_ro("slot_generation", [](const Request& r) { return r.frame.record.slot_generation; })
      .def_prop_ro("num_ids", [](const Request& r) { return r.frame.record.num_ids; })
      .def_prop_ro("record", &request_record)
      .def_prop_ro("record_bytes", &request_record_bytes)
      .def_prop_ro("ids", &request_ids)
      .def_prop_ro("id_range", &request_id_range)
      .def_prop_ro("extensions", &request_extensions);
}

// ---- EngineChannel ----

struct EngineChannel {
  std::unique_ptr<EngineEnd<>> end;
  std::shared_ptr<OutViews> views;
  nb::object control;
  nb::object stats;  // keeps the counted page mapped
  int req_doorbell_fd;
  uint32_t frontend_index;

  EngineEnd<>& usable() const {
    end->check_usable();
    return *end;
  }
};

std::unique_ptr<EngineChannel> accept(nb::object control, int req_doorbell_fd, int out_doorbell_fd,
                                      uint32_t engine_index, uint64_t max_segment_bytes, double timeout_s, bool crc,
                                      bool debug) {
  int socket = fileno_of(control);
  AcceptedSegment accepted;
  {
    nb::gil_scoped_release unlocked;
    accepted = serve_segment(socket, engine_index, max_segment_bytes, timeout_s);
  }
  auto channel = std::make_unique<EngineChannel>();
  channel->views = std::make_shared<OutViews>(accepted.segment, true);
  channel->end =
      std::make_unique<EngineEnd<>>(accepted.segment, req_doorbell_fd, out_doorbell_fd, ChannelOptions{crc, debug});
  channel->control = std::move(control);
  channel->req_doorbell_fd = req_doorbell_fd;
  channel->frontend_index = accepted.frontend_index;
  return channel;
}

nb::object poll_request(EngineChannel& self) {
  std::optional<RequestFrame> frame = self.usable().poll_request();
  if (!frame) return nb::none();
  return nb::cast(Request{std::move(*frame)});
}

[[noreturn]] void bad_value(const std::string& what) { throw nb::value_error(what.c_str()); }

void check_equal(size_t found, size_t needed, const char* what) {
  if (found == needed) return;
  bad_value(std::string(what) + " has " + std::to_string(found) + " elements, needed " + std::to_string(needed));
}

nb::object cancelled(EngineChannel& self, const Column<uint32_t>& slots, const Column<uint32_t>& generations,
                     nb::object out) {
  using Flags = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  check_equal(generations.size(), slots.size(), "generations");
  static nb::handle empty = nb::object(nb::module_::import_("numpy").attr("empty")).release();  // never freed
  if (out.is_none()) out = empty(slots.size(), "bool");
  auto flags = nb::cast<Flags>(out, false);
  check_equal(flags.size(), slots.size(), "out");
  self.usable().cancelled(span_of<uint32_t>(slots), span_of<uint32_t>(generations), flags.data());
  return out;
}

bool is_cancelled(EngineChannel& self, uint32_t stream_slot, uint32_t slot_generation) {
  bool flag;
  self.usable().cancelled({&stream_slot, 1}, {&slot_generation, 1}, &flag);
  return flag;
}

// ---- StepFrame: a claimed, not yet committed step; writable views into the ring itself ----

struct StepFrame {
  EngineChannel* channel;  // kept alive by `owner`
  nb::object owner;
  std::shared_ptr<OutViews> views;
  std::byte* address;
  StepShape shape;
  StepOffsets at;
  bool committed = false;

  const OutViews& open() const {
    if (committed) throw HandleDead("this step frame is committed: its columns are the front end's now");
    return *views;
  }
  void commit() {
    open();
    channel->usable().commit(step_header(shape, at));
    committed = true;
  }
};

StepShape step_shape(uint64_t num_rows, std::optional<uint64_t> num_token_ids, uint64_t num_finished,
                     uint64_t num_logprob_rows, uint64_t logprobs_width) {
  if (logprobs_width > kMaxLogprobs) bad_value("logprobs_width above " + std::to_string(kMaxLogprobs));
  StepShape shape{.num_rows = num_rows, .num_token_ids = num_token_ids.value_or(num_rows)};
  shape.multi_token = num_token_ids.has_value();
  shape.num_finished = num_finished;
  shape.num_logprob_rows = num_logprob_rows;
  shape.logprobs_width = logprobs_width;
  return shape;
}

nb::object claim_step(nb::object self_object, uint64_t num_rows, std::optional<uint64_t> num_token_ids,
                      uint64_t num_finished, uint64_t num_logprob_rows, uint64_t logprobs_width) {
  auto& self = nb::cast<EngineChannel&>(self_object);
  EngineEnd<>& end = self.usable();
  StepShape shape = step_shape(num_rows, num_token_ids, num_finished, num_logprob_rows, logprobs_width);
  StepOffsets at = step_offsets(shape);
  uint64_t most = std::max({num_rows, shape.num_token_ids, num_finished, num_logprob_rows});
  if (most > end.max_step_bytes() || at.length > end.max_step_bytes()) {
    bad_value("a step of " + std::to_string(at.length) + " bytes is larger than a quarter of the OUT ring (" +
              std::to_string(end.max_step_bytes()) + " bytes): use write_step(), which splits it");
  }
  std::byte* frame = end.claim(at.length);
  if (frame == nullptr) return nb::none();
  write_step_sections(frame, shape, at);
  return nb::cast(StepFrame{&self, self_object, self.views, frame, shape, at});
}

template <size_t kIndex>
nb::object step_logprob_column(const StepFrame& step) {
  LogprobsView logprobs{static_cast<uint32_t>(step.shape.num_logprob_rows),
                        static_cast<uint32_t>(step.shape.logprobs_width), step.at.logprobs};
  return nb::object(logprob_columns(step.open(), step.address, logprobs, true)[kIndex]);
}

nb::object step_num_tokens(const StepFrame& step) {
  if (!step.shape.multi_token) return nb::none();
  return step.open().u32(step.address, step.at.num_tokens, step.shape.num_rows);
}

nb::object step_finish(const StepFrame& step) {
  return step.open().records(step.address, step.at.finish, step.shape.num_finished, "FinishRecord",
                             sizeof(FinishRecord));
}

void bind_step_frame(nb::module_& module) {
  using Self = StepFrame;
  nb::class_<Self>(module, "StepFrame")
      .def_prop_ro("stream_slot",
                   [](const Self& s) { return s.open().u32(s.address, s.at.stream_slot, s.shape.num_rows); })
      .def_prop_ro("slot_generation",
                   [](const Self& s) { return s.open().u32(s.address, s.at.slot_generation, s.shape.num_rows); })
      .def_prop_ro("num_tokens", &step_num_tokens)
      .def_prop_ro("token_id",
                   [](const Self& s) { return s.open().i32(s.address, s.at.token_id, s.shape.num_token_ids); })
      .def_prop_ro("finish", &step_finish)
      .def_prop_ro("logprob_token_index", &step_logprob_column<0>)
      .def_prop_ro("logprob_rank", &step_logprob_column<1>)
      .def_prop_ro("logprob", &step_logprob_column<2>)
      .def_prop_ro("top_id", &step_logprob_column<3>)
      .def_prop_ro("top_logprob", &step_logprob_column<4>)
      .def("commit", &Self::commit);
}

// ---- write_step: optional columns arrive as None or an array ----

template <class T>
std::span<const T> optional_span(const std::optional<Column<T>>& column) {
  return column ? span_of<T>(*column) : std::span<const T>();
}

template <class T>
std::span<const T> optional_matrix(const std::optional<Matrix<T>>& matrix, size_t rows, size_t width,
                                   const char* what) {
  if (!matrix) {
    check_equal(0, rows * width, what);
    return {};
  }
  check_equal(matrix->shape(0), rows, what);
  check_equal(matrix->shape(1), width, what);
  return span_of<T>(*matrix);
}

uint32_t width_of(const std::optional<Matrix<int32_t>>& top_id) {
  size_t width = top_id ? top_id->shape(1) : 0;
  if (width > kMaxLogprobs)
    bad_value(std::to_string(width) + " logprobs a token, at most " + std::to_string(kMaxLogprobs));
  return static_cast<uint32_t>(width);
}

// The rows must point at tokens of this step, in ascending order.
void check_token_index(const StepColumns& step) {
  uint32_t least = 0;
  for (uint32_t index : step.logprob_token_index) {
    if (index < least || index >= step.token_id.size()) bad_value("logprob_token_index must ascend within token_id");
    least = index;
  }
}

bool write_step(EngineChannel& self, const Column<uint32_t>& stream_slot, const Column<uint32_t>& slot_generation,
                const Column<int32_t>& token_id, nb::object finish, const std::optional<Column<uint32_t>>& num_tokens,
                const std::optional<Column<uint32_t>>& logprob_token_index,
                const std::optional<Column<int32_t>>& logprob_rank, const std::optional<Column<float>>& logprob,
                const std::optional<Matrix<int32_t>>& top_id, const std::optional<Matrix<float>>& top_logprob) {
  StepColumns step;
  step.stream_slot = span_of<uint32_t>(stream_slot);
  step.slot_generation = span_of<uint32_t>(slot_generation);
  step.token_id = span_of<int32_t>(token_id);
  step.num_tokens = optional_span(num_tokens);
  check_equal(step.slot_generation.size(), step.stream_slot.size(), "slot_generation");
  size_t tokens = step.stream_slot.size();
  if (num_tokens) {
    check_equal(step.num_tokens.size(), step.stream_slot.size(), "num_tokens");
    tokens = detail::sum(step.num_tokens.data(), step.num_tokens.size());
  }
  check_equal(step.token_id.size(), tokens, "token_id");
  std::optional<Bytes> finish_bytes;
  if (!finish.is_none()) {
    std::span<const std::byte> bytes = finish_bytes.emplace(finish).bytes();
    if (bytes.size() % sizeof(FinishRecord) != 0) bad_value("finish must be an array of FINISH_DTYPE");
    step.finish = {reinterpret_cast<const FinishRecord*>(bytes.data()), bytes.size() / sizeof(FinishRecord)};
  }
  if (logprob) {
    step.logprob = span_of<float>(*logprob);
    step.logprob_token_index = optional_span(logprob_token_index);
    step.logprob_rank = optional_span(logprob_rank);
    step.logprobs_width = width_of(top_id);
    check_equal(step.logprob_token_index.size(), step.logprob.size(), "logprob_token_index");
    check_equal(step.logprob_rank.size(), step.logprob.size(), "logprob_rank");
    step.top_id = optional_matrix(top_id, step.logprob.size(), step.logprobs_width, "top_id");
    step.top_logprob = optional_matrix(top_logprob, step.logprob.size(), step.logprobs_width, "top_logprob");
    check_token_index(step);
  }
  return self.usable().write_step(step);
}

bool write_prompt_logprobs(EngineChannel& self, uint32_t stream_slot, uint32_t slot_generation, uint32_t start,
                           const Column<int32_t>& rank, const Column<float>& logprob,
                           const std::optional<Matrix<int32_t>>& top_id,
                           const std::optional<Matrix<float>>& top_logprob) {
  PromptLogprobColumns columns{};
  columns.stream_slot = stream_slot;
  columns.slot_generation = slot_generation;
  columns.start = start;
  columns.width = width_of(top_id);
  columns.rank = span_of<int32_t>(rank);
  columns.logprob = span_of<float>(logprob);
  check_equal(columns.logprob.size(), columns.rank.size(), "logprob");
  columns.top_id = optional_matrix(top_id, columns.rank.size(), columns.width, "top_id");
  columns.top_logprob = optional_matrix(top_logprob, columns.rank.size(), columns.width, "top_logprob");
  return self.usable().write_prompt_logprobs(columns);
}

bool write_ready(EngineChannel& self, nb::handle record) {
  return self.usable().write_ready(Bytes(record).record<ReadyRecord>("the READY record"));
}

uint64_t step_bytes(uint64_t num_rows, std::optional<uint64_t> num_token_ids, uint64_t num_finished,
                    uint64_t num_logprob_rows, uint64_t logprobs_width) {
  return step_offsets(step_shape(num_rows, num_token_ids, num_finished, num_logprob_rows, logprobs_width)).length;
}

}  // namespace

void bind_engine_channel(nb::module_& module) {
  bind_request(module);
  bind_step_frame(module);
  using Self = EngineChannel;
  nb::class_<Self>(module, "EngineChannel")
      .def_static("accept", &accept, "control"_a, "req_doorbell_fd"_a, "out_doorbell_fd"_a, nb::kw_only(),
                  "engine_index"_a = 0, "max_segment_bytes"_a = 1ULL << 30, "timeout_s"_a = 10.0, "crc"_a = false,
                  "debug"_a = false)
      .def_prop_ro("connection_generation", [](const Self& c) { return c.end->connection_generation(); })
      .def_prop_ro("num_stream_slots", [](const Self& c) { return c.end->num_stream_slots(); })
      .def_prop_ro("frontend_pid", [](const Self& c) { return c.usable().segment()->header().frontend_pid; })
      .def_ro("frontend_index", &Self::frontend_index)
      .def_prop_ro("max_step_bytes", [](const Self& c) { return c.usable().max_step_bytes(); })
      .def_prop_ro("segment_fd", [](const Self& c) { return c.usable().segment()->fd(); })
      .def_prop_ro("peer_closed", [](const Self& c) { return c.usable().peer_closed(); })
      .def_prop_ro("closed", [](const Self& c) { return c.end->segment() == nullptr; })
      .def_prop_ro("doorbell_owed", [](const Self& c) { return c.usable().doorbell_owed(); })
      .def_prop_ro("counters", &counters_of<Self>)
      .def_ro("control", &Self::control)
      .def_ro("req_doorbell_fd", &Self::req_doorbell_fd)
      .def("poll_request", &poll_request)
      .def("release_requests", [](Self& c) { c.usable().release_requests(); })
      .def("new_cancels", [](Self& c) { return c.usable().new_cancels(); })
      .def("cancelled", &cancelled, "stream_slots"_a.noconvert(), "generations"_a.noconvert(), "out"_a = nb::none())
      .def("is_cancelled", &is_cancelled, "stream_slot"_a, "slot_generation"_a)
      .def("claim_step", &claim_step, "num_rows"_a, nb::kw_only(), "num_token_ids"_a = nb::none(), "num_finished"_a = 0,
           "num_logprob_rows"_a = 0, "logprobs_width"_a = 0)
      .def("write_step", &write_step, "stream_slot"_a.noconvert(), "slot_generation"_a.noconvert(),
           "token_id"_a.noconvert(), "finish"_a = nb::none(), nb::kw_only(), "num_tokens"_a.noconvert() = nb::none(),
           "logprob_token_index"_a.noconvert() = nb::none(), "logprob_rank"_a.noconvert() = nb::none(),
           "logprob"_a.noconvert() = nb::none(), "top_id"_a.noconvert() = nb::none(),
           "top_logprob"_a.noconvert() = nb::none())
      .def("write_ready", &write_ready, "record"_a)
      .def("write_prompt_logprobs", &write_prompt_logprobs, "stream_slot"_a, "slot_generation"_a, "start"_a,
           "rank"_a.noconvert(), "logprob"_a.noconvert(), "top_id"_a.noconvert() = nb::none(),
           "top_logprob"_a.noconvert() = nb::none())
      .def("publish", [](Self& c) { c.usable().publish(); })
      .def("ring", [](Self& c) { c.usable().ring(); })
      .def("out_free_bytes", [](Self& c) { return c.usable().out_free_bytes(); })
      .def("arm_requests", [](Self& c) { return c.usable().arm(); })
      .def("drain_doorbell", [](Self& c) { c.usable().drain_doorbell(); })
      .def("count_in", &count_in<Self>, "page"_a, "peer"_a)
      .def("close", &close_channel<Self>)
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](Self& c, nb::args) { close_channel(c); });
  module.def("step_bytes", &step_bytes, "num_rows"_a, nb::kw_only(), "num_token_ids"_a = nb::none(),
             "num_finished"_a = 0, "num_logprob_rows"_a = 0, "logprobs_width"_a = 0);
}

}  // namespace tokring::binding
