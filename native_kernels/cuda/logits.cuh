// A row of logits, float32: walks over it, its maximum in parts, the order of floats as integers.
#pragma once
#include "block.cuh"

constexpr int kRowParts = 16;  // blocks that look for a row's maximum

// The maximum of a part of a row; id -1: the part holds NaN.
struct PartMaximum {
  float value;
  int id;
};

DEVICE float minus_infinity() { return -infinity(); }
DEVICE bool is_nan(float x) { return (float_bits(x) & 0x7fffffffu) > 0x7f800000u; }
DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7fffffffu) < 0x7f800000u; }

// Calls visit(id, logit) for ids [start, stop), each by one of the callers `rank` of `count`, 16 bytes at a time where
// the address allows it.
template <class Visit>
DEVICE void walk(const float* row, int start, int stop, int rank, int count, Visit visit) {
  const int to_boundary = int(-(reinterpret_cast<uint64_t>(row + start) / 4) & 3);
  const int body = start + to_boundary < stop ? start + to_boundary : stop;
  const int num_vectors = (stop - body) / 4, tail = body + 4 * num_vectors;
  if (start + rank < body) visit(start + rank, row[start + rank]);
#pragma unroll 2
  for (int i = rank; i < num_vectors; i += count) {
    const int id = body + 4 * i;
    const uint4 v = load_16_bytes(row + id);
    visit(id, float_of_bits(v.x));
    visit(id + 1, float_of_bits(v.y));
    visit(id + 2, float_of_bits(v.z));
    visit(id + 3, float_of_bits(v.w));
  }
  if (tail + rank < stop) visit(tail + rank, row[tail + rank]);
}

// Ascends with x; equal for -0 and 0.
DEVICE uint32_t order_key(float x) {
  const uint32_t bits = float_bits(add_rounded(x, 0.0f));
  return bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
}

DEVICE PartMaximum larger(PartMaximum a, PartMaximum b) {
  if (a.id < 0 || b.id < 0) return PartMaximum{0.0f, -1};
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.id < b.id ? a : b;
}
DEVICE PartMaximum warp_larger(PartMaximum mine) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    mine = larger(mine, PartMaximum{shuffle_xor(mine.value, mask), shuffle_xor(mine.id, mask)});
  }
  return mine;
}
// The row's maximum from its parts, in every thread of the warp.
DEVICE PartMaximum row_maximum(const PartMaximum* parts) { return warp_larger(parts[lane() % kRowParts]); }
