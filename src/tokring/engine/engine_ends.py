"""EngineEnds: the engine's descriptors of one channel."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineEnds:
    """Owned from the moment they arrive until the channel is closed."""

    control: socket.socket
    req_doorbell_fd: int
    out_doorbell_fd: int

    def close(self) -> None:
        self.control.close()
        os.close(self.req_doorbell_fd)
        os.close(self.out_doorbell_fd)
