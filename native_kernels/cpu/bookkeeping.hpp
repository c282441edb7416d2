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
  int64_t* first_token_ns;
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

// Gives each of the rows [0, num_rows) the blocks that it lacks for its tokens; false, with nothing done, if fewer are
// free. `rows` is scratch memory for num_rows.
bool append_blocks(const StepColumns& columns, int64_t num_rows, BlockPool& pool, int32_t* rows);

// Accounts for a step that was built: the KV of its tokens counts as computed, and every sample i appends a token to
// its row, which resolve_tokens() writes. lengths[i] is the row's length before it. A row that reaches max_total has
// nothing left to compute.
void advance_rows(const StepColumns& columns, const StepArrays& step, const StepSize& size, int64_t* lengths);

// Where the next step is built before resolve_tokens() says what sample i is: it is -1 - i until then.
void append_placeholders(const StepColumns& columns, const StepArrays& step, const int64_t* lengths, int64_t count);

// The token after lengths[i] tokens of rows[i] is token_ids[i]. Writes to `ended` the indices i of those that reached
// their length with it, that sampled one of the stop ids, or no token (-1); such a row is cut off behind it.
struct Resolved {
  int64_t num_ended, num_silent;  // of all: those without a token
};
Resolved resolve_tokens(const StepColumns& columns, const int32_t* rows, const int64_t* lengths,
                        const int32_t* token_ids, int64_t count, int64_t num_stop_columns, int64_t now_ns,
                        int32_t* ended);

// How drafts are looked up: the `max_tokens` tokens that followed the last earlier occurrence of the sequence's end, of
// as many tokens as possible from max_ngram down to min_ngram.
struct DraftRules {
  int32_t min_ngram, max_ngram, max_tokens;
};

// Writes drafts behind the tokens of those rows [0, num_rows) that decode (num_scheduled 1) and have eligible[row], as
// far as `budget` tokens in all, max_total and free blocks allow; num_drafts[row] says how many. They count in
// num_tokens and num_scheduled until the step is built.
void draft_tokens(const StepColumns& columns, int64_t num_rows, const int32_t* eligible, const DraftRules& rules,
                  int64_t budget, BlockPool& pool, int32_t* num_drafts);

// rows[i] has num_drafts[i] drafts behind its tokens; token_ids[i] was sampled in place of the first, and the next
// num_drafts[i] of `following` in place of the tokens behind each. Accepts drafts as long as they are what was sampled,
// end nothing, and are followed by a token: writes their number to `accepted`, what was sampled behind the last one to
// token_ids.
void verify_drafts(const StepColumns& columns, const int32_t* rows, const int32_t* num_drafts, int64_t count,
                   const int32_t* following, int64_t num_stop_columns, int32_t* token_ids, int32_t* accepted);

}  // namespace tokring::cpu
