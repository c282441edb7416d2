"""What a token path is: the interface that NativeTokenPath and ReferenceTokenPath share, and the types it speaks.

One token path per front end turns OUT frames into bytes on client connections, without a Python object per token:
frame -> (token bytes, UTF-8 hold-back, stop-string hold-back) -> JSON -> SSE event -> HTTP chunk -> send(2).
Only exceptions come back, as events. Life of one streamed request (n choices = n streams on one connection):

    connection = path.connect(chunked=True)            # paused: rows queue until attach()
    path.open(slot, generation, connection=connection, template=(b'{"id":...,"delta":{"content":"', Field.TEXT,
              b'"},"logprobs":null,"finish_reason":null}]}'), stop=["\n\n"], hidden_ids=eos_ids)
    channel.submit(...); await response.prepare(request); await response.write(role_chunk)
    path.attach(connection, sock.fileno())             # once the transport's write buffer is empty; -1 for TLS
    ...each doorbell:  for event in path.step(frame.address, frame.length): handle(event)
                       for connection, data in path.outputs(): transports[connection].write(data)
                       if path.pending(): loop.call_soon(flush)
    on FINISHED(slot): result = path.result(slot); path.write(connection, final_events, end=True); path.close(slot)
    on SENT(connection): path.disconnect(connection)   # closes the path's own descriptor; before response.write_eof()

Everything is called by the loop thread only. Slots, generations and connection ids out of range raise IndexError,
calls in the wrong state raise ValueError; a frame that does not hold together raises FrameError and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

DEFAULT_BUDGET_US = 1000
DEFAULT_MAX_BACKLOG_BYTES = 1 << 20
DEFAULT_MAX_BACKLOG_AGE_S = 60.0
MISSING_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON cannot say; vLLM's choice


class FrameError(ValueError):
    """A STEP frame whose counts, lengths or sections contradict each other: close the channel."""


class Field(enum.IntEnum):
    """A place in a chunk template that is filled per chunk; literal bytes stand for themselves."""

    TEXT = 1  # text since the last chunk, JSON-escaped, without quotes
    LOGPROBS = 2  # the whole value of "logprobs": an object in the stream's LogprobStyle
    TOKEN_IDS = 3  # a JSON list: ids since the last chunk
    COMPLETION_TOKENS = 4  # tokens of this stream so far (continuous_usage_stats)
    TOTAL_TOKENS = 5  # num_prompt_tokens given to open() + tokens of this stream so far


Template = Sequence[bytes | Field]
"""The JSON of one SSE event in pieces; "data: " before and a blank line after are added by the path."""


class LogprobStyle(enum.IntEnum):
    NONE = 0
    CHAT = 1  # {"content":[{"token":"..","logprob":-0.1,"bytes":[..],"top_logprobs":[{..}]}]}
    COMPLETIONS = 2  # {"text_offset":[..],"token_logprobs":[..],"tokens":[..],"top_logprobs":[{"..":-0.1}]}


class EventKind(enum.IntEnum):
    """What step(), flush(), attach() and write() report. `subject` is a stream slot or a connection id."""

    FINISHED = 1  # slot: the engine's finish row arrived; all text is released; result() has its `finish`
    STOPPED = 2  # slot: a stop string matched; the text is final; cancel it in the channel. FINISHED still follows
    DELTA = 3  # slot opened with deltas=True: take() has something new
    DEAD = 4  # connection: the peer is gone (EPIPE, ECONNRESET, ...); nothing more will be sent on it
    OVER_LIMIT = 5  # connection: backlog over max_backlog_bytes or older than max_backlog_age_s; treated as DEAD
    SENT = 6  # connection: everything up to write(end=True) has left (mostly in that call): disconnect() it


class Event(NamedTuple):
    kind: EventKind
    subject: int


class Finish(NamedTuple):
    """The engine's finish row (FinishRecord of layout.hpp), as Python ints; times on CLOCK_MONOTONIC."""

    reason: int
    error_code: int
    stop_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    scheduled_ns: int
    first_token_ns: int
    end_ns: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Result(NamedTuple):
    """State of one stream. After STOPPED or FINISHED nothing in it but `finish` changes any more."""

    num_tokens: int  # completion tokens: up to and with the one that completed a stop string
    num_text_bytes: int  # UTF-8 bytes of text released so far
    stop: str | None  # the stop string that matched
    first_output_ns: int  # CLOCK_MONOTONIC in step() at the first token; 0: none yet
    last_publish_ns: int  # publish_ns of the frame with the last counted token; 0: none yet
    finish: Finish | None


class Piece(NamedTuple):
    """What take() hands out: everything released since the last take()."""

    text: str
    token_ids: npt.NDArray[np.int32]  # tokens whose text is released
    logprobs: bytes | None  # JSON as Field.LOGPROBS renders it (use orjson.Fragment); None without logprobs
    num_tokens: int  # tokens of the stream so far, held ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram in the stats page: buckets u64[len(bounds_ns) + 1] (the last is +Inf), sum_ns u64[1]."""

    bounds_ns: npt.NDArray[np.uint64]  # inclusive upper bounds, ascending
    buckets: npt.NDArray[np.uint64]  # writable view; not cumulative
    sum_ns: npt.NDArray[np.uint64]


