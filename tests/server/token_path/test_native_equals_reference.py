"""The native path and the reference give the same bytes, events and results, whatever happens in whatever order."""

import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_frames import Logprob, finish_record, step_frame
from tokenizers import Tokenizer

from tokring.server.token_path import (
    Event,
    EventKind,
    Field,
    FrameError,
    Histogram,
    LogprobStyle,
    NativeTokenPath,
    ReferenceTokenPath,
    TokenPath,
    TokenTable,
)

NUM_SLOTS = 4
BUDGET_US = 10_000_000
TEMPLATE = (
    b'{"text":"', Field.TEXT, b'","logprobs":', Field.LOGPROBS, b',"ids":', Field.TOKEN_IDS, b',"usage":[',
    Field.COMPLETION_TOKENS, b",", Field.TOTAL_TOKENS, b"]}",
)  # fmt: skip
LETTERS = 'abé日😀<|>\n"\\ \x00\x7f\ufffd'

stops = st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=5), max_size=4)
options = st.fixed_dictionaries(
    {
        "stop": stops,
        "include_stop": st.booleans(),
        "min_tokens": st.integers(0, 4),
        "skip_special": st.booleans(),
        "hidden_ids": st.lists(st.integers(0, 5), max_size=2),
        "logprob_style": st.sampled_from(LogprobStyle),
        "num_logprobs": st.integers(0, 4),
        "tokens_as_ids": st.booleans(),
        "text_offset": st.integers(0, 1000),
        "return_token_ids": st.booleans(),
        "stream_interval": st.integers(1, 3),
        "num_prompt_tokens": st.integers(0, 1000),
        "strip_leading_space": st.booleans(),
    }
)


@dataclass
class Pair:
    """Both implementations, driven alike; every answer is compared."""

    paths: list[TokenPath]
    log: list[Any] = field(default_factory=list)

    def both(self, call: Callable[[TokenPath], Any]) -> Any:
        answers = [call(path) for path in self.paths]
        assert plain(answers[0]) == plain(answers[1])
        return answers[0]

    def step(self, frame: np.ndarray) -> list[Event]:
        events: list[Event] = self.both(lambda path: path.step(frame.ctypes.data, frame.size, BUDGET_US))
        self.both(lambda path: path.pending())
        return events

    def compare_outputs(self) -> None:
        self.both(lambda path: path.outputs())

    def compare_state(self, slot: int) -> None:
        self.both(lambda path: path.result(slot)._replace(first_output_ns=0))
        self.both(lambda path: path.token_ids(slot))


def plain(answer: Any) -> Any:
    """Without numpy arrays, whose == is elementwise."""
    if isinstance(answer, np.ndarray):
        return (str(answer.dtype), answer.tolist())
    if isinstance(answer, tuple):
        return (type(answer).__name__, *map(plain, answer))
    return answer


