// The one header that knows its target: every PTX instruction stands behind a wrapper here, with its meaning in plain
// C++ for the emulation (emulation.h, compiled by g++ with -DTOKRING_EMULATION). No CUDA header is included, for NVRTC
// finds none by itself. Rules for kernels: warps are whole (block sizes are multiples of 32, collectives take all 32
// lanes), shared memory comes from DYNAMIC_SHARED or SHARED_ARRAY, barriers are block_barrier().
#pragma once

#ifdef TOKRING_EMULATION
#include "emulation.h"
#else
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#define KERNEL_EXPORT(kernel)
// The block's dynamic shared memory, 128-byte aligned; its size is the launch's shared_bytes.
#define DYNAMIC_SHARED(Type, name)                                 \
  extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
  Type* const name = reinterpret_cast<Type*>(dynamic_shared)
// `count` elements of static shared memory, 16-byte aligned.
#define SHARED_ARRAY(Type, name, count) __shared__ __align__(16) Type name[count]
#endif

#define DEVICE __device__ __forceinline__
// A kernel: KERNEL(name, threads)(parameters) { ... } and after it KERNEL_EXPORT(name). A third argument is how many
// thread blocks must fit on a multiprocessor: it bounds registers.
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr int kKvBlockTokens = 16;  // tokens of one KV block

// ---- bits of floats ----

DEVICE uint32_t float_bits(float x) {
#ifdef TOKRING_EMULATION
  return emulation::bit_cast<uint32_t>(x);
#else
  return __float_as_uint(x);
#endif
}
DEVICE float float_of_bits(uint32_t bits) {
#ifdef TOKRING_EMULATION
  return emulation::bit_cast<float>(bits);
#else
  return __uint_as_float(bits);
#endif
}
DEVICE float infinity() { return float_of_bits(0x7f800000u); }

// ---- 16-bit element types: storage only, arithmetic is in float ----

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
DEVICE constexpr bool is_bf16(Bf16) { return true; }
DEVICE constexpr bool is_bf16(F16) { return false; }

