// Versions:
//   1  one pool job per phase; five of a layer's phases run in threads at batch 1 (q/k/v, attention, output, gate/up,
//   down),
//      the rest is too small to share. Residual adds are done by the task that computed the panel, gate and up by one
//      task.
#include "decoder.hpp"

#include <algorithm>

#include "attention.hpp"
#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

constexpr int64_t kRowsPerTask = 4;
constexpr int64_t kTasksPerThread = 4;  // enough to even out a thread that the scheduler held back

}  // namespace

void Decoder::run(const DecoderStep& step, const std::vector<LayerCache>& caches, int num_threads) {
  table_ = &kernels();
  num_threads_ = num_threads > 0 ? std::min(num_threads, ThreadPool::instance().num_threads())
                                 : ThreadPool::instance().num_threads();
  reserve(std::max(step.num_tokens, step.num_logits));
  embed(step);
  for (size_t i = 0; i < layers_.size(); ++i) {
    attend(layers_[i], step, caches[i]);
    feed_forward(layers_[i], step.num_tokens);
  }
  compute_logits(step);
}

void Decoder::reserve(int64_t rows) {
  if (rows <= capacity_) return;
  capacity_ = rows;
  auto fit = [&](std::vector<float>& memory, int64_t width) { memory.resize(static_cast<size_t>(rows * width)); };
  fit(hidden_, shape_.hidden);
  fit(normed_, shape_.hidden);
  fit(branch_, shape_.hidden);
  fit(qkv_, shape_.qkv_width());
  fit(attended_, shape_.query_width());
  fit(gate_, shape_.intermediate);
  fit(up_, shape_.intermediate);
  input_.reserve(rows, std::max({shape_.hidden, shape_.intermediate, shape_.query_width()}));
}

template <class Task>
void Decoder::by_panels(const PackedLinear& weight, Task&& task) {
  const int64_t num_panels = weight.num_panels();
  const int64_t chunk = std::max<int64_t>(1, num_panels / (kTasksPerThread * num_threads_));
  ThreadPool::instance().run((num_panels + chunk - 1) / chunk,
                             [&](int64_t index) { task(index * chunk, std::min(num_panels, (index + 1) * chunk)); },
                             num_threads_);
}

template <class Task>
void Decoder::by_rows(int64_t rows, Task&& task) {
  ThreadPool::instance().run((rows + kRowsPerTask - 1) / kRowsPerTask,
                             [&](int64_t index) {
                               for (int64_t row = index * kRowsPerTask;
                                    row < std::min(rows, (index + 1) * kRowsPerTask); ++row)
                                 task(row);
                             },
                             num_threads_);
}

void Decoder::embed(const DecoderStep& step) {
  for (int64_t token = 0; token < step.num_tokens; ++token) {
    const int64_t at = step.token_ids[token] * shape_.hidden;
    float* to = hidden_.data() + token * shape_.hidden;
    if (embedding_bf16_ != nullptr) {
      table_->widen(embedding_bf16_ + at, to, shape_.hidden);
    } else {
      std::copy_n(embedding_f32_ + at, shape_.hidden, to);
    }
  }
}

void Decoder::prepare(const float* x, int64_t rows, int64_t width, const PackedLinear& weights) {
  by_rows(rows, [&](int64_t row) { input_.set_row(*table_, row, x + row * width, width, weights.input_form()); });
}

void Decoder::prepare_normed(const float* x, const float* norm, int64_t rows, const PackedLinear& weights) {
  const int64_t width = shape_.hidden;
  by_rows(rows, [&](int64_t row) {
    float* normed = normed_.data() + row * width;
    table_->rms_norm(x + row * width, norm, shape_.norm_epsilon, normed, width);
    input_.set_row(*table_, row, normed, width, weights.input_form());
  });
}

void Decoder::add_to_hidden(const PackedLinear& weight, int64_t rows) {
  const int64_t width = shape_.hidden;
  by_panels(weight, [&](int64_t first, int64_t end) {
    input_.apply(*table_, weight, rows, first, end, branch_.data(), width);
    const int64_t from = first * kPanel, to = std::min(width, end * kPanel);
    for (int64_t row = 0; row < rows; ++row) {
      float* hidden = hidden_.data() + row * width;
      const float* branch = branch_.data() + row * width;
      for (int64_t i = from; i < to; ++i) hidden[i] += branch[i];
    }
  });
}

