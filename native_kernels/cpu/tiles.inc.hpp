// Included inside a level's namespace.

// Calls function(std::integral_constant<int, rows>, first row): as many tiles of `Most` rows as fit, then a smaller
// one.
template <int Most, class Function>
inline void by_tile(int64_t rows, Function&& function) {
  int64_t row = 0;
  for (; row + Most <= rows; row += Most) function(std::integral_constant<int, Most>{}, row);
  if constexpr (Most > 1) {
    if (row < rows) by_tile<Most / 2>(rows - row, [&](auto tile, int64_t first) { function(tile, row + first); });
  }
}
