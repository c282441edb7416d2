// Python module tokring_kernels._cpu: argument checks and release of the GIL around the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "attention.hpp"
#include "bind.hpp"
#include "dispatch.hpp"
#include "kernel_table.hpp"
#include "philox.hpp"
#include "sampling.hpp"
#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

using namespace nb::literals;

constexpr std::initializer_list<Type> kFloats{Type::f32, Type::bf16};

std::string numbered(const char* name, int64_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

// Every id that a kernel will follow, checked once a call: a wrong one must not become a wild read.
void check_sequences(const AttentionBatch& batch, int64_t num_tokens, int64_t num_blocks, int64_t table_width) {
  require(batch.query_start[0] == 0 && batch.query_start[batch.num_seqs] == num_tokens,
          "query_start must begin with 0 and end with the number of query tokens, " + std::to_string(num_tokens));
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t length = batch.query_start[seq + 1] - batch.query_start[seq];
    const int64_t seq_len = batch.seq_lens[seq];
    require(length >= 0, numbered("query_start", seq + 1) + " is smaller than the entry before it");
    require(length <= seq_len, numbered("seq_lens", seq) + " is " + std::to_string(seq_len) +
                                   ", fewer than its query tokens, " + std::to_string(length));
    if (length == 0) continue;
    const int64_t blocks = (seq_len + kBlockTokens - 1) / kBlockTokens;
    require(blocks <= table_width, numbered("seq_lens", seq) + " needs " + std::to_string(blocks) +
                                       " blocks, but block_table has " + std::to_string(table_width) + " columns");
    // Blocks wholly before the window are never read: the engine may have freed them.
    const int64_t oldest = seq_len - length - batch.sliding_window + 1;
    const int64_t begin = batch.sliding_window > 0 && oldest > 0 ? oldest / kBlockTokens : 0;
    const int32_t* ids = batch.block_table + seq * batch.block_table_stride;
    for (int64_t i = begin; i < blocks; ++i) {
      require(ids[i] >= 0 && ids[i] < num_blocks, numbered("block_table", seq) + "[" + std::to_string(i) + "] is " +
                                                      std::to_string(ids[i]) + ", not a block of the cache (0 to " +
                                                      std::to_string(num_blocks - 1) + ")");
    }
  }
}

void attention(const Input& query, const Input& key_cache, const Input& value_cache, const Input& block_table,
               const Input& query_start, const Input& seq_lens, float scale, const Output& out, int64_t sliding_window,
               float soft_cap, int num_threads) {
  expect(query, "query", kFloats, {kAny, kAny, kAny}, 2);
  const int64_t num_tokens = size(query, 0), num_heads = size(query, 1), head_dim = size(query, 2);
  expect(key_cache, "key_cache", kFloats, {kAny, kAny, kBlockTokens, head_dim});
  const int64_t num_blocks = size(key_cache, 0), num_kv_heads = size(key_cache, 1);
  expect(value_cache, "value_cache", {is_bf16(key_cache) ? Type::bf16 : Type::f32},
         {num_blocks, num_kv_heads, kBlockTokens, head_dim});
  expect(seq_lens, "seq_lens", {Type::i32}, {kAny});
  const int64_t num_seqs = size(seq_lens, 0);
  expect(query_start, "query_start", {Type::i32}, {num_seqs + 1});
  expect(block_table, "block_table", {Type::i32}, {num_seqs, kAny}, 1);
  expect(out, "out", kFloats, {num_tokens, num_heads, head_dim}, 2);
  require(head_dim % 8 == 0 && head_dim > 0, "head_dim must be a multiple of 8, but is " + std::to_string(head_dim));
  require(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
          "the " + std::to_string(num_heads) + " query heads must be a multiple of the " +
              std::to_string(num_kv_heads) + " KV heads");
  require(num_heads / num_kv_heads <= kMaxRows,
          "at most " + std::to_string(kMaxRows) + " query heads per KV head are supported");
  require(sliding_window >= 0, "sliding_window must not be negative; 0 turns it off");
  require(soft_cap >= 0.0f && std::isfinite(soft_cap), "soft_cap must be finite and not negative; 0 turns it off");
  AttentionBatch batch{};
  batch.query = data<void>(query);
  batch.query_is_bf16 = is_bf16(query);
  batch.query_stride = query.stride(0);
  batch.out = data<void>(out);
  batch.out_is_bf16 = is_bf16(out);
  batch.out_stride = out.stride(0);
  batch.key_cache = data<void>(key_cache);
  batch.value_cache = data<void>(value_cache);
  batch.cache_is_bf16 = is_bf16(key_cache);
  batch.block_table = data<int32_t>(block_table);
  batch.block_table_stride = block_table.stride(0);
  batch.query_start = data<int32_t>(query_start);
  batch.seq_lens = data<int32_t>(seq_lens);
  batch.num_seqs = static_cast<int>(num_seqs);
  batch.num_heads = static_cast<int>(num_heads);
  batch.num_kv_heads = static_cast<int>(num_kv_heads);
  batch.head_dim = static_cast<int>(head_dim);
  batch.scale = scale;
  batch.soft_cap = soft_cap;
  batch.sliding_window = sliding_window;
  check_sequences(batch, num_tokens, num_blocks, size(block_table, 1));
  nb::gil_scoped_release released;
  paged_attention(batch, num_threads);
}

