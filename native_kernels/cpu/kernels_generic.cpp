// The kernels at level generic: Plain C++: the level every processor has.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernel_table.hpp"
#include "simd_generic.hpp"

namespace tokring::cpu::generic {

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
    .level = Level::generic,
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

}  // namespace tokring::cpu::generic
