"""StreamSlots: which stream has which slot of the channel, and under which generation."""

import asyncio
from collections import deque
from collections.abc import Iterator

import numpy as np

from tokring.server.stream import Stream


class StreamSlots:
    """A slot is given out again only once it was freed; its generation rises with each use and each resubmission."""

    def __init__(self, num_slots: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: list[Stream | None] = [None] * num_slots
        self._generations = np.zeros(num_slots, np.uint32)
        self._free = deque(range(num_slots))

    @property
    def num_used(self) -> int:
        return len(self._streams) - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[Stream]:
        """Every stream there is now, in the order of their slots; slots may be freed meanwhile."""
        return iter([stream for stream in self._streams if stream is not None])

    def get(self, slot: int) -> Stream | None:
        """The stream in a slot; None if it is free, or no slot."""
        return self._streams[slot] if 0 <= slot < len(self._streams) else None

    def take(self, arrival_ns: int) -> Stream:
        """A stream in a free slot; the caller knows that there is one."""
        slot = self._free.popleft()
        self._generations[slot] += 1
        stream = Stream(slot, int(self._generations[slot]), arrival_ns, self._loop)
        self._streams[slot] = stream
        return stream

    def renew(self, stream: Stream) -> None:
        """Gives a stream that is submitted again the next generation."""
        self._generations[stream.slot] += 1
        stream.generation = int(self._generations[stream.slot])

    def free(self, stream: Stream) -> None:
        self._streams[stream.slot] = None
        self._free.append(stream.slot)
