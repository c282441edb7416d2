"""What an EngineClient needs of the engine's side and of the clients' side."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Channel(Protocol):
    """The part of tokring_ipc.FrontEndChannel that is used here."""

    @property
    def control(self) -> Any: ...
    @property
    def out_doorbell_fd(self) -> int: ...
    def submit(self, record: npt.NDArray[Any], ids: npt.NDArray[np.int32], extensions: bytes = b"") -> bool: ...
    def cancel(self, stream_slot: int, slot_generation: int) -> None: ...
    def poll(self) -> Any: ...
    def release(self) -> None: ...
    def arm(self) -> bool: ...
    def drain_doorbell(self) -> None: ...
    def close(self) -> None: ...


class Connection(Protocol):
    """A client connection that the token path sends on."""

    def deliver(self, data: bytes) -> None:
        """BYTES mode: writes to the transport."""

    def sent(self) -> None:
        """Everything up to the last write() has left."""

    def lost(self, reason: str) -> None:
        """The peer is gone or too slow; nothing more will be sent."""

    def tick(self, now_ns: int) -> None:
        """Once a second: pings, flow control."""
