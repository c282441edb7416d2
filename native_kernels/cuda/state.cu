// The step's state on the device: what the host changed is scattered in, decoding rows advance by themselves.
// Versions: 1  one thread a word or row.
#include "device.cuh"

DEVICE int global_thread() { return int(blockIdx.x * blockDim.x + threadIdx.x); }

// update = {number of pairs, (index, value) pairs}
KERNEL(scatter_metadata, 256)(int* state, const int* update, int state_size, int capacity) {
  const int count = update[0] < capacity ? update[0] : capacity;
  for (int i = global_thread(); i < count; i += int(gridDim.x * blockDim.x)) {
    const int index = update[1 + 2 * i];
    if (index >= 0 && index < state_size) state[index] = update[2 + 2 * i];
  }
}
KERNEL_EXPORT(scatter_metadata)

KERNEL(begin_decode, 256)
(int* slot_mapping, int* positions, const int* sequence_lengths, const int* block_table, int num_rows, int width) {
  const int row = global_thread();
  if (row >= num_rows) return;
  const int position = sequence_lengths[row] - 1, block = position / kKvBlockTokens;
  const bool is_there = position >= 0 && block < width;
  positions[row] = position > 0 ? position : 0;
  slot_mapping[row] =
      is_there ? block_table[int64_t(row) * width + block] * kKvBlockTokens + position % kKvBlockTokens : -1;
}
KERNEL_EXPORT(begin_decode)

KERNEL(advance_decode, 256)(int* token_ids, int* sequence_lengths, const int* sampled, int num_rows) {
  const int row = global_thread();
  if (row >= num_rows || sequence_lengths[row] <= 0) return;
  sequence_lengths[row]++;
  token_ids[row] = sampled[row] > 0 ? sampled[row] : 0;
}
KERNEL_EXPORT(advance_decode)
