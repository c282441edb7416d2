"""GgufFile: a GGUF's header, read with every count checked first.

Not the gguf library's GGUFReader: that builds numpy arrays per metadata element (seconds for a vocabulary, paid by
each process at every start) and follows damaged counts into endless loops. Types and block sizes are the library's,
too, but those in common use are written down here: importing it takes 0.2 s.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.mapped_file import MappedFile

#: Value type -> format of its one scalar. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: ggml's number of a tensor type -> (name, weights a block, bytes a block).
COMMON_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's extent: `kind` is ggml's type name ("F32", "Q4_1", ...), `shape` outermost dimension first."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """`metadata` (scalars, strings; arrays as lists of strings or numpy arrays) and `tensors` by their GGUF names.

    Raises CheckpointError on a file that isn't a whole GGUF of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        cursor = _Cursor(self.file)
        num_tensors, num_values = _read_prologue(cursor)
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(path, "is one part of a split GGUF; join the parts with llama-gguf-split --merge")
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        self._place_tensors(infos, cursor.offset)

    def array(self, tensor: GgufTensor, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The tensor's bytes as `dtype`, a read-only view of the file."""
        return self.file.array(tensor.offset, tensor.num_bytes, dtype, shape)

    def _place_tensors(self, infos: list[tuple[str, tuple[int, ...], int, int]], header_end: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise CheckpointError(self.path, f"has a damaged header: alignment {alignment!r}")
        start = -(-header_end // alignment) * alignment
        for name, shape, type_number, offset in infos:
            kind, num_bytes = _extent(self.path, name, shape, type_number)
            if start + offset + num_bytes > self.file.size:
                raise CheckpointError(
                    self.path,
                    f"is truncated: tensor {name!r} ends at byte {start + offset + num_bytes}, "
                    f"the file has {self.file.size}",
                )
            if name in self.tensors:
                raise CheckpointError(self.path, f"has two tensors named {name!r}")
            self.tensors[name] = GgufTensor(name, kind, shape, start + offset, num_bytes)


class _Cursor:
    """A position in the header; every read is checked against the file's end."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self._size = file.size
        self._bytes = memoryview(file.data.data)
        self.offset = 0

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.require(size, 1)
        (value,) = struct.unpack_from("<" + code, self._bytes, self.offset)
        self.offset += size
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.require(size, 1)
        text = bytes(self._bytes[self.offset : self.offset + size]).decode("utf-8", errors="replace")
        self.offset += size
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise CheckpointError(self.path, f"has a damaged header: value type {kind} at byte {self.offset}")
        return self.scalar(_SCALARS[kind])

    def _array(self, depth: int) -> Any:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
            self.require(count, dtype.itemsize)
            array = np.frombuffer(self._bytes, dtype, count, self.offset)
            self.offset += array.nbytes
            return array
        if depth == _MAX_ARRAY_DEPTH:
            raise CheckpointError(self.path, "has a damaged header: arrays nested too deeply")
        self.require(count, 8)  # a string takes at least its length; so does an array
        if kind == _STRING:
            return self._strings(count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As string(), so many times: a vocabulary has a hundred thousand, and every process reads it at its start."""
        unpack, data, size, offset = _LENGTH.unpack_from, self._bytes, self._size, self.offset
        strings = []
        for _ in range(count):
            if offset + 8 > size or offset + 8 + (length := unpack(data, offset)[0]) > size:
                break
            offset += 8 + length
            strings.append(str(data[offset - length : offset], "utf-8", "replace"))
        self.offset = offset
        return strings if len(strings) == count else [*strings, self.string()]  # which raises, at the broken one

    def require(self, count: int, size: int) -> None:
        """Raises unless `count` items of at least `size` bytes fit in what is left: before any loop over them."""
        if self.offset + count * size > self._size:
            raise CheckpointError(
                self.path,
                f"is truncated or damaged: the header asks for {count * size} bytes at byte {self.offset}, "
                f"the file has {self._size}",
            )


def _read_prologue(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata values)."""
    path = cursor.path
    if cursor.scalar("4s") != b"GGUF":
        raise CheckpointError(path, "is not a GGUF file (nor a Hugging Face directory)")
    version = cursor.scalar("I")
    if version not in (2, 3):
        hint = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(path, f"is a GGUF of {hint}; little-endian versions 2 and 3 can be read")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.require(num_tensors, 24)
    cursor.require(num_values, 13)
    return num_tensors, num_values


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape outermost first, ggml type, offset from the data section)."""
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(cursor.path, f"has a damaged header: {num_dimensions} dimensions in {name!r}")
    innermost_first = [cursor.scalar("Q") for _ in range(num_dimensions)]
    if 0 in innermost_first:
        raise CheckpointError(cursor.path, f"has a damaged header: {name!r} is empty")
    return name, tuple(reversed(innermost_first)), cursor.scalar("I"), cursor.scalar("Q")


def _extent(path: Path, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
    """(type name, bytes) of a tensor."""
    name_of_type, block, block_bytes = COMMON_TYPES.get(type_number) or _rare_type(path, name, type_number)
    columns = shape[-1]
    if columns % block:
        raise CheckpointError(path, f"tensor {name!r}: rows of {columns} can't be {name_of_type} blocks of {block}")
    return name_of_type, math.prod(shape) // block * block_bytes


def _rare_type(path: Path, name: str, type_number: int) -> tuple[str, int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError:
        raise CheckpointError(path, f"tensor {name!r} has the unknown type {type_number}") from None
    return kind.name, *GGML_QUANT_SIZES[kind]
