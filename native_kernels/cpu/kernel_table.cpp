#include "kernel_table.hpp"

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
#endif

const KernelTable& kernels(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512_vnni) {
    static const KernelTable table = avx512_vnni::improve(avx512::table);  // only here: improve() needs AVX-512
    return table;
  }
  if (level == Level::avx512) return avx512::table;
  if (level == Level::avx2) return avx2::table;
#endif
  (void)level;
  return generic::table;
}

}  // namespace tokring::cpu