void Decoder::attend(const DecoderLayer& layer, const DecoderStep& step, const LayerCache& cache) {
  const int64_t tokens = step.num_tokens, width = shape_.qkv_width();
  prepare_normed(hidden_.data(), layer.attention_norm, tokens, *layer.query);
  // One job for the three: their panels lie one after the other.
  const PackedLinear* const parts[] = {layer.query, layer.key, layer.value};
  const int64_t offsets[] = {0, shape_.query_width(), shape_.query_width() + shape_.kv_width()};
  const int64_t panels = layer.query->num_panels() + layer.key->num_panels() + layer.value->num_panels();
  const int64_t chunk = std::max<int64_t>(1, panels / (kTasksPerThread * num_threads_));
  ThreadPool::instance().run(
      (panels + chunk - 1) / chunk,
      [&](int64_t index) {
        int64_t first = index * chunk, end = std::min(panels, (index + 1) * chunk);
        for (int part = 0; part < 3; ++part) {
          const int64_t count = parts[part]->num_panels();
          const int64_t from = std::clamp<int64_t>(first, 0, count), to = std::clamp<int64_t>(end, 0, count);
          if (from < to) input_.apply(*table_, *parts[part], tokens, from, to, qkv_.data() + offsets[part], width);
          first -= count;
          end -= count;
        }
      },
      num_threads_);
  by_rows(tokens, [&](int64_t token) { rotate_and_store(layer, step, cache, token); });

  AttentionBatch batch{};
  batch.query = qkv_.data();
  batch.query_stride = width;
  batch.out = attended_.data();
  batch.out_stride = shape_.query_width();
  batch.key_cache = cache.keys;
  batch.value_cache = cache.values;
  batch.cache_type = cache.type;
  batch.key_scale = cache.key_scales;
  batch.value_scale = cache.value_scales;
  batch.block_table = step.block_table;
  batch.block_table_stride = step.block_table_stride;
  batch.query_start = step.query_start;
  batch.seq_lens = step.seq_lens;
  batch.num_seqs = step.num_seqs;
  batch.num_heads = shape_.num_heads;
  batch.num_kv_heads = shape_.num_kv_heads;
  batch.head_dim = shape_.head_dim;
  batch.scale = shape_.attention_scale;
  batch.sliding_window = layer.sliding_window;
  paged_attention(batch, num_threads_);

  prepare(attended_.data(), tokens, shape_.query_width(), *layer.output);
  add_to_hidden(*layer.output, tokens);
}

void Decoder::rotate_and_store(const DecoderLayer& layer, const DecoderStep& step, const LayerCache& cache,
                               int64_t token) {
  const int64_t dim = shape_.head_dim;
  float* row = qkv_.data() + token * shape_.qkv_width();
  if (layer.qkv_bias != nullptr) {
    for (int64_t i = 0; i < shape_.qkv_width(); ++i) row[i] += layer.qkv_bias[i];
  }
  const int64_t table_row = step.positions[token] * (dim / 2);
  for (int head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
    const float* norm = head < shape_.num_heads ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) table_->rms_norm(row + head * dim, norm, shape_.norm_epsilon, row + head * dim, dim);
    table_->rotate(row + head * dim, layer.cosine + table_row, layer.sine + table_row, dim / 2);
  }
  const int64_t slot = step.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / kBlockTokens, offset = slot % kBlockTokens;
  for (int head = 0; head < shape_.num_kv_heads; ++head) {
    const int64_t vector = (block * shape_.num_kv_heads + head) * kBlockTokens + offset;
    const float* key = row + shape_.query_width() + head * dim;
    const float* value = key + shape_.kv_width();
    store_cached(*table_, cache.type, key, cache.keys, cache.key_scales, vector, dim);
    store_cached(*table_, cache.type, value, cache.values, cache.value_scales, vector, dim);
  }
}

void Decoder::feed_forward(const DecoderLayer& layer, int64_t num_tokens) {
  const int64_t width = shape_.intermediate;
  prepare_normed(hidden_.data(), layer.mlp_norm, num_tokens, *layer.gate);
  by_panels(*layer.gate, [&](int64_t first, int64_t end) {
    input_.apply(*table_, *layer.gate, num_tokens, first, end, gate_.data(), width);
    input_.apply(*table_, *layer.up, num_tokens, first, end, up_.data(), width);
    const int64_t from = first * kPanel, count = std::min(width, end * kPanel) - from;
    for (int64_t row = 0; row < num_tokens; ++row) {
      float* gate = gate_.data() + row * width + from;
      table_->silu_mul(gate, up_.data() + row * width + from, gate, count);
    }
  });
  prepare(gate_.data(), num_tokens, width, *layer.down);
  add_to_hidden(*layer.down, num_tokens);
}

void Decoder::compute_logits(const DecoderStep& step) {
  const int64_t width = shape_.hidden;
  for (int64_t i = 0; i < step.num_logits; ++i) {
    std::copy_n(hidden_.data() + step.logits_index[i] * width, width, branch_.data() + i * width);
  }
  prepare_normed(branch_.data(), final_norm_, step.num_logits, *head_);
  by_panels(*head_, [&](int64_t first, int64_t end) {
    input_.apply(*table_, *head_, step.num_logits, first, end, step.logits, shape_.vocab_size);
  });
}

}  // namespace tokring::cpu
