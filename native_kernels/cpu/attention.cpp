#include "attention.hpp"

#include <algorithm>
#include <vector>

#include "kernel_table.hpp"
#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

constexpr int kUnitRows = 32;  // query rows (tokens x heads of one KV head) that read each key and value together

// One run of query tokens of one sequence under one KV head.
struct Unit {
  int seq;
  int kv_head;
  int64_t first_token;  // in the batch
  int num_tokens;
  int64_t first_position;  // of first_token in its sequence
  int64_t first_tile;      // KV tiles [first_tile, end_tile) hold what the unit sees
  int64_t end_tile;
  int64_t partials;  // offset of its first tile's partial result, in tiles
};

struct Plan {
  const AttentionBatch& batch;
  int group;  // query heads per KV head
  int unit_tokens;
  int padded_dim;
  std::vector<Unit> units;
  int64_t num_tiles = 0;

  int64_t row_floats() const { return padded_dim + 2; }  // maximum, sum, accumulator
};

int64_t first_visible(const AttentionBatch& batch, int64_t position) {
  return batch.sliding_window > 0 ? std::max<int64_t>(0, position - batch.sliding_window + 1) : 0;
}

Plan make_plan(const AttentionBatch& batch) {
  const int group = batch.num_heads / batch.num_kv_heads;
  Plan plan{batch, group, std::max(1, kUnitRows / group), (batch.head_dim + 15) / 16 * 16, {}, 0};
  plan.units.reserve(static_cast<size_t>(batch.num_seqs) * batch.num_kv_heads);
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t start = batch.query_start[seq];
    const int64_t stop = batch.query_start[seq + 1];
    const int64_t first_position = batch.seq_lens[seq] - (stop - start);
    for (int kv_head = 0; kv_head < batch.num_kv_heads; ++kv_head) {
      for (int64_t token = start; token < stop; token += plan.unit_tokens) {
        Unit unit{};
        unit.seq = seq;
        unit.kv_head = kv_head;
        unit.first_token = token;
        unit.num_tokens = static_cast<int>(std::min<int64_t>(plan.unit_tokens, stop - token));
        unit.first_position = first_position + token - start;
        unit.first_tile = first_visible(batch, unit.first_position) / kTileTokens;
        unit.end_tile = (unit.first_position + unit.num_tokens - 1) / kTileTokens + 1;
        unit.partials = plan.num_tiles;
        plan.num_tiles += unit.end_tile - unit.first_tile;
        plan.units.push_back(unit);
      }
    }
  }
  return plan;
}

// A thread's working memory, kept between calls.
struct Scratch {
  std::vector<float> query, scores, widened, state, partial;
  int64_t first[kMaxRows], last[kMaxRows];

  void reserve(int rows, int padded_dim) {
    query.resize(std::max(query.size(), static_cast<size_t>(rows) * padded_dim));
    scores.resize(std::max(scores.size(), static_cast<size_t>(rows) * kTileTokens));
    widened.resize(std::max(widened.size(), static_cast<size_t>(kBlockTokens) * padded_dim));
    state.resize(std::max(state.size(), static_cast<size_t>(rows) * (padded_dim + 2)));
    partial.resize(std::max(partial.size(), static_cast<size_t>(rows) * (padded_dim + 2)));
  }
};

Scratch& scratch() {
  thread_local Scratch memory;
  return memory;
}

class UnitRunner {
 public:
  UnitRunner(const KernelTable& kernels, const Plan& plan, const Unit& unit)
      : kernels_(kernels), plan_(plan), batch_(plan.batch), unit_(unit), rows_(unit.num_tokens * plan.group) {
    scratch().reserve(rows_, plan.padded_dim);
    gather_query();
    for (int row = 0; row < rows_; ++row) {
      scratch().last[row] = unit.first_position + row / plan.group;
      scratch().first[row] = first_visible(batch_, scratch().last[row]);
    }
  }

  // The partial result of one tile: [rows] maxima, [rows] sums, [rows][padded_dim] accumulators.
  void attend(int64_t tile_index, float* partial) const {
    const int64_t head_offset = static_cast<int64_t>(unit_.kv_head) * kBlockTokens * batch_.head_dim;
    const int64_t element = element_bytes(batch_.cache_type);
    AttentionTile tile{};
    tile.query = scratch().query.data();
    tile.rows = rows_;
    tile.head_dim = batch_.head_dim;
    tile.padded_dim = plan_.padded_dim;
    tile.key_cache = static_cast<const char*>(batch_.key_cache) + head_offset * element;
    tile.value_cache = static_cast<const char*>(batch_.value_cache) + head_offset * element;
    tile.cache_type = batch_.cache_type;
    if (batch_.cache_type == CacheType::int8) {
      tile.key_scale = batch_.key_scale + static_cast<int64_t>(unit_.kv_head) * kBlockTokens;
      tile.value_scale = batch_.value_scale + static_cast<int64_t>(unit_.kv_head) * kBlockTokens;
      tile.scale_stride = static_cast<int64_t>(batch_.num_kv_heads) * kBlockTokens;
    }
    tile.block_stride = static_cast<int64_t>(batch_.num_kv_heads) * kBlockTokens * batch_.head_dim;
    tile.block_ids = batch_.block_table + unit_.seq * batch_.block_table_stride;
    tile.tile_start = tile_index * kTileTokens;
    tile.first_visible = scratch().first;
    tile.last_visible = scratch().last;
    tile.scale = batch_.scale;
    tile.soft_cap = batch_.soft_cap;
    tile.scores = scratch().scores.data();
    tile.widened = scratch().widened.data();
    tile.maximum = partial;
    tile.sum = partial + rows_;
    tile.accumulator = partial + 2 * rows_;
    kernels_.attend(tile);
  }

