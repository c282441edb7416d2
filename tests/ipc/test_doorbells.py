"""Wake-ups: at most one doorbell a sleep, none while the reader polls, none lost."""

from __future__ import annotations

import select

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair, i32, request, rings, u32, write_tokens
from tokring_ipc import _core


@pytest.fixture(autouse=True)
def quiet(pair: ChannelPair) -> None:
    """Takes the two doorbells of attaching away."""
    rings(pair.req_read_fd)
    rings(pair.out_read_fd)


def read_all(pair: ChannelPair) -> int:
    count = 0
    while pair.front_end.poll() is not None:
        count += 1
    pair.front_end.release()
    return count


def test_a_polling_reader_gets_no_doorbell(pair: ChannelPair) -> None:
    for token in range(100):
        write_tokens(pair.engine, token)
        assert read_all(pair) == 1
    assert rings(pair.out_read_fd) == 0
    assert pair.engine.counters["doorbells_sent"] == 0
    assert pair.engine.counters["doorbells_suppressed"] == 100


def test_a_sleeping_reader_gets_exactly_one_doorbell_however_many_steps_follow(pair: ChannelPair) -> None:
    for _ in range(5):
        assert pair.front_end.arm()
        for token in range(10):
            write_tokens(pair.engine, token)
        assert rings(pair.out_read_fd) == 1
        assert read_all(pair) == 10
    assert pair.engine.counters["doorbells_sent"] == 5
    assert pair.front_end.counters["sleeps"] == 5


def test_a_reader_that_armed_and_polls_again_is_awake(pair: ChannelPair) -> None:
    assert pair.front_end.arm()
    assert pair.front_end.poll() is None
    write_tokens(pair.engine, 1)
    assert rings(pair.out_read_fd) == 0


def test_a_frame_published_before_arming_forbids_the_sleep(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 1)
    assert not pair.front_end.arm()
    write_tokens(pair.engine, 2)
    assert rings(pair.out_read_fd) == 0
    assert read_all(pair) == 2


def test_a_polled_but_unreleased_ring_may_sleep(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 1)
    assert pair.front_end.poll() is not None
    assert pair.front_end.arm()
    write_tokens(pair.engine, 2)
    assert rings(pair.out_read_fd) == 1


def test_publish_only_remembers_the_doorbell_and_ring_pays_it_once(pair: ChannelPair) -> None:
    assert pair.front_end.arm()
    pair.engine.write_step(u32(1), u32(1), i32(1))
    pair.engine.publish()
    assert pair.engine.doorbell_owed
    pair.engine.write_step(u32(1), u32(1), i32(2))
    pair.engine.publish()  # does not cross wake_at again, but the debt stays
    assert rings(pair.out_read_fd) == 0
    pair.engine.ring()
    pair.engine.ring()
    assert rings(pair.out_read_fd) == 1


def test_publishing_nothing_does_nothing(pair: ChannelPair) -> None:
    assert pair.front_end.arm()
    pair.engine.publish()
    pair.engine.ring()
    assert rings(pair.out_read_fd) == 0
    assert pair.engine.counters["doorbells_suppressed"] == 0


def test_a_request_wakes_a_sleeping_engine_only(pair: ChannelPair) -> None:
    assert pair.front_end.submit(request(), i32(1))
    assert rings(pair.req_read_fd) == 0
    assert not pair.engine.arm_requests()
    assert pair.engine.poll_request() is not None
    assert pair.engine.arm_requests()
    assert pair.front_end.submit(request(), i32(1))
    assert pair.front_end.submit(request(), i32(1))
    assert rings(pair.req_read_fd) == 1


def test_a_cancel_wakes_a_sleeping_engine_and_not_a_busy_one(pair: ChannelPair) -> None:
    pair.front_end.cancel(1, 1)
    assert rings(pair.req_read_fd) == 0
    assert not pair.engine.arm_requests()  # news: look at the cancel table first
    assert pair.engine.arm_requests()
    pair.front_end.cancel(2, 1)
    assert rings(pair.req_read_fd) == 1
    assert pair.engine.cancelled(u32(2), u32(1)).all()
    assert pair.engine.arm_requests()


def test_the_wake_word_shows_who_sleeps_where(pair: ChannelPair) -> None:
    assert pair.word("out_wake_at") == _core.AWAKE
    write_tokens(pair.engine, 1)
    assert read_all(pair) == 1
    assert pair.front_end.arm()
    assert pair.word("out_wake_at") == pair.word("out_write_position") == 64
    pair.front_end.poll()
    assert pair.word("out_wake_at") == _core.AWAKE


def test_draining_empties_a_flooded_doorbell(pair: ChannelPair) -> None:
    import os

    os.write(pair.out_write_fd, bytes(5000))
    pair.front_end.drain_doorbell()
    assert not select.select([pair.out_read_fd], [], [], 0)[0]
    pair.front_end.drain_doorbell()  # empty: returns at once


def test_a_full_doorbell_pipe_blocks_nobody(pair: ChannelPair) -> None:
    import os

    try:
        while True:
            os.write(pair.out_write_fd, bytes(65536))
    except BlockingIOError:
        pass
    assert pair.front_end.arm()
    write_tokens(pair.engine, 1)
    assert read_all(pair) == 1


def test_two_threads_exchange_many_steps_and_never_miss_a_wake_up(pair: ChannelPair) -> None:
    """Reader sleeps in select() between steps; every sleep must end by a doorbell, not by the watchdog."""
    import threading

    steps = 3000
    got: list[int] = []
    missed: list[int] = []

    def reader() -> None:
        while len(got) < steps:
            while (frame := pair.front_end.poll()) is not None:
                got.extend(frame.token_id.tolist())
                del frame
                pair.front_end.release()
            if len(got) < steps and pair.front_end.arm():
                if not select.select([pair.out_read_fd], [], [], 5)[0]:
                    missed.append(len(got))
                    return
                pair.front_end.drain_doorbell()

    thread = threading.Thread(target=reader)
    thread.start()
    slot, generation = u32(1), u32(1)
    for token in range(steps):
        while not pair.engine.write_step(slot, generation, np.array([token], np.int32)):
            if not thread.is_alive():
                break
        pair.engine.publish()
        pair.engine.ring()
    thread.join()
    assert missed == []
    assert got == list(range(steps))
    sent = pair.engine.counters["doorbells_sent"]
    assert sent <= pair.front_end.counters["sleeps"]
