// The kernels at level avx512: AVX-512 F, BW, DQ, VL.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernel_table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

// From here to the end of the file: everything above is compiled for any processor, everything below for this level.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,popcnt")

// GCC 12 warns of its own intrinsics' deliberately undefined operands (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "simd_avx512.hpp"

namespace tokring::cpu::avx512 {

#include "exp.inc.hpp"
//
#include "tiles.inc.hpp"
//
#include "attention.inc.hpp"
#include "elementwise.inc.hpp"
#include "linear.inc.hpp"
#include "sampling.inc.hpp"

extern const KernelTable table;
const KernelTable table = {
    .level = Level::avx512,
    .attend = attend,
    .merge = merge,
    .widen = widen_row,
    .narrow = narrow_row,
    .quantize_kv = quantize_kv_row,
    .divide = divide_row,
    .rms_norm = rms_norm_row,
    .rotate = rotate_row,
    .silu_mul = silu_mul_row,
    .quantize = quantize_row,
    .panels_q4 = panels_q4,
    .panels_q8 = panels_q8,
    .panels_f32 = panels_f32,
    .panels_bf16 = panels_bf16,
    .maximum = maximum_of_row,
    .find = find_value,
    .count_above = count_above,
    .sum_exp = sum_exp,
    .weigh = weigh_row,
    .order = order_row,
    .measure = measure,
    .compact = compact,
    .drop_below = drop_below,
};

}  // namespace tokring::cpu::avx512
#endif
