"""The reader trusts nothing: whatever stands in the segment, it reads it right or raises PeerCorrupt."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair, i32, request, u32, write_tokens
from tests.ipc.test_steps import finished, logprobs
from tokring_ipc import (
    FINISH_DTYPE,
    FRAME_HEADER_DTYPE,
    PROMPT_LOGPROBS_DTYPE,
    REQUEST_DTYPE,
    SECTION_DTYPE,
    ExtensionKind,
    Frame,
    FrameFlag,
    FrameType,
    PeerCorrupt,
    Request,
    encode_extensions,
    step_bytes,
)

HEADER_BYTES = FRAME_HEADER_DTYPE.itemsize
Dtype = np.dtype[np.void]


def field(dtype: Dtype, name: str, value: int, *, base: int = 0) -> tuple[int, bytes]:
    """(offset, bytes) of one field; value is taken modulo its width."""
    assert dtype.fields is not None
    type_, offset = dtype.fields[name][:2]
    return base + offset, (value % (1 << (8 * type_.itemsize))).to_bytes(type_.itemsize, "little")


def header(name: str, value: int) -> tuple[int, bytes]:
    return field(FRAME_HEADER_DTYPE, name, value)


def write_full_step(pair: ChannelPair) -> None:
    pair.engine.write_step(
        u32(1, 2), u32(1, 1), i32(5, 6, 7), finished(1, 2), num_tokens=u32(2, 1), **logprobs([0, 2], 2)
    )
    pair.engine.publish()


# stream_slot[2] generation[2] num_tokens[2] token_id[3] pad | section, 2 finish rows | section, logprobs
FINISH_SECTION = HEADER_BYTES + 40
FINISH_ROWS = FINISH_SECTION + SECTION_DTYPE.itemsize
LOGPROBS_SECTION = FINISH_ROWS + 2 * FINISH_DTYPE.itemsize

BAD_STEPS: dict[str, tuple[int, bytes]] = {
    "length 0": header("length", 0),
    "length not of whole lines": header("length", 65),
    "length beyond what is published": header("length", 1 << 13),
    "length beyond the ring": header("length", 0xFFFFFFC0),
    "another position": header("position", 64),
    "unknown type": header("type", 77),
    "a request in the OUT ring": header("type", FrameType.REQUEST),
    "too many rows": header("count", 1000),
    "rows beyond 32 bits": header("count", 0xFFFFFFFF),
    "a wrong CRC": header("flags", FrameFlag.HAS_CRC),
    "slot out of range": (HEADER_BYTES, (64).to_bytes(4, "little")),
    "sum of num_tokens beyond the frame": (HEADER_BYTES + 16, b"\xff\xff\xff\xff\xff\xff\xff\xff"),
    "unknown section": field(SECTION_DTYPE, "kind", 9, base=FINISH_SECTION),
    "section twice": field(SECTION_DTYPE, "kind", 1, base=LOGPROBS_SECTION),
    "section beyond the frame": field(SECTION_DTYPE, "bytes", 0xFFFFFFF8, base=FINISH_SECTION),
    "section of odd size": field(SECTION_DTYPE, "bytes", 127, base=FINISH_SECTION),
    "fewer finish rows than bytes": field(SECTION_DTYPE, "count", 1, base=FINISH_SECTION),
    "more finish rows than bytes": field(SECTION_DTYPE, "count", 0xFFFFFFFF, base=FINISH_SECTION),
    "finish slot out of range": field(FINISH_DTYPE, "stream_slot", 64, base=FINISH_ROWS),
    "finish reason 0": field(FINISH_DTYPE, "reason", 0, base=FINISH_ROWS),
    "unknown finish reason": field(FINISH_DTYPE, "reason", 6, base=FINISH_ROWS),
    "logprobs too wide": field(SECTION_DTYPE, "width", 21, base=LOGPROBS_SECTION),
    "logprobs of another width": field(SECTION_DTYPE, "width", 1, base=LOGPROBS_SECTION),
    "logprobs of a token that is not there": (LOGPROBS_SECTION + 16, (3).to_bytes(4, "little")),
}


def test_the_step_that_the_forgeries_start_from_is_sound(pair: ChannelPair) -> None:
    write_full_step(pair)
    frame = pair.front_end.poll()
    assert frame is not None
    data = frame.data.tobytes()
    assert data[FINISH_SECTION : FINISH_SECTION + 2] == b"\x01\x00"
    assert data[LOGPROBS_SECTION : LOGPROBS_SECTION + 2] == b"\x02\x00"


@pytest.mark.parametrize("forgery", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_forged_step_is_peer_corrupt(pair: ChannelPair, forgery: tuple[int, bytes]) -> None:
    write_full_step(pair)
    pair.poke("out", *forgery)
    with pytest.raises(PeerCorrupt, match="closing the channel"):
        pair.front_end.poll()


@pytest.mark.parametrize(
    "forgery",
    [
        field(PROMPT_LOGPROBS_DTYPE, name, value, base=HEADER_BYTES)
        for name, value in (("stream_slot", 64), ("width", 21), ("width", 20))
    ]
    + [header("count", 0xFFFFFFFF)],
)
def test_forged_prompt_logprobs_are_peer_corrupt(pair: ChannelPair, forgery: tuple[int, bytes]) -> None:
    pair.engine.write_prompt_logprobs(1, 1, 0, *list(logprobs([0, 1], 2).values())[1:])
    pair.engine.publish()
    pair.poke("out", *forgery)
    with pytest.raises(PeerCorrupt):
        pair.front_end.poll()


REQUEST = HEADER_BYTES
EXTENSION = HEADER_BYTES + REQUEST_DTYPE.itemsize + 16

BAD_REQUESTS: dict[str, tuple[int, bytes]] = {
    "length": header("length", 64),
    "position": header("position", 1 << 40),
    "a step in the REQ ring": header("type", FrameType.STEP),
    "ids beyond the frame": field(REQUEST_DTYPE, "num_ids", 1000, base=REQUEST),
    "ids beyond 32 bits": field(REQUEST_DTYPE, "num_ids", 0xFFFFFFFF, base=REQUEST),
    "extensions beyond the frame": field(REQUEST_DTYPE, "extension_bytes", 1 << 20, base=REQUEST),
    "extensions of odd size": field(REQUEST_DTYPE, "extension_bytes", 15, base=REQUEST),
    "half an extension": field(REQUEST_DTYPE, "extension_bytes", 24, base=REQUEST),
    "slot out of range": field(REQUEST_DTYPE, "stream_slot", 64, base=REQUEST),
    "generation 0": field(REQUEST_DTYPE, "slot_generation", 0, base=REQUEST),
    "too many stop ids": field(REQUEST_DTYPE, "num_stop_ids", 9, base=REQUEST),
    "more prior output than ids": field(REQUEST_DTYPE, "num_prior_output", 5, base=REQUEST),
    "unknown extension": (EXTENSION, b"\xff\xff"),
    "extension payload beyond the frame": (EXTENSION + 4, b"\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("forgery", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_forged_request_is_peer_corrupt(pair: ChannelPair, forgery: tuple[int, bytes]) -> None:
    extensions = encode_extensions([(ExtensionKind.CACHE_SALT, b"12345678")])
    assert pair.front_end.submit(request(), i32(1, 2, 3, 4), extensions)
    pair.poke("req", *forgery)
    with pytest.raises(PeerCorrupt, match="closing the channel"):
        pair.engine.poll_request()


FORGED_WORDS = {
    "write position behind": ("out_write_position", 0),
    "write position beyond the ring": ("out_write_position", 1 << 20),
    "write position within a line": ("out_write_position", 96),
    "write position at the end of numbers": ("out_write_position", (1 << 64) - 64),
    "request position beyond the ring": ("req_write_position", 1 << 30),
    "read position ahead of the writer": ("out_read_position", 1 << 20),
    "request read position ahead": ("req_read_position", 1 << 20),
}


@pytest.mark.parametrize(("word", "value"), FORGED_WORDS.values(), ids=FORGED_WORDS)
def test_a_forged_control_word_is_peer_corrupt_at_the_next_poll_and_nowhere_else(
    pair: ChannelPair, word: str, value: int
) -> None:
    write_tokens(pair.engine, 1)
    assert pair.front_end.poll() is not None
    pair.set_word(word, value)
    # None of these raises: whoever schedules, submits or goes to sleep need not know about corrupt peers.
    pair.engine.out_free_bytes()
    pair.front_end.req_free_bytes()
    write_tokens(pair.engine, 1)
    pair.set_word(word, value)
    pair.front_end.submit(request(), i32(1))
    pair.set_word(word, value)
    pair.front_end.arm()
    pair.engine.arm_requests()
    victim = pair.engine.poll_request if word in ("req_write_position", "out_read_position") else pair.front_end.poll
    with pytest.raises(PeerCorrupt, match="closing the channel"):
        while victim() is not None:
            pass


def test_a_writer_whose_reader_is_corrupt_reports_no_space(pair: ChannelPair) -> None:
    pair.set_word("out_read_position", 1 << 20)
    assert pair.engine.out_free_bytes() == 0


def test_a_forged_channel_harms_no_other(pair: ChannelPair) -> None:
    with ChannelPair() as other:
        write_tokens(pair.engine, 1)
        pair.poke("out", *header("position", 64))
        with pytest.raises(PeerCorrupt):
            pair.front_end.poll()
        write_tokens(other.engine, 1)
        assert other.front_end.poll() is not None


FRAME_COLUMNS = (
    "data",
    "stream_slot",
    "slot_generation",
    "num_tokens",
    "token_id",
    "finish",
    "logprobs",
    "ready",
    "prompt_logprobs",
)


def read_everything(frame: Any) -> None:
    """Touches every column, so that an over-read would crash."""
    names = FRAME_COLUMNS if isinstance(frame, Frame) else ("ids", "record")
    for name in names:
        try:
            value = getattr(frame, name)
        except TypeError:
            continue  # another type of frame
        for column in value if isinstance(value, tuple) else (value,):
            if column is not None:
                column.tobytes()
    if isinstance(frame, Request):
        assert len(frame.extensions) <= 2


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_are_read_right_or_refused(seed: int) -> None:
    """A smoke test beside the fuzzers: mutated frames and noise, in both directions."""
    rng = random.Random(seed)
    extensions = encode_extensions([(ExtensionKind.CACHE_SALT, b"salt")])
    outcomes = {"read": 0, "refused": 0}
    with ChannelPair(debug=False) as pair:
        memory = pair.memory()
        out_at, req_at = int(pair.header["out_offset"]), int(pair.header["req_offset"])
        write_full_step(pair)
        assert pair.front_end.submit(request(), i32(1, 2, 3, 4), extensions)
        length = step_bytes(2, num_token_ids=3, num_finished=2, num_logprob_rows=2, logprobs_width=2)
        step, sent = memory[out_at : out_at + length], memory[req_at : req_at + 256]
    for _ in range(60):
        with ChannelPair(debug=False) as pair:
            for offset, sound in ((out_at, step), (req_at, sent)):
                forged = bytearray(sound)
                for _ in range(rng.randint(1, 4)):
                    at = rng.choice([rng.randrange(len(forged)), rng.randrange(16, 64)])
                    forged[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
                pair.memory()[offset : offset + len(forged)] = bytes(forged)
            pair.set_word("out_write_position", len(step))
            pair.set_word("req_write_position", len(sent))
            for poll in (pair.front_end.poll, pair.engine.poll_request):
                try:
                    while (got := poll()) is not None:
                        read_everything(got)
                        outcomes["read"] += 1
                except PeerCorrupt:
                    outcomes["refused"] += 1
    assert outcomes["read"] > 0
    assert outcomes["refused"] > 0
