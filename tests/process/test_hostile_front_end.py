"""A front end that turned hostile hurts nobody but itself: others' answers stay right, the engine lives."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.test_intake import BAD_FIELDS
from tests.ipc.test_handshake import header, hello
from tests.process.test_engine_restart import Answer, ask, metric
from tests.support.hostile_front_end import HostileFrontEnd, connect_control
from tests.support.serving import ServerProcess, mock_server, wait_until
from tokring_ipc import ControlCaller, ControlKind, ControlMethod, ErrorCode, FinishReason, encode_extensions
from tokring_ipc.control import _encode

NUM_NEIGHBOURS = 4


class Neighbours:
    """Clients of another front end, whose answers are known, that ask again and again."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._asked: list[dict[str, Any]] = [
            {"prompt": [index + 1] * 40, "max_tokens": 30, "ignore_eos": True, "temperature": index % 2, "seed": index}
            for index in range(NUM_NEIGHBOURS)
        ]
        self._expected = [self._ask(body) for body in self._asked]
        self._stop = threading.Event()
        self.num_right = [0] * NUM_NEIGHBOURS
        self.wrong: list[object] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_NEIGHBOURS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, body: dict[str, Any]) -> Answer:
        texts, reasons, usage = ask(self._server.url, "completions", body)
        del usage["prompt_tokens_details"]  # what the prefix cache has found: depends on who ran before
        return texts, reasons, usage

    def _run(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                answer = self._ask(self._asked[index])
            except Exception as error:
                self.wrong.append(error)
                return
            if answer != self._expected[index]:
                self.wrong.append(answer)
            self.num_right[index] += 1

    def check(self) -> None:
        """Each has got another right answer from its first token to its last."""
        before = list(self.num_right)
        wait_until(
            lambda: self.wrong or all(now > then + 1 for now, then in zip(self.num_right, before, strict=True)),
            "every neighbour has been answered",
            100,
        )
        assert self.wrong == []

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Attacked:
    """A server with a foreign listener, and neighbours on its own front end."""

    def __init__(self, server: ServerProcess, path: Path) -> None:
        self.server = server
        self.path = path
        self.engine = server.children()["engine 0"]
        self.neighbours = Neighbours(server)

    def connect(self, **sizes: Any) -> HostileFrontEnd:
        return HostileFrontEnd(self.path, **sizes)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    path = tmp_path_factory.mktemp("ipc") / "engine.sock"
    with mock_server("--ipc-listen", str(path), "--mock-step-ms", "1", "--engine-restarts", "0") as server:
        attacked = Attacked(server, path)
        yield attacked
        attacked.neighbours.stop()
        assert attacked.neighbours.wrong == []
        assert metric(server, "engine_restarts") == 0
        assert server.children()["engine 0"] == attacked.engine


def forge_frame(hostile: HostileFrontEnd) -> None:
    """Noise where the next request is read, published."""
    rng = random.Random(1)
    hostile.memory[hostile.req_offset : hostile.req_offset + 4096] = rng.randbytes(4096)
    hostile.set_word("req_write_position", 4096)
    hostile.ring()


def forge_write_position(hostile: HostileFrontEnd) -> None:
    hostile.set_word("req_write_position", (1 << 64) - 64)
    hostile.ring()


def forge_read_position_ahead(hostile: HostileFrontEnd) -> None:
    assert hostile.submit([1, 2, 3], max_tokens=100)
    hostile.set_word("out_read_position", 1 << 40)
    hostile.ring()


def forge_read_position_back(hostile: HostileFrontEnd) -> None:
    assert hostile.submit([1, 2, 3])
    hostile.next_finish()
    hostile.set_word("out_read_position", 0)
    hostile.ring()


def send_nonsense(hostile: HostileFrontEnd) -> None:
    hostile.control.send(b"nonsense")


def send_nested_json(hostile: HostileFrontEnd) -> None:
    """Deeper than a parser that recurses can go."""
    packet = _encode(ControlKind.CALL, 1, ControlMethod.INSPECT, 0, "x" * 60000)  # type: ignore[arg-type]
    hostile.control.send(packet[:-60002] + b"[" * 60002)


@pytest.mark.parametrize(
    "attack",
    [
        forge_frame,
        forge_write_position,
        forge_read_position_ahead,
        forge_read_position_back,
        send_nonsense,
        send_nested_json,
    ],
)
def test_a_forger_loses_its_channel_and_nothing_else_happens(
    attacked: Attacked, attack: Callable[[HostileFrontEnd], None]
) -> None:
    with attacked.connect() as hostile:
        attack(hostile)
        wait_until(hostile.is_closed, "the engine closes the forger's channel")
        attacked.neighbours.check()


def test_the_segment_cannot_be_truncated_under_the_engine(attacked: Attacked) -> None:
    with attacked.connect() as hostile:
        for size in (0, 1 << 30):
            with pytest.raises(OSError) as caught:
                os.ftruncate(hostile.channel.segment_fd, size)
            assert caught.value.errno == errno.EPERM
        attacked.neighbours.check()


def test_every_field_out_of_range_is_refused_or_closes_its_channel(attacked: Attacked) -> None:
    """The table of tests/engine/test_intake.py, through a real ring."""
    outcomes = {"refused": 0, "closed": 0, "not sent": 0}
    for bad in BAD_FIELDS:
        if bad == {"ids": [1] * 256}:
            continue  # this engine's sequences may be longer
        fields = dict(bad)
        # The table is made for a vocabulary of 97; this one has 400.
        ids = [400 if token_id == 97 else token_id for token_id in fields.pop("ids", [1, 2, 3])]
        extensions = encode_extensions(
            [
                (kind, data.replace(struct.pack("<i", 97), struct.pack("<i", 400)))
                for kind, data in fields.pop("extensions", [])
            ]
        )
        if "stop_ids" in fields:
            fields |= {"stop_ids": [400] * 8, "num_stop_ids": 1}
        with attacked.connect() as hostile:
            try:
                assert hostile.submit(ids, extensions=extensions, **({"max_tokens": 16} | fields))
            except ValueError:
                outcomes["not sent"] += 1  # FrontEndChannel itself knows better
                continue
            finish = hostile.next_finish()
            outcomes["closed" if finish is None else "refused"] += 1
            if finish is not None:
                assert finish[0]["reason"] == FinishReason.ERROR, bad
                assert finish[0]["error_code"] in (ErrorCode.INVALID_REQUEST, ErrorCode.GRAMMAR), bad
    assert outcomes["refused"] > 25, outcomes
    attacked.neighbours.check()


def test_a_flood_of_refused_requests_whose_answers_nobody_reads_costs_the_engine_no_memory(attacked: Attacked) -> None:
    with attacked.connect(out_bytes=1 << 20) as hostile:
        before = psutil.Process(attacked.engine.pid).memory_info().rss
        sent = 0
        stop = threading.Event()

        def flood() -> None:
            nonlocal sent
            while not stop.is_set() and sent < 400_000:
                sent += hostile.submit([-1])

        thread = threading.Thread(target=flood)
        thread.start()
        attacked.neighbours.check()
        wait_until(lambda: sent > 1000, "a flood worth the name was sent", 60)
        stop.set()
        thread.join()
        grown = psutil.Process(attacked.engine.pid).memory_info().rss - before
        assert grown < 64 << 20
    attacked.neighbours.check()


def test_a_flood_of_control_calls_and_doorbells_keeps_nobody_waiting(attacked: Attacked) -> None:
    with attacked.connect() as hostile:
        packet = _encode(ControlKind.CALL, 1, ControlMethod.INSPECT, 0, None)  # type: ignore[arg-type]
        stop = threading.Event()
        hostile.control.settimeout(1)

        def flood() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    hostile.control.send(packet)  # waits while the engine's queue of packets is full
                with contextlib.suppress(BlockingIOError):
                    os.write(hostile.req_write_fd, bytes(4096))

        thread = threading.Thread(target=flood)
        thread.start()
        attacked.neighbours.check()
        stop.set()
        thread.join()


def test_doorbells_may_be_filled_drained_or_closed(attacked: Attacked) -> None:
    with attacked.connect() as hostile:
        # A pipe can be opened anew through /proc, at its other end too.
        wrong_out = os.open(f"/proc/self/fd/{hostile.out_read_fd}", os.O_WRONLY | os.O_NONBLOCK)
        wrong_req = os.open(f"/proc/self/fd/{hostile.req_write_fd}", os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(wrong_out, bytes(65536))
        for _ in range(3):
            assert hostile.submit([1, 2, 3])
            with contextlib.suppress(BlockingIOError):
                os.read(wrong_req, 65536)  # the engine's wake-up is gone: its recheck finds the request
            assert hostile.finishes()[0]["reason"] == FinishReason.LENGTH
        os.close(wrong_out)
        os.close(wrong_req)
        os.close(hostile.req_write_fd)
        os.close(hostile.out_read_fd)
        hostile.req_write_fd = hostile.out_read_fd = -1
        attacked.neighbours.check()


def test_a_forged_cancel_table_ends_its_owners_requests_only(attacked: Attacked) -> None:
    with attacked.connect() as hostile:
        assert hostile.submit([1, 2, 3], max_tokens=100_000)
        hostile.memory[hostile.cancel_offset : hostile.cancel_offset + 256] = b"\xff" * 256
        hostile.set_word("cancel_count", 7)
        hostile.ring()
        assert hostile.finishes()[0]["reason"] == FinishReason.ABORT
        attacked.neighbours.check()


def test_equal_slots_and_generations_and_parents_that_do_not_exist_are_served(attacked: Attacked) -> None:
    with attacked.connect() as hostile:
        ended = 0
        for _ in range(8):
            assert hostile.submit([1, 2, 3], stream_slot=1, slot_generation=1, parent_slot=1)
            assert hostile.submit([1, 2, 3], stream_slot=2, slot_generation=2**32 - 1, parent_slot=77)
        while ended < 16:
            ended += len(hostile.finishes())
        attacked.neighbours.check()


def test_a_foreign_front_end_cannot_pause_the_engine(attacked: Attacked) -> None:
    with attacked.connect() as hostile:
        caller = ControlCaller(hostile.control)
        calls = [caller.call(method) for method in (ControlMethod.PAUSE, ControlMethod.RESET_PREFIX_CACHE)]
        wait_until(lambda: caller.on_readable() and all(call.done() for call in calls), "answers")
        assert all("not for front ends" in str(call.exception()) for call in calls)
        attacked.neighbours.check()


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"x",
        header(ControlKind.SEGMENT),
        hello(req_bytes=1 << 40),
        hello(req_bytes=1 << 29),
        hello(out_bytes=65535),
    ],
    ids=["hangs up", "short", "wrong kind", "1 TiB", "more than a stranger may have", "odd size"],
)
def test_a_bad_greeting_is_turned_away(attacked: Attacked, packet: bytes) -> None:
    control, doorbells = connect_control(attacked.path)
    with control:
        if packet:
            control.send(packet)
            wait_until(lambda: b"" in (control.recv(65536), control.recv(65536)), "the engine hangs up")
    for fd in doorbells:
        os.close(fd)
    attacked.neighbours.check()


def test_many_silent_connections_leave_nothing_behind(attacked: Attacked) -> None:
    before = attacked.engine.num_fds()
    for _ in range(3):
        silent = [connect_control(attacked.path) for _ in range(20)]
        attacked.neighbours.check()
        for control, doorbells in silent:
            control.close()
            for fd in doorbells:
                os.close(fd)
    wait_until(lambda: attacked.engine.num_fds() <= before, "the engine's descriptors are closed")
