// The CUDA subset of device.cuh on the CPU, for g++ on x86-64. Threads of a block are fibers on one OS thread; blocks
// are shared out over `workers` OS threads. Strict where a GPU is merely undefined: a barrier or warp collective that
// some thread misses ends the launch with an error, shared memory starts as NaN, an asynchronous copy arrives only when
// it is waited for, wide accesses must be aligned. The order in which threads run is chosen per launch; results must
// not depend on it. Blocks of memory come from malloc, so that AddressSanitizer sees their ends.
#pragma once
#include <pthread.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef __x86_64__
#error "the emulation switches fibers with x86-64 instructions"
#endif

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

namespace emulation {

// ---- a launch, as Python passes it (EmulatedLauncher in launcher.py has the same layout) ----

struct Launch {
  dim3 grid, block;
  uint64_t shared_bytes;
  uint32_t order;    // 0: threads and blocks in ascending order, 1: descending, else random with this seed
  uint32_t workers;  // OS threads
  char* error;       // 256 bytes: "" or what went wrong and in which thread
};
constexpr size_t kErrorBytes = 256;

// ---- state of one worker: the block that it runs ----

enum class Wait : uint8_t { kNone, kWarp, kBlock, kDone };
struct Copy {
  void* destination;
  const void* source;  // null: zeros
};
struct CopyGroups {
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> closed;
};
// A product of a warpgroup that is under way, as one of its warps sees it: 16 rows of A, all of B, its rows of D.
struct Product {
  uint64_t a, b;  // descriptors; a is unused where the rows of A come from registers
  bool a_in_registers, transposed_b, accumulates;
  int columns;  // of B and D
  float (*widen)(uint16_t bits);
  std::vector<uint16_t> operands = {};  // A[16][16], B[16][columns] as they were at the issue
  const uint32_t* fragments[32] = {};   // each lane's registers of A
  float* d[32] = {};                    // and of D
};
// Registers that products under way write.
struct Accumulator {
  float* d[32];
  uint32_t pending;           // products
  std::vector<float> values;  // [32][columns / 2]
};
struct Products {
  std::vector<Product> open;
  std::vector<std::vector<Product>> closed;
  std::vector<Accumulator> accumulators;
  uint32_t issued = 0;  // since the block began
};
constexpr size_t kOperandBytes = 64;
struct Warp {
  uint32_t live, arrived, generation;
  int operation;
  Products products;
  alignas(64) unsigned char in[2][32][kOperandBytes];
  alignas(64) unsigned char out[2][32][kOperandBytes];
};
struct Fiber {
  void* stack_pointer;
  Wait wait;
  uint32_t generation;  // of the warp or block barrier waited for
  dim3 thread;
  int lane;
  Warp* warp;
  CopyGroups copies;
  bool registers_fenced;           // by warpgroup_fence, since the last wait for products
  std::vector<uint32_t> unfenced;  // the 16-byte units of shared memory that it wrote since its last proxy fence
};
struct SharedArray {
  const void* key;
  void* memory;
  size_t bytes;
};
struct Worker {
  const Launch* launch;
  void (*kernel)(void**);
  void** args;
  uint32_t* next_block;         // shared by the launch's workers
  uint32_t* failed;             // the same
  const uint32_t* block_order;  // block numbers in the order to run them
  Fiber* current;
  void* scheduler_stack;
  dim3 block;
  uint32_t live, arrived, generation;
  int barrier_line;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<SharedArray> shared;  // dynamic shared memory has the key null
  std::vector<uint16_t> writers;    // of its 16-byte units: thread + 1 whose write no proxy fence has followed, else 0
  std::vector<std::vector<std::array<uint64_t, 3>>> issued_products;  // by warpgroup: what its first warp issued
  uint64_t random;
};
inline thread_local Worker* worker = nullptr;
constexpr size_t kStackBytes = 256 << 10;

// An OS thread's stacks for fibers, kept from launch to launch: to map them anew costs more than most kernels.
struct Stacks {
  unsigned char* memory = nullptr;
  size_t count = 0;
  ~Stacks() { free(memory); }
  bool reserve(size_t wanted) {
    if (wanted <= count) return true;
    free(memory);
    memory = static_cast<unsigned char*>(malloc(wanted * kStackBytes));
    count = memory ? wanted : 0;
    return memory != nullptr;
  }
};
inline thread_local Stacks stacks;

// Saves the callee's registers on the running stack, its pointer in *save, and goes on with the other stack.
extern "C" void emulation_switch(void** save, void* other);
asm(".text\n.weak emulation_switch\n.type emulation_switch, @function\nemulation_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emulation_switch, .-emulation_switch\n");

// Never inlined: a compiler that sees through it may keep the address of thread-local data across the switch.
__attribute__((noinline)) inline void yield() {
  emulation_switch(&worker->current->stack_pointer, worker->scheduler_stack);
}

inline bool has_failed() { return __atomic_load_n(worker->failed, __ATOMIC_RELAXED) != 0; }

// Ends the launch with an error; the first one stays. Does not return into a kernel.
inline void fail(const char* what) {
  const Worker& w = *worker;
  if (!__atomic_exchange_n(w.failed, 1, __ATOMIC_ACQ_REL)) {
    if (w.current)
      snprintf(w.launch->error, kErrorBytes, "%s (block %u,%u,%u thread %u,%u,%u)", what, w.block.x, w.block.y,
               w.block.z, w.current->thread.x, w.current->thread.y, w.current->thread.z);
    else
      snprintf(w.launch->error, kErrorBytes, "%s (block %u,%u,%u)", what, w.block.x, w.block.y, w.block.z);
  }
  if (w.current)
    for (;;) yield();
}

// ---- barriers and collectives ----

inline void release_block() {
  Worker& w = *worker;
  if (w.arrived == 0 || w.arrived < w.live) return;
  w.arrived = 0;
  w.generation++;
}

inline void block_barrier(int line) {
  Worker& w = *worker;
  Fiber& fiber = *w.current;
  if (w.arrived && w.barrier_line != line) fail("threads of a block wait at different barriers");
  w.barrier_line = line;
  fiber.generation = w.generation;
  w.arrived++;
  release_block();
  if (w.generation != fiber.generation) return;
  fiber.wait = Wait::kBlock;
  yield();
}

// Every lane brings `in`; the last one to arrive computes combine(in[32], out[32]); returns this lane's out.
template <class In, class Out, class Combine>
Out collective(int operation, const In& in, Combine combine) {
  static_assert(sizeof(In) <= kOperandBytes && sizeof(Out) <= kOperandBytes);
  Fiber& fiber = *worker->current;
  Warp& warp = *fiber.warp;
  const uint32_t generation = warp.generation, side = generation & 1;
  if (warp.arrived && warp.operation != operation) fail("lanes of a warp are in different collectives");
  warp.operation = operation;
  memcpy(warp.in[side][fiber.lane], &in, sizeof in);
  warp.arrived |= 1u << fiber.lane;
  if (warp.arrived == ~0u) {
    In ins[32];
    Out outs[32];
    for (int lane = 0; lane < 32; lane++) memcpy(&ins[lane], warp.in[side][lane], sizeof(In));
    combine(ins, outs);
    for (int lane = 0; lane < 32; lane++) memcpy(warp.out[side][lane], &outs[lane], sizeof(Out));
    warp.arrived = 0;
    warp.generation++;
  } else {
    fiber.generation = generation;
    fiber.wait = Wait::kWarp;
    yield();
  }
  Out out;
  memcpy(&out, warp.out[side][fiber.lane], sizeof out);
  return out;
}

inline void warp_barrier() {
  collective<int, int>(1, 0, [](const int*, int*) {});
}
template <class T>
T shuffle_xor(T value, int mask) {
  return collective<T, T>(0x100 + mask, value, [mask](const T* in, T* out) {
    for (int lane = 0; lane < 32; lane++) out[lane] = in[lane ^ mask];
  });
}
template <class T>
T shuffle(T value, int source_lane) {
  struct In {
    T value;
    int source;
  };
  return collective<In, T>(0x200, In{value, source_lane}, [](const In* in, T* out) {
    for (int lane = 0; lane < 32; lane++) out[lane] = in[in[lane].source & 31].value;
  });
}
template <class T>
T shuffle_up(T value, int distance) {
  return collective<T, T>(0x300 + distance, value, [distance](const T* in, T* out) {
    for (int lane = 0; lane < 32; lane++) out[lane] = in[lane < distance ? lane : lane - distance];
  });
}
inline uint32_t ballot(bool predicate) {
  return collective<bool, uint32_t>(2, predicate, [](const bool* in, uint32_t* out) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= uint32_t(in[lane]) << lane;
    for (int lane = 0; lane < 32; lane++) out[lane] = bits;
  });
}

