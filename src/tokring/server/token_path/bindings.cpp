// NativeTokenPath: the Python face of TokenPath. Signatures and meaning are those of interface.TokenPath.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "json_shape.hpp"
#include "token_path.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tokring::token_path {
namespace {

// Below this many rows or queued connections a call keeps the GIL: getting it back beside a computing thread can cost
// milliseconds, more than the call.
constexpr size_t kReleaseGilFrom = 64;

using WordArray = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdArray = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

// Types of interface.py that are handed out.
struct PythonTypes {
  nb::object event, finish, result, piece, frame_error;
  std::vector<nb::object> event_kinds;  // by value

  static PythonTypes load() {
    nb::module_ interface = nb::module_::import_("tokring.server.token_path.interface");
    PythonTypes types = {interface.attr("Event"), interface.attr("Finish"),     interface.attr("Result"),
                         interface.attr("Piece"), interface.attr("FrameError"), {}};
    types.event_kinds.resize(static_cast<size_t>(EventKind::kSent) + 1);
    for (nb::handle kind : interface.attr("EventKind")) types.event_kinds.at(nb::cast<size_t>(kind)) = nb::borrow(kind);
    return types;
  }
};

Histogram histogram_from(nb::handle object) {
  if (object.is_none()) return {};
  auto bounds = nb::cast<WordArray>(object.attr("bounds_ns"));
  auto buckets = nb::cast<WordArray>(object.attr("buckets"));
  auto sum = nb::cast<WordArray>(object.attr("sum_ns"));
  if (buckets.shape(0) != bounds.shape(0) + 1 || sum.shape(0) != 1) {
    throw std::invalid_argument("a histogram needs one bucket more than bounds, and one word of sum");
  }
  return {{bounds.data(), bounds.data() + bounds.shape(0)}, buckets.data(), sum.data()};
}

TokenTable table_from(nb::handle object) {
  auto data = nb::cast<nb::bytes>(object.attr("data"));
  auto offsets = nb::cast<nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig>>(object.attr("offsets"));
  auto special = nb::cast<nb::ndarray<const bool, nb::ndim<1>, nb::c_contig>>(object.attr("special"));
  std::vector<uint32_t> ends(offsets.data(), offsets.data() + offsets.shape(0));
  if (ends.size() != special.shape(0) + 1 || ends.front() != 0 || ends.back() != data.size() ||
      !std::is_sorted(ends.begin(), ends.end())) {
    throw std::invalid_argument("the token table's offsets must ascend from 0 to the size of its data");
  }
  return TokenTable(std::string(data.c_str(), data.size()), std::move(ends),
                    std::vector<uint8_t>(special.data(), special.data() + special.shape(0)));
}

std::vector<TemplatePart> template_from(nb::handle parts) {
  std::vector<TemplatePart> result;
  for (nb::handle part : parts) {
    if (nb::isinstance<nb::bytes>(part)) {
      auto literal = nb::borrow<nb::bytes>(part);
      result.push_back({Field::kLiteral, std::string(literal.c_str(), literal.size())});
      continue;
    }
    int field = nb::cast<int>(part);
    if (field < static_cast<int>(Field::kText) || field > static_cast<int>(Field::kTotalTokens)) {
      throw std::invalid_argument("unknown template field " + std::to_string(field));
    }
    result.push_back({static_cast<Field>(field), {}});
  }
  return result;
}

IdArray id_array(const std::vector<int32_t>& ids) {
  auto copy = std::make_unique<int32_t[]>(ids.size());
  std::copy(ids.begin(), ids.end(), copy.get());
  nb::capsule owner(copy.get(), [](void* memory) noexcept { delete[] static_cast<int32_t*>(memory); });
  return IdArray(copy.release(), {ids.size()}, owner);
}

nb::str text_of(const std::string& text) { return nb::str(text.data(), text.size()); }

class NativeTokenPath {
 public:
  NativeTokenPath(nb::object table, size_t num_stream_slots, size_t max_backlog_bytes, double max_backlog_age_s,
                  nb::object inter_token, nb::object first_token)
      : types_(PythonTypes::load()),
        histograms_{inter_token, first_token},
        path_(table_from(table), num_stream_slots, {max_backlog_bytes, static_cast<uint64_t>(max_backlog_age_s * 1e9)},
              histogram_from(inter_token), histogram_from(first_token)) {}

  uint32_t connect(bool chunked) { return idle().connect(chunked); }
  nb::list attach(uint32_t connection, int fd) {
    return with_events([&](TokenPath& path) { path.attach(connection, fd, events_); });
  }
  void pause(uint32_t connection) { idle().pause(connection); }
  nb::list resume(uint32_t connection) {
    return with_events([&](TokenPath& path) { path.resume(connection, events_); });
  }
  nb::list write(uint32_t connection, nb::bytes data, bool end) {
    return with_events([&](TokenPath& path) { path.write(connection, {data.c_str(), data.size()}, end, events_); });
  }
  nb::list outputs() {
    nb::list drained;
    idle().outputs([&](uint32_t connection, std::string_view bytes) {
      drained.append(nb::make_tuple(connection, nb::bytes(bytes.data(), bytes.size())));
    });
    return drained;
  }
  size_t backlog(uint32_t connection) { return idle().backlog(connection); }
  nb::bytes disconnect(uint32_t connection) {
    std::string unsent = idle().disconnect(connection);
    return nb::bytes(unsent.data(), unsent.size());
  }
  int writable_fd() { return idle().writable_fd(); }

