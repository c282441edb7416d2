"""Requests through the REQ ring: what goes in comes out, full is a result, nonsense is refused before it is written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair, i32, request, u32
from tokring_ipc import (
    REQUEST_DTYPE,
    ExtensionKind,
    decode_extensions,
    encode_extensions,
    req_ring_bytes,
    request_frame_bytes,
)


def test_a_request_arrives_with_every_field(pair: ChannelPair) -> None:
    sent = request(
        5, 9, temperature=0.5, seed=-3, max_tokens=7, num_stop_ids=2, deadline_ns=1 << 60, num_prior_output=1
    )
    sent["stop_ids"][:2] = [11, 12]
    extensions = [
        (ExtensionKind.BAD_WORDS, b"abc"),
        (ExtensionKind.CACHE_SALT, b""),
        (ExtensionKind.GRAMMAR_REGEX, b"x" * 8),
    ]
    assert pair.front_end.submit(sent, i32(1, 2, 3), encode_extensions(extensions))
    got = pair.engine.poll_request()
    assert got is not None
    assert (got.stream_slot, got.slot_generation, got.num_ids) == (5, 9, 3)
    assert got.ids.tolist() == [1, 2, 3]
    assert got.extensions == extensions
    for field in REQUEST_DTYPE.names or ():
        if field not in ("num_ids", "extension_bytes"):
            assert np.array_equal(got.record[field], sent[field]), field


def test_a_request_without_ids_and_one_that_fills_its_frame_arrive(pair: ChannelPair) -> None:
    most = (pair.front_end.max_request_bytes - request_frame_bytes(0, 0)) // 4
    while request_frame_bytes(most + 1, 0) <= pair.front_end.max_request_bytes:
        most += 1
    for ids in (i32(), np.arange(most, dtype=np.int32)):
        assert pair.front_end.submit(request(), ids)
        got = pair.engine.poll_request()
        assert got is not None
        assert np.array_equal(got.ids, ids)
        pair.engine.release_requests()


def test_a_request_outlives_the_ring_it_came_through(pair: ChannelPair) -> None:
    assert pair.front_end.submit(request(), i32(41, 42))
    got = pair.engine.poll_request()
    assert got is not None
    ids = got.ids
    del got
    pair.engine.release_requests()
    for _ in range(200):  # overwrites the ring
        assert pair.front_end.submit(request(), np.zeros(500, np.int32))
        assert pair.engine.poll_request() is not None
        pair.engine.release_requests()
    pair.close_ends()
    assert ids.tolist() == [41, 42]


def test_the_range_of_ids_is_reported(pair: ChannelPair) -> None:
    for ids, expected in ((i32(), (0, 0)), (i32(5), (5, 5)), (i32(3, -1, 9), (-1, 9))):
        assert pair.front_end.submit(request(), ids)
        got = pair.engine.poll_request()
        assert got is not None
        assert got.id_range == expected


def test_submit_is_refused_when_the_request_ring_is_full(pair: ChannelPair) -> None:
    ids = np.zeros(1000, np.int32)
    accepted = 0
    while pair.front_end.submit(request(), ids):
        accepted += 1
    assert accepted == (1 << 16) // request_frame_bytes(1000, 0)
    assert pair.front_end.counters["sent_full"] == 1
    while pair.engine.poll_request() is not None:
        accepted -= 1
    assert accepted == 0
    assert not pair.front_end.submit(request(), ids)  # polled, not yet released
    pair.engine.release_requests()
    assert pair.front_end.submit(request(), ids)


def test_many_requests_cost_one_publish(pair: ChannelPair) -> None:
    assert pair.front_end.submit_many([(request(slot), i32(slot), b"") for slot in range(10)]) == 10
    assert pair.front_end.counters["doorbells_suppressed"] == 1
    got = [pair.engine.poll_request() for _ in range(11)]
    assert [r.stream_slot for r in got[:10] if r is not None] == list(range(10))
    assert got[10] is None


def test_many_requests_stop_at_the_first_that_does_not_fit(pair: ChannelPair) -> None:
    items = [(request(slot), np.zeros(3000, np.int32), b"") for slot in range(10)]
    assert pair.front_end.submit_many(items) == (1 << 16) // request_frame_bytes(3000, 0)


def test_what_was_committed_before_a_bad_item_is_shown(pair: ChannelPair) -> None:
    with pytest.raises(ValueError, match="stream slot 64"):
        pair.front_end.submit_many([(request(0), i32(1), b""), (request(64), i32(1), b"")])
    assert pair.engine.poll_request() is not None
    assert pair.engine.poll_request() is None


@pytest.mark.parametrize(
    ("record", "ids", "extensions", "message"),
    [
        (request(64), i32(1), b"", "slots are below 64"),
        (request(0, 0), i32(1), b"", "generations start at 1"),
        (request(num_stop_ids=9), i32(1), b"", "more than 8 inline stop ids"),
        (request(num_prior_output=2), i32(1), b"", "num_prior_output"),
        (request(), i32(1), b"abc", "encode_extensions"),
        (request(), np.zeros(5000, np.int32), b"", "larger than a quarter of the request ring"),
        (np.zeros(2, REQUEST_DTYPE), i32(1), b"", "needed one record of 144"),
    ],
)
def test_a_request_that_no_engine_would_take_is_refused_before_it_is_written(
    pair: ChannelPair, record: object, ids: object, extensions: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pair.front_end.submit(record, ids, extensions)  # type: ignore[arg-type]
    assert pair.front_end.submit(request(), i32(1))
    assert pair.engine.poll_request() is not None


def test_ids_of_another_type_are_refused_not_converted(pair: ChannelPair) -> None:
    for ids in (np.zeros(3, np.int64), np.zeros((3, 3), np.int32), np.zeros(8, np.int32)[::2], [1, 2]):
        with pytest.raises(TypeError):
            pair.front_end.submit(request(), ids)  # type: ignore[arg-type]


def test_a_ring_sized_for_a_prompt_takes_that_prompt() -> None:
    with ChannelPair(req_bytes=req_ring_bytes(131_072)) as pair:
        assert pair.front_end.submit(request(), np.zeros(131_072, np.int32), bytes(65536 // 2))


def test_extensions_that_are_cut_short_are_refused() -> None:
    data = encode_extensions([(ExtensionKind.CACHE_SALT, b"0123456789")])
    assert decode_extensions(data) == [(ExtensionKind.CACHE_SALT, b"0123456789")]
    for cut in (4, len(data) - 8):
        with pytest.raises(ValueError, match="extension"):
            decode_extensions(data[:cut])


# ---- cancel table ----


def test_a_cancel_ends_its_generation_and_everything_older_in_that_slot(pair: ChannelPair) -> None:
    slots, generations = u32(3, 3, 3, 4), u32(6, 7, 8, 7)
    assert not pair.engine.cancelled(slots, generations).any()
    pair.front_end.cancel(3, 7)
    assert pair.engine.cancelled(slots, generations).tolist() == [True, True, False, False]
    one_by_one = zip(slots.tolist(), generations.tolist(), strict=True)
    assert [pair.engine.is_cancelled(slot, generation) for slot, generation in one_by_one] == [True, True, False, False]


def test_a_cancel_needs_no_space_in_a_full_ring(pair: ChannelPair) -> None:
    while pair.front_end.submit(request(1), np.zeros(1000, np.int32)):
        pass
    pair.front_end.cancel(1, 1)
    assert pair.engine.cancelled(u32(1), u32(1)).all()


def test_news_of_cancels_is_told_once(pair: ChannelPair) -> None:
    assert not pair.engine.new_cancels()
    pair.front_end.cancel(3, 1)
    pair.front_end.cancel(4, 1)
    assert not pair.engine.arm_requests()  # nobody goes to sleep on it
    assert pair.engine.new_cancels()
    assert not pair.engine.new_cancels()
    assert pair.engine.cancelled(u32(3, 5), u32(1, 1)).tolist() == [True, False]


def test_cancelled_fills_the_callers_array(pair: ChannelPair) -> None:
    out = np.ones(2, np.bool_)
    pair.front_end.cancel(0, 1)
    assert pair.engine.cancelled(u32(0, 1), u32(1, 1), out) is out
    assert out.tolist() == [True, False]
    with pytest.raises(ValueError, match="out has 2 elements, needed 1"):
        pair.engine.cancelled(u32(0), u32(1), out)
    with pytest.raises(ValueError, match="generations"):
        pair.engine.cancelled(u32(0), u32(1, 2))


def test_a_slot_out_of_range_counts_as_cancelled_and_cannot_be_cancelled(pair: ChannelPair) -> None:
    assert pair.engine.cancelled(u32(64, 0xFFFFFFFF), u32(1, 1)).all()
    with pytest.raises(IndexError):
        pair.front_end.cancel(64, 1)
