#include "kernel_table.hpp"

#include <algorithm>

namespace tokring::cpu {

namespace generic {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512_vnni {
// The AVX-512 kernels with those replaced that VNNI and BF16 make faster.
KernelTable improve(KernelTable table);
}  // namespace avx512_vnni
namespace amx {
KernelTable improve(KernelTable table);
}
#endif
namespace amx_emulated {
KernelTable improve(KernelTable table);
}

#if defined(__x86_64__)
namespace {

// Without VNNI the widening multiplies of AVX2 are the fastest there are for quantized weights.
KernelTable with_avx2_linears(KernelTable table) {
  table.quantize = avx2::table.quantize;
  table.panels_q4 = avx2::table.panels_q4;
  table.panels_q8 = avx2::table.panels_q8;
  return table;
}

}  // namespace
#endif

const KernelTable& kernels(Level level) {
  if (level == Level::amx_emulated) {
    static const KernelTable table = [] {
      KernelTable base = kernels(std::min(best_level(), Level::avx512_vnni));
      base.quantize = generic::table.quantize;
      return amx_emulated::improve(base);
    }();
    return table;
  }
#if defined(__x86_64__)
  if (level == Level::amx) {
    static const KernelTable table = amx::improve(kernels(Level::avx512_vnni));
    return table;
  }
  if (level == Level::avx512_vnni) {
    static const KernelTable table = avx512_vnni::improve(avx512::table);  // only here: improve() needs AVX-512
    return table;
  }
  if (level == Level::avx512) {
    static const KernelTable table = with_avx2_linears(avx512::table);
    return table;
  }
  if (level == Level::avx2) return avx2::table;
#endif
  (void)level;
  return generic::table;
}

}  // namespace tokring::cpu
