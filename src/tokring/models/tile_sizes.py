"""TileSizes: the numbers of rows that a torch linear computes at once."""

from dataclasses import dataclass

MAX_TILE_ROWS = 32
# Few, because oneDNN compiles a kernel for every number of rows (0.4 ms each). Never 1: products of a single row are
# summed in another order for some shapes.
CANDIDATES = (4, 8, 12, 16, 24, MAX_TILE_ROWS)


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Allowed numbers of rows of a product, ascending up to MAX_TILE_ROWS."""

    sizes: tuple[int, ...]

    def padded(self, num_rows: int) -> int:
        """Full tiles and the smallest tile that holds the rest."""
        full, rest = divmod(num_rows, MAX_TILE_ROWS)
        return full * MAX_TILE_ROWS + (next(size for size in self.sizes if size >= rest) if rest else 0)
