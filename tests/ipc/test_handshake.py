"""Attaching: what is agreed, what is refused, and in which words."""

from __future__ import annotations

import fcntl
import os
import socket
import threading

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair, i32, request, rings
from tokring_ipc import AttachError, ControlKind, EngineChannel, FrontEndChannel, HandleDead, _core

HEADER = _core.struct_dtype("ControlHeader")
HELLO = _core.struct_dtype("HelloMessage")
SEGMENT = _core.struct_dtype("SegmentMessage")
REFUSE = _core.struct_dtype("RefuseMessage")


def header(kind: ControlKind, **fields: int) -> bytes:
    record = np.zeros((), HEADER)
    record["magic"] = _core.CONTROL_MAGIC
    record["kind"] = kind
    record["layout_version"] = _core.LAYOUT_VERSION
    record["layout_hash"] = _core.LAYOUT_HASH
    record["pid"] = os.getpid()
    for name, value in fields.items():
        record[name] = value
    return record.tobytes()


def hello(*, req_bytes: int = 1 << 16, out_bytes: int = 1 << 16, num_stream_slots: int = 8, **fields: int) -> bytes:
    record = np.zeros((), HELLO)
    record["req_bytes"] = req_bytes
    record["out_bytes"] = out_bytes
    record["num_stream_slots"] = num_stream_slots
    return header(ControlKind.HELLO, **fields) + record.tobytes()


def accept(packet: bytes | None, *, timeout_s: float = 5.0, max_segment_bytes: int = 1 << 30) -> tuple[str, bytes]:
    """Sends one packet (None: hangs up) to an accepting engine. Returns (the engine's error, its answer)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbells = os.pipe()
    with ours, theirs:
        ours.close() if packet is None else ours.send(packet)
        with pytest.raises(AttachError) as caught:
            EngineChannel.accept(theirs, *doorbells, timeout_s=timeout_s, max_segment_bytes=max_segment_bytes)
        answer = b"" if packet is None else ours.recv(65536, socket.MSG_DONTWAIT)
    for fd in doorbells:
        os.close(fd)
    return str(caught.value), answer


def connect(packet: bytes | None, fds: list[int] | None = None, **options: object) -> str:
    """Answers a connecting front end's HELLO with one packet (None: hangs up). Returns the front end's error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbells = os.pipe()

    def answer() -> None:
        theirs.recv(65536)
        theirs.close() if packet is None else socket.send_fds(theirs, [packet], fds or [])

    thread = threading.Thread(target=answer)
    thread.start()
    with ours, theirs, pytest.raises(AttachError) as caught:
        FrontEndChannel.connect(
            ours, doorbells[1], doorbells[0], req_bytes=1 << 16, out_bytes=1 << 16, num_stream_slots=8, timeout_s=5.0
        )
    thread.join()
    for fd in doorbells:
        os.close(fd)
    return str(caught.value)


def segment_message(segment_bytes: int, generation: int = 1, **fields: int) -> bytes:
    record = np.zeros((), SEGMENT)
    record["segment_bytes"] = segment_bytes
    record["connection_generation"] = generation
    return header(ControlKind.SEGMENT, **fields) + record.tobytes()


# ---- what is agreed ----


def test_both_sides_agree_on_generation_sizes_and_names(pair: ChannelPair) -> None:
    assert pair.front_end.connection_generation == pair.engine.connection_generation != 0
    assert pair.front_end.num_stream_slots == pair.engine.num_stream_slots == 64
    assert pair.front_end.engine_pid == pair.engine.frontend_pid == os.getpid()
    assert pair.header["layout_hash"] == _core.LAYOUT_HASH


def test_ring_sizes_are_rounded_up_to_powers_of_two() -> None:
    with ChannelPair(req_bytes=100_000, out_bytes=1) as pair:
        assert pair.front_end.max_request_bytes == (1 << 17) // 4
        assert pair.engine.max_step_bytes == (1 << 16) // 4


def test_indices_are_carried_both_ways() -> None:
    with ChannelPair(frontend_index=3, accept={"engine_index": 2}) as pair:
        assert pair.engine.frontend_index == 3
        assert pair.front_end.engine_index == 2


def test_attaching_rings_both_doorbells_once(pair: ChannelPair) -> None:
    assert rings(pair.req_read_fd) == 1
    assert rings(pair.out_read_fd) == 1


def test_every_connection_is_a_new_generation() -> None:
    generations = set()
    for _ in range(8):
        with ChannelPair() as pair:
            generations.add(pair.engine.connection_generation)
    assert len(generations) == 8


# ---- what the engine refuses ----


def test_another_layout_is_refused_and_both_sides_are_named() -> None:
    error, answer = accept(hello(layout_hash=0x1234, layout_version=9, pid=4711))
    assert "the front end (pid 4711) has layout version 9, hash 0x1234" in error
    assert (
        f"the engine (pid {os.getpid()}) has layout version {_core.LAYOUT_VERSION}, hash {_core.LAYOUT_HASH:#x}"
        in error
    )
    assert error.encode() in answer


