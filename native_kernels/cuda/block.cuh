// Sums and scans over a block of whole warps; every thread must call them.
#pragma once
#include "device.cuh"

constexpr int kMaxWarps = 32;

DEVICE int thread() { return int(threadIdx.x); }
DEVICE int lane() { return int(threadIdx.x & 31); }
DEVICE int warp() { return int(threadIdx.x >> 5); }
DEVICE int num_warps() { return int(blockDim.x >> 5); }

// The block's sum, in every thread. `partial` has kMaxWarps entries and may be used again after the next barrier.
template <class T>
DEVICE T block_sum(T x, T* partial) {
  x = warp_sum(x);
  if (lane() == 0) partial[warp()] = x;
  block_barrier();
  return warp_sum(lane() < num_warps() ? partial[lane()] : T(0));
}

struct Scan {
  uint64_t before;  // sum of the lower threads
  uint64_t total;
};
// The same rule for `partial`.
DEVICE Scan block_scan(uint64_t x, uint64_t* partial) {
  uint64_t upto = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const uint64_t lower = shuffle_up(upto, distance);
    if (lane() >= distance) upto += lower;
  }
  if (lane() == 31) partial[warp()] = upto;
  block_barrier();
  const uint64_t of_warp = lane() < num_warps() ? partial[lane()] : 0;
  const uint64_t lower_warps = warp_sum(lane() < warp() ? of_warp : uint64_t(0));
  return Scan{lower_warps + upto - x, warp_sum(of_warp)};
}