// ---- memory ----

template <class T>
inline T load(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T)) fail("misaligned wide load");
  return *static_cast<const T*>(address);
}
template <class T>
inline void store(void* address, T value) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T)) fail("misaligned wide store");
  *static_cast<T*>(address) = value;
}
// Blocks on other OS threads may update the same word.
template <class T, class Update>
T atomic_update(T* address, Update update) {
  T old, desired;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    desired = update(old);
  } while (!__atomic_compare_exchange(address, &old, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
// The running block's array behind `key`; made and poisoned (NaN in every float format) at its first use in the block.
inline void* shared_array(const void* key, size_t bytes) {
  for (const SharedArray& array : worker->shared)
    if (array.key == key) return array.memory;
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, bytes)) fail("no memory for a block's shared memory");
  memset(memory, 0xff, bytes);
  worker->shared.push_back({key, memory, bytes});
  return memory;
}
// 16 bytes of dynamic shared memory are this thread's until its next proxy fence.
inline void note_shared_write(const void* destination) {
  Worker& w = *worker;
  if (w.writers.empty()) return;
  const size_t unit = size_t(static_cast<const char*>(destination) - static_cast<const char*>(w.shared[0].memory)) / 16;
  if (unit >= w.writers.size()) return;  // of another array
  w.writers[unit] = uint16_t(w.current - w.fibers.data() + 1);
  w.current->unfenced.push_back(uint32_t(unit));
}
inline void copy_async(void* destination, const void* source, bool valid) {
  if ((reinterpret_cast<uintptr_t>(destination) | reinterpret_cast<uintptr_t>(source)) % 16)
    fail("misaligned asynchronous copy");
  memset(destination, 0xff, 16);
  worker->current->copies.open.push_back({destination, valid ? source : nullptr});
}
inline void close_copy_group() {
  CopyGroups& copies = worker->current->copies;
  copies.closed.push_back(std::move(copies.open));
  copies.open.clear();
}
inline void wait_copies(size_t pending) {
  auto& closed = worker->current->copies.closed;
  while (closed.size() > pending) {
    for (const Copy& copy : closed.front()) {
      if (copy.source)
        memcpy(copy.destination, copy.source, 16);
      else
        memset(copy.destination, 0, 16);
      note_shared_write(copy.destination);
    }
    closed.erase(closed.begin());
  }
}

