#include "dispatch.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace tokring::cpu {
namespace {

Features detect() {
  Features found;
#if defined(__x86_64__)
  __builtin_cpu_init();  // libgcc checks XCR0 too: a level is reported only if the kernel saves its registers
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
  found.avx512_vnni = found.avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return found;
}

Level parse(std::string_view name) {
  for (Level level : {Level::generic, Level::avx2, Level::avx512, Level::avx512_vnni}) {
    if (name != level_name(level)) continue;
    if (level > best_level()) {
      throw std::invalid_argument("kernel level '" + std::string(name) +
                                  "' is not supported by this processor; best: '" +
                                  std::string(level_name(best_level())) + "'");
    }
    return level;
  }
  throw std::invalid_argument("unknown kernel level '" + std::string(name) +
                              "': use generic, avx2, avx512 or avx512_vnni");
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
