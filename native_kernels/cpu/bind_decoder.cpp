// Python class Decoder: keeps the arrays it borrows alive and checks every id before the step follows it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "attention.hpp"
#include "bind.hpp"
#include "decoder.hpp"

namespace tokring::cpu {
namespace {

using OptionalInput = std::optional<Input>;

class BoundDecoder {
 public:
  BoundDecoder(const Input& embedding, const Input& final_norm, const PackedLinear& head, int64_t intermediate,
               int num_heads, int num_kv_heads, int head_dim, float norm_epsilon, float attention_scale,
               int activation_bits)
      : decoder_(checked_shape(embedding, final_norm, head, intermediate, num_heads, num_kv_heads, head_dim,
                               norm_epsilon, attention_scale, activation_bits),
                 is_bf16(embedding) ? data<uint16_t>(embedding) : nullptr,
                 is_bf16(embedding) ? nullptr : data<float>(embedding), data<float>(final_norm), &head),
        embedding_rows_(size(embedding, 0)),
        borrowed_{embedding, final_norm} {}

  void add_layer(const Input& attention_norm, const PackedLinear& query, const PackedLinear& key,
                 const PackedLinear& value, const PackedLinear& output, const Input& mlp_norm, const PackedLinear& gate,
                 const PackedLinear& up, const PackedLinear& down, const Input& cosine, const Input& sine,
                 const OptionalInput& qkv_bias, const OptionalInput& query_norm, const OptionalInput& key_norm,
                 int64_t sliding_window) {
    const DecoderShape& shape = decoder_.shape();
    const int64_t half = shape.head_dim / 2;
    expect(cosine, "cosine", {Type::f32}, {kAny, half});
    expect(sine, "sine", {Type::f32}, {size(cosine, 0), half});
    num_positions_ = std::min(num_positions_, size(cosine, 0));
    expect_linear(query, "query", shape.query_width(), shape.hidden, query);
    expect_linear(key, "key", shape.kv_width(), shape.hidden, query);
    expect_linear(value, "value", shape.kv_width(), shape.hidden, query);
    expect_linear(output, "output", shape.hidden, shape.query_width(), output);
    expect_linear(gate, "gate", shape.intermediate, shape.hidden, gate);
    expect_linear(up, "up", shape.intermediate, shape.hidden, gate);
    expect_linear(down, "down", shape.hidden, shape.intermediate, down);
    require(sliding_window >= 0, "sliding_window must not be negative; 0 turns it off");
    decoder_.add_layer({borrow(attention_norm, "attention_norm", shape.hidden), &query, &key, &value,
                        borrow(qkv_bias, "qkv_bias", shape.qkv_width()),
                        borrow(query_norm, "query_norm", shape.head_dim), borrow(key_norm, "key_norm", shape.head_dim),
                        data<float>(cosine), data<float>(sine), &output, borrow(mlp_norm, "mlp_norm", shape.hidden),
                        &gate, &up, &down, sliding_window});
    borrowed_.push_back(cosine);
    borrowed_.push_back(sine);
  }

  // key_scales, value_scales: one per layer for int8, else none.
  void set_cache(const std::vector<Output>& keys, const std::vector<Output>& values,
                 const std::vector<std::optional<Output>>& key_scales,
                 const std::vector<std::optional<Output>>& value_scales) {
    const DecoderShape& shape = decoder_.shape();
    const auto layers = static_cast<size_t>(decoder_.num_layers());
    require(keys.size() == layers && values.size() == layers && key_scales.size() == layers &&
                value_scales.size() == layers,
            "keys, values and their scales must each be one entry per layer, " + std::to_string(layers));
    require(layers > 0, "add_layer comes before set_cache");
    const CacheType type = cache_type(keys[0]);
    num_blocks_ = keys[0].ndim() == 4 ? size(keys[0], 0) : kAny;
    caches_.clear();
    for (size_t i = 0; i < layers; ++i) {
      for (const Output* cache : {&keys[i], &values[i]}) {
        expect(*cache, "every cache", {array_type(type)},
               {num_blocks_, shape.num_kv_heads, kBlockTokens, shape.head_dim});
      }
      check_scales(type, key_scales[i], value_scales[i], num_blocks_, shape.num_kv_heads);
      caches_.push_back(
          {type, keys[i].data(), values[i].data(), optional_data(key_scales[i]), optional_data(value_scales[i])});
    }
    borrowed_caches_ = keys;
    borrowed_caches_.insert(borrowed_caches_.end(), values.begin(), values.end());
    borrowed_scales_ = key_scales;
    borrowed_scales_.insert(borrowed_scales_.end(), value_scales.begin(), value_scales.end());
  }

