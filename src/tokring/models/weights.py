"""WeightReader: the checkpoint's numpy arrays as torch tensors of one dtype."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint, ModelConfig
from tokring.models.errors import ModelError

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


class WeightReader:
    """Copies tensors out of a Checkpoint, checks their shapes and reports progress.

    Progress is in bytes of the file, as the share of the model's elements that was read: arrays are larger than the
    file where that is quantized.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress) -> None:
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._names = set(checkpoint.tensor_names())
        self._progress = progress
        self._num_read = 0  # elements
        self._num_elements = num_weights(checkpoint.config)

    def has(self, name: str) -> bool:
        return name in self._names

    def matrix(self, names: Sequence[str], num_columns: int) -> torch.Tensor:
        """The matrices `names` one below the other: dtype[sum of rows, num_columns]."""
        return self._stacked(names, (num_columns,), self.dtype)

    def bias(self, names: Sequence[str]) -> torch.Tensor | None:
        """The biases `names` one after the other: dtype[sum]; None where the checkpoint has none of them."""
        return self._stacked(names, (), self.dtype) if any(self.has(name) for name in names) else None

    def vector(self, name: str, length: int) -> NDArray[np.float32]:
        """A norm's weight: float32[length]."""
        tensor = self._stacked([name], (), torch.float32)
        if len(tensor) != length:
            raise ModelError(f"tensor {name} has {len(tensor)} values, config says {length}")
        return np.asarray(tensor.numpy(), dtype=np.float32)

    def finish(self) -> None:
        """Everything the model needs has been read."""
        self._report(1.0)

    def _report(self, share: float) -> None:
        total = self._checkpoint.total_bytes
        self._progress(int(total * min(share, 1.0)), total)

    def _stacked(self, names: Sequence[str], row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        arrays = [self._array(name, row_shape) for name in names]
        result = torch.empty((sum(len(array) for array in arrays), *row_shape), dtype=dtype)
        start = 0
        for array in arrays:
            copy_into(result[start : start + len(array)], array)
            start += len(array)
            self._num_read += array.size
            self._report(self._num_read / self._num_elements)
        return result

    def _array(self, name: str, row_shape: tuple[int, ...]) -> NDArray[np.generic]:
        if name not in self._names:
            raise ModelError(f"the checkpoint has no tensor {name}; it does not fit its own config")
        array: NDArray[np.generic] = self._checkpoint.tensor(name)
        if array.ndim != 1 + len(row_shape) or array.shape[1:] != row_shape:
            raise ModelError(
                f"tensor {name} has shape {array.shape}, needed is [rows, {', '.join(map(str, row_shape))}]"
            )
        return array


def copy_into(target: torch.Tensor, array: NDArray[np.generic]) -> None:
    """Copies float32, float16 or uint16 (bfloat16's bits) into a float32 or bfloat16 tensor of the same shape."""
    is_bfloat16 = array.dtype == np.uint16
    if is_bfloat16 and target.dtype == torch.bfloat16:
        target.view(torch.uint16).numpy()[...] = array
    elif is_bfloat16:
        np.left_shift(array.astype(np.uint32), 16, out=target.view(torch.uint32).numpy())
    elif target.dtype == torch.float32:
        target.numpy()[...] = array
    else:
        target.copy_(torch.from_numpy(array.astype(np.float32)))  # torch rounds to nearest even


def num_weights(config: ModelConfig) -> int:
    """Elements of all matrices."""
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (attention + mlp) + embeddings