class Choices:
    """Token ids that meet the corners: single bytes, letters of stop strings, special tokens, out of range."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.by_bytes = {table.bytes_of(token_id): token_id for token_id in range(table.num_tokens)}
        singles = [self.by_bytes[bytes([byte])] for byte in range(256)]
        letters = [self.by_bytes[bytes([byte])] for letter in LETTERS for byte in letter.encode()]
        self.ids = st.one_of(
            st.sampled_from(letters),
            st.sampled_from(letters),
            st.sampled_from(singles),
            st.integers(0, table.num_tokens + 2),
        )

    def logprobs(self, draw: Callable[[Any], Any], num_tokens: int, width: int) -> dict[int, Logprob]:
        value = st.floats(width=32, max_value=0.0) | st.just(float("nan"))
        entries = st.lists(st.tuples(self.ids, value), max_size=width)
        rows = st.dictionaries(st.integers(0, max(num_tokens - 1, 0)), st.tuples(value, entries), max_size=num_tokens)
        return draw(rows) if num_tokens else {}


@pytest.fixture(scope="module")
def choices(table: TokenTable) -> Choices:
    return Choices(table)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_sequence_of_calls(choices: Choices, data: st.DataObject) -> None:
    pair = Pair([ReferenceTokenPath(choices.table, NUM_SLOTS), NativeTokenPath(choices.table, NUM_SLOTS)])
    connections: list[int] = []
    for _ in range(data.draw(st.integers(1, 2))):
        chunked = data.draw(st.booleans())
        connections.append(pair.both(lambda path, chunked=chunked: path.connect(chunked=chunked)))
    attached: set[int] = set()
    slots: dict[int, dict[str, Any]] = {}
    for slot in range(NUM_SLOTS):
        chosen = data.draw(options)
        chosen["connection"] = data.draw(st.sampled_from([*connections, *connections, None]))
        chosen["template"] = TEMPLATE
        chosen["deltas"] = chosen["connection"] is None and data.draw(st.booleans())
        pair.both(lambda path, slot=slot, chosen=chosen: path.open(slot, 1, **chosen))
        slots[slot] = chosen
    for turn in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["step", "step", "step", "step", "attach", "pause", "write", "cancel"]))
        connection = data.draw(st.sampled_from(connections))
        if action == "attach" and connection not in attached:
            attached.add(connection)
            pair.both(lambda path, connection=connection: path.attach(connection, -1))
        elif action == "attach":
            pair.both(lambda path, connection=connection: path.resume(connection))
        elif action == "pause":
            pair.both(lambda path, connection=connection: path.pause(connection))
        elif action == "write":
            end = data.draw(st.booleans())
            pair.both(lambda path, connection=connection, end=end: path.write(connection, b": ping\n\n", end=end))
        elif action == "cancel":
            slot = data.draw(st.integers(0, NUM_SLOTS - 1))
            pair.both(lambda path, slot=slot: path.cancel(slot))
        else:
            take_step(pair, choices, data.draw, turn)
        for slot, chosen in slots.items():
            pair.compare_state(slot)
            if chosen["connection"] is None and data.draw(st.booleans()):
                pair.both(lambda path, slot=slot: path.take(slot))
        pair.both(lambda path, connection=connection: path.backlog(connection))
        pair.compare_outputs()
    for connection in connections:
        if connection not in attached:
            pair.both(lambda path, connection=connection: path.attach(connection, -1))
    pair.both(lambda path: path.flush(BUDGET_US))
    pair.compare_outputs()
    for slot in slots:
        pair.both(lambda path, slot=slot: path.close(slot))
    for connection in connections:
        pair.both(lambda path, connection=connection: path.disconnect(connection))
    pair.both(lambda path: path.counters())
    for path in pair.paths:
        path.release()


def take_step(pair: Pair, choices: Choices, draw: Callable[[Any], Any], turn: int) -> None:
    generations = st.sampled_from([1, 1, 1, 1, 2])
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, NUM_SLOTS - 1), generations, st.lists(choices.ids, max_size=6)), max_size=NUM_SLOTS
        )
    )
    num_tokens = sum(len(row[2]) for row in rows)
    width = draw(st.integers(0, 5))
    logprobs = choices.logprobs(draw, num_tokens, width)
    ending = draw(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=1))
    frame = step_frame(
        rows, [finish_record(slot, 1) for slot in ending], logprobs, width=width, publish_ns=turn, multi=True
    )
    pair.step(frame)


@settings(max_examples=300, deadline=None)
@given(text=st.text(), cuts=st.lists(st.integers(0, 60), max_size=8), stop=stops)
def test_text_cut_anywhere_arrives_whole_and_escaped_as_orjson_does(
    choices: Choices, text: str, cuts: list[int], stop: list[str]
) -> None:
    ids = [choices.by_bytes[bytes([byte])] for byte in text.encode()]
    path = NativeTokenPath(choices.table, 1)
    connection = path.connect(chunked=False)
    path.attach(connection, -1)
    path.open(0, 1, connection=connection, template=(b'"', Field.TEXT, b'"'), stop=stop)
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    received = []
    for start, end in zip(borders, borders[1:], strict=False):
        frame = step_frame([(0, 1, ids[start:end])], multi=True)
        path.step(frame.ctypes.data, frame.size)
    frame = step_frame([], [finish_record(0, 1)])
    path.step(frame.ctypes.data, frame.size)
    path.flush(BUDGET_US)
    for _, data in path.outputs():
        received += [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    texts = [json.loads(event) for event in received]
    ends = [text.find(candidate) + len(candidate) for candidate in stop if candidate in text]
    expected = text
    if ends:
        cut = min(ends)
        expected = text[: cut - max(len(s) for s in stop if text.endswith(s, 0, cut))]
    assert "".join(texts) == expected
    assert received == [orjson.dumps(part) for part in texts]
    path.release()


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.binary(max_size=6), max_size=8))
def test_broken_utf8_is_replaced_as_python_does(choices: Choices, pieces: list[bytes]) -> None:
    path = NativeTokenPath(choices.table, 1)
    path.open(0, 1)
    for piece in pieces:
        frame = step_frame([(0, 1, [choices.by_bytes[bytes([byte])] for byte in piece])], multi=True)
        path.step(frame.ctypes.data, frame.size)
    frame = step_frame([], [finish_record(0, 1)])
    path.step(frame.ctypes.data, frame.size)
    assert path.take(0).text == b"".join(pieces).decode("utf-8", "replace")
    path.release()


def test_native_text_equals_tokenizers_decode(byte_level_tokenizer: Tokenizer, table: TokenTable) -> None:
    generator = random.Random(3)
    path = NativeTokenPath(table, 1)
    for generation in range(300):
        ids = [generator.randrange(table.num_tokens) for _ in range(generator.randint(1, 40))]
        skip_special = generator.random() < 0.5
        path.open(0, generation, skip_special=skip_special)
        for token_id in ids[:-1]:
            frame = step_frame([(0, generation, [token_id])])
            path.step(frame.ctypes.data, frame.size)
        frame = step_frame([(0, generation, ids[-1:])], [finish_record(0, generation)])
        path.step(frame.ctypes.data, frame.size)
        assert path.take(0).text == byte_level_tokenizer.decode(ids, skip_special_tokens=skip_special)
        path.close(0)
    path.release()


@settings(max_examples=500, deadline=None)
@given(value=st.floats(width=32, max_value=16384) | st.sampled_from([float("inf"), float("-inf"), float("nan")]))
def test_logprobs_are_the_same_shortest_digits_on_both_sides(choices: Choices, value: float) -> None:
    rendered = []
    token_id = choices.by_bytes[b"a"]
    for implementation in (ReferenceTokenPath, NativeTokenPath):
        path = implementation(choices.table, 1)
        path.open(0, 1, logprob_style=LogprobStyle.CHAT)
        frame = step_frame([(0, 1, [token_id])], logprobs={0: (value, [])})
        path.step(frame.ctypes.data, frame.size)
        rendered.append(path.take(0).logprobs)
        path.release()
    assert rendered[0] == rendered[1]
    shown = json.loads(rendered[0])["content"][0]["logprob"]
    assert isinstance(shown, float)
    if np.isfinite(value) and value >= -9999.0:
        assert np.float32(shown) == np.float32(value)
    else:
        assert shown == -9999.0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), readers_pace=st.integers(1, 20))
def test_blocked_sockets_lose_and_repeat_nothing(choices: Choices, seed: int, readers_pace: int) -> None:
    """Small buffers, n = 2 on one connection: what arrives is whole events whose texts join to the whole text."""
    generator = random.Random(seed)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    theirs.setblocking(False)
    path = NativeTokenPath(choices.table, 2, max_backlog_bytes=1 << 24)
    connection = path.connect(chunked=True)
    for slot in range(2):
        path.open(slot, 1, connection=connection, template=(b'{"i":%d,"t":"' % slot, Field.TEXT, b'"}'), stop=["\x00"])
    path.attach(connection, ours.fileno())
    expected = ["", ""]
    received = b""
    for turn in range(200):
        rows = []
        for slot in range(2):
            text = "".join(generator.choices('ab"é日😀\n', k=generator.randint(0, 40)))
            rows.append((slot, 1, [choices.by_bytes[bytes([byte])] for byte in text.encode()]))
            expected[slot] += text
        frame = step_frame(rows, multi=True)
        assert path.step(frame.ctypes.data, frame.size, BUDGET_US) == []
        if turn % readers_pace == 0:
            received += read_some(theirs)
            path.flush()
    assert path.write(connection, b"data: [DONE]\n\n", end=True) in ([], [Event(EventKind.SENT, connection)])
    while not received.endswith(b"0\r\n\r\n"):
        received += read_some(theirs)
        path.flush()
    events = b"".join(unchunk(received)).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    texts = ["", ""]
    for event in map(json.loads, (event.removeprefix(b"data: ") for event in events[:-2])):
        texts[event["i"]] += event["t"]
    assert texts == expected
    path.release()
    ours.close()
    theirs.close()


def read_some(reader: socket.socket) -> bytes:
    try:
        return reader.recv(4096)
    except BlockingIOError:
        return b""


def unchunk(body: bytes) -> list[bytes]:
    """The chunks of an HTTP/1.1 chunked body that is complete."""
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        chunks.append(rest[:length])
        body = rest[length + 2 :]
    assert chunks.pop() == b""
    return chunks


def test_histograms_agree(table: TokenTable) -> None:
    generator = random.Random(5)
    bounds = np.array([10, 20, 50, 100], np.uint64)
    histograms = [
        Histogram(bounds_ns=bounds, buckets=np.zeros(5, np.uint64), sum_ns=np.zeros(1, np.uint64)) for _ in "ab"
    ]
    pair = Pair(
        [
            ReferenceTokenPath(table, 2, inter_token=histograms[0]),
            NativeTokenPath(table, 2, inter_token=histograms[1]),
        ]
    )
    for slot in range(2):
        pair.both(lambda path, slot=slot: path.open(slot, 1))
    publish_ns = 0
    for _ in range(200):
        publish_ns += generator.choice([0, 5, 10, 11, 20, 60, 100, 101])
        pair.step(step_frame([(generator.randrange(2), 1, [5])], publish_ns=publish_ns))
    assert histograms[0].buckets.tolist() == histograms[1].buckets.tolist()
    assert histograms[0].sum_ns == histograms[1].sum_ns
    assert histograms[0].buckets.sum() == 198
    for path in pair.paths:
        path.release()


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 319), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_frame_is_refused_or_read_alike(choices: Choices, changes: list[tuple[int, int]]) -> None:
    frame = step_frame(
        [(0, 1, [70, 71]), (1, 1, [72]), (2, 1, [])],
        [finish_record(1, 1), finish_record(2, 1)],
        {0: (-1.0, [(70, -1.0), (71, -2.0)]), 2: (-0.5, [(72, -0.5)])},
        width=2,
    ).copy()
    assert frame.size == 320
    for offset, value in changes:
        frame[offset] = value
    answers = []
    for implementation in (ReferenceTokenPath, NativeTokenPath):
        path = implementation(choices.table, NUM_SLOTS)
        for slot in range(NUM_SLOTS):
            path.open(slot, 1, logprob_style=LogprobStyle.CHAT, num_logprobs=2)
        try:
            events: object = path.step(frame.ctypes.data, frame.size)
        except FrameError:
            events = "refused"
        state = [(plain(path.take(slot)), path.result(slot)._replace(first_output_ns=0)) for slot in range(NUM_SLOTS)]
        answers.append((events, state, path.counters()))
        path.release()
    assert answers[0] == answers[1]
