"""Linear: y = x Wᵀ + b with weights packed once, in tiles of rows that are quick or, in float32, invariant."""

import torch

MAX_TILE_ROWS = 32


class Linear:
    """A matrix [num_outputs, num_inputs], float32 or bfloat16, with an optional bias.

    oneDNN's prepacked weights are 1.4 to 2 times as fast as `torch.nn.functional.linear`, which packs at every call;
    where torch comes without them, that is what runs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._is_packed = can_pack(weight.dtype)
        self._weight = pack(weight) if self._is_packed else weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """dtype[num_rows, num_inputs] -> dtype[num_rows, num_outputs]; num_rows as by TileSizes.padded()."""
        if self.dtype == torch.bfloat16 or len(rows) <= MAX_TILE_ROWS:
            return self.product(rows)
        result = torch.empty((len(rows), self.num_outputs), dtype=self.dtype)
        for start in range(0, len(rows), MAX_TILE_ROWS):
            tile = slice(start, start + MAX_TILE_ROWS)
            result[tile] = self.product(rows[tile])
        return result

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in one piece, whatever the number of rows."""
        if self._is_packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
            return result
        return torch.nn.functional.linear(rows, self._weight, self._bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have oneDNN's prepacked linear for the dtype."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """oneDNN's own layout, chosen for full tiles in float32 and for a few rows in bfloat16."""
    batch_size = MAX_TILE_ROWS if weight.dtype == torch.float32 else None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, batch_size)
    return packed