def test_the_refused_front_end_repeats_the_engines_words() -> None:
    text = b"no more front ends: raise --api-server-count"
    refuse = np.zeros((), REFUSE)
    refuse["text_bytes"] = len(text)
    error = connect(header(ControlKind.REFUSE) + refuse.tobytes() + text)
    assert error == "the engine refused this front end: " + text.decode()


@pytest.mark.parametrize(
    "sizes",
    [
        {"req_bytes": 65535},
        {"out_bytes": 3 << 16},
        {"req_bytes": 1 << 40},
        {"num_stream_slots": 0},
        {"num_stream_slots": 1 << 30},
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    error, answer = accept(hello(**sizes))
    assert "is not possible" in error
    assert error.encode() in answer


def test_a_segment_above_the_engines_limit_is_refused() -> None:
    assert "at most 100000 bytes" in accept(hello(), max_segment_bytes=100_000)[0]


@pytest.mark.parametrize(
    "packet",
    [b"x", b"x" * 100, header(ControlKind.SEGMENT), header(ControlKind.HELLO), hello() + b"\0"],
    ids=["short", "long", "another kind", "header alone", "a byte too many"],  # the packets hold this process's pid
)
def test_a_message_that_is_no_hello_is_refused(packet: bytes) -> None:
    error, answer = accept(packet)
    assert error.encode() in answer


def test_a_front_end_that_hangs_up_is_an_error_at_once() -> None:
    assert "closed the control socket" in accept(None)[0]


# ---- what the front end refuses ----


def test_a_silent_engine_is_a_time_out() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(AttachError, match="timed out waiting for the engine's SEGMENT"):
        FrontEndChannel.connect(ours, 0, 0, timeout_s=0.01)


def test_an_engine_that_hangs_up_is_an_error_at_once() -> None:
    assert "closed the control socket" in connect(None)


def test_another_engines_layout_is_refused_by_the_front_end() -> None:
    assert "the engine (pid 7) has layout version 2" in connect(segment_message(1, layout_version=2, pid=7))


def test_a_segment_message_without_descriptor_is_refused() -> None:
    assert "0 descriptors" in connect(segment_message(1 << 17))


def test_a_descriptor_that_is_not_sealed_is_refused() -> None:
    fd = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 18)
    assert "not a sealed memfd" in connect(segment_message(1 << 18), [fd])
    os.close(fd)


def sealed(data: bytes, size: int) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def test_a_segment_of_another_size_is_refused() -> None:
    fd = sealed(b"", 4096)
    assert "has 4096 bytes, this front end asked for" in connect(segment_message(4096), [fd])
    os.close(fd)


@pytest.mark.parametrize(
    "field",
    [
        "magic",
        "layout_version",
        "layout_hash",
        "req_offset",
        "out_bytes",
        "connection_generation",
        "engine_pid",
        "frontend_pid",
    ],
)
def test_every_forged_word_of_the_header_is_refused(field: str) -> None:
    with ChannelPair(num_stream_slots=8) as pair:
        forged = pair.header
        size = os.fstat(pair.engine.segment_fd).st_size
    forged[field] += 1
    fd = sealed(forged.tobytes(), size)
    error = connect(
        segment_message(size, int(forged["connection_generation"]) - (field == "connection_generation")), [fd]
    )
    assert "segment header: the engine wrote" in error
    os.close(fd)


# ---- the segment itself ----


def test_neither_side_can_truncate_the_segment(pair: ChannelPair) -> None:
    for fd in (pair.engine.segment_fd, pair.front_end.segment_fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)


def test_the_segment_is_reserved_whole(pair: ChannelPair) -> None:
    status = os.fstat(pair.engine.segment_fd)
    assert status.st_blocks * 512 >= status.st_size


def test_descriptors_are_close_on_exec(pair: ChannelPair) -> None:
    for fd in (pair.engine.segment_fd, pair.front_end.segment_fd):
        assert not os.get_inheritable(fd)


def test_use_after_close_is_a_clear_error(pair: ChannelPair) -> None:
    pair.front_end.close()
    pair.front_end.close()
    with pytest.raises(HandleDead, match="closed"):
        pair.front_end.poll()
    assert pair.engine.peer_closed
    pair.engine.close()
    with pytest.raises(HandleDead):
        pair.engine.publish()


def test_closing_wakes_the_peer(pair: ChannelPair) -> None:
    rings(pair.out_read_fd)
    pair.engine.close()
    assert rings(pair.out_read_fd) == 1
    assert pair.front_end.peer_closed


def test_64_generations_leave_no_descriptor_and_no_mapping() -> None:
    def resources() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:tokring" in line for line in maps)

    with ChannelPair():
        pass
    before = resources()
    for _ in range(64):
        with ChannelPair() as pair:
            assert pair.front_end.submit(request(), i32(1))
            assert pair.engine.poll_request() is not None
    assert resources() == before
