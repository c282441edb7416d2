"""What every token path does, one sentence each, for the reference and the native one alike."""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from step_frames import ABORT, STOP, Row, finish_record, step_frame
from tokenizers import Tokenizer

from tokring.server.token_path import (
    Event,
    EventKind,
    Field,
    FrameError,
    Histogram,
    LogprobStyle,
    TokenPath,
    TokenTable,
)

TEMPLATE = (b'{"text":"', Field.TEXT, b'"}')
BUDGET_US = 10_000_000


def step(path: TokenPath, rows: list[Row] = (), finish: list[bytes] = (), **options: Any) -> list[Event]:  # type: ignore[assignment]
    frame = step_frame(rows, finish, **options)
    return path.step(frame.ctypes.data, frame.size, BUDGET_US)


def bytes_connection(path: TokenPath, *, chunked: bool = False) -> int:
    connection = path.connect(chunked=chunked)
    assert path.attach(connection, -1) == []
    return connection


def output(path: TokenPath, connection: int) -> bytes:
    """What the connection would be sent, text that waits for write() included."""
    path.flush(BUDGET_US)
    return dict(path.outputs()).get(connection, b"")


def sent_texts(path: TokenPath, connection: int) -> list[str]:
    events = output(path, connection).decode().split("\n\n")
    return [json.loads(event.removeprefix("data: "))["text"] for event in events if event]


@pytest.fixture
def ids(byte_level_tokenizer: Tokenizer) -> Any:
    """Text to token ids, one token a byte: borders fall everywhere."""
    alphabet = TokenTable.from_tokenizer(byte_level_tokenizer)
    by_bytes = {alphabet.bytes_of(token_id): token_id for token_id in range(alphabet.num_tokens)}
    return lambda text: [by_bytes[bytes([byte])] for byte in text.encode()]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


def read_all(reader: socket.socket) -> bytes:
    reader.setblocking(False)
    received = b""
    try:
        while data := reader.recv(1 << 20):
            received += data
    except BlockingIOError:
        pass
    return received


# ---- text ----


def test_a_token_becomes_one_event_in_one_http_chunk(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path, chunked=True)
    path.open(3, 7, connection=connection, template=TEMPLATE)
    assert step(path, [(3, 7, ids("a"))]) == []
    event = b'data: {"text":"a"}\n\n'
    assert path.outputs() == [(connection, b"%x\r\n%b\r\n" % (len(event), event))]
    assert path.outputs() == []