  void open(uint64_t stream_slot, uint32_t slot_generation, std::optional<uint32_t> connection, nb::object parts,
            bool deltas, std::vector<std::string> stop, bool include_stop, uint64_t min_tokens, bool skip_special,
            std::vector<int32_t> hidden_ids, int logprob_style, uint32_t num_logprobs, bool tokens_as_ids,
            uint64_t text_offset, bool return_token_ids, uint64_t stream_interval, uint64_t num_prompt_tokens,
            uint64_t arrival_ns, bool strip_leading_space, nb::object /* prompt_ids: of other families */) {
    bool has_empty_stop = std::any_of(stop.begin(), stop.end(), [](const std::string& text) { return text.empty(); });
    if (has_empty_stop || num_logprobs > kMaxLogprobs || stream_interval < 1) {
      throw std::invalid_argument(
          "stop strings must not be empty, num_logprobs at most 20, stream_interval at least 1");
    }
    if (connection && deltas) {
      throw std::invalid_argument("a stream is sent to a connection or handed out as deltas, not both");
    }
    if (logprob_style < 0 || logprob_style > static_cast<int>(LogprobStyle::kCompletions)) {
      throw std::invalid_argument("unknown logprob style " + std::to_string(logprob_style));
    }
    StreamOptions options;
    options.mode = connection ? StreamMode::kSend : deltas ? StreamMode::kDelta : StreamMode::kCollect;
    options.chunk_template = template_from(parts);
    options.stop = std::move(stop);
    options.include_stop = include_stop;
    options.min_tokens = min_tokens;
    options.skip_special = skip_special;
    options.hidden_ids = std::move(hidden_ids);
    options.logprob_style = static_cast<LogprobStyle>(logprob_style);
    options.num_logprobs = num_logprobs;
    options.tokens_as_ids = tokens_as_ids;
    options.text_offset = text_offset;
    options.return_token_ids = return_token_ids;
    options.stream_interval = stream_interval;
    options.num_prompt_tokens = num_prompt_tokens;
    options.arrival_ns = arrival_ns;
    options.strip_leading_space = strip_leading_space;
    idle().open(stream_slot, slot_generation, std::move(options), connection ? &*connection : nullptr);
  }

  void rebind(uint64_t stream_slot, uint32_t slot_generation) {
    idle().stream(stream_slot).generation = slot_generation;
  }
  void cancel(uint64_t stream_slot) { idle().stream(stream_slot).is_cancelled = true; }

  nb::object take(uint64_t stream_slot) {
    Stream& stream = idle().stream(stream_slot);
    if (stream.options.mode == StreamMode::kSend) {
      throw std::invalid_argument("stream slot " + std::to_string(stream_slot) + " sends to a connection");
    }
    nb::object logprobs = nb::none();
    if (stream.has_logprobs()) {
      std::string json;
      stream.render_logprobs(json);
      logprobs = nb::bytes(json.data(), json.size());
    }
    nb::object piece = types_.piece(text_of(stream.ready_text()), id_array(stream.ready_token_ids()), logprobs,
                                    stream.token_ids.size());
    stream.discard();
    stream.is_delta_reported = false;
    return piece;
  }

  nb::object result(uint64_t stream_slot) {
    Stream& stream = idle().stream(stream_slot);
    nb::object stop = nb::none();
    if (stream.stop() != nullptr) stop = text_of(*stream.stop());
    nb::object finish = nb::none();
    if (const auto& row = stream.finish) {
      finish = types_.finish(row->reason, row->error_code, row->stop_id, row->num_prompt_tokens, row->num_cached_tokens,
                             row->num_output_tokens, row->num_preemptions, row->scheduled_ns, row->first_token_ns,
                             row->end_ns, row->num_draft_tokens, row->num_accepted_tokens);
    }
    return types_.result(stream.token_ids.size(), stream.num_released_bytes(), stop, stream.first_output_ns,
                         stream.last_publish_ns, finish);
  }

  IdArray token_ids(uint64_t stream_slot) { return id_array(idle().stream(stream_slot).token_ids); }
  void close(uint64_t stream_slot) { idle().close(stream_slot); }

  nb::list step(uintptr_t address, size_t length, uint64_t budget_us) {
    return with_events([&](TokenPath& path) {
      const StepFrame* frame = nullptr;
      try {
        frame = &path.read(reinterpret_cast<const void*>(address), length);
      } catch (const FrameFault& fault) {
        PyErr_SetString(types_.frame_error.ptr(), fault.what());
        throw nb::python_error();
      }
      releasing_gil(frame->num_rows(), [&] { path.step(budget_us, events_); });
    });
  }
  nb::list flush(uint64_t budget_us) {
    return with_events(
        [&](TokenPath& path) { releasing_gil(path.pending(), [&] { path.flush(budget_us, events_); }); });
  }
  size_t pending() { return idle().pending(); }

