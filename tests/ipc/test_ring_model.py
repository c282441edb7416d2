"""The channel against a model made of two queues, driven by hypothesis."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.ipc.channel_pair import ChannelPair, request, rings
from tests.ipc.test_steps import finished
from tokring_ipc import FrameFlag, request_frame_bytes

NUM_SLOTS = 4096


class ChannelMachine(RuleBasedStateMachine):
    """Sizes are such that a few frames fill a ring, so that wraps and full rings are common."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = ChannelPair(num_stream_slots=NUM_SLOTS, crc=True, accept={"crc": True})
        rings(self.pair.req_read_fd)
        rings(self.pair.out_read_fd)
        self.serial = 0
        self.committed: list[tuple[list[int], list[int]]] = []  # (tokens, finished slots), not yet published
        self.published: deque[tuple[list[int], list[int]]] = deque()
        self.requests: deque[list[int]] = deque()
        self.asleep = False
        self.doorbell = False

    def teardown(self) -> None:
        self.pair.close()

    @rule(rows=st.integers(0, 5000), finishes=st.integers(0, 40))
    def write_step(self, rows: int, finishes: int) -> None:
        if rows + finishes == 0:
            return
        tokens = np.arange(self.serial, self.serial + rows, dtype=np.int32)
        slots = np.arange(rows, dtype=np.uint32) % NUM_SLOTS
        done = finished(*range(finishes))
        free = self.pair.engine.out_free_bytes()
        if self.pair.engine.write_step(slots, np.ones(rows, np.uint32), tokens, done):
            self.serial += rows
            self.committed.append((tokens.tolist(), done["stream_slot"].tolist()))
        else:
            assert free < 12 * rows + 64 * finishes + 8 * 256

    @rule()
    def publish_and_ring(self) -> None:
        self.pair.engine.publish()
        if self.committed and self.asleep:
            assert self.pair.engine.doorbell_owed or self.doorbell
        self.pair.engine.ring()
        expected = 1 if self.committed and self.asleep and not self.doorbell else 0
        assert rings(self.pair.out_read_fd) == expected
        self.doorbell = self.doorbell or expected == 1
        self.published.extend(self.committed)
        self.committed.clear()

    @rule()
    def read_one_step(self) -> None:
        self.asleep = self.doorbell = False
        tokens: list[int] = []
        done: list[int] = []
        more = True
        while more:
            frame = self.pair.front_end.poll()
            if frame is None:
                assert not self.published
                return
            tokens += frame.token_id.tolist()
            done += frame.finish["stream_slot"].tolist()
            more = bool(frame.flags & FrameFlag.MORE)
        assert (tokens, done) == self.published.popleft()

    @rule()
    def release(self) -> None:
        self.pair.front_end.release()

    @rule()
    def arm(self) -> None:
        may_sleep = self.pair.front_end.arm()
        assert may_sleep == (not self.published)
        self.asleep, self.doorbell = may_sleep, False

    @rule(num_ids=st.integers(0, 4000))
    def submit(self, num_ids: int) -> None:
        if request_frame_bytes(num_ids, 0) > self.pair.front_end.max_request_bytes:
            return
        ids = np.arange(self.serial, self.serial + num_ids, dtype=np.int32)
        free = self.pair.front_end.req_free_bytes()
        accepted = self.pair.front_end.submit(request(), ids)
        assert accepted == (free >= request_frame_bytes(num_ids, 0))
        if accepted:
            self.requests.append(ids.tolist())

    @rule()
    def take_request(self) -> None:
        got = self.pair.engine.poll_request()
        assert (got is not None) == bool(self.requests)
        if got is not None:
            assert got.ids.tolist() == self.requests.popleft()

    @precondition(lambda self: True)
    @rule()
    def release_requests(self) -> None:
        self.pair.engine.release_requests()

    @invariant()
    def positions_are_ordered(self) -> None:
        for ring in ("req", "out"):
            used = self.pair.word(f"{ring}_write_position") - self.pair.word(f"{ring}_read_position")
            assert 0 <= used <= 1 << 16


ChannelMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_a_channel_behaves_like_two_queues = ChannelMachine.TestCase