// ---- numbers ----

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(fraction) * 0x1p-24f;
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}
inline uint16_t float_to_half(float x) {
  const uint16_t sign = uint16_t(bit_cast<uint32_t>(x) >> 16 & 0x8000u);
  const float magnitude = fabsf(x);
  if (magnitude != magnitude) return 0x7fff;
  if (magnitude >= 65520.0f) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) return uint16_t(sign | uint16_t(nearbyintf(magnitude * 0x1p24f)));
  uint32_t bits = bit_cast<uint32_t>(magnitude);
  bits += 0xfffu + ((bits >> 13) & 1);
  return uint16_t(sign | ((bits >> 13) - (112u << 10)));
}
inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; i++) picked |= uint32_t(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return picked;
}

// ---- tensor cores ----

template <class Widen>
void multiply_accumulate(Widen widen, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct In {
    uint32_t a[4], b[2];
    float d[4];
  };
  struct Out {
    float d[4];
  };
  const In operands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}};
  const Out out = collective<In, Out>(3, operands, [widen](const In* in, Out* outs) {
    float left[16][16], right[16][8], product[16][8] = {};
    for (int lane = 0; lane < 32; lane++) {
      const int row = lane >> 2, column = (lane & 3) * 2;
      for (int part = 0; part < 2; part++)
        for (int e = 0; e < 2; e++) {
          left[row][column + 8 * part + e] = widen(uint16_t(in[lane].a[2 * part] >> (16 * e)));
          left[row + 8][column + 8 * part + e] = widen(uint16_t(in[lane].a[2 * part + 1] >> (16 * e)));
          right[column + 8 * part + e][row] = widen(uint16_t(in[lane].b[part] >> (16 * e)));
        }
    }
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++)
        for (int j = 0; j < 8; j++) product[i][j] += left[i][k] * right[k][j];
    for (int lane = 0; lane < 32; lane++)
      for (int e = 0; e < 4; e++)
        outs[lane].d[e] = in[lane].d[e] + product[(lane >> 2) + 8 * (e >> 1)][(lane & 3) * 2 + (e & 1)];
  });
  memcpy(d, out.d, sizeof out.d);
}

