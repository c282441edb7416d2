// Python: sampling, and what is done to logits before.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "philox.hpp"
#include "sampling.hpp"
#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

int64_t expect_logits(const Input& logits) {
  expect(logits, "logits", {Type::f32}, {kAny, kAny}, 1);
  require(size(logits, 1) > 0, "logits must have at least one column");
  return size(logits, 0);
}

void sample(const Input& logits, const Input& temperature, const Input& top_k, const Input& top_p, const Input& min_p,
            const Input& seed, const Input& choice, const Input& position, const Output& out_token,
            const Output& finite, uint32_t draw, int num_threads) {
  const int64_t rows = expect_logits(logits), vocab_size = size(logits, 1);
  expect(temperature, "temperature", {Type::f32}, {rows});
  expect(top_k, "top_k", {Type::i32}, {rows});
  expect(top_p, "top_p", {Type::f32}, {rows});
  expect(min_p, "min_p", {Type::f32}, {rows});
  expect(seed, "seed", {Type::i64}, {rows});
  expect(choice, "choice", {Type::u32}, {rows});
  expect(position, "position", {Type::i64}, {rows});
  expect(out_token, "out_token", {Type::i32}, {rows});
  expect(finite, "finite", {Type::boolean}, {rows});
  nb::gil_scoped_release released;
  ThreadPool::instance().run(
      rows,
      [&](int64_t i) {
        const SamplingRow row{data<float>(temperature)[i],
                              data<int32_t>(top_k)[i],
                              data<float>(top_p)[i],
                              data<float>(min_p)[i],
                              static_cast<uint64_t>(data<int64_t>(seed)[i]),
                              data<uint32_t>(choice)[i],
                              static_cast<uint64_t>(data<int64_t>(position)[i]),
                              draw};
        const int32_t token = sample_row(data<float>(logits) + i * logits.stride(0), vocab_size, row);
        data<int32_t>(out_token)[i] = token;
        data<bool>(finite)[i] = token >= 0;
      },
      num_threads);
}

void check_rows(const int32_t* rows, int64_t count, int64_t limit, const char* name) {
  for (int64_t i = 0; i < count; ++i) {
    require(rows[i] >= 0 && rows[i] < limit, numbered(name, i) + " is " + std::to_string(rows[i]) + ", beyond the " +
                                                 std::to_string(limit) + " rows it indexes");
  }
}

void apply_penalties(const Output& logits, const Input& rows, const Input& token_ids, const Input& token_rows,
                     const Input& num_prompt, const Input& num_tokens, const Input& repetition, const Input& presence,
                     const Input& frequency) {
  expect(logits, "logits", {Type::f32}, {kAny, kAny}, 1);
  expect(rows, "rows", {Type::i32}, {kAny});
  const int64_t count = size(rows, 0);
  expect(token_ids, "token_ids", {Type::i32}, {kAny, kAny}, 1);
  expect(token_rows, "token_rows", {Type::i32}, {count});
  expect(num_prompt, "num_prompt", {Type::i32}, {count});
  expect(num_tokens, "num_tokens", {Type::i32}, {count});
  expect(repetition, "repetition", {Type::f32}, {count});
  expect(presence, "presence", {Type::f32}, {count});
  expect(frequency, "frequency", {Type::f32}, {count});
  check_rows(data<int32_t>(rows), count, size(logits, 0), "rows");
  check_rows(data<int32_t>(token_rows), count, size(token_ids, 0), "token_rows");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t prompt = data<int32_t>(num_prompt)[i], all = data<int32_t>(num_tokens)[i];
    require(0 <= prompt && prompt <= all && all <= size(token_ids, 1),
            "row " + std::to_string(i) +
                " needs 0 <= num_prompt <= num_tokens <= " + std::to_string(size(token_ids, 1)) + ", but has " +
                std::to_string(prompt) + " and " + std::to_string(all));
    require(data<float>(repetition)[i] > 0.0f, numbered("repetition", i) + " must be positive; 1 turns it off");
  }
  nb::gil_scoped_release released;
  for (int64_t i = 0; i < count; ++i) {
    const Penalties penalties{data<float>(repetition)[i], data<float>(presence)[i], data<float>(frequency)[i]};
    penalize_row(data<float>(logits) + data<int32_t>(rows)[i] * logits.stride(0), size(logits, 1),
                 data<int32_t>(token_ids) + data<int32_t>(token_rows)[i] * token_ids.stride(0),
                 data<int32_t>(num_prompt)[i], data<int32_t>(num_tokens)[i], penalties);
  }
}