#ifdef TOKRING_EMULATION
DEVICE float to_float(F16 x) { return emulation::half_to_float(x.bits); }
DEVICE uint32_t pack_bf16(float low, float high) {
  return emulation::float_to_bf16(low) | uint32_t(emulation::float_to_bf16(high)) << 16;
}
DEVICE uint32_t pack_f16(float low, float high) {
  return emulation::float_to_half(low) | uint32_t(emulation::float_to_half(high)) << 16;
}
#else
DEVICE float to_float(F16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif
DEVICE float to_float(Bf16 x) { return float_of_bits(uint32_t(x.bits) << 16); }
DEVICE float to_float(float x) { return x; }

// Two neighbouring 16-bit elements in one word; the first in memory is the low half. Rounds to nearest even.
template <class T>
DEVICE uint32_t pack(float low, float high);
template <>
DEVICE uint32_t pack<Bf16>(float low, float high) {
  return pack_bf16(low, high);
}
template <>
DEVICE uint32_t pack<F16>(float low, float high) {
  return pack_f16(low, high);
}
template <class T>
DEVICE float low_half(uint32_t pair) {
  return to_float(T{uint16_t(pair)});
}
template <class T>
DEVICE float high_half(uint32_t pair) {
  return to_float(T{uint16_t(pair >> 16)});
}
template <class T>
DEVICE T from_float(float x) {
  return T{uint16_t(pack<T>(x, 0.0f))};
}
template <>
DEVICE float from_float<float>(float x) {
  return x;
}

// ---- fp8 e4m3 ----

// To nearest even; beyond 448 becomes 448, NaN 0x7f.
DEVICE uint32_t e4m3_of_float(float x) {
  const uint32_t sign = float_bits(x) >> 24 & 0x80u;
  const float magnitude = fminf(fabsf(x), 448.0f);
  if (x != x) return 0x7fu;
  if (magnitude < 0.015625f) return sign | uint32_t(rintf(magnitude * 512.0f));
  const uint32_t bits = float_bits(magnitude);
  return sign | (((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3));
}
// Two neighbours in one word, the first in the low byte.
DEVICE uint16_t pack_e4m3(float low, float high) {
#if defined(TOKRING_EMULATION) || __CUDA_ARCH__ < 890
  return uint16_t(e4m3_of_float(low) | e4m3_of_float(high) << 8);
#else
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// ---- arithmetic ----

// 2^x and log2(x) to about 2 units in the last place; results below the normal range are 0.
DEVICE float exp2_fast(float x) {
#ifdef TOKRING_EMULATION
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
DEVICE float log2_fast(float x) {
#ifdef TOKRING_EMULATION
  return log2f(x);
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
// Never contracted to a fused multiply-add: for results that must have the CPU kernels' bits.
DEVICE float multiply_rounded(float a, float b) {
#ifdef TOKRING_EMULATION
  return a * b;
#else
  return __fmul_rn(a, b);
#endif
}
DEVICE float add_rounded(float a, float b) {
#ifdef TOKRING_EMULATION
  return a + b;
#else
  return __fadd_rn(a, b);
#endif
}
DEVICE float divide_rounded(float a, float b) {
#ifdef TOKRING_EMULATION
  return a / b;
#else
  return __fdiv_rn(a, b);
#endif
}
// 1/x to about 1 unit in the last place.
DEVICE float reciprocal_fast(float x) {
#ifdef TOKRING_EMULATION
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef TOKRING_EMULATION
  return uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
#else
  return __umul64hi(a, b);
#endif
}
DEVICE int count_bits(uint32_t x) {
#ifdef TOKRING_EMULATION
  return __builtin_popcount(x);
#else
  return __popc(x);
#endif
}
// Four bytes picked from the eight of {high, low} by the nibbles of `selector`.
DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef TOKRING_EMULATION
  return emulation::permute_bytes(low, high, selector);
#else
  return __byte_perm(low, high, selector);
#endif
}

// ---- 8-bit elements, widened to two pairs of T in the order of memory ----

template <class T>
DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b);
template <class T>
DEVICE uint32_t subtract_pairs(uint32_t a, uint32_t b);
#ifdef TOKRING_EMULATION
template <class T>
DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return pack<T>(low_half<T>(a) * low_half<T>(b), high_half<T>(a) * high_half<T>(b));
}
template <class T>
DEVICE uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  return pack<T>(low_half<T>(a) - low_half<T>(b), high_half<T>(a) - high_half<T>(b));
}
#else
template <>
DEVICE uint32_t multiply_pairs<Bf16>(uint32_t a, uint32_t b) {
  uint32_t product;  // sm_80 has no mul.bf16x2; adding -0 keeps every product, zeros with their signs
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}
template <>
DEVICE uint32_t multiply_pairs<F16>(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
template <>
DEVICE uint32_t subtract_pairs<F16>(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
#endif

struct Pairs {
  uint32_t first, second;
};
// Four e4m3 floats, exactly; the NaN codes become 480. The bits move to T's fields, then the exponent's bias is made
// up.
template <class T>
DEVICE Pairs widen_fp8(uint32_t bytes) {
  constexpr bool kBf16 = is_bf16(T{});
  constexpr int kShift = kBf16 ? 4 : 1;
  constexpr uint32_t kBias = kBf16 ? 0x7b807b80u : 0x5c005c00u;  // 2^120 or 2^8
  const uint32_t first = permute_bytes(bytes, 0, 0x1404), second = permute_bytes(bytes, 0, 0x3424);
  return {multiply_pairs<T>((first & 0x80008000u) | ((first & 0x7f007f00u) >> kShift), kBias),
          multiply_pairs<T>((second & 0x80008000u) | ((second & 0x7f007f00u) >> kShift), kBias)};
}
// Four int8, exactly: bytes go into the last bits of floats that are large enough to count in ones.
template <class T>
DEVICE Pairs widen_int8(uint32_t bytes);
template <>
DEVICE Pairs widen_int8<F16>(uint32_t bytes) {
  const uint32_t biased = bytes ^ 0x80808080u;
  return {subtract_pairs<F16>(permute_bytes(biased, 0x64646464u, 0x4140), 0x64806480u),
          subtract_pairs<F16>(permute_bytes(biased, 0x64646464u, 0x4342), 0x64806480u)};
}
template <>
DEVICE Pairs widen_int8<Bf16>(uint32_t bytes) {
  const uint32_t biased = bytes ^ 0x80808080u;
  uint32_t wide[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    wide[i] = float_bits(float_of_bits(permute_bytes(biased, 0x4b000000u, 0x7440u | uint32_t(i))) - 8388736.0f);
  return {permute_bytes(wide[0], wide[1], 0x7632), permute_bytes(wide[2], wide[3], 0x7632)};
}

// ---- memory ----

// 16 bytes of memory that nobody writes while the kernel runs, read once: not kept in L1.
DEVICE uint4 load_streaming(const void* address) {
#ifdef TOKRING_EMULATION
  return emulation::load<uint4>(address);
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
#endif
}
DEVICE uint4 load_16_bytes(const void* address) {
#ifdef TOKRING_EMULATION
  return emulation::load<uint4>(address);
#else
  return *static_cast<const uint4*>(address);
#endif
}
DEVICE void store_16_bytes(void* address, uint4 value) {
#ifdef TOKRING_EMULATION
  emulation::store(address, value);
#else
  *static_cast<uint4*>(address) = value;
#endif
}

// Memory that another block of this launch has written, past the L1 cache of this one. Follows a memory_fence.
DEVICE float load_coherent(const float* address) {
#ifdef TOKRING_EMULATION
  return *address;
#else
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
#endif
}
// This thread's writes before it are visible to all of the device before its writes after it.
DEVICE void memory_fence() {
#ifdef TOKRING_EMULATION
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#else
  __threadfence();
#endif
}

// Atomics on global or shared memory, relaxed; each returns the old value.
template <class T>
DEVICE T atomic_add(T* address, T value) {
#ifdef TOKRING_EMULATION
  return emulation::atomic_update(address, [value](T old) { return T(old + value); });
#else
  return atomicAdd(address, value);
#endif
}
template <class T>
DEVICE T atomic_or(T* address, T value) {
#ifdef TOKRING_EMULATION
  return emulation::atomic_update(address, [value](T old) { return T(old | value); });
#else
  return atomicOr(address, value);
#endif
}

// Copies 16 bytes from global to shared memory without registers; writes zeros instead if `valid` is false (the source
// is not read then). Arrives at wait_copies; other threads see it after a barrier that follows the wait.
DEVICE void copy_async(void* shared, const void* global, bool valid) {
#ifdef TOKRING_EMULATION
  emulation::copy_async(shared, global, valid);
#else
  const uint32_t bytes = valid ? 16 : 0;
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes)
      : "memory");
#endif
}
// Closes the group of the copies issued since the last close.
DEVICE void close_copy_group() {
#ifdef TOKRING_EMULATION
  emulation::close_copy_group();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `kPending` of this thread's closed groups are still under way.
template <int kPending>
DEVICE void wait_copies() {
#ifdef TOKRING_EMULATION
  emulation::wait_copies(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ---- collectives of a block and of a warp ----

DEVICE void block_barrier(int line = __builtin_LINE()) {
#ifdef TOKRING_EMULATION
  emulation::block_barrier(line);
#else
  __syncthreads();
#endif
}
DEVICE void warp_barrier() {
#ifdef TOKRING_EMULATION
  emulation::warp_barrier();
#else
  __syncwarp();
#endif
}
// T: 4 or 8 bytes.
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
#ifdef TOKRING_EMULATION
  return emulation::shuffle_xor(value, mask);
#else
  return __shfl_xor_sync(kAllLanes, value, mask);
#endif
}
template <class T>
DEVICE T shuffle(T value, int source_lane) {
#ifdef TOKRING_EMULATION
  return emulation::shuffle(value, source_lane);
#else
  return __shfl_sync(kAllLanes, value, source_lane);
#endif
}
// The value of the lane `distance` below; the lowest lanes keep their own.
template <class T>
DEVICE T shuffle_up(T value, int distance) {
#ifdef TOKRING_EMULATION
  return emulation::shuffle_up(value, distance);
#else
  return __shfl_up_sync(kAllLanes, value, distance);
#endif
}
// Bit i = lane i's predicate.
DEVICE uint32_t ballot(bool predicate) {
#ifdef TOKRING_EMULATION
  return emulation::ballot(predicate);
#else
  return __ballot_sync(kAllLanes, predicate);
#endif
}
template <class T>
DEVICE T warp_sum(T value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}
DEVICE float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

// ---- tensor cores ----

// Fragments are the PTX ones of m16n8k16. With r = lane / 4 and c = lane % 4: a[0] holds A[r][2c..], a[1] A[r +
// 8][2c..], a[2] and a[3] the same at columns + 8; b[0] holds B[2c..][r], b[1] B[2c + 8..][r]; d[0..1] is D[r][2c..],
// d[2..3] D[r + 8][2c..].
struct FragmentA {
  uint32_t a[4];
};
struct FragmentB {
  uint32_t b[2];
};

// D(16 x 8) += A(16 x 16) B(16 x 8); T is Bf16 or F16, sums in float.
template <class T>
DEVICE void multiply_accumulate(float (&d)[4], FragmentA x, FragmentB y);
#ifdef TOKRING_EMULATION
template <class T>
DEVICE void multiply_accumulate(float (&d)[4], FragmentA x, FragmentB y) {
  emulation::multiply_accumulate([](uint16_t bits) { return to_float(T{bits}); }, d, x.a, y.b);
}
#else
template <>
DEVICE void multiply_accumulate<Bf16>(float (&d)[4], FragmentA x, FragmentB y) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "r"(y.b[0]), "r"(y.b[1]));
}
template <>
DEVICE void multiply_accumulate<F16>(float (&d)[4], FragmentA x, FragmentB y) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "r"(y.b[0]), "r"(y.b[1]));
}
#endif

