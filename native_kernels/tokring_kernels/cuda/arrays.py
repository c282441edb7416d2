"""Arrays as the ops see them: torch tensors or numpy arrays by duck typing, checked and reduced to addresses."""

from __future__ import annotations

from typing import Any

Array = Any  # data_ptr() or __array_interface__, and dtype and shape

# Names of element types; numpy has no bfloat16 and no fp8, their bits stand for them.
_KINDS = {
    "bfloat16": "bf16",
    "uint16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "fp8",
    "uint8": "fp8",
    "int8": "int8",
    "int32": "i32",
    "uint32": "i32",  # the same bits
    "int64": "i64",
}
_KINDS_OF_DTYPES: dict[Any, str] = {}  # filled as dtypes come; a look-up by name would cost more than all other checks


def address(array: Array | None) -> int:
    """The address of the first element; 0 for None."""
    if array is None:
        return 0
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])


def kind(array: Array) -> str:
    """bf16, f16, f32, fp8, int8, i32 or i64; another dtype's own name."""
    dtype = array.dtype
    found = _KINDS_OF_DTYPES.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        found = _KINDS_OF_DTYPES[dtype] = _KINDS.get(name, name)
    return found


def row_stride(array: Array) -> int:
    """Elements from one row to the next."""
    if hasattr(array, "data_ptr"):
        return int(array.stride(0))
    return int(array.strides[0] // array.itemsize)


def size_in_bytes(array: Array) -> int:
    return int(array.nbytes)


def expect(name: str, array: Array | None, kinds: str, *shape: int | None, rows_strided: bool = False) -> None:
    """Raises ValueError unless `array` is None or has one of the kinds ("bf16 f16"), that shape and is contiguous.

    A None in the shape is any size; with rows_strided only what is behind the first dimension must be contiguous.
    """
    if array is None:
        return
    if kind(array) not in kinds.split():
        raise ValueError(f"{name} must be {' or '.join(kinds.split())}, but is {array.dtype}")
    found = tuple(array.shape)
    if found != shape and not _fits(found, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], but has {list(found)}")
    if not (_is_contiguous(array) or (rows_strided and _is_contiguous(array[:1]))):
        raise ValueError(f"{name} must be contiguous{' behind its rows' if rows_strided else ''}")


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))


def _is_contiguous(array: Array) -> bool:
    return bool(array.is_contiguous() if hasattr(array, "data_ptr") else array.flags.c_contiguous)
