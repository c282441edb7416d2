"""StepBuffer: the one copy of a step's metadata to the device, and what comes back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.engine.cuda.backend import Device

NUM_SLOTS = 3  # two steps may be in flight while a third one is packed
MOST_FIRST_WORDS = 1 << 22


class StepBuffer:
    """Packs int32 arrays into pinned memory and sends them in one copy.

    It begins with room for `num_words` (16 MB at most); a step that needs more waits until memory was reserved anew.
    """

    def __init__(self, device: Device, num_words: int) -> None:
        self._device = device
        self._slot = 0
        self._reserve(min(num_words, MOST_FIRST_WORDS))

    def send(self, arrays: list[NDArray[np.int32]]) -> list[torch.Tensor]:
        """The arrays on the device, flat; valid until the next call. Each starts at a multiple of 16 bytes."""
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + -(-array.size // 4) * 4)
        if starts[-1] > len(self._on_device):
            self._reserve(2 * starts[-1])
        self._slot = (self._slot + 1) % NUM_SLOTS
        pinned, view = self._pinned[self._slot], self._views[self._slot]
        for start, array in zip(starts, arrays, strict=False):
            view[start : start + array.size] = array.reshape(-1)
        self._device.copy(self._on_device[: starts[-1]], pinned[: starts[-1]])
        return [self._on_device[start : start + array.size] for start, array in zip(starts, arrays, strict=False)]

    def _reserve(self, num_words: int) -> None:
        """New memory; what is in flight keeps the old one alive until the copies from it are over: see wait()."""
        if hasattr(self, "_on_device"):
            self._device.event().wait()
        self._pinned = [self._device.pinned(num_words, torch.int32) for _ in range(NUM_SLOTS)]
        self._views = [pinned.numpy() for pinned in self._pinned]
        self._on_device = torch.empty(num_words, dtype=torch.int32, device=self._device.torch_device)


class PinnedSlots:
    """Pinned memory for what comes back, one piece for each step that may be in flight; grows in powers of two."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._slots = [device.pinned(0, dtype) for _ in range(NUM_SLOTS)]

    def copy(self, slot: int, source: torch.Tensor) -> torch.Tensor:
        """Start to copy `source` into a slot whose last step has been collected; returns where it will be."""
        count = source.numel()
        if count > self._slots[slot].numel():
            self._slots[slot] = self._device.pinned(1 << (count - 1).bit_length(), self._dtype)
        pinned = self._slots[slot][:count].view(source.shape)
        self._device.copy(pinned, source)
        return pinned
