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
#endif

const KernelTable& kernels(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512) return avx512::table;
  if (level == Level::avx2) return avx2::table;
#endif
  (void)level;
  return generic::table;
}

}  // namespace tokring::cpu