inline uint32_t transpose_8x8(uint32_t pair) {
  return collective<uint32_t, uint32_t>(4, pair, [](const uint32_t* in, uint32_t* out) {
    uint16_t matrix[8][8];
    for (int lane = 0; lane < 32; lane++)
      for (int e = 0; e < 2; e++) matrix[lane >> 2][(lane & 3) * 2 + e] = uint16_t(in[lane] >> (16 * e));
    for (int lane = 0; lane < 32; lane++)
      out[lane] = matrix[(lane & 3) * 2][lane >> 2] | uint32_t(matrix[(lane & 3) * 2 + 1][lane >> 2]) << 16;
  });
}

inline void load_matrices(const void* row, bool transposed, uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("misaligned matrix row");
  struct Out {
    uint32_t words[4];
  };
  using Row = const uint16_t*;
  const Out out = collective<Row, Out>(5 + transposed, static_cast<Row>(row), [transposed](const Row* rows, Out* outs) {
    for (int matrix = 0; matrix < 4; matrix++)
      for (int lane = 0; lane < 32; lane++) {
        const int r = lane >> 2, c = (lane & 3) * 2;
        const uint16_t first = transposed ? rows[matrix * 8 + c][r] : rows[matrix * 8 + r][c];
        const uint16_t second = transposed ? rows[matrix * 8 + c + 1][r] : rows[matrix * 8 + r][c + 1];
        outs[lane].words[matrix] = first | uint32_t(second) << 16;
      }
  });
  memcpy(words, out.words, sizeof out.words);
}

// ---- products of a warpgroup ----
// What PTX leaves to the programmer is checked: results are NaN until the wait for them, operands must stay as they are
// until then, registers and shared memory must have been fenced, and all warps of a group issue the same products.

// Where the dynamic shared memory begins in the addresses that descriptors hold. As far from a multiple of 1024 as its
// declared alignment allows: kernels whose matrices need more must see to it.
constexpr uint64_t kSharedWindow = 1024 + 128;

inline const SharedArray& dynamic_shared() {
  if (!worker->launch->shared_bytes) fail("the launch has no dynamic shared memory");
  return worker->shared.front();
}
inline uint32_t shared_address(const void* pointer) {
  const SharedArray& array = dynamic_shared();
  const long offset = static_cast<const char*>(pointer) - static_cast<const char*>(array.memory);
  if (offset < 0 || size_t(offset) > array.bytes) fail("an address that is not in dynamic shared memory");
  return uint32_t(kSharedWindow + uint64_t(offset));
}
inline void fence_async_proxy() {
  Fiber& fiber = *worker->current;
  const uint16_t self = uint16_t(&fiber - worker->fibers.data() + 1);
  for (const uint32_t unit : fiber.unfenced)
    if (worker->writers[unit] == self) worker->writers[unit] = 0;
  fiber.unfenced.clear();
}

