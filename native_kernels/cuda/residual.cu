// The residual stream: it starts as rows of the embedding table; branches are added to it (Gemma normalises them first)
// and RMSNorm gives the next layer's input. -DELEMENT=Bf16|F16 -DRESIDUAL=ELEMENT|float.
// Versions: 1  float arithmetic, 128-bit accesses; one block a row of up to 16,384 columns, which stays in registers.
#include "block.cuh"
#include "elements.cuh"

constexpr int kMaxRuns = 2;  // runs of 8 columns a thread

struct Columns {
  float x[kMaxRuns][8];
};

// Calls action(run, first column) for this thread's runs.
template <class Action>
DEVICE void for_runs(int width, Action action) {
#pragma unroll
  for (int run = 0; run < kMaxRuns; run++) {
    const int column = 8 * (thread() + run * int(blockDim.x));
    if (column < width) action(run, column);
  }
}

DEVICE float inverse_rms(const Columns& row, int width, float epsilon, float* partial) {
  float squares = 0.0f;
#pragma unroll
  for (int run = 0; run < kMaxRuns; run++)
#pragma unroll
    for (int i = 0; i < 8; i++) squares += row.x[run][i] * row.x[run][i];
  return 1.0f / sqrtf(block_sum(squares, partial) / float(width) + epsilon);
}

DEVICE void scale_run(float (&x)[8], float scale, const float* weight, float offset) {
  float w[8];
  load_8(weight, w);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= scale * (w[i] + offset);
}

// out: ELEMENT[n, width]; residual: RESIDUAL[T, width]; branch: ELEMENT[T, width]; weights: float[width]; rows: int[n].
// branch, branch_weight and rows may be null; without a branch, or with rows, residual is only read. Grid: n blocks.
KERNEL(add_rms_norm, 1024)
(ELEMENT* out, RESIDUAL* residual, const ELEMENT* branch, const float* weight, const float* branch_weight,
 const int* rows, int width, float epsilon, float weight_offset) {
  SHARED_ARRAY(float, branch_partial, kMaxWarps);
  SHARED_ARRAY(float, partial, kMaxWarps);
  const int row = rows ? rows[blockIdx.x] : int(blockIdx.x);
  if (row < 0) return;
  const int64_t base = int64_t(row) * width;
  Columns columns = {};
  if (branch) {
    for_runs(width, [&](int run, int column) { load_8(branch + base + column, columns.x[run]); });
  }
  if (branch && branch_weight) {
    const float scale = inverse_rms(columns, width, epsilon, branch_partial);
    for_runs(width,
             [&](int run, int column) { scale_run(columns.x[run], scale, branch_weight + column, weight_offset); });
  }
  for_runs(width, [&](int run, int column) {
    float stream[8];
    load_8(residual + base + column, stream);
#pragma unroll
    for (int i = 0; i < 8; i++) columns.x[run][i] += stream[i];
    if (branch && !rows) store_8(residual + base + column, columns.x[run]);
  });
  const float scale = inverse_rms(columns, width, epsilon, partial);
  for_runs(width, [&](int run, int column) {
    scale_run(columns.x[run], scale, weight + column, weight_offset);
    store_8(out + int64_t(blockIdx.x) * width + column, columns.x[run]);
  });
}
KERNEL_EXPORT(add_rms_norm)

// out: RESIDUAL[T, width]; table: ELEMENT[vocab_size, width]; ids outside the vocabulary give zeros. Grid: T, columns /
// 1024.
KERNEL(embed, 128)
(RESIDUAL* out, const int* token_ids, const ELEMENT* table, int width, int vocab_size, float scale) {
  const int column = 8 * int(blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= width) return;
  const int id = token_ids[blockIdx.x];
  float x[8] = {};
  if (id >= 0 && id < vocab_size) load_8(table + int64_t(id) * width + column, x);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= scale;
  store_8(out + int64_t(blockIdx.x) * width + column, x);
}
KERNEL_EXPORT(embed)
