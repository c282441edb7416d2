"""TileSizes: how many rows a linear computes for a batch, so that float32 results are invariant."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tokring.models.linear import MAX_TILE_ROWS, Linear

# Few, because oneDNN compiles a kernel for every number of rows (0.4 ms each). Never 1 in float32: products of a
# single row are summed in another order for some shapes.
FLOAT32_SIZES = (4, 8, 12, 16, 24, MAX_TILE_ROWS)
BFLOAT16_SIZES = (1, 2, 4, 8, 12, 16, 24, MAX_TILE_ROWS)


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Allowed numbers of rows of a product, ascending up to MAX_TILE_ROWS.

    is_invariant: a row's bits in float32 depend on the row alone, whatever its neighbours, its place and the size of
    its tile.
    """

    sizes: tuple[int, ...]
    is_invariant: bool

    def padded(self, num_rows: int) -> int:
        """Full tiles and the smallest tile that holds the rest."""
        full, rest = divmod(num_rows, MAX_TILE_ROWS)
        return full * MAX_TILE_ROWS + (next(size for size in self.sizes if size >= rest) if rest else 0)


def choose_tile_sizes(linears: Iterable[Linear]) -> TileSizes:
    """The sizes for a model's linears, which all have one dtype.

    GEMM kernels choose their order of summation by the matrix's shape, so nothing promises that a row has the same bits
    in products of 4 and of 32 rows. On many CPUs it has, which makes small batches up to five times as fast as always
    computing 32 rows: here it is tried on every shape in the model, and a size that fails is left out.
    """
    by_shape = {(linear.num_inputs, linear.num_outputs): linear for linear in linears}
    if any(linear.dtype == torch.bfloat16 for linear in by_shape.values()):
        return TileSizes(BFLOAT16_SIZES, is_invariant=False)
    proven = set(FLOAT32_SIZES)
    for linear in by_shape.values():
        proven &= equal_sizes(linear)
    if MAX_TILE_ROWS not in proven:
        return TileSizes(FLOAT32_SIZES, is_invariant=False)
    return TileSizes(tuple(sorted(proven)), is_invariant=True)


def equal_sizes(linear: Linear) -> set[int]:
    """The tile sizes in which a row gets the bits it has alone in a full tile, first and last in its tile."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(linear.num_inputs, generator=generator)
    alone = torch.zeros(MAX_TILE_ROWS, linear.num_inputs)
    alone[0] = row
    expected = linear.product(alone)[0]

    def has_equal_bits(size: int, place: int) -> bool:
        tile = torch.randn(size, linear.num_inputs, generator=generator)
        tile[place] = row
        return torch.equal(linear.product(tile)[place], expected)

    return {size for size in FLOAT32_SIZES if has_equal_bits(size, 0) and has_equal_bits(size, size - 1)}
