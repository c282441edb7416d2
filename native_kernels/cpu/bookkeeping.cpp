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

int64_t count_lacking(const StepColumns& columns, int64_t num_rows) {
  int64_t count = 0;
  for (int64_t row = 0; row < num_rows; ++row) count += lacking(columns, row);
  return count;
}

void append_blocks(const StepColumns& columns, int64_t num_rows, const int64_t* blocks) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int32_t left = lacking(columns, row); left > 0; --left) {
      columns.block_ids[row * columns.max_blocks + columns.num_blocks[row]++] = static_cast<int32_t>(*blocks++);
    }
  }
}

int64_t append_tokens(const StepColumns& columns, const int32_t* rows, const int32_t* token_ids, int64_t count,
                      int64_t num_stop_columns, int32_t* ended) {
  int64_t num_ended = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = rows[i], token_id = token_ids[i];
    const int32_t length = columns.num_tokens[row]++;
    columns.token_ids[columns.token_base[row] + length] = token_id;
    columns.last_token[row] = token_id;
    if (token_id < 0 || length + 1 >= columns.max_total[row] || is_stop_id(columns, row, token_id, num_stop_columns)) {
      ended[num_ended++] = static_cast<int32_t>(i);
    }
  }
  return num_ended;
}

}  // namespace tokring::cpu
