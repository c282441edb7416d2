"""Linear: y = x Wᵀ + b with weights packed once, on rows padded to sizes that are quick or, in float32, invariant."""

import torch

ROWS_PER_TILE = 32  # float32: every product has exactly this many rows, whatever the batch


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """The number of rows a linear really computes for `num_rows`; inputs must have this many.

    float32: whole tiles. bfloat16: oneDNN compiles a kernel for every new number of rows (0.4 ms each), so there are
    few of them.
    """
    if dtype == torch.float32 or num_rows > 64:
        return -(-num_rows // ROWS_PER_TILE) * ROWS_PER_TILE
    return num_rows if num_rows <= 8 else -(-num_rows // 8) * 8


class Linear:
    """A matrix [num_outputs, num_inputs], float32 or bfloat16, with an optional bias.

    oneDNN's prepacked weights are 1.4 to 2 times as fast as `torch.nn.functional.linear`, which packs at every call;
    where torch comes without them, that is what runs.

    In float32 a row's bits depend on nothing but the row: GEMM kernels choose their summation order by the matrix's
    shape, and each product here has the one shape [ROWS_PER_TILE, num_inputs] (`has_independent_rows` proves it).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._is_packed = can_pack(weight.dtype)
        self._weight = pack(weight) if self._is_packed else weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """dtype[num_rows, num_inputs] -> dtype[num_rows, num_outputs]; num_rows as by padded_rows()."""
        if self.dtype == torch.bfloat16 or len(rows) == ROWS_PER_TILE:
            return self._product(rows)
        result = torch.empty((len(rows), self.num_outputs), dtype=self.dtype)
        for start in range(0, len(rows), ROWS_PER_TILE):
            tile = slice(start, start + ROWS_PER_TILE)
            result[tile] = self._product(rows[tile])
        return result

    def has_independent_rows(self) -> bool:
        """Whether a row's bits are the same at the tile's start, middle and end, among other neighbours."""
        generator = torch.Generator().manual_seed(1)
        row = torch.randn(self.num_inputs, generator=generator)
        alone = torch.zeros(ROWS_PER_TILE, self.num_inputs)
        alone[0] = row
        expected = self._product(alone)[0]
        for place in (0, 7, ROWS_PER_TILE - 1):
            crowd = torch.randn(ROWS_PER_TILE, self.num_inputs, generator=generator)
            crowd[place] = row
            if not torch.equal(self._product(crowd)[place], expected):
                return False
        return True

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
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
    """oneDNN's own layout, chosen for tiles in float32 and for a few rows in bfloat16."""
    batch_size = ROWS_PER_TILE if weight.dtype == torch.float32 else None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, batch_size)
    return packed
