// Paged attention over a whole batch: which rows, which tiles, in which threads.
#pragma once

#include <cstdint>

#include "kernel_table.hpp"

namespace tokring::cpu {

struct AttentionBatch {
  const void* query;  // [num_tokens][num_heads][head_dim]
  bool query_is_bf16;
  int64_t query_stride;  // elements from token to token
  void* out;             // [num_tokens][num_heads][head_dim]
  bool out_is_bf16;
  int64_t out_stride;
  const void* key_cache;  // [num_blocks][num_kv_heads][kBlockTokens][head_dim]
  const void* value_cache;
  CacheType cache_type;
  const float* key_scale;  // int8: [num_blocks][num_kv_heads][kBlockTokens]
  const float* value_scale;
  const int32_t* block_table;  // [num_seqs][*]
  int64_t block_table_stride;
  const int32_t* query_start;  // [num_seqs + 1]
  const int32_t* seq_lens;     // [num_seqs], this step's tokens included
  int num_seqs;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float scale;
  float soft_cap;          // 0 = none
  int64_t sliding_window;  // a token sees the last `sliding_window` positions, itself included; 0 = all
};

void paged_attention(const AttentionBatch& batch, int num_threads);

// Writes x[dim] as cached vector `vector`, counted over [num_blocks][num_kv_heads][kBlockTokens].
void store_cached(const KernelTable& table, CacheType type, const float* x, void* cache, float* scales, int64_t vector,
                  int64_t dim);

}  // namespace tokring::cpu