// The operand that a descriptor describes, in units of 16 bytes (8 elements); the formulas are the canonical layouts of
// the PTX ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor Format" of wgmma.
struct Matrix {
  uint64_t start, leading, stride, width;  // bytes; width: of a row of the swizzle pattern, 16 without swizzling
  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        width(descriptor >> 62 ? 256 >> (descriptor >> 62) : 16) {
    if (descriptor >> 49 & 7) fail("the base offset of a matrix descriptor is not emulated");
    if (start % (8 * width) >= width && width > 16) fail("a matrix starts inside of its swizzle pattern");
  }
  const uint16_t* at(uint64_t address) const {
    address ^= (address >> 7 & (width / 16 - 1)) << 4;
    const SharedArray& array = dynamic_shared();
    const uint64_t offset = address - kSharedWindow;
    if (address < kSharedWindow || offset + 16 > array.bytes) fail("a matrix reaches beyond the shared memory");
    if (worker->writers[offset / 16]) fail("a product reads what was written without a proxy fence");
    return reinterpret_cast<const uint16_t*>(static_cast<const char*>(array.memory) + offset);
  }
  // Elements k = 8 part, ... of a row of A or a column of B that is contiguous along k.
  const uint16_t* along_k(int row, int part) const {
    const uint64_t to_part = uint64_t(part) * (width > 16 ? 16 : leading);
    return at(start + uint64_t(row / 8) * stride + uint64_t(row % 8) * width + to_part);
  }
  // Columns 8 part, ... of row k of a B that is contiguous along its columns.
  const uint16_t* along_n(int k, int part) const {
    const int parts = int(width / 16);  // in a row of the pattern
    const uint64_t to_rows = uint64_t(k / 8) * (width > 16 ? stride : leading) + uint64_t(k % 8) * width;
    return at(start + uint64_t(part / parts) * (width > 16 ? leading : stride) + uint64_t(part % parts) * 16 + to_rows);
  }
};

// A[16][16] of a warp, then B[16][columns].
inline std::vector<uint16_t> read_operands(const Product& product, int warp) {
  std::vector<uint16_t> operands(256 + 16 * size_t(product.columns));
  uint16_t* const left = operands.data();
  uint16_t* const right = left + 256;
  if (product.a_in_registers) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++)
        for (int e = 0; e < 2; e++)
          left[(lane / 4 + 8 * (i & 1)) * 16 + lane % 4 * 2 + 8 * (i >> 1) + e] =
              uint16_t(product.fragments[lane][i] >> 16 * e);
  } else {
    const Matrix a(product.a);
    for (int row = 0; row < 16; row++)
      for (int part = 0; part < 2; part++) memcpy(left + row * 16 + part * 8, a.along_k(16 * warp + row, part), 16);
  }
  const Matrix b(product.b);
  if (product.transposed_b)
    for (int k = 0; k < 16; k++)
      for (int part = 0; part < product.columns / 8; part++)
        memcpy(right + k * product.columns + part * 8, b.along_n(k, part), 16);
  else
    for (int column = 0; column < product.columns; column++)
      for (int part = 0; part < 2; part++) {
        const uint16_t* const elements = b.along_k(column, part);
        for (int e = 0; e < 8; e++) right[(part * 8 + e) * product.columns + column] = elements[e];
      }
  return operands;
}

inline Accumulator* accumulator_of(Products& products, const Product& product) {
  for (Accumulator& accumulator : products.accumulators)
    if (accumulator.d[0] == product.d[0]) return &accumulator;
  return nullptr;
}