  void run(const Input& token_ids, const Input& positions, const Input& slot_mapping, const Input& block_table,
           const Input& query_start, const Input& seq_lens, const Input& logits_index, const Output& logits,
           int num_threads) {
    require(!caches_.empty(), "set_cache comes before run");
    expect(token_ids, "token_ids", {Type::i32}, {kAny});
    const int64_t tokens = size(token_ids, 0);
    expect(positions, "positions", {Type::i32}, {tokens});
    expect(slot_mapping, "slot_mapping", {Type::i64}, {tokens});
    expect(seq_lens, "seq_lens", {Type::i32}, {kAny});
    expect(query_start, "query_start", {Type::i32}, {size(seq_lens, 0) + 1});
    expect(block_table, "block_table", {Type::i32}, {size(seq_lens, 0), kAny}, 1);
    expect(logits_index, "logits_index", {Type::i32}, {kAny});
    expect(logits, "logits", {Type::f32}, {size(logits_index, 0), decoder_.shape().vocab_size});
    const DecoderStep step{data<int32_t>(token_ids),
                           data<int32_t>(positions),
                           data<int64_t>(slot_mapping),
                           tokens,
                           data<int32_t>(block_table),
                           block_table.stride(0),
                           data<int32_t>(query_start),
                           data<int32_t>(seq_lens),
                           static_cast<int>(size(seq_lens, 0)),
                           data<int32_t>(logits_index),
                           size(logits_index, 0),
                           data<float>(logits)};
    check_step(step, size(block_table, 1));
    nb::gil_scoped_release released;
    decoder_.run(step, caches_, num_threads);
  }

 private:
  static DecoderShape checked_shape(const Input& embedding, const Input& final_norm, const PackedLinear& head,
                                    int64_t intermediate, int num_heads, int num_kv_heads, int head_dim,
                                    float norm_epsilon, float attention_scale, int activation_bits) {
    expect(embedding, "embedding", kFloats, {kAny, head.inputs()});
    expect(final_norm, "final_norm", {Type::f32}, {head.inputs()});
    require(head_dim > 0 && head_dim % 8 == 0, "head_dim must be a multiple of 8");
    require(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
            "num_heads must be a multiple of num_kv_heads");
    require(num_heads / num_kv_heads <= kMaxRows, "too many query heads per KV head");
    require(activation_bits == 8 || activation_bits == 15, "activation_bits must be 8 or 15");
    return {head.inputs(),  intermediate, num_heads,       num_kv_heads,         head_dim,
            head.outputs(), norm_epsilon, attention_scale, activation_bits == 15};
  }

  // `like`: a layer that shares its prepared input, so both must want it in one form.
  static void expect_linear(const PackedLinear& linear, const char* name, int64_t outputs, int64_t inputs,
                            const PackedLinear& like) {
    require(linear.outputs() == outputs && linear.inputs() == inputs,
            std::string(name) + " must be [" + std::to_string(outputs) + ", " + std::to_string(inputs) + "], but is [" +
                std::to_string(linear.outputs()) + ", " + std::to_string(linear.inputs()) + "]");
    require(linear.input_form() == like.input_form(),
            std::string(name) + " and the layers it shares its input with must all be quantized, all BF16 or all F32");
  }

