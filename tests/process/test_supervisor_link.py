"""Descriptors that come from the supervisor to a process which has no room for them."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from tokring.launch.child import NUM_SPARE_FDS, SupervisorLink


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorLink, socket.socket]]:
    """A process's link, and the supervisor's end; while it is used, all descriptors are taken."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SupervisorLink(near.detach())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with far, contextlib.closing(link._socket), contextlib.ExitStack() as others:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        others.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while take_one(others):
            pass
        yield link, far
        link.keep_fds(0)


def take_one(stack: contextlib.ExitStack) -> bool:
    """Held by the stack. False: there is none."""
    with contextlib.suppress(OSError):
        stack.callback(os.close, os.dup(0))
        return True
    return False


def test_there_is_room_for_the_descriptors_of_a_message_when_all_others_are_taken(
    ends: tuple[SupervisorLink, socket.socket],
) -> None:
    link, far = ends
    for _ in range(2):
        socket.send_fds(far, [b"{}"], [0] * NUM_SPARE_FDS)
        message = link.receive()
        assert message is not None
        assert len(message["fds"]) == NUM_SPARE_FDS
        for fd in message["fds"]:
            os.close(fd)
        link.keep_fds(NUM_SPARE_FDS)
        with contextlib.ExitStack() as stack:
            assert not take_one(stack)


def test_of_the_descriptors_of_a_message_either_all_are_received_or_none(
    ends: tuple[SupervisorLink, socket.socket],
) -> None:
    link, far = ends
    link.keep_fds(0)
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_SPARE_FDS - 2):
            assert take_one(stack)
        socket.send_fds(far, [b'{"type": "channel"}'], [0] * 3)
        assert link.receive() == {"type": "channel", "fds": []}
        link.keep_fds(0)
        assert [take_one(stack) for _ in range(3)] == [True, True, False]
