"""ServerLog: standard error of `tokring serve`, with the supervisor's lines, its children's and the progress bar."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator

from tokring.config import LaunchSettings
from tokring.launch.child import configure_logging
from tokring.launch.child_process import ChildProcess
from tokring.launch.death_cause import FROM_OUTSIDE
from tokring.launch.json_log import as_json_line
from tokring.launch.log_merge import LineReader, LogSink
from tokring.launch.progress_bar import ProgressBar
from tokring_ipc import StatsPage

log = logging.getLogger("tokring.launch")

PROGRESS_INTERVAL_S = 0.1
FLUSH_S = 2.0


class ServerLog:
    """Nothing here waits for whoever reads the log."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._sink = LogSink(sys.stderr.fileno())
        self._progress = ProgressBar("loading weights") if sys.stderr.isatty() else None
        self._progress_due = time.monotonic()

    @contextlib.contextmanager
    def taking_log_records(self) -> Iterator[None]:
        """This process's own log records go the same way as its children's lines; all is written at the end."""
        configure_logging(self._settings, "supervisor")
        handler = logging.getLogger().handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        old_stream = handler.setStream(SinkStream(self.print))
        try:
            yield
        finally:
            handler.setStream(old_stream or sys.stderr)
            self._sink.close(FLUSH_S)

    def print(self, text: str) -> None:
        """Lines of the supervisor."""
        tag = f"supervisor {os.getpid()}"
        lines = [line.encode(errors="replace") for line in text.splitlines()]
        if self._settings.log_format == "json":
            tagged = [as_json_line(tag, line) for line in lines]
        else:
            tagged = [f"[{tag}] ".encode() + line for line in lines]
        self._write(b"".join(line + b"\n" for line in tagged))

    def print_for_copying(self, text: str) -> None:
        """Without a tag."""
        self._sink.write(text.encode())

    def copy_lines(self, reader: LineReader) -> bool:
        """What a child has written; False if no more can come."""
        lines, closed = reader.read_lines()
        if lines:
            self._write(lines)
        return not closed

    def print_last_words(self, child: ChildProcess) -> None:
        """Why it ended, as far as it has said so; one that was killed had no say in it."""
        assert child.exit_code is not None
        if child.fatal is not None and child.fatal.traceback is not None:
            self.print(child.fatal.traceback)
        elif -child.exit_code not in FROM_OUTSIDE and (last_lines := child.last_lines()):
            log.error("its last words:\n%s", "\n".join(f"    {line}" for line in last_lines))

    @property
    def progress_due(self) -> float | None:
        """When draw_progress() is to be called next, in time.monotonic(); None: this is no terminal."""
        return None if self._progress is None else self._progress_due

    def draw_progress(self, engine_page: StatsPage, now: float) -> None:
        """Redraws the bar; to be called whenever the loop comes round while the engine loads."""
        if self._progress is not None and now >= self._progress_due:
            self._progress_due = now + PROGRESS_INTERVAL_S
            counters = engine_page.read()
            self._sink.write(self._progress.render(counters["load_done_bytes"], counters["load_total_bytes"]))

    def _write(self, lines: bytes) -> None:
        self._sink.write((self._progress.clear() if self._progress else b"") + lines)


class SinkStream:
    """Lets a logging.StreamHandler write through a function."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self.write = write_line

    def flush(self) -> None:
        """Nothing is held back here."""
