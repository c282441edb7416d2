"""What a kernel is to its callers: a function of a source file, compiled with some defines, and its parameter types."""

import ctypes
from dataclasses import dataclass
from typing import Any

_C_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}

# Grid or block size; missing dimensions are 1.
Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry function. Hashable: launchers keep compiled modules by (source, defines).

    source: file name in `sources/`. function: the extern "C" name. parameters: one letter each, in order: p pointer
    (an address as int, 0 = null), i int32, u uint32, l int64, f float32. defines: compile-time choices, always in
    the same order.
    What the compile gates (`check`) hold the kernel to, besides no spills and no local memory: max_registers;
    tensor_cores: it has HMMA instructions; wide_loads: it has 128-bit loads from global memory.
    """

    source: str
    function: str
    parameters: str
    defines: tuple[tuple[str, str | int], ...] = ()
    max_registers: int = 128
    tensor_cores: bool = False
    wide_loads: bool = False

    def arguments(self, *values: float) -> "Arguments":
        return Arguments(self, *values)

    @property
    def title(self) -> str:
        """For tables and errors: residual_rms_norm[ELEMENT=Bf16]."""
        return f"{self.function}[{', '.join(f'{name}={value}' for name, value in self.defines)}]"


class Arguments:
    """Arguments of one launch, packed as cuLaunchKernel takes them: an array of pointers to the values.

    Built once and launched often; `set` changes a value in place. Whoever packs a pointer keeps its memory alive.
    """

    __slots__ = ("_values", "address", "pointers")

    def __init__(self, kernel: Kernel, *values: float) -> None:
        if len(values) != len(kernel.parameters):
            raise TypeError(f"{kernel.title} takes {len(kernel.parameters)} arguments, {len(values)} given")
        self._values = [_C_TYPES[letter]() for letter in kernel.parameters]
        for index, value in enumerate(values):
            self.set(index, value)
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self._values))
        self.address = ctypes.addressof(self.pointers)  # void**

    def set(self, index: int, value: float) -> None:
        """Raises TypeError for a float where an integer belongs, OverflowError for an integer out of range."""
        slot = self._values[index]
        slot.value = value
        if isinstance(value, int) and not isinstance(slot, ctypes.c_float) and (slot.value or 0) != value:
            raise OverflowError(f"argument {index}: {value} does not fit {type(slot).__name__}")


def three(size: Size) -> tuple[int, int, int]:
    """The size with all its dimensions."""
    x, y, z = (*size, 1, 1)[:3]
    return x, y, z