// Transposes an 8 x 8 matrix of 16-bit elements; lane holds row lane / 4, columns 2 (lane % 4) and the next.
DEVICE uint32_t transpose_8x8(uint32_t pair) {
#ifdef TOKRING_EMULATION
  return emulation::transpose_8x8(pair);
#else
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
#endif
}

// Four 8 x 8 matrices from shared memory: lanes 8i to 8i + 7 give the addresses of matrix i's rows (16 bytes each).
template <bool kTransposed>
DEVICE FragmentA load_matrices(const void* row) {
  FragmentA f;
#ifdef TOKRING_EMULATION
  emulation::load_matrices(row, kTransposed, f.a);
#else
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.a[0]), "=r"(f.a[1]), "=r"(f.a[2]), "=r"(f.a[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.a[0]), "=r"(f.a[1]), "=r"(f.a[2]), "=r"(f.a[3])
                 : "r"(address)
                 : "memory");
#endif
  return f;
}

// ---- tensor cores of sm_90a: products of a warpgroup, asynchronous ----
// A warpgroup is four whole warps, the first of them a multiple of 4; all of its threads make these calls together:
// warpgroup_fence, then multiply_tiles as often as wanted, warpgroup_commit, and warpgroup_wait, before which results
// must not be read and operands not be overwritten. Products see what threads wrote to shared memory (by copy_async:
// after wait_copies) if those call fence_async_proxy after it and a barrier follows.