  nb::dict counters() {
    const Counters& counters = idle().counters();
    nb::dict result;
    result["tokens"] = counters.tokens;
    result["surplus_tokens"] = counters.surplus_tokens;
    result["stale_rows"] = counters.stale_rows;
    result["chunks"] = counters.chunks;
    result["sends"] = counters.sends;
    result["sent_bytes"] = counters.sent_bytes;
    result["blocked"] = counters.blocked;
    result["stalled"] = idle().num_stalled();
    return result;
  }
  void release() { idle().release(); }

 private:
  // Guards against a second thread while a call has given the GIL away.
  TokenPath& idle() {
    if (is_running_) throw std::runtime_error("the token path is in use by another thread");
    return path_;
  }

  template <class Call>
  nb::list with_events(Call call) {
    TokenPath& path = idle();
    events_.clear();
    try {
      call(path);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    nb::list list;
    for (const Event& event : events_) {
      list.append(types_.event(types_.event_kinds[static_cast<size_t>(event.kind)], event.subject));
    }
    return list;
  }

  template <class Call>
  void releasing_gil(size_t amount, Call call) {
    if (amount < kReleaseGilFrom) return call();
    struct Running {
      bool& flag;
      explicit Running(bool& flag) : flag(flag) { flag = true; }
      ~Running() { flag = false; }
    } running(is_running_);
    nb::gil_scoped_release release;
    call();
  }

  PythonTypes types_;
  std::pair<nb::object, nb::object> histograms_;  // keep the stats page's words alive
  TokenPath path_;
  Events events_;
  bool is_running_ = false;
};

}  // namespace
}  // namespace tokring::token_path

NB_MODULE(_native, module) {
  using tokring::token_path::NativeTokenPath;
  nb::set_leak_warnings(false);  // a path that lives until the process ends is no leak
  module.doc() = "The native token path; see tokring.server.token_path.interface.";
  nb::class_<NativeTokenPath>(module, "NativeTokenPath")
      .def(nb::init<nb::object, size_t, size_t, double, nb::object, nb::object>(), "table"_a, "num_stream_slots"_a,
           nb::kw_only(), "max_backlog_bytes"_a = 1 << 20, "max_backlog_age_s"_a = 60.0, "inter_token"_a = nb::none(),
           "first_token"_a = nb::none())
      .def("connect", &NativeTokenPath::connect, nb::kw_only(), "chunked"_a)
      .def("attach", &NativeTokenPath::attach, "connection"_a, "fd"_a)
      .def("pause", &NativeTokenPath::pause, "connection"_a)
      .def("resume", &NativeTokenPath::resume, "connection"_a)
      .def("write", &NativeTokenPath::write, "connection"_a, "data"_a, nb::kw_only(), "end"_a = false)
      .def("outputs", &NativeTokenPath::outputs)
      .def("backlog", &NativeTokenPath::backlog, "connection"_a)
      .def("disconnect", &NativeTokenPath::disconnect, "connection"_a)
      .def("writable_fd", &NativeTokenPath::writable_fd)
      .def("open", &NativeTokenPath::open, "stream_slot"_a, "slot_generation"_a, nb::kw_only(),
           "connection"_a = nb::none(), "template"_a = nb::make_tuple(), "deltas"_a = false,
           "stop"_a = nb::make_tuple(), "include_stop"_a = false, "min_tokens"_a = 0, "skip_special"_a = true,
           "hidden_ids"_a = nb::make_tuple(), "logprob_style"_a = 0, "num_logprobs"_a = 0, "tokens_as_ids"_a = false,
           "text_offset"_a = 0, "return_token_ids"_a = false, "stream_interval"_a = 1, "num_prompt_tokens"_a = 0,
           "arrival_ns"_a = 0, "strip_leading_space"_a = false, "prompt_ids"_a = nb::make_tuple())
      .def("rebind", &NativeTokenPath::rebind, "stream_slot"_a, "slot_generation"_a)
      .def("cancel", &NativeTokenPath::cancel, "stream_slot"_a)
      .def("take", &NativeTokenPath::take, "stream_slot"_a)
      .def("result", &NativeTokenPath::result, "stream_slot"_a)
      .def("token_ids", &NativeTokenPath::token_ids, "stream_slot"_a)
      .def("close", &NativeTokenPath::close, "stream_slot"_a)
      .def("step", &NativeTokenPath::step, "address"_a, "length"_a, "budget_us"_a = 1000)
      .def("flush", &NativeTokenPath::flush, "budget_us"_a = 1000)
      .def("pending", &NativeTokenPath::pending)
      .def("counters", &NativeTokenPath::counters)
      .def("release", &NativeTokenPath::release);
  module.def(
      "json_shape",
      [](const nb::bytes& text) {
        std::string_view view(text.c_str(), text.size());
        tokring::token_path::JsonShape shape;
        {
          nb::gil_scoped_release unlocked;
          shape = tokring::token_path::json_shape(view);
        }
        return nb::make_tuple(shape.depth, shape.containers, shape.strings, shape.commas);
      },
      "text"_a);
}
