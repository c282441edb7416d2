// The parts of the Python module, and checks that several of them share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "arrays.hpp"
#include "attention.hpp"

namespace tokring::cpu {

void bind_attention(nanobind::module_& module);
void bind_bookkeeping(nanobind::module_& module);
void bind_decoder(nanobind::module_& module);
void bind_elementwise(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);

// Throws ValueError unless query_start, seq_lens and block_table fit together and every block id that a kernel will
// follow is one of the cache's: a wrong one must not become a wild read.
void check_sequences(const AttentionBatch& batch, int64_t num_tokens, int64_t num_blocks, int64_t table_width);

// Throws ValueError unless the scales of keys and values, float32[num_blocks, num_kv_heads, 16], are there exactly
// where the cache is int8.
void check_scales(CacheType type, const std::optional<Output>& key_scale, const std::optional<Output>& value_scale,
                  int64_t num_blocks, int64_t num_kv_heads);

constexpr std::initializer_list<Type> kCacheTypes{Type::f32, Type::bf16, Type::i8};

template <class Array>
CacheType cache_type(const Array& cache) {
  return holds(cache, Type::i8) ? CacheType::int8 : is_bf16(cache) ? CacheType::bf16 : CacheType::f32;
}

inline Type array_type(CacheType type) {
  return type == CacheType::int8 ? Type::i8 : type == CacheType::bf16 ? Type::bf16 : Type::f32;
}

// Null where there is none.
inline float* optional_data(const std::optional<Output>& array) { return array ? data<float>(*array) : nullptr; }

}  // namespace tokring::cpu
