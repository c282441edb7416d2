// What a step does for every running request, as loops over columns.
#pragma once

#include <cstdint>

#include "block_pool.hpp"

namespace tokring::cpu {

// Columns by row; see tokring_kernels.StepColumns.
struct StepColumns {
  int64_t max_rows, max_blocks;
  int32_t block_shift;
  int32_t* num_tokens;
  int32_t* num_computed;
  int32_t* num_scheduled;
  int32_t* last_token;
  int32_t* max_total;
  int64_t* token_base;
  int32_t* token_ids;
  int64_t token_ids_size;
  int32_t* stop_ids;   // [num_stop_columns, max_rows]
  int32_t* block_ids;  // [max_rows, max_blocks]
  int32_t* num_blocks;
};

// Arrays of the step; see tokring.engine.step_batch.StepBatch.
struct StepArrays {
  int64_t max_tokens;
  int32_t* rows;
  int32_t* num_scheduled;
  int32_t* num_computed;
  int32_t* query_start;
  int32_t* token_ids;
  int32_t* positions;
  int64_t* slot_mapping;
  int32_t* seq_lens;
  int32_t* sample_index;
  int32_t* logits_index;
};

struct StepSize {
  int64_t num_requests, num_tokens, num_samples;
};

// Fills `step` from the rows [0, num_rows) with num_scheduled > 0. Returns num_requests -1 if the tokens exceed
// max_tokens, -2 if a row's positions exceed its blocks.
StepSize build_step(const StepColumns& columns, int64_t num_rows, const StepArrays& step);

// Schedules one token for each of the rows [0, num_rows) that lacks the KV of just one, none for the others, nor for
// those with held[row]. Writes the rows that lack more, and are not held, to `prefilling`; returns how many of either
// kind.
struct Plan {
  int64_t num_decoding, num_prefilling;
};
Plan plan_decodes(const StepColumns& columns, int64_t num_rows, const bool* held, int32_t* prefilling);

// Blocks that the rows [0, num_rows) lack for their tokens.
int64_t count_lacking(const StepColumns& columns, int64_t num_rows);

// Gives each of the rows [0, num_rows) the blocks that it lacks, out of `blocks`.
void append_blocks(const StepColumns& columns, int64_t num_rows, const int64_t* blocks);

// Appends token_ids[i] to rows[i], and writes to `ended` the indices i of those that reached their length, sampled one
// of the stop ids, or no token (-1). Returns how many.
int64_t append_tokens(const StepColumns& columns, const int32_t* rows, const int32_t* token_ids, int64_t count,
                      int64_t num_stop_columns, int32_t* ended);

}  // namespace tokring::cpu
