"""DeviceWeightReader: a checkpoint's matrices in bfloat16 on the device; quantized ones are dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint
from tokring.engine.cuda.backend import Device
from tokring.models.errors import ModelError
from tokring.models.weights import Progress, TensorReader, to_bfloat16


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """y = x Wᵀ + b. Tensor parallel ranks will hold rows (qkv, gate_up) or columns (output, down: then summed)."""

    weight: torch.Tensor  # bfloat16 [num_outputs, num_inputs]
    bias: torch.Tensor | None  # bfloat16 [num_outputs]


class DeviceWeightReader(TensorReader):
    """tokring.models.weights.Weights of DeviceLinear. A head tied to the embedding shares its memory."""

    def __init__(self, checkpoint: Checkpoint, device: Device, progress: Progress) -> None:
        super().__init__(checkpoint, progress)
        self._device = device
        self._embedding_name = ""
        self.embedding_table = torch.empty(0)  # bfloat16 [vocabulary, hidden], once read

    def linear(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> DeviceLinear:
        weight_names = [f"{name}.weight" for name in names]
        if weight_names == [self._embedding_name]:
            return DeviceLinear(self.embedding_table, None)
        weight = torch.empty(num_outputs, num_inputs, dtype=torch.bfloat16, device=self._device.torch_device)
        start = 0
        for name in weight_names:
            matrix = self._matrix(name, num_inputs)
            if start + len(matrix) <= num_outputs:
                weight[start : start + len(matrix)].copy_(as_tensor(matrix))
            start += len(matrix)
        if start != num_outputs:
            raise ModelError(f"{' + '.join(names)} has {start} rows, config says {num_outputs}")
        bias = self._bias([f"{name}.bias" for name in names])
        return DeviceLinear(weight, None if bias is None else as_tensor(bias).to(self._device.torch_device))

    def embedding(self, name: str, num_columns: int) -> NDArray[Any]:
        matrix = self._matrix(name, num_columns)
        self._embedding_name = name
        self.embedding_table = as_tensor(matrix).to(self._device.torch_device)
        return matrix


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """bfloat16, on the host."""
    bits = to_bfloat16(array)
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
