// RequestLimits for Python: what an engine can serve of a request's numbers and token ids.
#include <algorithm>
#include <cmath>

#include "bindings.hpp"

namespace tokring::binding {

namespace {

constexpr double kMaxTemperature = 100.0;
constexpr int32_t kNoStopId = -2;  // never sampled
constexpr uint64_t kNoDeadline = UINT64_MAX;

[[noreturn]] void refuse(const std::string& why) { throw nb::value_error(why.c_str()); }

std::string text_of(double number) { return nb::repr(nb::float_(number)).c_str(); }

bool is_between(double number, double least, double most) { return least <= number && number <= most; }  // not NaN

class RequestLimits {
 public:
  RequestLimits(int64_t vocab_size, int64_t max_model_len, int64_t max_logprobs)
      : vocab_size_(vocab_size), max_model_len_(max_model_len), max_logprobs_(max_logprobs) {}

  nb::tuple check(const nb::bytes& bytes, const Column<int32_t>& ids) const {
    if (bytes.size() != sizeof(RequestRecord)) refuse("record must be the bytes of one REQUEST_DTYPE");
    RequestRecord record;
    std::memcpy(&record, bytes.c_str(), sizeof record);
    const int64_t num_prompt = static_cast<int64_t>(ids.size()) - record.num_prior_output;
    check_ids(span_of<int32_t>(ids));
    check_lengths(record, num_prompt);
    check_numbers(record);
    check_stop_ids(record);
    const nb::object stop_ids = nb::steal(PyTuple_New(record.num_stop_ids));
    if (!stop_ids.is_valid()) throw nb::python_error();
    for (uint32_t i = 0; i < record.num_stop_ids; ++i) {
      PyTuple_SET_ITEM(stop_ids.ptr(), i, nb::cast(record.stop_ids[i]).release().ptr());
    }
    std::fill(record.stop_ids + record.num_stop_ids, std::end(record.stop_ids), kNoStopId);
    record.top_k = std::max(record.top_k, 0);
    const bool has_parent = record.parent_slot != kNoStreamSlot && record.parent_slot != record.stream_slot;
    if (record.deadline_ns == 0) record.deadline_ns = kNoDeadline;
    // With prior output the prompt's logprobs are out already.
    const int32_t num_prompt_logprobs = record.num_prior_output != 0 ? -1 : record.num_prompt_logprobs;
    const bool has_rules = record.min_tokens != 0 || record.repetition_penalty != 1.0F ||
                           record.presence_penalty != 0.0F || record.frequency_penalty != 0.0F;
    return nb::make_tuple(nb::bytes(&record, sizeof record), record.stream_slot, record.slot_generation,
                          has_parent ? static_cast<int64_t>(record.parent_slot) : -1, record.flags, record.priority,
                          record.deadline_ns, num_prompt, std::min(num_prompt + record.max_tokens, max_model_len_),
                          record.num_logprobs, num_prompt_logprobs, stop_ids, has_rules,
                          num_prompt_logprobs >= 0 || record.max_tokens == 0);
  }

 private:
  bool is_token(int32_t id) const { return 0 <= id && id < vocab_size_; }

  std::string not_in_vocabulary() const {
    return " is not in the vocabulary (0 to " + std::to_string(vocab_size_ - 1) + ")";
  }

  void check_ids(std::span<const int32_t> ids) const {
    int32_t least = 0, most = 0;
    for (int32_t id : ids) {
      least = std::min(least, id);
      most = std::max(most, id);
    }
    if (!is_token(least) || !is_token(most)) refuse("ids: a token id" + not_in_vocabulary());
  }

  void check_lengths(const RequestRecord& record, int64_t num_prompt) const {
    const int64_t num_prior_output = record.num_prior_output;
    const auto above_max_tokens = [&](const char* name, int64_t number) {
      refuse(name + (": " + std::to_string(number)) + " is above max_tokens (" + std::to_string(record.max_tokens) +
             ")");
    };
    if (num_prompt < 1) {
      refuse("num_ids: " + std::to_string(num_prompt + num_prior_output) + " ids hold no prompt token");
    }
    const int64_t longest = max_model_len_ - (record.max_tokens > 0 ? 1 : 0);
    if (num_prompt > longest) {
      refuse("num_ids: " + std::to_string(num_prompt) + " prompt tokens, at most " + std::to_string(longest) +
             " leave room for output");
    }
    if (num_prior_output > record.max_tokens) above_max_tokens("num_prior_output", num_prior_output);
    if (num_prompt + num_prior_output > max_model_len_) {
      refuse("num_prior_output: prompt and prior output exceed " + std::to_string(max_model_len_) + " tokens");
    }
    if (record.min_tokens > record.max_tokens) above_max_tokens("min_tokens", record.min_tokens);
  }

  void check_numbers(const RequestRecord& record) const {
    if (!is_between(record.temperature, 0.0, kMaxTemperature)) {
      refuse("temperature: " + text_of(record.temperature) + " is not between 0 and " + text_of(kMaxTemperature));
    }
    if (!is_between(record.top_p, 0.0, 1.0) || !is_between(record.min_p, 0.0, 1.0)) {
      refuse("top_p " + text_of(record.top_p) + " or min_p " + text_of(record.min_p) + " is not between 0 and 1");
    }
    if (!(record.repetition_penalty > 0.0F && std::isfinite(record.repetition_penalty))) {
      refuse("repetition_penalty: " + text_of(record.repetition_penalty) + " is not above 0 and finite");
    }
    if (!std::isfinite(record.presence_penalty) || !std::isfinite(record.frequency_penalty)) {
      refuse("presence_penalty or frequency_penalty is not finite");
    }
    check_num_logprobs("num_logprobs", record.num_logprobs);
    check_num_logprobs("num_prompt_logprobs", record.num_prompt_logprobs);
  }

  void check_num_logprobs(const char* name, int32_t wanted) const {
    if (wanted < -1 || wanted > max_logprobs_) {
      refuse(std::string(name) + ": " + std::to_string(wanted) + " is not between -1 and " +
             std::to_string(max_logprobs_));
    }
  }

  void check_stop_ids(const RequestRecord& record) const {
    if (record.num_stop_ids > kNumInlineStopIds) {
      refuse("num_stop_ids: " + std::to_string(record.num_stop_ids) + " is above " + std::to_string(kNumInlineStopIds));
    }
    for (uint32_t i = 0; i < record.num_stop_ids; ++i) {
      if (!is_token(record.stop_ids[i])) {
        refuse("stop_ids: " + std::to_string(record.stop_ids[i]) + not_in_vocabulary());
      }
    }
  }

  int64_t vocab_size_, max_model_len_, max_logprobs_;
};

}  // namespace

void bind_request_limits(nb::module_& module) {
  nb::class_<RequestLimits>(module, "RequestLimits")
      .def(nb::init<int64_t, int64_t, int64_t>(), nb::kw_only(), "vocab_size"_a, "max_model_len"_a, "max_logprobs"_a)
      .def("check", &RequestLimits::check, "record"_a, "ids"_a.noconvert());
}

}  // namespace tokring::binding
