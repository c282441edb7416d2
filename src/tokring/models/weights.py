"""TensorReader: a checkpoint's tensors, checked and counted; WeightReader: the CPU's linears and embedding table."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint, ModelConfig
from tokring.models.errors import ModelError
from tokring.models.linear import ActivationBits, Float32, NativeLinear, NativePart
from tokring_kernels.linear import WeightKind

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)
WeightFormat = Literal["float32", "bfloat16", "stored"]
NATIVE_KINDS: dict[str, WeightKind] = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}


LinearT = TypeVar("LinearT", covariant=True)


class Weights(Protocol[LinearT]):
    """What the loader reads a model from; a backend's own linears come out."""

    def linear(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> LinearT:
        """The projections `names` (without ".weight"), one below the other, as one linear with their biases."""
        ...

    def embedding(self, name: str, num_columns: int) -> NDArray[Any]:
        """[vocabulary, num_columns], float32 or bfloat16's bits."""
        ...

    def vector(self, name: str, length: int) -> Float32:
        """A norm's weight, a copy."""
        ...

    def finish(self) -> None:
        """Everything the model needs has been read."""
        ...


class TensorReader:
    """Reads tensors, checks their shapes and reports progress.

    Progress is in bytes of the file, as the share of the model's elements that was read: arrays are larger than the
    file where that is quantized.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._names = set(checkpoint.tensor_names())
        self._progress = progress
        self._num_read = 0  # elements
        self._num_elements = num_weights(checkpoint.config)

    def vector(self, name: str, length: int) -> Float32:
        """A norm's weight, a copy."""
        vector = to_float32(self._tensor(name))
        if vector.shape != (length,):
            raise ModelError(f"tensor {name} has shape {vector.shape}, needed is ({length},)")
        return vector

    def finish(self) -> None:
        """Everything the model needs has been read."""
        self._report(1.0)

    def _bias(self, names: Sequence[str]) -> Float32 | None:
        """The biases one after the other; None where the checkpoint has none of them."""
        if not any(name in self._names for name in names):
            return None
        return np.concatenate([to_float32(self._tensor(name)) for name in names])

    def _matrix(self, name: str, num_columns: int) -> NDArray[Any]:
        matrix = self._tensor(name)
        self._check_columns(name, matrix.shape, num_columns)
        return matrix

    def _check_columns(self, name: str, shape: tuple[int, ...], num_columns: int) -> None:
        if len(shape) != 2 or shape[1] != num_columns:
            raise ModelError(f"tensor {name} has shape {shape}, needed is [rows, {num_columns}]")

    def _tensor(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise ModelError(f"the checkpoint has no tensor {name}; it does not fit its own config")
        array: NDArray[Any] = self._checkpoint.tensor(name)
        self._count(array.size)
        return array

    def _count(self, num_elements: int) -> None:
        self._num_read += num_elements
        self._report(self._num_read / self._num_elements)

    def _report(self, share: float) -> None:
        total = self._checkpoint.total_bytes
        self._progress(int(total * min(share, 1.0)), total)


class WeightReader(TensorReader):
    """Packs linears for the CPU in one format.

    Formats: float32, bfloat16, or stored: quantized matrices stay as they are where there is a kernel
    for them, all others become bfloat16.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weight_format: WeightFormat,
        progress: Progress,
        activation_bits: ActivationBits = 15,
    ) -> None:
        self._activation_bits = activation_bits
        super().__init__(checkpoint, progress)
        self._format = weight_format

    def linear(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> NativeLinear:
        """The projections `names` (without ".weight"), one below the other, as one linear with their biases."""
        bias = self._bias([f"{name}.bias" for name in names])
        weight_names = [f"{name}.weight" for name in names]
        linear = NativeLinear(
            [self._part(name, num_inputs) for name in weight_names], num_inputs, bias, self._activation_bits
        )
        if linear.num_outputs != num_outputs:
            raise ModelError(f"{' + '.join(names)} has {linear.num_outputs} rows, config says {num_outputs}")
        return linear

    def embedding(self, name: str, num_columns: int) -> NDArray[Any]:
        """[vocabulary, num_columns], float32 or bfloat16's bits: a table in the file's precision or better."""
        matrix = self._matrix(name, num_columns)
        return np.array(matrix) if matrix.dtype == np.uint16 else to_float32(matrix)

    def _part(self, name: str, num_columns: int) -> NativePart:
        if self._format == "float32":
            return NativePart("F32", to_float32(self._matrix(name, num_columns)))
        quantized = self._checkpoint.quantized(name) if self._format == "stored" and name in self._names else None
        if quantized is None or quantized.kind not in NATIVE_KINDS:
            return NativePart("BF16", to_bfloat16(self._matrix(name, num_columns)))
        self._check_columns(name, quantized.shape, num_columns)
        self._count(quantized.shape[0] * quantized.shape[1])
        return NativePart(NATIVE_KINDS[quantized.kind], np.ascontiguousarray(quantized.data))


def to_float32(array: NDArray[Any]) -> Float32:
    """A writable copy of float32, float16 or bfloat16's bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.array(array, dtype=np.float32, order="C")


def to_bfloat16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """bfloat16's bits, rounded to nearest even; NaN stays NaN."""
    if array.dtype == np.uint16:
        return np.ascontiguousarray(array)
    bits = to_float32(array).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    result: NDArray[np.uint16] = np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return result


def num_weights(config: ModelConfig) -> int:
    """Elements of all matrices."""
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (attention + mlp) + embeddings
