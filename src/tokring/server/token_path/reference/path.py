"""ReferenceTokenPath: the token path in plain Python, the meaning that NativeTokenPath is tested against."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokring.server.token_path.interface import (
    DEFAULT_BUDGET_US,
    DEFAULT_MAX_BACKLOG_AGE_S,
    DEFAULT_MAX_BACKLOG_BYTES,
    Event,
    EventKind,
    Histogram,
    LogprobStyle,
    Piece,
    Result,
    Template,
)
from tokring.server.token_path.reference.connection import Connection
from tokring.server.token_path.reference.step_frame import MAX_LOGPROBS, StepFrame, read_step_frame
from tokring.server.token_path.reference.stream import Stream, StreamOptions
from tokring.server.token_path.token_table import TokenTable

COUNTERS = ("tokens", "surplus_tokens", "stale_rows", "chunks", "sends", "sent_bytes", "blocked")


class ReferenceTokenPath:
    """See interface.TokenPath."""

    def __init__(
        self,
        table: TokenTable,
        num_stream_slots: int,
        *,
        max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES,
        max_backlog_age_s: float = DEFAULT_MAX_BACKLOG_AGE_S,
        inter_token: Histogram | None = None,
        first_token: Histogram | None = None,
    ) -> None:
        self._table = table
        self._max_backlog_bytes = max_backlog_bytes
        self._max_backlog_age_ns = int(max_backlog_age_s * 1e9)
        self._inter_token = inter_token
        self._first_token = first_token
        self._streams: list[Stream | None] = [None] * num_stream_slots
        self._connections: dict[int, Connection] = {}
        self._queue: dict[int, Connection] = {}  # with something to render or send, in order
        self._next_connection = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._epoll = select.epoll()
        self._blocked: dict[int, Connection] = {}  # by the descriptor registered in _epoll

    # ---- connections ----

    def connect(self, *, chunked: bool) -> int:
        connection = Connection(self._next_connection, chunked)
        self._connections[connection.id] = connection
        self._next_connection += 1
        return connection.id

    def attach(self, connection: int, fd: int) -> list[Event]:
        found = self._connection(connection)
        if found.is_attached:
            raise ValueError(f"connection {connection} is already attached")
        found.attach(fd)
        return self._pump_now(found)

    def pause(self, connection: int) -> None:
        self._connection(connection).is_paused = True

    def resume(self, connection: int) -> list[Event]:
        found = self._connection(connection)
        if not found.is_attached:
            raise ValueError(f"connection {connection} is not attached")
        found.is_paused = False
        return self._pump_now(found)

    def write(self, connection: int, data: bytes, *, end: bool = False) -> list[Event]:
        found = self._connection(connection)
        if found.is_dead:
            return []
        self._render(found)
        if data:
            found.append(data)
        if end:
            found.append_end()
        return self._pump_now(found)

    def outputs(self) -> list[tuple[int, bytes]]:
        drained: list[tuple[int, bytes]] = []
        for connection in self._connections.values():
            if connection.output and not connection.owns_descriptor and not connection.is_paused:
                drained.append((connection.id, bytes(connection.output)))
                connection.output.clear()
        return drained

    def backlog(self, connection: int) -> int:
        return self._connection(connection).backlog()

    def disconnect(self, connection: int) -> bytes:
        found = self._connection(connection)
        self._unwatch(found)
        found.close()
        unsent = bytes(found.output)
        found.drop()
        self._queue.pop(connection, None)
        del self._connections[connection]
        return unsent

    def writable_fd(self) -> int:
        return self._epoll.fileno()

    # ---- streams ----

    def open(
        self,
        stream_slot: int,
        slot_generation: int,
        *,
        connection: int | None = None,
        template: Template = (),
        deltas: bool = False,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
        hidden_ids: Sequence[int] = (),
        logprob_style: LogprobStyle = LogprobStyle.NONE,
        num_logprobs: int = 0,
        tokens_as_ids: bool = False,
        text_offset: int = 0,
        return_token_ids: bool = False,
        stream_interval: int = 1,
        num_prompt_tokens: int = 0,
        arrival_ns: int = 0,
        strip_leading_space: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        if not 0 <= stream_slot < len(self._streams):
            raise IndexError(f"stream slot {stream_slot} is not below {len(self._streams)}")
        if self._streams[stream_slot] is not None:
            raise ValueError(f"stream slot {stream_slot} is already open")
        if "" in stop or not 0 <= num_logprobs <= MAX_LOGPROBS or stream_interval < 1:
            raise ValueError("stop strings must not be empty, num_logprobs at most 20, stream_interval at least 1")
        if connection is not None and deltas:
            raise ValueError("a stream is sent to a connection or handed out as deltas, not both")
        options = StreamOptions(
            connection=connection,
            template=template,
            deltas=deltas,
            stop=stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
            skip_special=skip_special,
            hidden_ids=hidden_ids,
            logprob_style=logprob_style,
            num_logprobs=num_logprobs,
            tokens_as_ids=tokens_as_ids,
            text_offset=text_offset,
            return_token_ids=return_token_ids,
            stream_interval=stream_interval,
            num_prompt_tokens=num_prompt_tokens,
            arrival_ns=arrival_ns,
            strip_leading_space=strip_leading_space,
            prompt_ids=prompt_ids,
        )
        stream = Stream(self._table, slot_generation, options)
        if connection is not None:
            self._connection(connection).streams.append(stream)
        self._streams[stream_slot] = stream

    def rebind(self, stream_slot: int, slot_generation: int) -> None:
        self._stream(stream_slot).generation = slot_generation

    def cancel(self, stream_slot: int) -> None:
        self._stream(stream_slot).is_cancelled = True

    def take(self, stream_slot: int) -> Piece:
        stream = self._stream(stream_slot)
        if stream.options.connection is not None:
            raise ValueError(f"stream slot {stream_slot} sends to connection {stream.options.connection}")
        return stream.take()

    def result(self, stream_slot: int) -> Result:
        return self._stream(stream_slot).result()

    def token_ids(self, stream_slot: int) -> npt.NDArray[np.int32]:
        return np.array(self._stream(stream_slot).token_ids, dtype=np.int32)

    def close(self, stream_slot: int) -> None:
        stream = self._stream(stream_slot)
        connection = self._connection_of(stream)
        if connection is not None:
            self._render(connection)  # keeps released text of a stream that is closed before write()
            connection.streams.remove(stream)
        self._streams[stream_slot] = None

    # ---- driving it ----

    def step(self, address: int, length: int, budget_us: int = DEFAULT_BUDGET_US) -> list[Event]:
        frame = read_step_frame(address, length, len(self._streams))
        events: list[Event] = []
        now_ns = time.monotonic_ns()
        for row in range(len(frame.stream_slot)):
            self._feed_row(frame, row, now_ns, events)
        for slot, generation, finish in frame.finish:
            stream = self._live_stream(slot, generation)
            if stream is not None:
                stream.end(finish)
                self._report(slot, stream, events)
                events.append(Event(EventKind.FINISHED, slot))
                self._hold_for_write(stream)
        self._pump_queue(budget_us, events, skip_awaiting=True)
        return events

    def flush(self, budget_us: int = DEFAULT_BUDGET_US) -> list[Event]:
        events: list[Event] = []
        for fd, _ in self._epoll.poll(0):
            connection = self._blocked[fd]
            self._unwatch(connection)
            connection.is_blocked = False
            self._queue[connection.id] = connection
        self._pump_queue(budget_us, events, skip_awaiting=False)
        for connection in self._connections.values():
            if connection.is_paused or connection.is_blocked:
                self._check_limits(connection, events)
        return events

    def pending(self) -> int:
        return len(self._queue)

    def counters(self) -> dict[str, int]:
        return {**self._counters, "stalled": sum(link.is_stalled for link in self._connections.values())}

    def release(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._queue.clear()
        self._epoll.close()

    # ---- first pass: rows to text ----

    def _feed_row(self, frame: StepFrame, row: int, now_ns: int, events: list[Event]) -> None:
        slot = frame.stream_slot[row]
        stream = self._live_stream(slot, frame.slot_generation[row])
        if stream is None:
            return
        tokens = range(frame.first_token[row], frame.first_token[row + 1])
        if tokens and not stream.is_dropping:
            self._observe_output(stream, frame.publish_ns, now_ns)
        for index in tokens:
            if stream.is_dropping:
                self._counters["surplus_tokens"] += 1
                continue
            self._counters["tokens"] += 1
            stream.feed(frame.token_id[index], frame.logprobs.get(index))
            if stream.stop is not None:
                self._report(slot, stream, events)
                events.append(Event(EventKind.STOPPED, slot))
                self._hold_for_write(stream)
        self._report(slot, stream, events)

    def _live_stream(self, slot: int, generation: int) -> Stream | None:
        """The stream that a row speaks of; None (and counted) if that request is over."""
        stream = self._streams[slot]
        if stream is None or stream.generation != generation or stream.finish is not None:
            self._counters["stale_rows"] += 1
            return None
        return stream

    def _observe_output(self, stream: Stream, publish_ns: int, now_ns: int) -> None:
        if stream.first_output_ns == 0:
            stream.first_output_ns = now_ns
            if stream.options.arrival_ns:
                _observe(self._first_token, now_ns - stream.options.arrival_ns)
        else:
            _observe(self._inter_token, publish_ns - stream.last_publish_ns)
        stream.last_publish_ns = publish_ns

    def _report(self, slot: int, stream: Stream, events: list[Event]) -> None:
        """Queues what a row released: to its connection, as a DELTA event, or nowhere if the client is gone."""
        if not stream.has_news():
            return
        if stream.options.connection is not None:
            connection = self._connection_of(stream)
            if connection is None or connection.is_dead:
                stream.discard()
            else:
                self._queue[connection.id] = connection
        elif stream.options.deltas and not stream.is_delta_reported:
            stream.is_delta_reported = True
            events.append(Event(EventKind.DELTA, slot))

    def _hold_for_write(self, stream: Stream) -> None:
        connection = self._connection_of(stream)
        if connection is not None:
            connection.awaits_write = True

    # ---- second pass: text to bytes to clients ----

    def _pump_queue(self, budget_us: int, events: list[Event], *, skip_awaiting: bool) -> None:
        deadline_ns = time.monotonic_ns() + budget_us * 1000
        for connection in list(self._queue.values()):
            if skip_awaiting and connection.awaits_write:
                continue
            self._pump(connection, events)
            if time.monotonic_ns() > deadline_ns:
                break

    def _pump_now(self, connection: Connection) -> list[Event]:
        events: list[Event] = []
        if not connection.is_dead:
            self._pump(connection, events)
        return events

    def _pump(self, connection: Connection, events: list[Event]) -> None:
        """Renders and sends; leaves the queue, since what can't go now goes on attach, resume or writability."""
        self._queue.pop(connection.id, None)
        connection.awaits_write = False
        if connection.is_paused or connection.is_blocked:
            self._check_limits(connection, events)
            return
        connection.stalled_since_ns = 0
        while not connection.is_blocked:
            self._render(connection)
            if not connection.output or not connection.owns_descriptor:
                self._report_sent(connection, events)
                return
            self._send(connection, events)

    def _report_sent(self, connection: Connection, events: list[Event]) -> None:
        if connection.is_ending and not connection.is_dead:
            connection.is_ending = False
            events.append(Event(EventKind.SENT, connection.id))

    def _render(self, connection: Connection) -> None:
        for stream in connection.streams:
            if stream.has_news():
                connection.append(b"data: " + stream.render() + b"\n\n")
                self._counters["chunks"] += 1

    def _send(self, connection: Connection, events: list[Event]) -> None:
        self._counters["sends"] += 1
        try:
            self._counters["sent_bytes"] += connection.send()
        except OSError:
            self._drop(connection, EventKind.DEAD, events)
            return
        if connection.is_blocked:
            self._counters["blocked"] += 1
            self._epoll.register(connection.fileno(), select.EPOLLOUT)
            self._blocked[connection.fileno()] = connection

    def _check_limits(self, connection: Connection, events: list[Event]) -> None:
        if not connection.is_dead and connection.is_over_limit(self._max_backlog_bytes, self._max_backlog_age_ns):
            self._drop(connection, EventKind.OVER_LIMIT, events)

    def _drop(self, connection: Connection, kind: EventKind, events: list[Event]) -> None:
        self._unwatch(connection)
        connection.drop()
        self._queue.pop(connection.id, None)
        events.append(Event(kind, connection.id))

    def _unwatch(self, connection: Connection) -> None:
        if self._blocked.pop(connection.fileno(), None) is not None:
            self._epoll.unregister(connection.fileno())

    # ---- look-ups ----

    def _connection(self, connection: int) -> Connection:
        if connection not in self._connections:
            raise IndexError(f"connection {connection} does not exist")
        return self._connections[connection]

    def _connection_of(self, stream: Stream) -> Connection | None:
        return None if stream.options.connection is None else self._connections.get(stream.options.connection)

    def _stream(self, stream_slot: int) -> Stream:
        stream = self._streams[stream_slot] if 0 <= stream_slot < len(self._streams) else None
        if stream is None:
            raise IndexError(f"stream slot {stream_slot} is not open")
        return stream


def _observe(histogram: Histogram | None, value_ns: int) -> None:
    if histogram is not None:
        value_ns = max(value_ns, 0)
        histogram.buckets[np.searchsorted(histogram.bounds_ns, value_ns, side="left")] += np.uint64(1)
        histogram.sum_ns[0] += np.uint64(value_ns)
