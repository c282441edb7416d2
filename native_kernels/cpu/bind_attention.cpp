// Python: paged_attention and write_kv, with every id checked before a kernel follows it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "attention.hpp"
#include "bind.hpp"
#include "kernel_table.hpp"

namespace tokring::cpu {

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

void check_scales(CacheType type, const std::optional<Output>& key_scale, const std::optional<Output>& value_scale,
                  int64_t num_blocks, int64_t num_kv_heads) {
  const bool needed = type == CacheType::int8;
  require(key_scale.has_value() == needed && value_scale.has_value() == needed,
          needed ? "an int8 cache needs key_scale and value_scale" : "only an int8 cache takes key_scale, value_scale");
  if (!needed) return;
  expect(*key_scale, "key_scale", {Type::f32}, {num_blocks, num_kv_heads, kBlockTokens});
  expect(*value_scale, "value_scale", {Type::f32}, {num_blocks, num_kv_heads, kBlockTokens});
}

namespace {

void attention(const Input& query, const Input& key_cache, const Input& value_cache, const Input& block_table,
               const Input& query_start, const Input& seq_lens, float scale, const Output& out, int64_t sliding_window,
               float soft_cap, int num_threads, const std::optional<Output>& key_scale,
               const std::optional<Output>& value_scale) {
  expect(query, "query", kFloats, {kAny, kAny, kAny}, 2);
  const int64_t num_tokens = size(query, 0), num_heads = size(query, 1), head_dim = size(query, 2);
  expect(key_cache, "key_cache", kCacheTypes, {kAny, kAny, kBlockTokens, head_dim});
  const int64_t num_blocks = size(key_cache, 0), num_kv_heads = size(key_cache, 1);
  expect(value_cache, "value_cache", {array_type(cache_type(key_cache))},
         {num_blocks, num_kv_heads, kBlockTokens, head_dim});
  check_scales(cache_type(key_cache), key_scale, value_scale, num_blocks, num_kv_heads);
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
  batch.cache_type = cache_type(key_cache);
  batch.key_scale = optional_data(key_scale);
  batch.value_scale = optional_data(value_scale);
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

void write_kv(const Input& key, const Input& value, const Output& key_cache, const Output& value_cache,
              const Input& slot_mapping, const std::optional<Output>& key_scale,
              const std::optional<Output>& value_scale) {
  expect(key, "key", kFloats, {kAny, kAny, kAny}, 2);
  const int64_t num_tokens = size(key, 0), num_heads = size(key, 1), dim = size(key, 2);
  expect(value, "value", kFloats, {num_tokens, num_heads, dim}, 2);
  expect(key_cache, "key_cache", kCacheTypes, {kAny, num_heads, kBlockTokens, dim});
  const int64_t num_blocks = size(key_cache, 0);
  const CacheType type = cache_type(key_cache);
  expect(value_cache, "value_cache", {array_type(type)}, {num_blocks, num_heads, kBlockTokens, dim});
  check_scales(type, key_scale, value_scale, num_blocks, num_heads);
  expect(slot_mapping, "slot_mapping", {Type::i64}, {num_tokens});
  const auto* slots = data<int64_t>(slot_mapping);
  for (int64_t token = 0; token < num_tokens; ++token) {
    require(slots[token] >= -1 && slots[token] < num_blocks * kBlockTokens,
            numbered("slot_mapping", token) + " is " + std::to_string(slots[token]) + ", beyond the cache's " +
                std::to_string(num_blocks * kBlockTokens) + " slots");
  }
  nb::gil_scoped_release released;
  const KernelTable& table = kernels();
  std::vector<float> widened(static_cast<size_t>(dim));
  auto write = [&](const Input& rows, const Output& cache, float* scales, int64_t token, int64_t head) {
    const int64_t block = slots[token] / kBlockTokens, offset = slots[token] % kBlockTokens;
    const int64_t vector = (block * num_heads + head) * kBlockTokens + offset;
    const void* from = element(rows.data(), is_bf16(rows), token * rows.stride(0) + head * dim);
    if (is_bf16(rows)) table.widen(static_cast<const uint16_t*>(from), widened.data(), dim);  // and back: equal bits
    store_cached(table, type, is_bf16(rows) ? widened.data() : static_cast<const float*>(from), cache.data(), scales,
                 vector, dim);
  };
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (slots[token] < 0) continue;  // a padding row
    for (int64_t head = 0; head < num_heads; ++head) {
      write(key, key_cache, optional_data(key_scale), token, head);
      write(value, value_cache, optional_data(value_scale), token, head);
    }
  }
}

}  // namespace

void bind_attention(nb::module_& module) {
  using nb::arg;
  module.def("paged_attention", attention, arg("query").noconvert(), arg("key_cache").noconvert(),
             arg("value_cache").noconvert(), arg("block_table").noconvert(), arg("query_start").noconvert(),
             arg("seq_lens").noconvert(), arg("scale"), arg("out").noconvert(), arg("sliding_window"), arg("soft_cap"),
             arg("num_threads"), arg("key_scale").noconvert().none(), arg("value_scale").noconvert().none());
  module.def("write_kv", write_kv, arg("key").noconvert(), arg("value").noconvert(), arg("key_cache").noconvert(),
             arg("value_cache").noconvert(), arg("slot_mapping").noconvert(), arg("key_scale").noconvert().none(),
             arg("value_scale").noconvert().none());
}

}  // namespace tokring::cpu
