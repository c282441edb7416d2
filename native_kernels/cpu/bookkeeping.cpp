#include "bookkeeping.hpp"

#include <algorithm>

namespace tokring::cpu {

StepSize build_step(const StepColumns& columns, int64_t num_rows, const StepArrays& step) {
  StepSize size{0, 0, 0};
  const int32_t mask = (1 << columns.block_shift) - 1;
  step.query_start[0] = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t count = columns.num_scheduled[row];
    if (count <= 0) continue;
    const int32_t first = columns.num_computed[row], stop = first + count;
    if (size.num_tokens + count > step.max_tokens) return {-1, 0, 0};
    if (stop > columns.num_blocks[row] << columns.block_shift || stop > columns.num_tokens[row]) return {-2, 0, 0};
    const int32_t* blocks = columns.block_ids + row * columns.max_blocks;
    const int32_t* tokens = columns.token_ids + columns.token_base[row];
    for (int32_t position = first; position < stop; ++position, ++size.num_tokens) {
      step.token_ids[size.num_tokens] = tokens[position];
      step.positions[size.num_tokens] = position;
      step.slot_mapping[size.num_tokens] =
          (static_cast<int64_t>(blocks[position >> columns.block_shift]) << columns.block_shift) + (position & mask);
    }
    if (stop == columns.num_tokens[row]) {
      step.sample_index[size.num_samples] = static_cast<int32_t>(size.num_requests);
      step.logits_index[size.num_samples++] = static_cast<int32_t>(size.num_tokens - 1);
    }
    step.rows[size.num_requests] = static_cast<int32_t>(row);
    step.num_scheduled[size.num_requests] = count;
    step.num_computed[size.num_requests] = first;
    step.seq_lens[size.num_requests] = stop;
    step.query_start[++size.num_requests] = static_cast<int32_t>(size.num_tokens);
  }
  return size;
}

namespace {

int32_t lacking(const StepColumns& columns, int64_t row) {
  if (columns.num_computed[row] >= columns.num_tokens[row]) return 0;
  const int32_t needed = (columns.num_tokens[row] + (1 << columns.block_shift) - 1) >> columns.block_shift;
  return std::max(needed - columns.num_blocks[row], 0);
}

bool is_stop_id(const StepColumns& columns, int64_t row, int32_t token_id, int64_t num_stop_columns) {
  for (int64_t i = 0; i < num_stop_columns; ++i) {
    if (columns.stop_ids[i * columns.max_rows + row] == token_id) return true;
  }
  return false;
}

}  // namespace

Plan plan_decodes(const StepColumns& columns, int64_t num_rows, const bool* held, int32_t* prefilling) {
  Plan plan{0, 0};
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t wanted = held != nullptr && held[row] ? 0 : columns.num_tokens[row] - columns.num_computed[row];
    columns.num_scheduled[row] = wanted == 1;
    plan.num_decoding += wanted == 1;
    if (wanted > 1) prefilling[plan.num_prefilling++] = static_cast<int32_t>(row);
  }
  return plan;
}

bool append_blocks(const StepColumns& columns, int64_t num_rows, BlockPool& pool, int32_t* rows) {
  int64_t num_lacking = 0, count = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t lacks = lacking(columns, row);
    rows[num_lacking] = static_cast<int32_t>(row);
    num_lacking += lacks > 0;
    count += lacks;
  }
  if (count > pool.num_free()) return false;
  for (int64_t i = 0; i < num_lacking; ++i) {
    const int32_t row = rows[i], lacks = lacking(columns, row);
    pool.allocate(lacks, columns.block_ids + row * columns.max_blocks + columns.num_blocks[row]);
    columns.num_blocks[row] += lacks;
  }
  return true;
}

void advance_rows(const StepColumns& columns, const StepArrays& step, const StepSize& size, int64_t* lengths) {
  for (int64_t i = 0; i < size.num_requests; ++i) columns.num_computed[step.rows[i]] += step.num_scheduled[i];
  for (int64_t i = 0; i < size.num_samples; ++i) {
    const int32_t row = step.rows[step.sample_index[i]];
    const int32_t length = columns.num_tokens[row]++;
    lengths[i] = length;
    if (length + 1 >= columns.max_total[row]) columns.num_computed[row] = length + 1;
  }
}

void append_placeholders(const StepColumns& columns, const StepArrays& step, const int64_t* lengths, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = step.rows[step.sample_index[i]];
    columns.token_ids[columns.token_base[row] + lengths[i]] = static_cast<int32_t>(-1 - i);
  }
}