void apply_bias(const Output& logits, const Input& rows, const Input& ids, const Input& bias) {
  expect(logits, "logits", {Type::f32}, {kAny, kAny}, 1);
  expect(rows, "rows", {Type::i32}, {kAny});
  const int64_t count = size(rows, 0);
  expect(ids, "ids", {Type::i32}, {count});
  expect(bias, "bias", {Type::f32}, {count});
  check_rows(data<int32_t>(rows), count, size(logits, 0), "rows");
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = data<int32_t>(ids)[i];
    require(id >= 0 && id < size(logits, 1), numbered("ids", i) + " is " + std::to_string(id) +
                                                 ", beyond the vocabulary of " + std::to_string(size(logits, 1)));
  }
  for (int64_t i = 0; i < count; ++i) {
    data<float>(logits)[data<int32_t>(rows)[i] * logits.stride(0) + data<int32_t>(ids)[i]] += data<float>(bias)[i];
  }
}

void apply_bitmask(const Output& logits, const Input& mask, std::optional<Input> rows) {
  expect(logits, "logits", {Type::f32}, {kAny, kAny}, 1);
  const int64_t vocab_size = size(logits, 1);
  if (rows) expect(*rows, "rows", {Type::i32}, {kAny});
  const int64_t count = rows ? size(*rows, 0) : size(logits, 0);
  expect(mask, "mask", {Type::u32}, {count, kAny}, 1);
  require(size(mask, 1) * 32 >= vocab_size, "mask has " + std::to_string(size(mask, 1)) + " words a row, but " +
                                                std::to_string(vocab_size) + " tokens need " +
                                                std::to_string((vocab_size + 31) / 32));
  if (rows) check_rows(data<int32_t>(*rows), count, size(logits, 0), "rows");
  nb::gil_scoped_release released;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows ? data<int32_t>(*rows)[i] : i;
    mask_row(data<float>(logits) + row * logits.stride(0), vocab_size, data<uint32_t>(mask) + i * mask.stride(0));
  }
}

void logprobs(const Input& logits, const Input& chosen, const Output& chosen_logprob, const Output& rank,
              const Output& top_ids, const Output& top_logprobs, int num_threads) {
  const int64_t rows = expect_logits(logits), vocab_size = size(logits, 1);
  expect(chosen, "chosen", {Type::i32}, {rows});
  expect(chosen_logprob, "chosen_logprob", {Type::f32}, {rows});
  expect(rank, "rank", {Type::i32}, {rows});
  expect(top_ids, "top_ids", {Type::i32}, {rows, kAny});
  const int64_t k = size(top_ids, 1);
  expect(top_logprobs, "top_logprobs", {Type::f32}, {rows, k});
  require(k <= vocab_size, "k is " + std::to_string(k) + ", more than the vocabulary of " + std::to_string(vocab_size));
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t id = data<int32_t>(chosen)[i];
    require(id >= 0 && id < vocab_size, numbered("chosen", i) + " is " + std::to_string(id) +
                                            ", beyond the vocabulary of " + std::to_string(vocab_size));
  }
  nb::gil_scoped_release released;
  ThreadPool::instance().run(
      rows,
      [&](int64_t i) {
        logprobs_row(data<float>(logits) + i * logits.stride(0), vocab_size, data<int32_t>(chosen)[i], k,
                     data<float>(chosen_logprob) + i, data<int32_t>(rank) + i, data<int32_t>(top_ids) + i * k,
                     data<float>(top_logprobs) + i * k);
      },
      num_threads);
}

std::vector<uint32_t> philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  require(counter.size() == 4 && key.size() == 2, "philox4x32 needs 4 counter words and 2 key words");
  const auto words = philox4x32({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  return {words.begin(), words.end()};
}

}  // namespace

void bind_sampling(nb::module_& module) {
  using nb::arg;
  module.def("sample", sample, arg("logits").noconvert(), arg("temperature").noconvert(), arg("top_k").noconvert(),
             arg("top_p").noconvert(), arg("min_p").noconvert(), arg("seed").noconvert(), arg("choice").noconvert(),
             arg("position").noconvert(), arg("out_token").noconvert(), arg("finite").noconvert(), arg("draw"),
             arg("num_threads"));
  module.def("apply_penalties", apply_penalties, arg("logits").noconvert(), arg("rows").noconvert(),
             arg("token_ids").noconvert(), arg("token_rows").noconvert(), arg("num_prompt").noconvert(),
             arg("num_tokens").noconvert(), arg("repetition").noconvert(), arg("presence").noconvert(),
             arg("frequency").noconvert());
  module.def("apply_bias", apply_bias, arg("logits").noconvert(), arg("rows").noconvert(), arg("ids").noconvert(),
             arg("bias").noconvert());
  module.def("apply_bitmask", apply_bitmask, arg("logits").noconvert(), arg("mask").noconvert(),
             arg("rows").noconvert().none());
  module.def("logprobs", logprobs, arg("logits").noconvert(), arg("chosen").noconvert(),
             arg("chosen_logprob").noconvert(), arg("rank").noconvert(), arg("top_ids").noconvert(),
             arg("top_logprobs").noconvert(), arg("num_threads"));
  module.def("philox4x32", philox, arg("counter"), arg("key"));
}

}  // namespace tokring::cpu
