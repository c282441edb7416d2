"""The oracle's eyes: a cut or wrong answer must not look like a right one."""

import pytest

from tests.chaos.client import Answer, Exchange, _take_apart, read_answer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"index":0,"text":"ab","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"c","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
]
RIGHT = Answer({0: "abc"}, {0: "length"}, {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})


def answer_of(received: bytes) -> Answer:
    done = Exchange()
    _take_apart(done, received)
    return read_answer(done, is_stream=True)


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def test_a_whole_stream_is_put_together() -> None:
    assert answer_of(HEAD + chunked(*EVENTS) + b"0\r\n\r\n") == RIGHT


@pytest.mark.parametrize("missing", range(1, 200, 7))
def test_a_stream_that_lacks_its_end_is_an_error(missing: int) -> None:
    answer = answer_of((HEAD + chunked(*EVENTS) + b"0\r\n\r\n")[: -missing - 2])
    assert answer.error and answer != RIGHT and answer.starts_like(RIGHT)


def test_an_error_event_and_a_changed_text_are_seen() -> None:
    error = b'data: {"error":{"code":"poison"}}\n\n'
    assert "poison" in answer_of(HEAD + chunked(EVENTS[0], error, EVENTS[3]) + b"0\r\n\r\n").error
    other = answer_of(HEAD + chunked(EVENTS[0].replace(b"ab", b"xb"), *EVENTS[1:]) + b"0\r\n\r\n")
    assert not other.error and other != RIGHT and not other.starts_like(RIGHT)
