"""TorchLinear: float32 matrices on torch (oneDNN), in tiles of rows that keep each row's bits its own."""

import torch

from tokring.models.linear import Float32, LinearInput
from tokring.models.tile_sizes import MAX_TILE_ROWS


class TorchLinear:
    """A float32 matrix with an optional bias.

    oneDNN's prepacked weights are 1.4 to 2 times as fast as `torch.nn.functional.linear`, which packs at every call;
    where torch comes without them, that is what runs.
    """

    def __init__(self, weight: Float32, bias: Float32 | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self._bias = None if bias is None else torch.from_numpy(bias)
        self._is_packed = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        tensor = torch.from_numpy(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(tensor, MAX_TILE_ROWS) if self._is_packed else tensor

    def apply(self, x: LinearInput, out: Float32) -> None:
        rows, target = torch.from_numpy(x.padded), torch.from_numpy(out)
        for start in range(0, len(target), MAX_TILE_ROWS):
            tile = target[start : start + MAX_TILE_ROWS]
            tile.copy_(self.product(rows[start : start + MAX_TILE_ROWS])[: len(tile)])

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in one piece, whatever the number of rows."""
        if self._is_packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
            return result
        return torch.nn.functional.linear(rows, self._weight, self._bias)


def equal_sizes(linear: TorchLinear, sizes: tuple[int, ...]) -> set[int]:
    """Which of `sizes` give a row the bits it has alone in a full tile, both as the first and as the last in its tile.

    GEMM kernels choose their order of summation by the matrix's shape, so nothing promises that a row has the same bits
    in products of 4 and of 32 rows. On many CPUs it has, which makes small batches up to five times as fast as always
    computing 32 rows: so it is tried.
    """
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(linear.num_inputs, generator=generator)
    alone = torch.zeros(MAX_TILE_ROWS, linear.num_inputs)
    alone[0] = row
    expected = linear.product(alone)[0]

    def has_equal_bits(size: int, place: int) -> bool:
        tile = torch.randn(size, linear.num_inputs, generator=generator)
        tile[place] = row
        return torch.equal(linear.product(tile)[place], expected)

    return {size for size in sizes if has_equal_bits(size, 0) and has_equal_bits(size, size - 1)}