Resolved resolve_tokens(const StepColumns& columns, const int32_t* rows, const int64_t* lengths,
                        const int32_t* token_ids, int64_t count, int64_t num_stop_columns, int64_t now_ns,
                        int32_t* ended) {
  Resolved resolved{0, 0};
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = rows[i], token_id = token_ids[i];
    const auto length = static_cast<int32_t>(lengths[i]);
    columns.token_ids[columns.token_base[row] + length] = token_id;
    columns.last_token[row] = token_id;
    resolved.num_silent += token_id < 0;
    if (columns.first_token_ns[row] == 0) columns.first_token_ns[row] = now_ns;
    if (token_id < 0 || length + 1 >= columns.max_total[row] || is_stop_id(columns, row, token_id, num_stop_columns)) {
      ended[resolved.num_ended++] = static_cast<int32_t>(i);
      columns.num_tokens[row] = length + 1;
      columns.num_computed[row] = std::min(columns.num_computed[row], length);
    }
  }
  return resolved;
}

namespace {

// Finds what followed the last earlier occurrence of the end of tokens[0, count), as if the end of the sequence
// repeated itself; writes `limit` tokens to tokens[count, …) and returns how many: 0 without such an occurrence.
int32_t look_up(int32_t* tokens, int32_t count, const DraftRules& rules, int32_t limit) {
  for (int32_t size = std::min(rules.max_ngram, count - 1); size >= rules.min_ngram; --size) {
    for (int32_t start = count - size - 1; start >= 0; --start) {
      if (!std::equal(tokens + start, tokens + start + size, tokens + count - size)) continue;
      for (int32_t i = 0; i < limit; ++i) tokens[count + i] = tokens[start + size + i];  // may read what it wrote
      return limit;
    }
  }
  return 0;
}

// Gives a row blocks for `num_drafts` tokens more, or for as many as there are blocks; returns how many that is.
int32_t fit_blocks(const StepColumns& columns, int64_t row, int32_t num_drafts, BlockPool& pool) {
  const int32_t length = columns.num_tokens[row];
  const int32_t needed = (length + num_drafts + (1 << columns.block_shift) - 1) >> columns.block_shift;
  while (columns.num_blocks[row] < needed && pool.num_free() > 0) {
    int64_t block;
    pool.allocate(1, &block);
    columns.block_ids[row * columns.max_blocks + columns.num_blocks[row]++] = static_cast<int32_t>(block);
  }
  return std::min(num_drafts, (columns.num_blocks[row] << columns.block_shift) - length);
}

}  // namespace

void draft_tokens(const StepColumns& columns, int64_t num_rows, const int32_t* eligible, const DraftRules& rules,
                  int64_t budget, BlockPool& pool, int32_t* num_drafts) {
  for (int64_t row = 0; row < num_rows; ++row) {
    num_drafts[row] = 0;
    const int32_t length = columns.num_tokens[row];
    if (eligible[row] == 0 || columns.num_scheduled[row] != 1 || length - columns.num_computed[row] != 1) continue;
    // The last token that may come is sampled, never drafted.
    const auto limit =
        static_cast<int32_t>(std::min<int64_t>({rules.max_tokens, columns.max_total[row] - length - 1, budget}));
    if (limit <= 0) continue;
    int32_t* tokens = columns.token_ids + columns.token_base[row];
    const int32_t found = look_up(tokens, length, rules, limit);
    if (found == 0) continue;
    const int32_t count = fit_blocks(columns, row, found, pool);
    num_drafts[row] = count;
    columns.num_tokens[row] += count;
    columns.num_scheduled[row] += count;
    budget -= count;
  }
}

void verify_drafts(const StepColumns& columns, const int32_t* rows, const int32_t* num_drafts, int64_t count,
                   const int32_t* following, int64_t num_stop_columns, int32_t* token_ids, int32_t* accepted) {
  for (int64_t i = 0; i < count; following += num_drafts[i++]) {
    const int32_t* drafts = columns.token_ids + columns.token_base[rows[i]] + columns.num_tokens[rows[i]];
    int32_t num_accepted = 0, token_id = token_ids[i];
    while (num_accepted < num_drafts[i] && token_id == drafts[num_accepted] && following[num_accepted] >= 0 &&
           !is_stop_id(columns, rows[i], token_id, num_stop_columns)) {
      token_id = following[num_accepted++];
    }
    token_ids[i] = token_id;
    accepted[i] = num_accepted;
  }
}

}  // namespace tokring::cpu