  const float* borrow(const OptionalInput& vector, const char* name, int64_t length) {
    if (!vector) return nullptr;
    expect(*vector, name, {Type::f32}, {length});
    borrowed_.push_back(*vector);
    return data<float>(*vector);
  }

  void check_step(const DecoderStep& step, int64_t table_width) const {
    const int64_t num_slots = num_blocks_ * kBlockTokens;
    for (int64_t i = 0; i < step.num_tokens; ++i) {
      const int32_t id = step.token_ids[i], position = step.positions[i];
      require(id >= 0 && id < embedding_rows_, numbered("token_ids", i) + " is " + std::to_string(id) +
                                                   ", beyond the vocabulary of " + std::to_string(embedding_rows_));
      require(position >= 0 && position < num_positions_, numbered("positions", i) + " is " + std::to_string(position) +
                                                              ", beyond the tables' " + std::to_string(num_positions_));
      require(step.slot_mapping[i] >= -1 && step.slot_mapping[i] < num_slots,
              numbered("slot_mapping", i) + " is " + std::to_string(step.slot_mapping[i]) + ", beyond the cache's " +
                  std::to_string(num_slots) + " slots");
    }
    for (int64_t i = 0; i < step.num_logits; ++i) {
      require(step.logits_index[i] >= 0 && step.logits_index[i] < step.num_tokens,
              numbered("logits_index", i) + " is no token of this step");
    }
    AttentionBatch batch{};
    batch.block_table = step.block_table;
    batch.block_table_stride = step.block_table_stride;
    batch.query_start = step.query_start;
    batch.seq_lens = step.seq_lens;
    batch.num_seqs = step.num_seqs;
    check_sequences(batch, step.num_tokens, num_blocks_, table_width);
  }

  Decoder decoder_;
  int64_t embedding_rows_;
  int64_t num_positions_ = INT64_MAX;
  int64_t num_blocks_ = 0;
  std::vector<LayerCache> caches_;
  std::vector<Input> borrowed_;
  std::vector<Output> borrowed_caches_;
  std::vector<std::optional<Output>> borrowed_scales_;
};

}  // namespace

void bind_decoder(nb::module_& module) {
  using nb::arg;
  // keep_alive: the decoder points to its layers' weights.
  nb::class_<BoundDecoder>(module, "Decoder")
      .def(nb::init<const Input&, const Input&, const PackedLinear&, int64_t, int, int, int, float, float, int>(),
           arg("embedding").noconvert(), arg("final_norm").noconvert(), arg("head"), arg("intermediate"),
           arg("num_heads"), arg("num_kv_heads"), arg("head_dim"), arg("norm_epsilon"), arg("attention_scale"),
           arg("activation_bits"), nb::keep_alive<1, 4>())
      .def("add_layer", &BoundDecoder::add_layer, arg("attention_norm").noconvert(), arg("query"), arg("key"),
           arg("value"), arg("output"), arg("mlp_norm").noconvert(), arg("gate"), arg("up"), arg("down"),
           arg("cosine").noconvert(), arg("sine").noconvert(), arg("qkv_bias").noconvert().none(),
           arg("query_norm").noconvert().none(), arg("key_norm").noconvert().none(), arg("sliding_window"),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>())
      .def("set_cache", &BoundDecoder::set_cache, arg("keys"), arg("values"), arg("key_scales"), arg("value_scales"))
      .def("run", &BoundDecoder::run, arg("token_ids").noconvert(), arg("positions").noconvert(),
           arg("slot_mapping").noconvert(), arg("block_table").noconvert(), arg("query_start").noconvert(),
           arg("seq_lens").noconvert(), arg("logits_index").noconvert(), arg("logits").noconvert(), arg("num_threads"));
}

}  // namespace tokring::cpu
