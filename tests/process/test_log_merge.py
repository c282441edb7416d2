"""Log lines of several processes become one stream; a log that cannot take them never blocks."""

import os

from tokring.launch.child import LossyWriter
from tokring.launch.log_merge import MAX_LINE_BYTES, MAX_QUEUED_CHUNKS, LineReader, LogSink
from tokring.launch.progress_bar import ProgressBar


def test_lines_are_tagged_and_partial_lines_wait_for_their_end() -> None:
    read_fd, write_fd = os.pipe()
    reader = LineReader(read_fd, "engine 0 17")
    os.write(write_fd, b"one\ntw")
    assert reader.read_lines() == (b"[engine 0 17] one\n", False)
    os.write(write_fd, b"o\n")
    assert reader.read_lines() == (b"[engine 0 17] two\n", False)
    os.write(write_fd, b"last words")
    os.close(write_fd)
    assert reader.read_lines() == (b"[engine 0 17] last words\n", True)
    assert list(reader.tail) == ["one", "two", "last words"]
    os.close(read_fd)


def test_an_endless_line_is_cut() -> None:
    read_fd, write_fd = os.pipe()
    reader = LineReader(read_fd, "x")
    os.write(write_fd, b"a" * (MAX_LINE_BYTES + 1))
    assert reader.read_lines() == (b"[x] " + b"a" * (MAX_LINE_BYTES + 1) + b"\n", False)
    os.close(write_fd)
    os.close(read_fd)


def test_a_full_log_drops_lines_and_says_so_when_it_has_room_again() -> None:
    read_fd, write_fd = os.pipe()
    sink = LogSink(write_fd)
    line = b"x" * 1023 + b"\n"
    num_lines = MAX_QUEUED_CHUNKS + 200  # more than pipe and queue hold together
    for _ in range(num_lines):
        sink.write(line)
    assert sink.dropped_lines > 0
    received = bytearray()
    while b"dropped" not in received:
        received += os.read(read_fd, 1 << 20)
        sink.write(b"later\n")
    os.close(read_fd)
    sink.close(5)
    os.close(write_fd)


def test_a_closed_log_is_dropped_without_an_exception() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    sink = LogSink(write_fd)
    sink.write(b"one\ntwo\n")
    sink.close(5)
    assert sink.dropped_lines == 2
    os.close(write_fd)


def test_a_childs_stream_drops_what_a_full_pipe_does_not_take() -> None:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    stream = LossyWriter(write_fd)
    for _ in range(100):
        assert stream.write(b"x" * 4096) == 4096
    assert stream.dropped_bytes > 0
    os.close(read_fd)
    before = stream.dropped_bytes
    stream.write(b"nobody reads this")
    assert stream.dropped_bytes == before + 17
    os.close(write_fd)


def test_the_progress_bar_shows_share_and_megabytes_and_clears_itself() -> None:
    bar = ProgressBar("loading weights")
    assert bar.clear() == b""
    text = bar.render(50_000_000, 200_000_000).decode()
    assert " 25%" in text
    assert "50 of 200 MB" in text
    assert bar.clear() == b"\r\x1b[2K"
    assert bar.clear() == b""
