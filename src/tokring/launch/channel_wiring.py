"""The kernel objects of one channel: a socketpair for control and two doorbell pipes, made before the sides start."""

import os
import socket
from dataclasses import dataclass, field

from tokring.launch.child import ChannelEnds


@dataclass(slots=True)
class ChannelWiring:
    """Both sides' descriptors, owned by the supervisor until each side's process has them."""

    frontend_ends: ChannelEnds
    engine_ends: ChannelEnds
    _open: set[int] = field(default_factory=set)

    @classmethod
    def create(cls, frontend: int, engine: int) -> "ChannelWiring":
        """New descriptors for the channel of one front end and one engine. Raises OSError, with none left open."""
        made: list[int] = []
        try:
            made += (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            made += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            made += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        frontend_control, engine_control, req_read, req_write, out_read, out_write = made
        return cls(
            ChannelEnds(
                frontend=frontend,
                engine=engine,
                control_fd=frontend_control,
                req_doorbell_fd=req_write,
                out_doorbell_fd=out_read,
            ),
            ChannelEnds(
                frontend=frontend,
                engine=engine,
                control_fd=engine_control,
                req_doorbell_fd=req_read,
                out_doorbell_fd=out_write,
            ),
            set(made),
        )

    def close_ends(self, ends: ChannelEnds) -> None:
        """Closes the supervisor's copies of one side's descriptors; while open, that side's death is no EOF."""
        for fd in fds_of(ends):
            if fd in self._open:
                self._open.remove(fd)
                os.close(fd)

    def close(self) -> None:
        self.close_ends(self.frontend_ends)
        self.close_ends(self.engine_ends)


def fds_of(ends: ChannelEnds) -> tuple[int, int, int]:
    return ends.control_fd, ends.req_doorbell_fd, ends.out_doorbell_fd