// fragment: this lane's part of A where that is in registers.
inline void issue_product(Product product, const uint32_t* fragment, float* d) {
  struct In {
    uint64_t a, b;
    const uint32_t* fragment;
    float* d;
  };
  Fiber& fiber = *worker->current;
  if (!fiber.registers_fenced) fail("a product without a warpgroup_fence before it");
  const In in{product.a, product.b, fragment, d};
  const int kind = product.a_in_registers | product.transposed_b << 1 | product.accumulates << 2 | product.columns << 3;
  collective<In, int>(0x1000 + kind, in, [&product, kind](const In* ins, int*) {
    Worker& w = *worker;
    Warp& warp = *w.current->warp;
    const size_t index = size_t(&warp - w.warps.data()), group = index / 4;
    if ((group + 1) * 4 > w.warps.size()) fail("a product in a warpgroup that is not whole");
    w.issued_products.resize(w.warps.size() / 4);
    auto& issued = w.issued_products[group];
    const std::array<uint64_t, 3> signature{product.a, product.b, uint64_t(kind)};
    if (warp.products.issued == issued.size()) issued.push_back(signature);
    if (issued[warp.products.issued++] != signature) fail("warps of a warpgroup issue different products");

    for (int lane = 0; lane < 32; lane++) {
      if (ins[lane].a != product.a || ins[lane].b != product.b) fail("lanes of a warp bring different descriptors");
      product.fragments[lane] = ins[lane].fragment;
      product.d[lane] = ins[lane].d;
    }
    product.operands = read_operands(product, int(index % 4));
    const size_t registers = size_t(product.columns) / 2;
    Accumulator* accumulator = accumulator_of(warp.products, product);
    if (!accumulator) {
      accumulator = &warp.products.accumulators.emplace_back();
      accumulator->pending = 0;
      for (int lane = 0; lane < 32; lane++) {
        float* const values = accumulator->d[lane] = product.d[lane];
        accumulator->values.insert(accumulator->values.end(), values, values + registers);
        for (size_t i = 0; i < registers; i++) values[i] = NAN;
      }
    }
    if (accumulator->values.size() != 32 * registers) fail("products of different shapes in the same registers");
    accumulator->pending++;
    warp.products.open.push_back(std::move(product));
  });
}

inline void finish_product(Products& products, const Product& product, int warp) {
  if (read_operands(product, warp) != product.operands)
    fail("an operand changed before the wait for the product that reads it");

  const int columns = product.columns;
  std::vector<float> wide(product.operands.size()), sum(16 * size_t(columns));
  for (size_t i = 0; i < wide.size(); i++) wide[i] = product.widen(product.operands[i]);
  const float *const left = wide.data(), *const right = left + 256;
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < columns; j++) sum[i * columns + j] += left[i * 16 + k] * right[k * columns + j];

  Accumulator& accumulator = *accumulator_of(products, product);
  float* value = accumulator.values.data();
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < columns / 2; i++, value++)
      *value = (product.accumulates ? *value : 0.0f) +
               sum[(lane / 4 + 8 * (i >> 1 & 1)) * columns + i / 4 * 8 + lane % 4 * 2 + (i & 1)];
  if (--accumulator.pending) return;
  const size_t registers = size_t(columns) / 2;
  for (int lane = 0; lane < 32; lane++)
    memcpy(accumulator.d[lane], accumulator.values.data() + lane * registers, registers * sizeof(float));
  accumulator = std::move(products.accumulators.back());
  products.accumulators.pop_back();
}

inline void close_products() {
  collective<int, int>(0x800, 0, [](const int*, int*) {
    Products& products = worker->current->warp->products;
    products.closed.push_back(std::move(products.open));
    products.open.clear();
  });
}
inline void wait_products(size_t pending) {
  collective<int, int>(0x801, 0, [pending](const int*, int*) {
    Warp& warp = *worker->current->warp;
    auto& closed = warp.products.closed;
    while (closed.size() > pending) {
      for (const Product& product : closed.front())
        finish_product(warp.products, product, int((&warp - worker->warps.data()) % 4));
      closed.erase(closed.begin());
    }
  });
  worker->current->registers_fenced = false;
}

// ---- running a launch ----

