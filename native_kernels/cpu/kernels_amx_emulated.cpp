// Level amx_emulated: the AMX kernels on emulated tiles, for tests on any processor.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernel_table.hpp"

namespace tokring::cpu::amx_emulated {

KernelTable improve(KernelTable table);

namespace {

#include "amx_emulation.hpp"
//
#include "linear_amx.inc.hpp"

}  // namespace

KernelTable improve(KernelTable table) {
  table.level = Level::amx_emulated;
  table.panels_q4 = tile_panels<Q4Block>;
  table.panels_q8 = tile_panels<Q8Block>;
  table.panels_bf16 = tile_panels_bf16;
  return table;
}

}  // namespace tokring::cpu::amx_emulated
