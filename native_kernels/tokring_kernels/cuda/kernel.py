"""What a kernel is to its callers: a function of a source file, compiled with some defines, and its parameter types."""

import ctypes
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

_FORMATS = {"p": "P", "i": "i", "u": "I", "l": "q", "f": "f"}  # of the struct module, native sizes and alignment

# Grid or block size; missing dimensions are 1.
Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry function. Hashable: launchers keep compiled modules by (source, defines).

    source: file name in `sources/`. function: the extern "C" name. parameters: one letter each, in order: p pointer
    (an address as int, 0 = null), i int32, u uint32, l int64, f float32. defines: compile-time choices, always in
    the same order.
    What the compile gates (`check`) hold the kernel to, besides no spills and no local memory: max_registers;
    tensor_cores: it has HMMA instructions (HGMMA where only_for is sm_90a), and ptxas reports none that wait for each
    other without need; wide_loads: it has 128-bit loads from global memory.
    only_for: the one architecture it is for ("sm_90a"); "" = all.
    """

    source: str
    function: str
    parameters: str
    defines: tuple[tuple[str, str | int], ...] = ()
    max_registers: int = 128
    tensor_cores: bool = False
    wide_loads: bool = False
    only_for: str = ""

    def arguments(self, *values: float) -> "Arguments":
        return Arguments(self, *values)

    @property
    def title(self) -> str:
        """For tables and errors: residual_rms_norm[ELEMENT=Bf16]."""
        return f"{self.function}[{', '.join(f'{name}={value}' for name, value in self.defines)}]"


class Arguments:
    """Arguments of one launch, packed as cuLaunchKernel takes them: an array of pointers to the values.

    Whoever packs a pointer keeps its memory alive. Raises struct.error for a wrong number of values, for a float where
    an integer belongs and for an integer out of range.
    """

    __slots__ = ("_values", "address", "pointers")

    def __init__(self, kernel: Kernel, *values: float) -> None:
        layout, offsets, pointer_array = _layout(kernel.parameters)
        self._values = ctypes.create_string_buffer(layout.pack(*values))
        start = ctypes.addressof(self._values)
        self.pointers = pointer_array(*[start + offset for offset in offsets])
        self.address = ctypes.addressof(self.pointers)  # void**

    def values(self, kernel: Kernel) -> tuple[Any, ...]:
        """What was packed, for that kernel."""
        return _layout(kernel.parameters)[0].unpack_from(self._values)


@cache
def _layout(parameters: str) -> tuple[struct.Struct, list[int], type[ctypes.Array[ctypes.c_void_p]]]:
    """How values are packed, where each begins, and the type of the pointers to them."""
    formats = [_FORMATS[letter] for letter in parameters]
    offsets = [struct.calcsize("".join(formats[: i + 1])) - struct.calcsize(formats[i]) for i in range(len(formats))]
    return struct.Struct("".join(formats)), offsets, ctypes.c_void_p * len(formats)


def three(size: Size) -> tuple[int, int, int]:
    """The size with all its dimensions."""
    x, y, z = (*size, 1, 1)[:3]
    return x, y, z