inline uint64_t random_number(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

inline void fiber_main() {
  worker->kernel(worker->args);
  Worker& w = *worker;
  Fiber& fiber = *w.current;
  for (const auto& group : fiber.copies.closed)
    if (!group.empty()) fail("a thread ended without waiting for its asynchronous copies");
  if (!fiber.copies.open.empty()) fail("a thread ended with an open group of asynchronous copies");
  const Products& products = fiber.warp->products;
  if (!products.open.empty() || !products.closed.empty()) fail("a warp ended without waiting for its products");
  fiber.wait = Wait::kDone;
  w.live--;
  fiber.warp->live &= ~(1u << fiber.lane);
  if (fiber.warp->arrived) fail("a lane ended while others of its warp wait in a collective");
  for (;;) yield();
}

inline void start_block(Worker& w, uint32_t index) {
  const dim3 &grid = w.launch->grid, &block = w.launch->block;
  const uint32_t threads = block.x * block.y * block.z;
  w.block = dim3{index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y)};
  w.live = threads;
  w.arrived = w.generation = 0;
  for (Warp& warp : w.warps) {
    warp.live = ~0u, warp.arrived = warp.generation = 0;
    warp.products = {};
  }
  for (const SharedArray& array : w.shared) memset(array.memory, 0xff, array.bytes);
  w.writers.assign(w.launch->shared_bytes / 16, 0);
  w.issued_products.clear();
  for (uint32_t i = 0; i < threads; i++) {
    Fiber& fiber = w.fibers[i];
    fiber.wait = Wait::kNone;
    fiber.thread = dim3{i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    fiber.lane = int(i & 31);
    fiber.warp = &w.warps[i / 32];
    fiber.copies.open.clear();
    fiber.copies.closed.clear();
    fiber.registers_fenced = false;
    fiber.unfenced.clear();
    void** top = reinterpret_cast<void**>(stacks.memory + (i + 1) * kStackBytes);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.stack_pointer = top;
  }
}

inline bool is_ready(const Worker& w, const Fiber& fiber) {
  if (fiber.wait == Wait::kWarp) return fiber.warp->generation != fiber.generation;
  if (fiber.wait == Wait::kBlock) return w.generation != fiber.generation;
  return fiber.wait == Wait::kNone;
}

// Lets each ready lane of a warp run to its next wait; false if none was ready.
inline bool run_warp_once(Worker& w, uint32_t warp) {
  bool moved = false;
  for (uint32_t i = 0; i < 32 && !has_failed(); i++) {
    Fiber& fiber = w.fibers[warp * 32 + (w.launch->order == 1 ? 31 - i : i)];
    if (!is_ready(w, fiber)) continue;
    fiber.wait = Wait::kNone;
    w.current = &fiber;
    emulation_switch(&w.scheduler_stack, fiber.stack_pointer);
    w.current = nullptr;
    moved = true;
    if (fiber.wait == Wait::kDone) release_block();
  }
  return moved;
}

// One warp at a time as far as it gets, from the first or the last; or random warps for random stretches: between them
// these orders show most missing barriers.
inline void run_block(Worker& w) {
  const uint32_t num_warps = uint32_t(w.warps.size());
  std::vector<uint32_t> order(num_warps);
  for (uint32_t i = 0; i < num_warps; i++) order[i] = w.launch->order == 1 ? num_warps - 1 - i : i;
  while (w.live && !has_failed()) {
    bool moved = false;
    if (w.launch->order > 1)
      for (uint32_t i = num_warps - 1; i > 0; i--) std::swap(order[i], order[random_number(w.random) % (i + 1)]);
    for (const uint32_t warp : order) {
      const uint64_t random = random_number(w.random);
      uint64_t stretch = w.launch->order > 1 ? 1 + (random >> 1 & (random & 1 ? 255 : 15)) : ~0ull;
      while (stretch-- && !has_failed() && run_warp_once(w, warp)) moved = true;
    }
    if (!moved && !has_failed()) fail("deadlock: not every thread reaches a barrier or collective");
  }
  for (size_t i = 0; i < w.warps.size() && i / 4 < w.issued_products.size(); i++)
    if (w.warps[i].products.issued != w.issued_products[i / 4].size() && !has_failed())
      fail("a warp issued fewer products than others of its warpgroup");
}

inline void* work(void* argument) {
  Worker& w = *static_cast<Worker*>(argument);
  worker = &w;
  const dim3 &grid = w.launch->grid, &block = w.launch->block;
  const uint32_t threads = block.x * block.y * block.z, blocks = grid.x * grid.y * grid.z;
  w.fibers.resize(threads);
  w.warps.resize(threads / 32);
  if (!stacks.reserve(threads)) fail("no memory for the stacks of a block's threads");
  if (w.launch->shared_bytes) shared_array(nullptr, w.launch->shared_bytes);
  for (;;) {
    const uint32_t i = __atomic_fetch_add(w.next_block, 1, __ATOMIC_RELAXED);
    if (i >= blocks || has_failed()) break;
    start_block(w, w.block_order[i]);
    run_block(w);
  }
  for (const SharedArray& array : w.shared) free(array.memory);
  worker = nullptr;
  return nullptr;
}

inline int run(const Launch& launch, void (*kernel)(void**), void** args) {
  const uint32_t blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  launch.error[0] = 0;
  if (launch.block.x * launch.block.y * launch.block.z % 32 ||
      launch.block.x * launch.block.y * launch.block.z > 1024) {
    snprintf(launch.error, kErrorBytes, "a block must have whole warps and at most 1024 threads");
    return 1;
  }
  uint64_t random = 0x9e3779b97f4a7c15ull ^ launch.order;
  std::vector<uint32_t> block_order(blocks);
  for (uint32_t i = 0; i < blocks; i++) block_order[i] = launch.order == 1 ? blocks - 1 - i : i;
  if (launch.order > 1)
    for (uint32_t i = blocks; i > 1; i--) std::swap(block_order[i - 1], block_order[random_number(random) % i]);
  uint32_t next_block = 0, failed = 0;
  const uint32_t num_workers = launch.workers < blocks ? launch.workers : blocks;
  std::vector<Worker> workers(num_workers);
  std::vector<pthread_t> threads;
  for (Worker& w : workers) {
    w.launch = &launch, w.kernel = kernel, w.args = args;
    w.next_block = &next_block, w.failed = &failed, w.block_order = block_order.data();
    w.random = random_number(random);
    w.current = nullptr;
  }
  for (uint32_t i = 1; i < num_workers; i++) {
    pthread_t thread;
    if (!pthread_create(&thread, nullptr, work, &workers[i])) threads.push_back(thread);
  }
  if (num_workers) work(&workers[0]);
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  return failed ? 1 : 0;
}

// Calls a kernel with `args` as cuLaunchKernel takes them: one pointer to each argument's value.
template <auto kKernel>
struct Entry;
template <class... Args, void (*kKernel)(Args...)>
struct Entry<kKernel> {
  template <size_t... I>
  static void unpack(void** args, std::index_sequence<I...>) {
    kKernel(*static_cast<std::remove_const_t<Args>*>(args[I])...);
  }
  static void call(void** args) { unpack(args, std::index_sequence_for<Args...>{}); }
};

}  // namespace emulation

#define threadIdx (emulation::worker->current->thread)
#define blockIdx (emulation::worker->block)
#define blockDim (emulation::worker->launch->block)
#define gridDim (emulation::worker->launch->grid)
#define KERNEL_EXPORT(kernel)                                                                                      \
  extern "C"                                                                                                       \
      __attribute__((visibility("default"))) int emulated_##kernel(const emulation::Launch* launch, void** args) { \
    return emulation::run(*launch, &emulation::Entry<&kernel>::call, args);                                        \
  }
#define DYNAMIC_SHARED(Type, name) Type* const name = static_cast<Type*>(emulation::shared_array(nullptr, 0))
#define SHARED_ARRAY(Type, name, count) \
  static char name##_key;               \
  Type* const name = static_cast<Type*>(emulation::shared_array(&name##_key, (count) * sizeof(Type)))
