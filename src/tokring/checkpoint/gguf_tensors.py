"""GgufTensors: the weights of a GGUF under Hugging Face names and in Hugging Face's row order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.gguf_file import GgufFile, GgufTensor
from tokring.checkpoint.gguf_names import PERMUTED, hf_names
from tokring.checkpoint.model_config import ModelConfig
from tokring.checkpoint.quantized_tensor import BLOCK_SIZES, QuantizedTensor, dequantize_blocks

_PLAIN: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class GgufTensors:
    """A TensorSource over a GgufFile."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._gguf_names = hf_names(list(file.tensors))
        self._total_bytes = sum(file.tensors[name].num_bytes for name in self._gguf_names.values())
        self._num_heads = {}
        if config.architecture in PERMUTED:
            self._num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    @property
    def names(self) -> Sequence[str]:
        return list(self._gguf_names)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def tensor(self, name: str) -> npt.NDArray[Any]:
        tensor = self._find(name)
        if tensor.kind in _PLAIN:
            array = self._file.array(tensor, _PLAIN[tensor.kind], tensor.shape)
        else:
            array = self._dequantize(tensor)
        return self._unpermute(name, array)

    def quantized(self, name: str) -> QuantizedTensor | None:
        tensor = self._find(name)
        kind = tensor.kind.lower()
        if kind not in BLOCK_SIZES or len(tensor.shape) != 2:
            return None
        rows, columns = tensor.shape
        blocks = self._file.array(tensor, np.uint8, (rows, tensor.num_bytes // rows if rows else 0))
        return QuantizedTensor(kind, (rows, columns), self._unpermute(name, blocks))

    def _find(self, name: str) -> GgufTensor:
        if name not in self._gguf_names:
            raise CheckpointError(self._file.path, f"has no tensor {name!r}")
        return self._file.tensors[self._gguf_names[name]]

    def _dequantize(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        blocks = self._file.array(tensor, np.uint8, (*tensor.shape[:-1], -1))
        try:
            return dequantize_blocks(tensor.kind, blocks).reshape(tensor.shape)
        except NotImplementedError:
            raise CheckpointError(
                self._file.path, f"tensor {tensor.name!r} is {tensor.kind}, which the gguf library can't dequantize"
            ) from None

    def _unpermute(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undoes llama.cpp's row order of q and k: in each head, row 2 * i + j goes back to j * head_dim / 2 + i.

        A row is a whole number of blocks, so raw blocks are moved by the same rule.
        """
        num_heads = self._num_heads.get(name.split(".")[-2])
        if num_heads is None:
            return array
        if array.shape[0] % (2 * num_heads):
            raise CheckpointError(self._file.path, f"{name!r} has {array.shape[0]} rows for {num_heads} heads")
        pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
