"""Transport: one way to move a payload from a writer process to a reader process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from tokring.bench.case import Delivery, Regime, Waiting
from tokring.bench.payload import Payload, Rows
from tokring.bench.track import ReaderTrack, WriterTrack


class Transport(ABC):
    """Made before the fork; then one process opens the writer's side and one the reader's.

    A subclass says in `variants` which combinations of delivery and waiting it has, and brings the receiving methods
    of those: receive() for BLOCKING, try_receive() for POLLING, attach() for UVLOOP.
    """

    label: ClassVar[str]
    variants: ClassVar[tuple[tuple[Delivery, Waiting], ...]]
    carries_requests: ClassVar[bool] = False

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        self.payload = payload
        self.delivery = delivery
        self.waiting = waiting

    # ---- the writer's process ----

    @abstractmethod
    def open_writer(self) -> None: ...

    @abstractmethod
    def send(self) -> bool:
        """Encode and send one payload; False = no room now."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Of one payload on its way, without what the kernel adds."""

    def counters(self) -> dict[str, int]:
        """What the writer's side counted itself: doorbells."""
        return {}

    def write(self, track: WriterTrack, regime: Regime, first: int, last: int) -> None:
        for step in range(first, last):
            track.begin(step, regime)
            while not self.send():
                pass
            track.end(step, regime)

    # ---- the reader's process ----

    @abstractmethod
    def open_reader(self) -> None: ...

    def receive(self) -> Any:
        """Sleep until a payload is there; return it in the delivered form."""
        raise NotImplementedError

    def try_receive(self) -> Any:
        """The next payload, or None."""
        raise NotImplementedError

    async def attach(self, deliver: Callable[[Any], None]) -> None:
        """Call `deliver` with each payload from now on."""
        raise NotImplementedError

    @abstractmethod
    def rows(self, delivered: Any) -> Rows:
        """What arrived, as plain objects, to be compared with payload.rows()."""

    def read(self, track: ReaderTrack) -> None:
        """Receive all steps of the track."""
        if self.waiting == Waiting.UVLOOP:
            import uvloop

            uvloop.run(self._read_in_loop(track))
            return
        while not track.finished:
            delivered = self.receive() if self.waiting == Waiting.BLOCKING else self.try_receive()
            if delivered is not None:
                track.deliver(delivered)

    async def _read_in_loop(self, track: ReaderTrack) -> None:
        finished = asyncio.get_running_loop().create_future()

        def deliver(delivered: Any) -> None:
            track.deliver(delivered)
            if track.finished and not finished.done():
                finished.set_result(None)

        await self.attach(deliver)
        track.ready()
        await finished

    # ---- either ----

    @abstractmethod
    def close(self) -> None:
        """Frees what this process holds; both sides call it, at their ends."""
