// Instruction-set levels of the CPU kernels, and the choice between them at run time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tokring::cpu {

// avx512_vnni: BF16 too. amx: only where it is asked for, until somebody has measured it. amx_emulated, for tests: the
// kernels of amx on tiles in software, on any processor; never chosen by itself.
enum class Level : int { generic = 0, avx2 = 1, avx512 = 2, avx512_vnni = 3, amx = 4, amx_emulated = 5 };

// What this processor and its operating system offer (CPUID and XCR0, asked once).
struct Features {
  bool avx2 = false;    // AVX2, FMA, F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_bf16 = false;
  bool avx512_vnni = false;
  bool amx = false;  // tiles of int8 and bf16, and the kernel's permission to use them
};

const Features& features();
Level best_level();

// The level kernels run at: the best one, or what TOKRING_KERNELS_LEVEL or set_level() asked for.
Level active_level();

// Throws std::invalid_argument for an unknown name or a level this processor lacks.
void set_level(std::string_view name);
std::string_view level_name(Level level);

}  // namespace tokring::cpu