  void merge(float* state, const float* partial) const {
    const int dim = plan_.padded_dim;
    for (int row = 0; row < rows_; ++row) {
      kernels_.merge(state + row, state + rows_ + row, state + 2 * rows_ + static_cast<int64_t>(row) * dim,
                     partial[row], partial[rows_ + row], partial + 2 * rows_ + static_cast<int64_t>(row) * dim, dim);
    }
  }

  void finish(float* state) const {
    const int dim = batch_.head_dim;
    for (int row = 0; row < rows_; ++row) {
      float* values = state + 2 * rows_ + static_cast<int64_t>(row) * plan_.padded_dim;
      const int64_t token = unit_.first_token + row / plan_.group;
      const int64_t head = static_cast<int64_t>(unit_.kv_head) * plan_.group + row % plan_.group;
      const int64_t offset = token * batch_.out_stride + head * dim;
      if (!batch_.out_is_bf16) {
        kernels_.divide(values, state[rows_ + row], static_cast<float*>(batch_.out) + offset, dim);
        continue;
      }
      kernels_.divide(values, state[rows_ + row], values, dim);
      kernels_.narrow(values, static_cast<uint16_t*>(batch_.out) + offset, dim);
    }
  }

  int64_t partial_floats() const { return static_cast<int64_t>(rows_) * plan_.row_floats(); }

 private:
  void gather_query() const {
    const int dim = batch_.head_dim;
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = unit_.first_token + row / plan_.group;
      const int64_t head = static_cast<int64_t>(unit_.kv_head) * plan_.group + row % plan_.group;
      const int64_t offset = token * batch_.query_stride + head * dim;
      float* to = scratch().query.data() + static_cast<int64_t>(row) * plan_.padded_dim;
      if (batch_.query_is_bf16) {
        kernels_.widen(static_cast<const uint16_t*>(batch_.query) + offset, to, dim);
      } else {
        std::copy_n(static_cast<const float*>(batch_.query) + offset, dim, to);
      }
      std::fill(to + dim, to + plan_.padded_dim, 0.0f);
    }
  }

  const KernelTable& kernels_;
  const Plan& plan_;
  const AttentionBatch& batch_;
  const Unit& unit_;
  const int rows_;
};

void run_whole(const KernelTable& kernels, const Plan& plan, const Unit& unit) {
  const UnitRunner runner(kernels, plan, unit);
  float* state = scratch().state.data();
  runner.attend(unit.first_tile, state);
  for (int64_t tile = unit.first_tile + 1; tile < unit.end_tile; ++tile) {
    runner.attend(tile, scratch().partial.data());
    runner.merge(state, scratch().partial.data());
  }
  runner.finish(state);
}

// Few units, long contexts: the tiles themselves are the tasks, merged afterwards in the same order as in run_whole.
void run_split(const KernelTable& kernels, const Plan& plan, int num_threads) {
  const int64_t tile_floats = static_cast<int64_t>(plan.unit_tokens) * plan.group * plan.row_floats();
  std::vector<float> partials(static_cast<size_t>(plan.num_tiles * tile_floats));
  std::vector<const Unit*> owner(static_cast<size_t>(plan.num_tiles));
  for (const Unit& unit : plan.units) {
    std::fill_n(owner.begin() + unit.partials, unit.end_tile - unit.first_tile, &unit);
  }
  ThreadPool& pool = ThreadPool::instance();
  pool.run(
      plan.num_tiles,
      [&](int64_t index) {
        const Unit& unit = *owner[static_cast<size_t>(index)];
        UnitRunner(kernels, plan, unit)
            .attend(unit.first_tile + index - unit.partials, partials.data() + index * tile_floats);
      },
      num_threads);
  pool.run(
      static_cast<int64_t>(plan.units.size()),
      [&](int64_t index) {
        const Unit& unit = plan.units[static_cast<size_t>(index)];
        const UnitRunner runner(kernels, plan, unit);
        float* state = partials.data() + unit.partials * tile_floats;
        for (int64_t tile = 1; tile < unit.end_tile - unit.first_tile; ++tile) {
          runner.merge(state, state + tile * tile_floats);
        }
        runner.finish(state);
      },
      num_threads);
}

}  // namespace

void paged_attention(const AttentionBatch& batch, int num_threads) {
  const KernelTable& table = kernels();
  const Plan plan = make_plan(batch);
  const auto num_units = static_cast<int64_t>(plan.units.size());
  const int threads = num_threads > 0 ? std::min(num_threads, ThreadPool::instance().num_threads())
                                      : ThreadPool::instance().num_threads();
  if (threads > 1 && num_units < 4 * threads && plan.num_tiles > num_units) {
    return run_split(table, plan, threads);
  }
  ThreadPool::instance().run(
      num_units, [&](int64_t index) { run_whole(table, plan, plan.units[static_cast<size_t>(index)]); }, threads);
}

void store_cached(const KernelTable& table, CacheType type, const float* x, void* cache, float* scales, int64_t vector,
                  int64_t dim) {
  const int64_t at = vector * dim;
  switch (type) {
    case CacheType::f32:
      std::copy_n(x, dim, static_cast<float*>(cache) + at);
      return;
    case CacheType::bf16:
      return table.narrow(x, static_cast<uint16_t*>(cache) + at, dim);
    case CacheType::int8:
      scales[vector] = table.quantize_kv(x, static_cast<int8_t*>(cache) + at, dim);
      return;
  }
}

}  // namespace tokring::cpu
