"""Rare control calls beside the rings."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tokring_ipc import CallRefused, CallStatus, ControlCaller, ControlMethod, PeerCorrupt, PeerGone, receive_calls


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


Sockets = tuple[socket.socket, socket.socket]


def test_a_call_is_answered(sockets: Sockets) -> None:
    caller = ControlCaller(sockets[0])
    future = caller.call(ControlMethod.RESET_PREFIX_CACHE, {"reset_running_requests": True})
    (call,) = receive_calls(sockets[1])
    assert call.method is ControlMethod.RESET_PREFIX_CACHE
    assert call.payload == {"reset_running_requests": True}
    assert not future.done()
    call.reply({"blocks": 7})
    assert caller.on_readable()
    assert future.result(0) == {"blocks": 7}
    assert caller.num_pending == 0


def test_answers_find_their_calls_in_any_order(sockets: Sockets) -> None:
    caller = ControlCaller(sockets[0])
    futures = [caller.call(ControlMethod.PAUSE, number) for number in range(3)]
    for call in reversed(receive_calls(sockets[1])):
        call.reply(call.payload * 10)
    assert caller.on_readable()
    assert [future.result(0) for future in futures] == [0, 10, 20]


def test_a_refusal_arrives_with_its_text(sockets: Sockets) -> None:
    caller = ControlCaller(sockets[0])
    future = caller.call(ControlMethod.RESUME)
    receive_calls(sockets[1])[0].refuse(CallStatus.FAILED, "not paused")
    caller.on_readable()
    with pytest.raises(CallRefused, match="not paused") as caught:
        future.result(0)
    assert caught.value.status is CallStatus.FAILED


def test_all_pending_calls_fail_when_the_peer_dies_and_later_ones_at_once(sockets: Sockets) -> None:
    caller = ControlCaller(sockets[0])
    futures = [caller.call(ControlMethod.PAUSE) for _ in range(3)]
    sockets[1].close()
    assert not caller.on_readable()
    futures.append(caller.call(ControlMethod.PAUSE))
    for future in futures:
        with pytest.raises(PeerGone):
            future.result(0)
    assert not caller.on_readable()


def test_the_answering_side_sees_the_end(sockets: Sockets) -> None:
    sockets[0].close()
    with pytest.raises(PeerGone):
        receive_calls(sockets[1])


def test_nothing_to_receive_is_an_empty_list(sockets: Sockets) -> None:
    assert receive_calls(sockets[1]) == []
    assert ControlCaller(sockets[0]).on_readable()


@pytest.mark.parametrize("packet", [b"x", b"\0" * 48, b"\x80\x04N." * 30])
def test_nonsense_is_peer_corrupt(sockets: Sockets, packet: bytes) -> None:
    sockets[0].send(packet)
    with pytest.raises(PeerCorrupt):
        receive_calls(sockets[1])


def test_a_packet_cut_short_or_without_json_is_peer_corrupt(sockets: Sockets) -> None:
    ControlCaller(sockets[0]).call(ControlMethod.PAUSE, "abcdef")
    packet = sockets[1].recv(65536)
    for forged in (packet[:-1], packet[:-1] + b"}"):
        sockets[0].send(forged)
        with pytest.raises(PeerCorrupt):
            receive_calls(sockets[1])


def test_nonsense_from_the_engine_fails_what_is_pending(sockets: Sockets) -> None:
    caller = ControlCaller(sockets[0])
    future = caller.call(ControlMethod.PAUSE)
    sockets[1].send(b"nonsense")
    assert not caller.on_readable()
    with pytest.raises(PeerGone):
        future.result(0)


def test_a_payload_that_fits_no_packet_is_refused(sockets: Sockets) -> None:
    with pytest.raises(ValueError, match="at most"):
        ControlCaller(sockets[0]).call(ControlMethod.PAUSE, "x" * 70000)


def test_an_engine_that_does_not_read_blocks_nobody(sockets: Sockets) -> None:
    caller = ControlCaller(sockets[0])
    futures = [caller.call(ControlMethod.PAUSE, "x" * 30000) for _ in range(100)]
    failed = [future for future in futures if future.done()]
    assert failed
    with pytest.raises(BlockingIOError):
        failed[0].result(0)
