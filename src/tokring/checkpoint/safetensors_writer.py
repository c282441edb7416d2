"""Writing a safetensors file from numpy arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: uint16 stands for bfloat16's bits, as everywhere in this package.
_DTYPE_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
_ALIGNMENT = 64


def to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of finite float32 (or float16) values, rounded to nearest, ties to even, as torch does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
    """Writes float32, float16 and uint16 (bfloat16) arrays."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # readers map the file: rows should start where loads are quick
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays.values():
            file.write(array.data)
