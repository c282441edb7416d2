// The kernels at level avx2: AVX2 and FMA.
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
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")

#include "simd_avx2.hpp"

namespace tokring::cpu::avx2 {

#include "exp.inc.hpp"
//
#include "tiles.inc.hpp"
//
#include "attention.inc.hpp"
#include "elementwise.inc.hpp"
#include "linear.inc.hpp"
//
#include "linear_avx2.inc.hpp"
//
#include "sampling.inc.hpp"

extern const KernelTable table;
const KernelTable table = {
    .level = Level::avx2,
    .attend = attend,
    .merge = merge,
    .widen = widen_row,
    .narrow = narrow_row,
    .quantize_kv = quantize_kv_row,
    .divide = divide_row,
    .rms_norm = rms_norm_row,
    .rotate = rotate_row,
    .silu_mul = silu_mul_row,
    .quantize = quantize_row_wide,
    .panels_q4 = madd_panels_q4,
    .panels_q8 = madd_panels_q8,
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

}  // namespace tokring::cpu::avx2
#endif