// One row from one float type to another.
void copy_row(const KernelTable& table, const void* from, bool from_bf16, void* to, bool to_bf16, int64_t n) {
  if (from_bf16 == to_bf16) {
    std::copy_n(static_cast<const char*>(from), n * (from_bf16 ? 2 : 4), static_cast<char*>(to));
  } else if (from_bf16) {
    table.widen(static_cast<const uint16_t*>(from), static_cast<float*>(to), n);
  } else {
    table.narrow(static_cast<const float*>(from), static_cast<uint16_t*>(to), n);
  }
}

void* element(const void* base, bool bf16, int64_t index) {
  return const_cast<char*>(static_cast<const char*>(base)) + index * (bf16 ? 2 : 4);
}

void write_kv(const Input& key, const Input& value, const Output& key_cache, const Output& value_cache,
              const Input& slot_mapping) {
  expect(key, "key", kFloats, {kAny, kAny, kAny}, 2);
  const int64_t num_tokens = size(key, 0), num_heads = size(key, 1), dim = size(key, 2);
  expect(value, "value", kFloats, {num_tokens, num_heads, dim}, 2);
  expect(key_cache, "key_cache", kFloats, {kAny, num_heads, kBlockTokens, dim});
  const int64_t num_blocks = size(key_cache, 0);
  expect(value_cache, "value_cache", kFloats, {num_blocks, num_heads, kBlockTokens, dim});
  expect(slot_mapping, "slot_mapping", {Type::i64}, {num_tokens});
  const auto* slots = data<int64_t>(slot_mapping);
  for (int64_t token = 0; token < num_tokens; ++token) {
    require(slots[token] >= -1 && slots[token] < num_blocks * kBlockTokens,
            numbered("slot_mapping", token) + " is " + std::to_string(slots[token]) + ", beyond the cache's " +
                std::to_string(num_blocks * kBlockTokens) + " slots");
  }
  nb::gil_scoped_release released;
  const KernelTable& table = kernels();
  auto write = [&](const Input& rows, const Output& cache, int64_t token, int64_t head) {
    const int64_t block = slots[token] / kBlockTokens, offset = slots[token] % kBlockTokens;
    copy_row(table, element(rows.data(), is_bf16(rows), token * rows.stride(0) + head * dim), is_bf16(rows),
             element(cache.data(), is_bf16(cache), ((block * num_heads + head) * kBlockTokens + offset) * dim),
             is_bf16(cache), dim);
  };
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (slots[token] < 0) continue;  // a padding row
    for (int64_t head = 0; head < num_heads; ++head) {
      write(key, key_cache, token, head);
      write(value, value_cache, token, head);
    }
  }
}

// A float32 row of the input, widened into `memory` if need be.
const float* as_f32(const KernelTable& table, const void* row, bool bf16, std::vector<float>& memory, int64_t n) {
  if (!bf16) return static_cast<const float*>(row);
  if (memory.size() < static_cast<size_t>(n)) memory.resize(static_cast<size_t>(n));
  table.widen(static_cast<const uint16_t*>(row), memory.data(), n);
  return memory.data();
}

// Runs row(index, in, out) on float32 rows, converting to the output's type.
template <class Row>
void by_row(int64_t num_rows, const Output& out, int64_t width, int num_threads, Row&& row) {
  const KernelTable& table = kernels();
  constexpr int64_t kRowsPerTask = 8;
  ThreadPool::instance().run((num_rows + kRowsPerTask - 1) / kRowsPerTask,
                             [&](int64_t task) {
                               thread_local std::vector<float> memory;
                               if (memory.size() < static_cast<size_t>(width))
                                 memory.resize(static_cast<size_t>(width));
                               for (int64_t i = task * kRowsPerTask; i < std::min(num_rows, (task + 1) * kRowsPerTask);
                                    ++i) {
                                 void* to = element(out.data(), is_bf16(out), i * out.stride(0));
                                 row(table, i, is_bf16(out) ? memory.data() : static_cast<float*>(to));
                                 if (is_bf16(out)) table.narrow(memory.data(), static_cast<uint16_t*>(to), width);
                               }
                             },
                             num_threads);
}

void rms_norm(const Input& x, const Input& weight, float epsilon, const Output& out, int num_threads) {
  expect(x, "x", kFloats, {kAny, kAny}, 1);
  const int64_t rows = size(x, 0), width = size(x, 1);
  expect(weight, "weight", {Type::f32}, {width});
  expect(out, "out", kFloats, {rows, width}, 1);
  nb::gil_scoped_release released;
  by_row(rows, out, width, num_threads, [&](const KernelTable& table, int64_t i, float* to) {
    thread_local std::vector<float> memory;
    const float* from = as_f32(table, element(x.data(), is_bf16(x), i * x.stride(0)), is_bf16(x), memory, width);
    table.rms_norm(from, data<float>(weight), epsilon, to, width);
  });
}

