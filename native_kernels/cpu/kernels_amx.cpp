// Level amx: AVX-512 with VNNI, and linear layers of many rows by AMX tiles (all of them in bf16).
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernel_table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi,bmi2,popcnt")
#pragma GCC target("amx-tile,amx-int8,amx-bf16")

namespace tokring::cpu::amx {

KernelTable improve(KernelTable table);

namespace {

// Macros, since the tile's number must be a literal.
#define tile_loadconfig(config) _tile_loadconfig(config)
#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_loadd(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_stored(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dpbsud(c, a, b) _tile_dpbsud(c, a, b)
#define tile_dpbf16ps(c, a, b) _tile_dpbf16ps(c, a, b)

#include "linear_amx.inc.hpp"

// Below this a tile is mostly padding, and VNNI gives the same bits. By instruction counts; not measured yet.
constexpr int64_t kFewestRows = 8;

KernelTable few_rows;

template <class Format, auto Few>
void panels(const uint8_t* panels, int64_t num_panels, const QuantizedRows& x, float* out, int64_t out_stride) {
  if (x.rows < kFewestRows) return (few_rows.*Few)(panels, num_panels, x, out, out_stride);
  tile_panels<Format>(panels, num_panels, x, out, out_stride);
}

}  // namespace

KernelTable improve(KernelTable table) {
  few_rows = table;
  table.level = Level::amx;
  table.panels_q4 = panels<Q4Block, &KernelTable::panels_q4>;
  table.panels_q8 = panels<Q8Block, &KernelTable::panels_q8>;
  table.panels_bf16 = tile_panels_bf16;
  return table;
}

}  // namespace tokring::cpu::amx
#endif
