"""SafetensorsShards: the weights of a Hugging Face directory, one file or several with an index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.json_file import parse_object, read_object
from tokring.checkpoint.mapped_file import MappedFile
from tokring.checkpoint.quantized_tensor import QuantizedTensor

#: The types a model may be stored in. The safetensors library itself needs torch for BF16: numpy has no such type.
_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Extent:
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsShards:
    """A TensorSource over safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._extents: dict[str, _Extent] = {}
        for path, expected in _shards(directory):
            extents = _read_extents(MappedFile(path))
            missing = sorted(expected - extents.keys())
            if missing:
                raise CheckpointError(path, f"lacks {len(missing)} tensors that the index names, first {missing[0]!r}")
            self._extents.update(extents)

    @property
    def names(self) -> Sequence[str]:
        return list(self._extents)

    @property
    def total_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._extents.values())

    def tensor(self, name: str) -> npt.NDArray[Any]:
        extent = self._extents.get(name)
        if extent is None:
            raise CheckpointError(self._directory, f"has no tensor {name!r}")
        dtype = _DTYPES.get(extent.dtype)
        if dtype is None:
            known = ", ".join(_DTYPES)
            raise CheckpointError(extent.file.path, f"tensor {name!r} is {extent.dtype}; {known} can be used")
        return extent.file.array(extent.offset, extent.num_bytes, dtype, extent.shape)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return None


def _shards(directory: Path) -> list[tuple[Path, set[str]]]:
    """Each weight file with the names that an index expects in it (an empty set without an index)."""
    index_path = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [(single, set())]
    if index_path.is_file():
        return _indexed_shards(index_path)
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        raise CheckpointError(directory, "has weights in pickle files (*.bin) only; safetensors are needed")
    raise CheckpointError(directory, "has neither model.safetensors nor model.safetensors.index.json")


def _indexed_shards(index_path: Path) -> list[tuple[Path, set[str]]]:
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index_path, "has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or "/" in file_name or file_name.startswith("."):
            raise CheckpointError(index_path, f"names a strange file for {tensor!r}: {file_name!r}")
        shards.setdefault(file_name, set()).add(tensor)
    for file_name in shards:
        if not (index_path.parent / file_name).is_file():
            raise CheckpointError(index_path.parent / file_name, f"is missing, {index_path.name} names it")
    return [(index_path.parent / file_name, names) for file_name, names in sorted(shards.items())]


def _read_extents(file: MappedFile) -> dict[str, _Extent]:
    """The header: u64 length, then a JSON object of name -> dtype, shape, data_offsets (from the header's end)."""
    header_bytes = int(file.array(0, 8, "<u8", (1,))[0])
    if header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(file.path, f"is no safetensors file: header of {header_bytes} bytes")
    text = file.array(8, header_bytes, np.uint8, (header_bytes,)).tobytes()
    try:
        header = parse_object(text.decode("utf-8"), file.path)
    except UnicodeDecodeError:
        raise CheckpointError(file.path, "is no safetensors file: its header is not UTF-8") from None
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    return {name: _extent(file, name, entry, start) for name, entry in header.items()}


def _extent(file: MappedFile, name: str, entry: Any, start: int) -> _Extent:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        well_formed = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(file.path, f"has a damaged header entry for {name!r}")
    if start + end > file.size:
        raise CheckpointError(file.path, f"is truncated: {start + end} bytes are described, the file has {file.size}")
    if dtype in _DTYPES and math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != end - begin:
        raise CheckpointError(file.path, f"tensor {name!r}: {end - begin} bytes don't hold {dtype} of shape {shape}")
    return _Extent(file, dtype, shape, start + begin, end - begin)