// The address in shared memory's own window, as descriptors hold it.
DEVICE uint32_t shared_address(const void* pointer) {
#ifdef TOKRING_EMULATION
  return emulation::shared_address(pointer);
#else
  return uint32_t(__cvta_generic_to_shared(pointer));
#endif
}
// The first address in shared memory from `memory` on that is a multiple of kBytes, a power of two.
template <uint32_t kBytes>
DEVICE void* align_shared(void* memory) {
  return static_cast<char*>(memory) + ((0u - shared_address(memory)) & (kBytes - 1));
}
// What this thread has written to shared memory is for the products of whoever meets it at a barrier.
DEVICE void fence_async_proxy() {
#ifdef TOKRING_EMULATION
  emulation::fence_async_proxy();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A matrix of 16-bit elements in shared memory in rows of 64, 128 bytes, whose 16-byte units are permuted: unit u of
// row r lies at u ^ r % 8 ("128-byte swizzle"; row 0 is at a multiple of 1024 bytes). Either the rows go along k, one
// for each row of A or column of B, and `start` is where in row 0 the 16 wanted elements would begin without the
// permutation; or (multiply_tiles with A in registers) they go along B's columns, one for each k, and `leading_bytes`
// is from the first 64 columns to the next. `stride_bytes`: from 8 rows to the next 8.
// Bits 0-13: start / 16, 16-29: leading / 16 (1 where unused), 32-45: stride / 16, 49-51: base offset (0), 62-63:
// swizzle (1 = 128 bytes), as in the PTX ISA, "Matrix Descriptor Format" and "Canonical Layouts" of wgmma; the same in
// CUTLASS (cute/arch/mma_sm90_desc.hpp, cute/atom/mma_traits_sm90_gmma.hpp) and ThunderKittens
// (ops/group/wgmma/base/base.cuh).
DEVICE uint64_t matrix_descriptor(const void* start, uint32_t stride_bytes, uint32_t leading_bytes = 16) {
  return uint64_t((shared_address(start) & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t(stride_bytes >> 4) << 32 | uint64_t(1) << 62;
}

// Keeps the compiler from moving what is done with these registers across this place.
template <int kCount>
DEVICE void pin_registers(float (&d)[kCount]) {
#ifndef TOKRING_EMULATION
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
#else
  (void)d;
#endif
}
template <int kCount>
DEVICE void pin_registers(FragmentA (&x)[kCount]) {
#ifndef TOKRING_EMULATION
#pragma unroll
  for (int i = 0; i < kCount; i++)
    asm volatile("" : "+r"(x[i].a[0]), "+r"(x[i].a[1]), "+r"(x[i].a[2]), "+r"(x[i].a[3])::"memory");
#else
  (void)x;
#endif
}
// Registers written before it may be used by products after it; pin_registers comes first.
DEVICE void warpgroup_fence() {
#ifdef TOKRING_EMULATION
  emulation::worker->current->registers_fenced = true;
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Closes the group of the products issued since the last close.
DEVICE void warpgroup_commit() {
#ifdef TOKRING_EMULATION
  emulation::close_products();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most kPending of the closed groups are still under way; `d` is what a finished one has computed.
template <int kPending, int kCount>
DEVICE void warpgroup_wait(float (&d)[kCount]) {
#ifdef TOKRING_EMULATION
  emulation::wait_products(kPending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
  pin_registers(d);
}

#ifndef TOKRING_EMULATION
#define OPERANDS_10(tens)                                                                                           \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens "7, %" #tens \
  "8, %" #tens "9, "
#define OPERANDS_32 OPERANDS_10() OPERANDS_10(1) OPERANDS_10(2) "%30, %31"
#define OPERANDS_60 OPERANDS_10() OPERANDS_10(1) OPERANDS_10(2) OPERANDS_10(3) OPERANDS_10(4) OPERANDS_10(5)
#define OPERANDS_64 OPERANDS_60 "%60, %61, %62, %63"
#define OPERANDS_110 OPERANDS_60 OPERANDS_10(6) OPERANDS_10(7) OPERANDS_10(8) OPERANDS_10(9) OPERANDS_10(10)
#define OPERANDS_128 OPERANDS_110 OPERANDS_10(11) "%120, %121, %122, %123, %124, %125, %126, %127"
#define REGISTERS_8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define REGISTERS_32(i) REGISTERS_8(i), REGISTERS_8(i + 8), REGISTERS_8(i + 16), REGISTERS_8(i + 24)
#define REGISTERS_64(i) REGISTERS_32(i), REGISTERS_32(i + 32)
#define REGISTERS_128(i) REGISTERS_64(i), REGISTERS_64(i + 64)
#define PRODUCT(type, columns, operands, predicate, immediates)                             \
  "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %" #predicate                       \
  ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" operands \
  ", accumulates, 1, 1, " immediates ";\n}"
#define MULTIPLY_SHARED(type, columns, count, a, b, predicate)                                \
  asm volatile(PRODUCT(type, columns, OPERANDS_##count "}, %" #a ", %" #b, predicate, "0, 0") \
               : REGISTERS_##count(0)                                                         \
               : "l"(x), "l"(y), "r"(int(accumulates))                                        \
               : "memory")
#define MULTIPLY_REGISTERS(type, columns, count, a0, a1, a2, a3, b, predicate)                                     \
  asm volatile(                                                                                                    \
      PRODUCT(type, columns, OPERANDS_##count "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b, predicate, "1") \
      : REGISTERS_##count(0)                                                                                       \
      : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "l"(y), "r"(int(accumulates))                          \
      : "memory")
#endif

// D(64 x kColumns) = A(64 x 16) B(16 x kColumns), added to D if `accumulates`. Warp w of the group holds rows 16 w to
// 16 w + 15; d[4 n] to d[4 n + 3] are the fragment of columns 8 n to 8 n + 7 as in multiply_accumulate. T is Bf16 or
// F16, sums in float. Here both A and B are in shared memory, rows along k.
template <class T, int kColumns>
DEVICE void multiply_tiles(float (&d)[kColumns / 2], uint64_t x, uint64_t y, bool accumulates) {
  static_assert(kColumns == 64 || kColumns == 128);
#ifdef TOKRING_EMULATION
  emulation::issue_product({.a = x,
                            .b = y,
                            .a_in_registers = false,
                            .transposed_b = false,
                            .accumulates = accumulates,
                            .columns = kColumns,
                            .widen = [](uint16_t bits) { return to_float(T{bits}); }},
                           nullptr, d);
#else
  if constexpr (kColumns == 64 && is_bf16(T{})) MULTIPLY_SHARED("bf16", 64, 32, 32, 33, 34);
  if constexpr (kColumns == 64 && !is_bf16(T{})) MULTIPLY_SHARED("f16", 64, 32, 32, 33, 34);
  if constexpr (kColumns == 128 && is_bf16(T{})) MULTIPLY_SHARED("bf16", 128, 64, 64, 65, 66);
  if constexpr (kColumns == 128 && !is_bf16(T{})) MULTIPLY_SHARED("f16", 128, 64, 64, 65, 66);
#endif
}
// The same with each warp's 16 rows of A in registers and B's rows along its columns.
template <class T, int kColumns>
DEVICE void multiply_tiles(float (&d)[kColumns / 2], const FragmentA& x, uint64_t y, bool accumulates) {
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256);
#ifdef TOKRING_EMULATION
  emulation::issue_product({.a = 0,
                            .b = y,
                            .a_in_registers = true,
                            .transposed_b = true,
                            .accumulates = accumulates,
                            .columns = kColumns,
                            .widen = [](uint16_t bits) { return to_float(T{bits}); }},
                           x.a, d);
#else
  if constexpr (kColumns == 64 && is_bf16(T{})) MULTIPLY_REGISTERS("bf16", 64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (kColumns == 64 && !is_bf16(T{})) MULTIPLY_REGISTERS("f16", 64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (kColumns == 128 && is_bf16(T{})) MULTIPLY_REGISTERS("bf16", 128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (kColumns == 128 && !is_bf16(T{})) MULTIPLY_REGISTERS("f16", 128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (kColumns == 256 && is_bf16(T{})) MULTIPLY_REGISTERS("bf16", 256, 128, 128, 129, 130, 131, 132, 133);
  if constexpr (kColumns == 256 && !is_bf16(T{})) MULTIPLY_REGISTERS("f16", 256, 128, 128, 129, 130, 131, 132, 133);
#endif
}
