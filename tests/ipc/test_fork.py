"""A forked child has no channel: its handles are dead, the parent's go on."""

from __future__ import annotations

import os
import warnings

from tests.ipc.channel_pair import ChannelPair, i32, request, rings, write_tokens
from tokring_ipc import HandleDead, Role, StatsPage, page_name, server_prefix


def in_child(check: object) -> int:
    """Runs check() in a forked child; its exit status: 0 if it returned true."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # multi-threaded process: that is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)  # type: ignore[operator]
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raises_handle_dead(call: object, *arguments: object) -> bool:
    try:
        call(*arguments)  # type: ignore[operator]
    except HandleDead:
        return True
    return False


def test_handles_are_dead_in_a_forked_child_and_alive_in_the_parent(pair: ChannelPair) -> None:
    front_end, engine = pair.front_end, pair.engine

    def all_dead() -> bool:
        return (
            raises_handle_dead(front_end.submit, request(), i32(1))
            and raises_handle_dead(front_end.poll)
            and raises_handle_dead(front_end.cancel, 0, 1)
            and raises_handle_dead(engine.poll_request)
            and raises_handle_dead(engine.publish)
        )

    assert in_child(all_dead) == 0
    assert front_end.submit(request(), i32(1))
    assert engine.poll_request() is not None
    assert write_tokens(engine, 7)


def test_closing_in_the_child_tells_the_peer_nothing(pair: ChannelPair) -> None:
    rings(pair.req_read_fd)

    def close_both() -> bool:
        pair.front_end.close()
        pair.engine.close()
        return True

    assert in_child(close_both) == 0
    assert rings(pair.req_read_fd) == 0
    assert not pair.engine.peer_closed
    assert not pair.front_end.peer_closed


def test_a_stats_page_is_dead_in_a_forked_child() -> None:
    name = page_name(server_prefix(), Role.ENGINE, 0)
    with StatsPage.create(name, Role.ENGINE) as page:
        try:
            assert in_child(lambda: raises_handle_dead(page.add, "steps")) == 0
            page.add("steps")
            assert page.get("steps") == 1
        finally:
            page.unlink()
