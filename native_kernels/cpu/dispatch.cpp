#include "dispatch.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace tokring::cpu {
namespace {

#if defined(__x86_64__)
// Whether the processor has the tiles and Linux lets this process use them; asking is what gives the permission.
bool amx_permitted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTileInt8Bf16 = 1u << 22 | 1u << 24 | 1u << 25;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTileInt8Bf16) != kTileInt8Bf16) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Features detect() {
  Features found;
#if defined(__x86_64__)
  __builtin_cpu_init();  // libgcc checks XCR0 too: a level is reported only if the kernel saves its registers
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
  found.avx512_vnni = found.avx512 && __builtin_cpu_supports("avx512vnni");
  found.amx = found.avx512_vnni && found.avx512_bf16 && amx_permitted();
#endif
  return found;
}

Level parse(std::string_view name) {
  if (name == level_name(Level::amx_emulated)) return Level::amx_emulated;
  for (Level level : {Level::generic, Level::avx2, Level::avx512, Level::avx512_vnni, Level::amx}) {
    if (name != level_name(level)) continue;
    if (level == Level::amx ? !features().amx : level > best_level()) {
      throw std::invalid_argument("kernel level '" + std::string(name) +
                                  "' is not supported by this processor; best: '" +
                                  std::string(level_name(best_level())) + "'");
    }
    return level;
  }
  throw std::invalid_argument("unknown kernel level '" + std::string(name) +
                              "': use generic, avx2, avx512, avx512_vnni or amx");
}

Level initial() {
  const char* asked = std::getenv("TOKRING_KERNELS_LEVEL");
  return asked != nullptr && *asked != '\0' ? parse(asked) : best_level();
}

std::atomic<Level>& current() {
  static std::atomic<Level> level{initial()};
  return level;
}

}  // namespace

const Features& features() {
  static const Features found = detect();
  return found;
}

Level best_level() {
  if (features().avx512_vnni && features().avx512_bf16) return Level::avx512_vnni;
  if (features().avx512) return Level::avx512;
  return features().avx2 ? Level::avx2 : Level::generic;
}

Level active_level() { return current().load(std::memory_order_relaxed); }

void set_level(std::string_view name) { current().store(parse(name), std::memory_order_relaxed); }

std::string_view level_name(Level level) {
  switch (level) {
    case Level::amx_emulated:
      return "amx_emulated";
    case Level::amx:
      return "amx";
    case Level::avx512_vnni:
      return "avx512_vnni";
    case Level::avx512:
      return "avx512";
    case Level::avx2:
      return "avx2";
    case Level::generic:
      break;
  }
  return "generic";
}

}  // namespace tokring::cpu
