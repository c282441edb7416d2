// A whole decoder step in one call: Llama-shaped layers on packed weights, over a paged KV cache.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_table.hpp"
#include "linear.hpp"

namespace tokring::cpu {

// Borrowed arrays: whoever builds a Decoder keeps them alive. Null = the model has none.
struct DecoderLayer {
  const float* attention_norm;  // [hidden]
  const PackedLinear* query;
  const PackedLinear* key;
  const PackedLinear* value;
  const float* qkv_bias;    // [(heads + 2 * kv_heads) * head_dim]
  const float* query_norm;  // [head_dim]
  const float* key_norm;
  const float* cosine;  // [num_positions][head_dim / 2]
  const float* sine;
  const PackedLinear* output;
  const float* mlp_norm;  // [hidden]
  const PackedLinear* gate;
  const PackedLinear* up;
  const PackedLinear* down;
  int64_t sliding_window;  // 0 = all
};

struct DecoderShape {
  int64_t hidden;
  int64_t intermediate;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int64_t vocab_size;
  float norm_epsilon;
  float attention_scale;
  bool fine_activations;  // 15 bits instead of 8

  int64_t query_width() const { return static_cast<int64_t>(num_heads) * head_dim; }
  int64_t kv_width() const { return static_cast<int64_t>(num_kv_heads) * head_dim; }
  int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
};

// One step's inputs, as StepBatch has them.
struct DecoderStep {
  const int32_t* token_ids;  // [num_tokens]
  const int32_t* positions;
  const int64_t* slot_mapping;
  int64_t num_tokens;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int num_seqs;
  const int32_t* logits_index;  // [num_logits] tokens whose logits are wanted
  int64_t num_logits;
  float* logits;  // [num_logits][vocab_size]
};

struct LayerCache {
  CacheType type;
  void* keys;  // [num_blocks][num_kv_heads][16][head_dim]
  void* values;
  float* key_scales;  // int8: [num_blocks][num_kv_heads][16]
  float* value_scales;
};

// Every row's arithmetic is its own, so a token's logits have the same bits in any batch and chunk.
class Decoder {
 public:
  Decoder(const DecoderShape& shape, const uint16_t* embedding_bf16, const float* embedding_f32,
          const float* final_norm, const PackedLinear* head)
      : shape_(shape),
        embedding_bf16_(embedding_bf16),
        embedding_f32_(embedding_f32),
        final_norm_(final_norm),
        head_(head),
        input_(shape.fine_activations) {}

  const DecoderShape& shape() const { return shape_; }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  void add_layer(const DecoderLayer& layer) { layers_.push_back(layer); }
  void run(const DecoderStep& step, const std::vector<LayerCache>& caches, int num_threads);

 private:
  void reserve(int64_t rows);
  void embed(const DecoderStep& step);
  void attend(const DecoderLayer& layer, const DecoderStep& step, const LayerCache& cache);
  void rotate_and_store(const DecoderLayer& layer, const DecoderStep& step, const LayerCache& cache, int64_t token);
  void feed_forward(const DecoderLayer& layer, int64_t num_tokens);
  void compute_logits(const DecoderStep& step);

  // input_ := norm(rows of x) * weight, made ready for `weights`
  void prepare_normed(const float* x, const float* norm, int64_t rows, const PackedLinear& weights);
  void prepare(const float* x, int64_t rows, int64_t width, const PackedLinear& weights);
  // Runs task(first_panel, end_panel) over all panels of `weight`.
  template <class Task>
  void by_panels(const PackedLinear& weight, Task&& task);
  // Runs task(row), in threads only if there are enough rows to pay for waking them.
  template <class Task>
  void by_rows(int64_t rows, Task&& task);
  // hidden += input_ weight^T
  void add_to_hidden(const PackedLinear& weight, int64_t rows);

  // Whole life
  const DecoderShape shape_;
  const uint16_t* embedding_bf16_;
  const float* embedding_f32_;
  const float* final_norm_;
  const PackedLinear* head_;
  std::vector<DecoderLayer> layers_;

  // This step; grows, never shrinks
  const KernelTable* table_ = nullptr;
  int num_threads_ = 0;
  int64_t capacity_ = 0;
  LinearInput input_;
  std::vector<float> hidden_, normed_, qkv_, attended_, gate_, up_, branch_;
};

}  // namespace tokring::cpu