class TokenPath(Protocol):
    """One front end's path from OUT frames to client bytes. See the module docstring for the order of calls."""

    # ---- connections ----

    def connect(self, *, chunked: bool) -> int:
        """A new connection id, paused and without a descriptor: what is written queues until attach().

        chunked: wrap every event in HTTP/1.1 chunk framing (False for HTTP/1.0 or `Connection: close` bodies).
        """

    def attach(self, connection: int, fd: int) -> list[Event]:
        """Starts sending what queued. fd >= 0: the path send()s on its own dup() of it, non-blocking, until
        disconnect(); nobody else may write meanwhile. fd == -1: BYTES mode (TLS): outputs() hands bytes back.
        Raises OSError if dup fails.
        """

    def pause(self, connection: int) -> None:
        """Queue from now on (transport.pause_writing in BYTES mode): text merges into one later chunk."""

    def resume(self, connection: int) -> list[Event]:
        """Ends pause() and sends what queued. Raises ValueError before attach()."""

    def write(self, connection: int, data: bytes, *, end: bool = False) -> list[Event]:
        """Sends `data` (whole SSE events, ready made: role, usage, ping, [DONE]) after all text released so far.

        Chunk framing is added if the connection is chunked. `end`: nothing follows; adds the terminating chunk if
        chunked, and SENT is reported, now or when the client has taken everything. The last text of a
        stream that finished in the latest step() waits for this call, so that both leave in one send(2).
        """

    def outputs(self) -> list[tuple[int, bytes]]:
        """(connection, bytes) of BYTES-mode connections with something to write, in order; they are then empty."""

    def backlog(self, connection: int) -> int:
        """Bytes queued: rendered and unsent, plus released text not yet rendered."""

    def disconnect(self, connection: int) -> bytes:
        """Closes the path's descriptor and forgets the connection; returns what was rendered but not yet sent.

        After SENT this is b"" (BYTES mode: what outputs() would return). Otherwise the bytes belong to the client, in
        order, before anything else on its transport. Streams still open on it go on silently.
        """

    def writable_fd(self) -> int:
        """An epoll descriptor that becomes readable when a blocked connection can be written again: add_reader()
        it once and call flush() from the callback. Owned by the path; -1 if the path never blocks on its own.
        """

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
        """Binds a stream to a slot, before its request is submitted. Raises ValueError if the slot is open.

        connection given: SEND mode, chunks are rendered from `template` and sent there. Otherwise take() hands the
        text out: at the end, or with deltas=True on each DELTA event (tool and reasoning parsers).
        stop: non-empty strings. The match that is complete first in the text wins (of several ending at the same
        character the longest), wherever token borders are; a match completed by one of the first `min_tokens`
        tokens does not count. include_stop keeps the matched string in the text.
        hidden_ids: tokens without visible text even if not special: EOS ids, and stop token ids unless the client
        wants them shown. They count, and appear in ids and logprobs.
        num_logprobs: entries of top_logprobs per token, at most 20 (fewer if the engine sent fewer). A token's entry
        leaves with the end of its text; at finish all are out.
        tokens_as_ids: logprobs name tokens "token_id:N" (return_tokens_as_token_ids).
        text_offset: characters before the first generated one, for COMPLETIONS text_offset (echoed prompt).
        return_token_ids: keeps chunks for tokens without text too, and Field.TOKEN_IDS filled.
        stream_interval: tokens per chunk; the first token and the finish do not wait.
        arrival_ns: CLOCK_MONOTONIC; 0: no time-to-first-token observation.
        strip_leading_space: drop one leading space of the text (byte-fallback tokenizers after an empty prompt).
        prompt_ids: needed by tables of family "stream" only, which decode in context.
        """

    def rebind(self, stream_slot: int, slot_generation: int) -> None:
        """The same stream under a new slot generation: its request was resubmitted to a new engine."""

    def cancel(self, stream_slot: int) -> None:
        """Drops (and counts as surplus) every later token of the stream; FINISHED still comes."""

    def take(self, stream_slot: int) -> Piece:
        """What was released since the last take(). Not for SEND mode (raises ValueError)."""

    def result(self, stream_slot: int) -> Result:
        """Counts, stop string and finish row so far."""

    def token_ids(self, stream_slot: int) -> npt.NDArray[np.int32]:
        """A copy of every token counted so far, held ones included (for resume)."""

    def close(self, stream_slot: int) -> None:
        """Frees the slot. Rows that still arrive for its generation are dropped and counted as stale."""

    # ---- driving it ----

    def step(self, address: int, length: int, budget_us: int = DEFAULT_BUDGET_US) -> list[Event]:
        """One STEP frame in memory: every row is decoded, then connections are rendered and sent for about
        `budget_us`; what is left waits for flush(). Events in row order, finish rows last. Raises FrameError.
        """

    def flush(self, budget_us: int = DEFAULT_BUDGET_US) -> list[Event]:
        """Goes on sending; retries blocked connections that became writable and checks backlog ages. Call it while
        pending() > 0, when writable_fd() is readable, and about once a second.
        """

    def pending(self) -> int:
        """Connections with something to send now (neither paused nor blocked)."""

    def counters(self) -> dict[str, int]:
        """tokens, surplus_tokens, stale_rows, chunks, sends, sent_bytes, blocked (would-block results);
        stalled: connections whose client takes no more now."""

    def release(self) -> None:
        """Closes every descriptor the path owns. Idempotent; the path is unusable afterwards."""

    def __init__(
        self,
        table: Any,
        num_stream_slots: int,
        *,
        max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES,
        max_backlog_age_s: float = DEFAULT_MAX_BACKLOG_AGE_S,
        inter_token: Histogram | None = None,
        first_token: Histogram | None = None,
    ) -> None: ...