def test_half_a_character_is_held_until_it_is_whole(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    smile = ids("😀")
    for token_id in smile[:-1]:
        step(path, [(0, 1, [token_id])])
        assert output(path, connection) == b""
    step(path, [(0, 1, smile[-1:])])
    assert sent_texts(path, connection) == ["😀"]


def test_an_unfinished_character_becomes_one_replacement_at_the_end(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    step(path, [(0, 1, ids("a😀")[:3])], [finish_record(0, 1)])
    assert sent_texts(path, connection) == ["a\ufffd"]


@pytest.mark.parametrize("skip_special", [False, True])
def test_special_tokens_show_only_on_request(
    make_path: Any, byte_level_tokenizer: Tokenizer, skip_special: bool
) -> None:
    path = make_path()
    path.open(0, 1, skip_special=skip_special)
    names = ["<|two words|>", "<tool call>"]
    step(path, [(0, 1, [byte_level_tokenizer.token_to_id(name) for name in names])], [finish_record(0, 1)])
    assert path.take(0).text == ("" if skip_special else names[0]) + names[1]


def test_hidden_ids_have_no_text_but_count(make_path: Any, ids: Any, byte_level_tokenizer: Tokenizer) -> None:
    path = make_path()
    end = byte_level_tokenizer.token_to_id("<|end|>")
    path.open(0, 1, skip_special=False, hidden_ids=[end])
    step(path, [(0, 1, [*ids("ab"), end])], [finish_record(0, 1, STOP, stop_id=end)])
    piece = path.take(0)
    assert (piece.text, piece.token_ids.tolist(), piece.num_tokens) == ("ab", [*ids("ab"), end], 3)


def test_a_leading_space_is_kept_unless_asked_to_go(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1)
    path.open(1, 1, strip_leading_space=True)
    step(path, [(0, 1, ids("  a")), (1, 1, ids("  a"))])
    assert (path.take(0).text, path.take(1).text) == ("  a", " a")


def test_ids_outside_the_vocabulary_are_counted_and_have_no_text(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1)
    step(path, [(0, 1, [2**31 - 1, -1, *ids("x")])])
    assert path.take(0).text == "x"
    assert path.token_ids(0).tolist() == [2**31 - 1, -1, *ids("x")]


# ---- stop strings ----


@pytest.mark.parametrize(
    ("text", "stops", "include", "shown", "matched"),
    [
        ("one END two", ["END"], False, "one ", "END"),
        ("one END two", ["END"], True, "one END", "END"),
        ("ENENDx", ["END"], False, "EN", "END"),
        ("abcabd", ["abd", "bca"], False, "a", "bca"),
        ("xabcd", ["abcd", "bc"], False, "xa", "bc"),
        ("xabc", ["bc", "abc"], False, "x", "abc"),
        ("aaab", ["aab"], False, "a", "aab"),
        ("日本語", ["本"], False, "日", "本"),
        ("no stop", ["stopper", "p!"], False, "no stop", None),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_stop_string_complete_first_cuts_the_text(
    make_path: Any, ids: Any, text: str, stops: list[str], include: bool, shown: str, matched: str | None, at_once: bool
) -> None:
    path = make_path()
    path.open(0, 1, stop=stops, include_stop=include)
    events: list[Event] = []
    for row in [ids(text)] if at_once else [[token_id] for token_id in ids(text)]:
        events += step(path, [(0, 1, row)])
    events += step(path, [], [finish_record(0, 1)])
    assert path.take(0).text == shown
    assert path.result(0).stop == matched
    stopped = [Event(EventKind.STOPPED, 0)] if matched else []
    assert events == [*stopped, Event(EventKind.FINISHED, 0)]


def test_only_what_may_become_a_stop_string_is_held_back(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    path.open(0, 1, connection=connection, template=TEMPLATE, stop=["</s>"])
    shown = []
    for token_id in ids("a<b</s<"):
        step(path, [(0, 1, [token_id])])
        shown.append(sent_texts(path, connection))
    assert shown == [["a"], [], ["<b"], [], [], [], ["</s"]]
    step(path, [], [finish_record(0, 1)])
    assert sent_texts(path, connection) == ["<"]


def test_min_tokens_holds_against_stop_strings(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, stop=["ab"], min_tokens=3)
    assert step(path, [(0, 1, ids("abx"))]) == []
    assert path.take(0).text == "abx"
    assert step(path, [(0, 1, ids("ab"))]) == [Event(EventKind.STOPPED, 0)]
    assert path.take(0).text == ""


def test_a_match_that_ends_after_min_tokens_counts(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, stop=["abc"], min_tokens=2)
    assert step(path, [(0, 1, ids("abc"))]) == [Event(EventKind.STOPPED, 0)]
    assert path.take(0).text == ""


def test_tokens_after_a_stop_string_are_surplus(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, stop=["b"])
    assert step(path, [(0, 1, ids("abcd"))]) == [Event(EventKind.STOPPED, 0)]
    step(path, [(0, 1, ids("e"))])
    assert step(path, [], [finish_record(0, 1, ABORT)]) == [Event(EventKind.FINISHED, 0)]
    result = path.result(0)
    assert (result.num_tokens, result.stop) == (2, "b")
    assert path.token_ids(0).tolist() == ids("ab")
    assert path.counters()["surplus_tokens"] == 3
    assert path.counters()["tokens"] == 2


def test_a_cancelled_stream_drops_tokens_until_its_finish_row(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1)
    step(path, [(0, 1, ids("a"))])
    path.cancel(0)
    assert step(path, [(0, 1, ids("b"))]) == []
    assert step(path, [], [finish_record(0, 1, ABORT)]) == [Event(EventKind.FINISHED, 0)]
    assert path.take(0).text == "a"
    assert path.counters()["surplus_tokens"] == 1


def test_bad_options_are_refused(make_path: Any) -> None:
    path = make_path(4)
    for options in ({"stop": [""]}, {"num_logprobs": 21}, {"stream_interval": 0}, {"connection": 0, "deltas": True}):
        with pytest.raises((ValueError, IndexError)):
            path.open(0, 1, **options)
    with pytest.raises(IndexError):
        path.open(4, 1)
    path.open(0, 1)
    with pytest.raises(ValueError):
        path.open(0, 2)


# ---- rows, slots and frames ----


def test_rows_of_another_generation_are_stale(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 2)
    assert step(path, [(0, 1, ids("a")), (1, 1, ids("a"))], [finish_record(0, 1)]) == []
    assert path.take(0).text == ""
    assert path.counters()["stale_rows"] == 3


def test_a_closed_slot_can_be_opened_again(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1)
    step(path, [(0, 1, ids("a"))], [finish_record(0, 1)])
    path.close(0)
    with pytest.raises(IndexError):
        path.result(0)
    path.open(0, 2)
    step(path, [(0, 2, ids("b"))])
    assert path.take(0).text == "b"


def test_a_resubmitted_stream_goes_on_under_its_new_generation(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1)
    half = ids("é")
    step(path, [(0, 1, half[:1])])
    path.rebind(0, 5)
    step(path, [(0, 1, ids("x")), (0, 5, half[1:])])
    assert path.take(0).text == "é"
    assert path.token_ids(0).tolist() == half


def test_the_finish_row_is_handed_out_whole(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1)
    assert path.result(0).finish is None
    row = finish_record(
        0, 1, STOP, error_code=2, stop_id=5, num_prompt_tokens=6, num_cached_tokens=7, num_output_tokens=8,
        num_preemptions=9, scheduled_ns=2**40, first_token_ns=2**41, end_ns=2**42, num_draft_tokens=10,
        num_accepted_tokens=11,
    )  # fmt: skip
    assert step(path, [(0, 1, ids("a"))], [row], publish_ns=77) == [Event(EventKind.FINISHED, 0)]
    result = path.result(0)
    assert result.finish == (STOP, 2, 5, 6, 7, 8, 9, 2**40, 2**41, 2**42, 10, 11)
    assert (result.num_tokens, result.num_text_bytes, result.last_publish_ns) == (1, 1, 77)
    assert result.first_output_ns > 0


def broken_frames() -> Iterator[tuple[str, np.ndarray]]:
    good = step_frame([(0, 1, [5]), (1, 1, [6, 7])], [finish_record(0, 1)], {0: (-1.0, [(3, -1.0)])}, width=1)
    changes: dict[str, tuple[int, bytes]] = {
        "length beyond": (0, b"\xff\xff"),
        "another type": (4, b"\x02"),
        "count beyond": (24, b"\xff\xff\xff\x7f"),
        "slot beyond": (32, b"\xff\xff\xff\xff"),
        "tokens beyond": (48, b"\xff\xff\xff\xff"),
        "unknown section": (72, b"\x09"),
        "finish rows beyond": (76, b"\x03"),
        "section bytes beyond": (80, b"\xf8\xff\xff\xff"),
        "odd section bytes": (80, b"\x41"),
        "finish slot beyond": (88, b"\x08"),
        "logprob width": (154, b"\x15"),
        "logprob rows beyond": (156, b"\x09"),
        "token index beyond": (168, b"\x03"),
    }
    for name, (offset, data) in changes.items():
        frame = good.copy()
        frame[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        yield name, frame


@pytest.mark.parametrize("frame", [pytest.param(frame, id=name) for name, frame in broken_frames()])
def test_a_frame_that_does_not_hold_together_changes_nothing(make_path: Any, frame: np.ndarray) -> None:
    path = make_path(8)
    path.open(0, 1)
    path.open(1, 1)
    with pytest.raises(FrameError):
        path.step(frame.ctypes.data, frame.size)
    assert path.result(0).num_tokens == path.result(1).num_tokens == 0
    assert path.result(0).finish is None


def test_every_cut_of_a_frame_is_refused_or_shorter(make_path: Any) -> None:
    good = step_frame([(0, 1, [5])], [finish_record(0, 1)])
    path = make_path(8)
    for length in range(good.size):
        with pytest.raises(FrameError):
            path.step(good.ctypes.data, length)


# ---- templates ----


def test_counts_and_ids_are_rendered_where_the_template_says(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    template = (
        b'{"ids":', Field.TOKEN_IDS, b',"t":"', Field.TEXT, b'","c":', Field.COMPLETION_TOKENS, b',"s":',
        Field.TOTAL_TOKENS, b',"l":', Field.LOGPROBS, b"}",
    )  # fmt: skip
    path.open(0, 1, connection=connection, template=template, return_token_ids=True, num_prompt_tokens=10)
    step(path, [(0, 1, ids("ab"))])
    step(path, [(0, 1, ids('"\n'))])
    first, second = (json.loads(event[6:]) for event in output(path, connection).decode().split("\n\n")[:2])
    assert first == {"ids": ids("ab"), "t": "ab", "c": 2, "s": 12, "l": None}
    assert second == {"ids": ids('"\n'), "t": '"\n', "c": 4, "s": 14, "l": None}


def test_stream_interval_gathers_tokens_after_the_first(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    path.open(0, 1, connection=connection, template=TEMPLATE, stream_interval=3)
    shown = []
    for token_id in ids("abcdefgh"):
        step(path, [(0, 1, [token_id])])
        shown += sent_texts(path, connection)
    step(path, [], [finish_record(0, 1)])
    assert [*shown, *sent_texts(path, connection)] == ["a", "bcd", "efg", "h"]


def test_choices_share_a_connection_in_order(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    for slot in (5, 2):
        path.open(slot, 1, connection=connection, template=(b'{"text":"%d' % slot, Field.TEXT, b'"}'))
    step(path, [(2, 1, ids("b")), (5, 1, ids("a"))])
    step(path, [(2, 1, ids("c"))], [finish_record(5, 1)])
    assert sent_texts(path, connection) == ["5a", "2b", "2c"]


def test_written_bytes_follow_the_text_released_before(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = path.connect(chunked=True)
    path.open(0, 1, connection=connection, template=(Field.TEXT,))
    step(path, [(0, 1, ids("a"))])
    assert path.outputs() == []
    assert path.write(connection, b": ping\n\n") == []
    assert path.attach(connection, -1) == []
    step(path, [(0, 1, ids("b"))], [finish_record(0, 1)])
    assert path.write(connection, b"data: [DONE]\n\n", end=True) == [Event(EventKind.SENT, connection)]
    expected = b"9\r\ndata: a\n\n\r\n8\r\n: ping\n\n\r\n9\r\ndata: b\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert path.outputs() == [(connection, expected)]
    assert path.disconnect(connection) == b""


def test_paused_connections_queue_and_merge(make_path: Any, ids: Any) -> None:
    path = make_path()
    connection = bytes_connection(path)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    path.pause(connection)
    for token_id in ids("abc"):
        step(path, [(0, 1, [token_id])])
    assert path.outputs() == [] and path.backlog(connection) == 3 and path.pending() == 0
    path.resume(connection)
    assert sent_texts(path, connection) == ["abc"]
    assert path.backlog(connection) == 0


def test_deltas_are_reported_and_taken(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, deltas=True)
    assert step(path, [(0, 1, ids("ab"))]) == [Event(EventKind.DELTA, 0)]
    assert step(path, [(0, 1, ids("c"))]) == []
    assert path.take(0).text == "abc"
    assert step(path, [(0, 1, ids("é")[:1])]) == []
    assert step(path, [(0, 1, ids("é")[1:])], [finish_record(0, 1)]) == [
        Event(EventKind.DELTA, 0),
        Event(EventKind.FINISHED, 0),
    ]
    piece = path.take(0)
    assert (piece.text, piece.token_ids.tolist()) == ("é", ids("é"))


# ---- logprobs ----


def test_chat_logprobs(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, logprob_style=LogprobStyle.CHAT, num_logprobs=2)
    a, quote = ids('a"')
    step(path, [(0, 1, [a])], logprobs={0: (-0.5, [(quote, -0.25), (a, float("-inf")), (a, -7.0)])}, width=3)
    logprobs = path.take(0).logprobs
    assert json.loads(logprobs) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": '"', "logprob": -0.25, "bytes": [34]},
                    {"token": "a", "logprob": -9999.0, "bytes": [97]},
                ],
            }
        ]
    }


def test_completions_logprobs(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, logprob_style=LogprobStyle.COMPLETIONS, num_logprobs=1, text_offset=100)
    first, second = ids("é")
    a, b = ids("ab")
    rows = {0: (-1.0, [(a, -0.5)]), 1: (-2.0, [(second, -2.0)]), 2: (-3.0, [(b, -0.0)])}
    step(path, [(0, 1, [first, second, a])], logprobs=rows, width=1)
    assert json.loads(path.take(0).logprobs) == {
        "text_offset": [100, 100, 101],
        "token_logprobs": [-1.0, -2.0, -3.0],
        "tokens": ["\ufffd", "\ufffd", "a"],
        "top_logprobs": [{"a": -0.5, "\ufffd": -1.0}, {"\ufffd": -2.0}, {"b": -0.0, "a": -3.0}],
    }


def test_logprobs_wait_for_the_text_of_their_token(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, logprob_style=LogprobStyle.CHAT, stop=["<end>"])
    shown = []
    for token_id in ids("a<é"):
        step(path, [(0, 1, [token_id])], logprobs={0: (-1.0, [])})
        piece = path.take(0)
        names = [bytes(entry["bytes"]) for entry in json.loads(piece.logprobs)["content"]]
        assert len(names) == len(piece.token_ids)
        shown.append((piece.text, names))
    assert shown == [("a", [b"a"]), ("", []), ("", []), ("<é", [b"<", b"\xc3", b"\xa9"])]


def test_tokens_can_be_named_by_id(make_path: Any, ids: Any) -> None:
    path = make_path()
    path.open(0, 1, logprob_style=LogprobStyle.COMPLETIONS, tokens_as_ids=True)
    step(path, [(0, 1, ids("a"))], logprobs={0: (-1.0, [])})
    logprobs = json.loads(path.take(0).logprobs)
    assert logprobs["tokens"] == [f"token_id:{ids('a')[0]}"]
    assert logprobs["top_logprobs"] == [{f"token_id:{ids('a')[0]}": -1.0}]


def test_logprobs_of_a_token_without_text_are_sent_too(make_path: Any, byte_level_tokenizer: Tokenizer) -> None:
    path = make_path()
    connection = bytes_connection(path)
    end = byte_level_tokenizer.token_to_id("<|end|>")
    template = (b'{"text":"', Field.TEXT, b'","logprobs":', Field.LOGPROBS, b"}")
    path.open(0, 1, connection=connection, template=template, logprob_style=LogprobStyle.CHAT)
    step(path, [(0, 1, [end])], [finish_record(0, 1)], logprobs={0: (-1.0, [])})
    event = json.loads(output(path, connection)[6:])
    assert event["text"] == "" and event["logprobs"]["content"][0]["token"] == "<|end|>"


# ---- sockets ----


def test_text_is_sent_on_a_descriptor_of_its_own(make_path: Any, ids: Any, sockets: Any) -> None:
    ours, theirs = sockets
    path = make_path()
    connection = path.connect(chunked=False)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    path.attach(connection, ours.fileno())
    step(path, [(0, 1, ids("a"))])
    assert read_all(theirs) == b'data: {"text":"a"}\n\n'
    number = ours.fileno()
    ours.close()  # the client's connection goes away in the transport, and its number is taken by another one
    left, right = socket.socketpair()
    if left.fileno() != number:
        os.dup2(left.fileno(), number)
    step(path, [(0, 1, ids("b"))])
    assert read_all(right) == b""
    assert read_all(theirs) == b'data: {"text":"b"}\n\n'
    if left.fileno() != number:
        os.close(number)
    left.close()
    right.close()


def test_disconnect_closes_the_descriptor_and_never_the_callers(make_path: Any, sockets: Any) -> None:
    ours, theirs = sockets
    path = make_path()
    before = len(os.listdir("/proc/self/fd"))
    connection = path.connect(chunked=False)
    path.attach(connection, ours.fileno())
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert path.disconnect(connection) == b""
    assert len(os.listdir("/proc/self/fd")) == before
    ours.send(b"still open")
    assert read_all(theirs) == b"still open"


def test_a_descriptor_that_cannot_be_duplicated_is_an_os_error(make_path: Any) -> None:
    path = make_path()
    connection = path.connect(chunked=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        path.attach(connection, 1_000_000)
    assert path.attach(connection, -1) == []  # the connection is as it was
    with pytest.raises(ValueError, match="already attached"):
        path.attach(connection, -1)


def test_many_rows_are_sent_without_the_gil(make_path: Any, ids: Any) -> None:
    path = make_path(200)
    connection = bytes_connection(path)
    for slot in range(200):
        path.open(slot, 1, connection=connection, template=(Field.TEXT,))
    assert step(path, [(slot, 1, ids("a")) for slot in range(200)]) == []
    assert output(path, connection) == b"data: a\n\n" * 200


def test_the_last_text_leaves_together_with_the_final_bytes(make_path: Any, ids: Any, sockets: Any) -> None:
    ours, theirs = sockets
    path = make_path()
    connection = path.connect(chunked=True)
    path.open(0, 1, connection=connection, template=(Field.TEXT,))
    path.attach(connection, ours.fileno())
    step(path, [(0, 1, ids("a"))], [finish_record(0, 1)])
    assert read_all(theirs) == b""
    sends = path.counters()["sends"]
    assert path.write(connection, b"data: [DONE]\n\n", end=True) == [Event(EventKind.SENT, connection)]
    assert path.counters()["sends"] == sends + 1
    assert read_all(theirs).endswith(b"0\r\n\r\n")


def test_text_held_for_write_goes_on_flush_if_nobody_writes(make_path: Any, ids: Any, sockets: Any) -> None:
    ours, theirs = sockets
    path = make_path()
    connection = path.connect(chunked=False)
    path.open(0, 1, connection=connection, template=(Field.TEXT,), stop=["b"])
    path.attach(connection, ours.fileno())
    step(path, [(0, 1, ids("ab"))])
    assert path.pending() == 1
    assert path.flush() == [] and path.pending() == 0
    assert read_all(theirs) == b"data: a\n\n"


def test_a_closed_peer_is_reported_once_as_dead(make_path: Any, ids: Any, sockets: Any) -> None:
    ours, theirs = sockets
    path = make_path()
    connection = path.connect(chunked=False)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    path.open(1, 1)
    path.attach(connection, ours.fileno())
    theirs.close()
    events = step(path, [(0, 1, ids("a")), (1, 1, ids("b"))])
    assert events == [Event(EventKind.DEAD, connection)]
    assert step(path, [(0, 1, ids("a"))]) == []
    assert path.write(connection, b"x", end=True) == []
    assert path.backlog(connection) == 0
    assert path.take(1).text == "b"
    assert path.disconnect(connection) == b""
    assert step(path, [], [finish_record(0, 1)]) == [Event(EventKind.FINISHED, 0)]


def fill(path: TokenPath, slot: int, row: list[int]) -> int:
    """Steps until the connection would block; returns the number of steps."""
    for count in range(1, 100_000):
        step(path, [(slot, 1, row)])
        if path.counters()["blocked"]:
            return count
    raise AssertionError("the socket never filled")


def test_a_blocked_client_gets_everything_later_merged(make_path: Any, ids: Any, sockets: Any) -> None:
    ours, theirs = sockets
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    path = make_path()
    connection = path.connect(chunked=False)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    path.attach(connection, ours.fileno())
    row = ids("0123456789" * 20)
    count = fill(path, 0, row)
    chunks = path.counters()["chunks"]
    for _ in range(50):
        step(path, [(0, 1, row)])
    assert path.counters()["chunks"] == chunks
    assert path.backlog(connection) >= 50 * 200
    assert path.write(connection, b'data: {"text":"end"}\n\n', end=True) == []
    received, events = b"", []
    while not events:
        received += read_all(theirs)
        events = path.flush()
    received += read_all(theirs)
    assert events == [Event(EventKind.SENT, connection)]
    texts = [json.loads(event[6:])["text"] for event in received.decode().split("\n\n") if event]
    assert "".join(texts) == "0123456789" * 20 * (count + 50) + "end"
    assert len(texts) == chunks + 2


def test_a_backlog_over_the_limit_ends_the_connection(make_path: Any, ids: Any, sockets: Any) -> None:
    ours, _ = sockets
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    path = make_path(max_backlog_bytes=5000)
    connection = path.connect(chunked=False)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    path.attach(connection, ours.fileno())
    fill(path, 0, ids("x" * 100))
    events: list[Event] = []
    for _ in range(60):
        events += step(path, [(0, 1, ids("x" * 100))])
    assert events == [Event(EventKind.OVER_LIMIT, connection)]
    assert path.backlog(connection) == 0


def test_a_backlog_over_the_age_ends_the_connection(make_path: Any, ids: Any) -> None:
    path = make_path(max_backlog_age_s=0.0)
    connection = path.connect(chunked=False)  # never attached
    path.open(0, 1, connection=connection, template=TEMPLATE)
    assert path.flush() == []
    events = step(path, [(0, 1, ids("x"))])
    events += path.flush()
    assert events == [Event(EventKind.OVER_LIMIT, connection)]


def test_a_writable_descriptor_wakes_for_blocked_connections(make_path: Any, ids: Any, sockets: Any) -> None:
    import select

    ours, theirs = sockets
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    path = make_path()
    connection = path.connect(chunked=False)
    path.open(0, 1, connection=connection, template=TEMPLATE)
    path.attach(connection, ours.fileno())
    fill(path, 0, ids("x" * 100))
    poll = select.poll()
    poll.register(path.writable_fd(), select.POLLIN)
    assert poll.poll(0) == []
    read_all(theirs)
    assert poll.poll(1000) != []
    path.flush()
    assert poll.poll(0) == []


def test_a_spent_budget_leaves_the_rest_for_flush(make_path: Any, ids: Any) -> None:
    path = make_path(64)
    pairs = [socket.socketpair() for _ in range(64)]
    for slot, (ours, _) in enumerate(pairs):
        connection = path.connect(chunked=False)
        path.open(slot, 1, connection=connection, template=(Field.TEXT,))
        path.attach(connection, ours.fileno())
    frame = step_frame([(slot, 1, ids("a")) for slot in range(64)])
    path.step(frame.ctypes.data, frame.size, 0)
    assert 0 < path.pending() < 64
    while path.pending():
        path.flush(0)
    for ours, theirs in pairs:
        assert read_all(theirs) == b"data: a\n\n"
        ours.close()
        theirs.close()


# ---- times ----


def histogram() -> Histogram:
    return Histogram(
        bounds_ns=np.array([10, 100, 1000], np.uint64), buckets=np.zeros(4, np.uint64), sum_ns=np.zeros(1, np.uint64)
    )


def test_gaps_between_outputs_are_observed_on_the_engines_clock(make_path: Any, ids: Any) -> None:
    inter_token, first_token = histogram(), histogram()
    path = make_path(inter_token=inter_token, first_token=first_token)
    path.open(0, 1, arrival_ns=1)
    path.open(1, 1)
    for publish_ns, text in [(1000, "a"), (1010, "bc"), (1111, "d"), (9999, "e")]:
        step(path, [(0, 1, ids(text))], publish_ns=publish_ns)
    step(path, [(1, 1, ids("x"))], publish_ns=9999)
    assert inter_token.buckets.tolist() == [1, 0, 1, 1]
    assert inter_token.sum_ns[0] == 10 + 101 + 8888
    assert first_token.buckets.tolist() == [0, 0, 0, 1]