void silu_mul(const Input& gate_up, const Output& out, int num_threads) {
  expect(gate_up, "gate_up", kFloats, {kAny, kAny}, 1);
  const int64_t rows = size(gate_up, 0), width = size(gate_up, 1) / 2;
  require(size(gate_up, 1) % 2 == 0, "gate_up must have an even number of columns: gate, then up");
  expect(out, "out", kFloats, {rows, width}, 1);
  nb::gil_scoped_release released;
  by_row(rows, out, width, num_threads, [&](const KernelTable& table, int64_t i, float* to) {
    thread_local std::vector<float> memory;
    const bool bf16 = is_bf16(gate_up);
    const float* from = as_f32(table, element(gate_up.data(), bf16, i * gate_up.stride(0)), bf16, memory, 2 * width);
    table.silu_mul(from, from + width, to, width);
  });
}

void rope(const Output& x, const Input& cosine, const Input& sine, const Input& positions) {
  expect(x, "x", kFloats, {kAny, kAny, kAny}, 2);
  const int64_t num_tokens = size(x, 0), num_heads = size(x, 1), dim = size(x, 2);
  expect(cosine, "cosine", {Type::f32}, {kAny, kAny});
  const int64_t num_positions = size(cosine, 0), half = size(cosine, 1);
  expect(sine, "sine", {Type::f32}, {num_positions, half});
  require(2 * half <= dim,
          "cosine has " + std::to_string(half) + " columns, more than half of head_dim " + std::to_string(dim));
  expect(positions, "positions", {Type::i32, Type::i64}, {num_tokens});
  auto position = [&](int64_t token) -> int64_t {
    return holds(positions, Type::i32) ? data<int32_t>(positions)[token] : data<int64_t>(positions)[token];
  };
  for (int64_t token = 0; token < num_tokens; ++token) {
    require(position(token) >= 0 && position(token) < num_positions,
            numbered("positions", token) + " is " + std::to_string(position(token)) + ", beyond the tables' " +
                std::to_string(num_positions) + " rows");
  }
  nb::gil_scoped_release released;
  const KernelTable& table = kernels();
  std::vector<float> memory(static_cast<size_t>(2 * half));
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float* c = data<float>(cosine) + position(token) * half;
    const float* s = data<float>(sine) + position(token) * half;
    for (int64_t head = 0; head < num_heads; ++head) {
      void* row = element(x.data(), is_bf16(x), token * x.stride(0) + head * dim);
      if (!is_bf16(x)) {
        table.rotate(static_cast<float*>(row), c, s, half);
        continue;
      }
      table.widen(static_cast<const uint16_t*>(row), memory.data(), 2 * half);
      table.rotate(memory.data(), c, s, half);
      table.narrow(memory.data(), static_cast<uint16_t*>(row), 2 * half);
    }
  }
}

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

std::vector<std::string> supported_levels() {
  std::vector<std::string> names;
  for (Level level : {Level::generic, Level::avx2, Level::avx512, Level::avx512_vnni}) {
    if (level <= best_level()) names.emplace_back(level_name(level));
  }
  return names;
}

void set_threads(int num_threads, int worker_nice, int spin_us) {
  require(num_threads >= 1, "num_threads must be at least 1");
  nb::gil_scoped_release released;
  ThreadPool::instance().set_num_threads(num_threads, worker_nice);
  ThreadPool::instance().set_spin_us(spin_us);
}

}  // namespace
}  // namespace tokring::cpu

NB_MODULE(_cpu, module) {
  using namespace tokring::cpu;
  using nb::arg;
  module.attr("BLOCK_SIZE") = kBlockTokens;
  module.attr("TILE_TOKENS") = kTileTokens;
  module.def("paged_attention", attention, arg("query").noconvert(), arg("key_cache").noconvert(),
             arg("value_cache").noconvert(), arg("block_table").noconvert(), arg("query_start").noconvert(),
             arg("seq_lens").noconvert(), arg("scale"), arg("out").noconvert(), arg("sliding_window"), arg("soft_cap"),
             arg("num_threads"));
  module.def("write_kv", write_kv, arg("key").noconvert(), arg("value").noconvert(), arg("key_cache").noconvert(),
             arg("value_cache").noconvert(), arg("slot_mapping").noconvert());
  module.def("rms_norm", rms_norm, arg("x").noconvert(), arg("weight").noconvert(), arg("epsilon"),
             arg("out").noconvert(), arg("num_threads"));
  module.def("silu_mul", silu_mul, arg("gate_up").noconvert(), arg("out").noconvert(), arg("num_threads"));
  module.def("rope", rope, arg("x").noconvert(), arg("cosine").noconvert(), arg("sine").noconvert(),
             arg("positions").noconvert());
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
  bind_linear(module);
  module.def("philox4x32", philox, arg("counter"), arg("key"));
  module.def("supported_levels", supported_levels);
  module.def("level", [] { return std::string(level_name(active_level())); });
  module.def(
      "set_level", [](const std::string& name) { set_level(name); }, arg("name"));
  module.def("set_num_threads", set_threads, arg("num_threads"), arg("worker_nice"), arg("spin_us"));
  module.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
}
