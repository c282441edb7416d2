// The parts of the Python module, and checks that several of them share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

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

}  // namespace tokring::cpu
