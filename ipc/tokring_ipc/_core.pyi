"""The native core. Arrays are numpy; `u32`/`i32`/`f32` arguments must have exactly that dtype and be C-contiguous."""

import socket
from collections.abc import Iterable
from typing import Any, Self, TypedDict

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]
Buffer = bytes | bytearray | memoryview | npt.NDArray[Any] | np.void

LAYOUT_VERSION: int
LAYOUT_HASH: int
FRAME_ALIGNMENT: int
SEGMENT_HEADER_BYTES: int
SEGMENT_CONTROL_OFFSET: int
DATA_ALIGNMENT: int
MIN_RING_BYTES: int
MAX_LOGPROBS: int
MAX_STREAM_SLOTS: int
NUM_INLINE_STOP_IDS: int
NO_STREAM_SLOT: int
SEGMENT_MAGIC: int
CONTROL_MAGIC: int
MAX_CONTROL_MESSAGE_BYTES: int
AWAKE: int
STATS_VERSION: int
STATS_HASH: int
STATS_PAGE_BYTES: int
MAX_PEERS: int
MAX_HANDLERS: int
MAX_HTTP_METHODS: int
HOP_BOUNDS: tuple[float, ...]

class PeerCorrupt(RuntimeError):
    """The peer wrote what the protocol forbids. Close this channel; nothing else is harmed."""

class AttachError(RuntimeError):
    """The handshake failed; the text names both sides and the remedy."""

class HandleDead(RuntimeError):
    """Used after close(), in a forked child, after release() (frames) or after commit() (step frames)."""

def field_table() -> list[tuple[str, str, str, int, int]]: ...
def struct_sizes() -> dict[str, int]: ...
def enum_table() -> dict[str, dict[str, int]]: ...
def struct_dtype(structure: str) -> np.dtype[np.void]: ...
def request_frame_bytes(num_ids: int, extension_bytes: int) -> int: ...
def step_bytes(
    num_rows: int,
    *,
    num_token_ids: int | None = None,
    num_finished: int = 0,
    num_logprob_rows: int = 0,
    logprobs_width: int = 0,
) -> int:
    """Bytes that such a step takes in the OUT ring, as one frame."""

def now_ns() -> int:
    """CLOCK_MONOTONIC, the clock of every shared time."""

def crc32c(data: Buffer) -> int: ...
def cgroup_memory_available(mount: str = ...) -> int | None:
    """Bytes that this process's cgroup (v2) and its parents still allow; None: no limit known."""

class Frame:
    """A checked frame in the OUT ring, read in place. Dead after release(): accessors then raise HandleDead.

    Views that were taken earlier stay mapped but show whatever comes next; with debug=True release() refuses while any
    view lives. Native consumers take (address, length) and must bound what they read by these.
    """

    @property
    def type(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def count(self) -> int:
        """Rows of a step, positions of prompt logprobs."""

    @property
    def length(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def publish_ns(self) -> int: ...
    @property
    def num_token_ids(self) -> int: ...
    @property
    def num_finished(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def data(self) -> U8:
        """The whole frame, header included."""

    @property
    def stream_slot(self) -> U32: ...
    @property
    def slot_generation(self) -> U32: ...
    @property
    def num_tokens(self) -> U32 | None:
        """Tokens per row; None: one each."""

    @property
    def token_id(self) -> I32:
        """One per row, or sum(num_tokens)."""

    @property
    def finish(self) -> Records:
        """FINISH_DTYPE[num_finished]"""

    @property
    def logprobs(self) -> tuple[U32, I32, F32, I32, F32] | None:
        """(token_index[m], rank[m], logprob[m], top_id[m, width], top_logprob[m, width]) or None."""

    def columns(self) -> tuple[Any, ...]:
        """(stream_slot, slot_generation, token_id), then those of `logprobs` if the step has any: all in one call."""

    def rows(self) -> list[tuple[Any, ...]]:
        """A tuple per row of a step: (stream_slot, [token ids], finish reason or None).

        Then, for each of its tokens that has logprobs: rank, logprob, [top ids], [top logprobs]. For readers that want
        objects; columns are cheaper. Copies: valid after release().
        """

    @property
    def ready(self) -> np.void | None:
        """A private copy of the READY_DTYPE record; None for frames of another type."""

    @property
    def prompt_logprobs(self) -> tuple[np.void, I32, F32, I32, F32] | None:
        """(PROMPT_LOGPROBS_DTYPE record, rank[m], logprob[m], top_id[m, width], top_logprob[m, width]) or None."""

class FrontEndChannel:
    """The front end's end of one connection. One thread. Everything raises HandleDead after close() and in a fork."""

    @staticmethod
    def connect(
        control: socket.socket,
        req_doorbell_fd: int,
        out_doorbell_fd: int,
        *,
        req_bytes: int = ...,
        out_bytes: int = ...,
        num_stream_slots: int = ...,
        timeout_s: float = ...,
        frontend_index: int = ...,
        has_said_hello: bool = ...,
        crc: bool = ...,
        debug: bool = ...,
    ) -> FrontEndChannel:
        """HELLO -> SEGMENT. Ring sizes are rounded up to powers of two of at least 64 KiB.

        `has_said_hello`: after say_hello() with the same sizes, to be called once the control socket is readable.
        The doorbells are duplicated and made non-blocking; `req_doorbell_fd` is a pipe's write end, `out_doorbell_fd` a
        read end. `debug` makes release() refuse while views live; `crc` stamps CRC32C into the requests.
        Raises AttachError, naming both sides, on any mismatch, refusal, time-out or a closed socket.
        """

    @staticmethod
    def say_hello(
        control: socket.socket,
        *,
        req_bytes: int = ...,
        out_bytes: int = ...,
        num_stream_slots: int = ...,
        timeout_s: float = ...,
        frontend_index: int = ...,
    ) -> None:
        """HELLO alone, for those who have other things to do until the engine answers. Raises AttachError."""

    @property
    def connection_generation(self) -> int: ...
    @property
    def num_stream_slots(self) -> int: ...
    @property
    def engine_pid(self) -> int: ...
    @property
    def engine_index(self) -> int: ...
    @property
    def max_request_bytes(self) -> int: ...
    @property
    def segment_fd(self) -> int: ...
    @property
    def peer_closed(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def counters(self) -> dict[str, int]: ...
    @property
    def control(self) -> socket.socket: ...
    @property
    def out_doorbell_fd(self) -> int: ...
    def submit(self, record: Records | np.void, ids: I32, extensions: Buffer = ...) -> bool:
        """Writes, publishes and rings if the engine sleeps. False: the ring is full (a 503).

        `record` is one REQUEST_DTYPE; num_ids and extension_bytes are filled in. Raises ValueError for a slot out of
        range, generation 0, or a request above max_request_bytes.
        """

    def submit_many(self, items: Iterable[tuple[Records | np.void, I32, Buffer]]) -> int:
        """(record, ids, extensions) each; one publish for all. Returns how many fitted."""

    def cancel(self, stream_slot: int, slot_generation: int) -> None:
        """Asks the engine to end this request; idempotent, never full. Rings if the engine sleeps."""

    def poll(self) -> Frame | None:
        """The next frame, or None. Raises PeerCorrupt before a forged byte is used (no other method does)."""

    def release(self) -> None:
        """Everything polled so far may be overwritten."""

    def arm(self) -> bool:
        """True: empty, and the next publish rings: sleep on out_doorbell_fd. False: poll again. poll() disarms."""

    def req_free_bytes(self) -> int: ...
    def drain_doorbell(self) -> None: ...
    def count_in(self, page: StatsMap, peer: int) -> None:
        """Counts in block `peer` (the engine's index) of this process's stats page from now on."""

    def close(self) -> None:
        """Idempotent. The mapping goes with the last view."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

class Request:
    """One request in private memory; structurally checked (slots, counts, extensions), not semantically."""

    @property
    def stream_slot(self) -> int: ...
    @property
    def slot_generation(self) -> int: ...
    @property
    def num_ids(self) -> int: ...
    @property
    def record(self) -> np.void:
        """REQUEST_DTYPE, read-only."""

    @property
    def record_bytes(self) -> bytes:
        """The same as bytes: cheaper where only plain values are wanted."""

    @property
    def ids(self) -> I32:
        """Prompt, then prior output; read-only, keeps the request's memory alive."""

    @property
    def id_range(self) -> tuple[int, int]:
        """(least, largest) of the ids, (0, 0) if there are none."""

    @property
    def extensions(self) -> list[tuple[int, bytes]]:
        """(ExtensionKind, payload); the kind as a plain int."""

class RequestLimits:
    """What an engine can serve of a request's numbers and token ids."""

    def __init__(self, *, vocab_size: int, max_model_len: int, max_logprobs: int) -> None: ...
    def check(
        self, record: bytes, ids: I32
    ) -> tuple[bytes, int, int, int, int, int, int, int, int, int, int, tuple[int, ...], bool, bool]:
        """Check a REQUEST_DTYPE and its ids. ValueError: the field that can't be served, and why.

        Returns the record with top_k at least 0, unused inline stop ids -2 (never sampled), and deadline_ns 2**64 - 1
        for none; stream_slot; slot_generation; parent_slot, -1 for none but itself; flags; priority; deadline_ns;
        number of prompt tokens; number of tokens at which it ends by length; num_logprobs; num_prompt_logprobs, -1
        behind prior output; its inline stop ids; whether min_tokens or a penalty changes its logits; whether it wants
        logprobs of its prompt or no output.
        """

class StepFrame:
    """A claimed step: writable views into the ring. Nothing is visible before commit() and publish().

    One claim at a time; a claim that is dropped without commit() leaves nothing behind. Fill every column.
    """

    @property
    def stream_slot(self) -> U32: ...
    @property
    def slot_generation(self) -> U32: ...
    @property
    def num_tokens(self) -> U32 | None: ...
    @property
    def token_id(self) -> I32: ...
    @property
    def finish(self) -> Records: ...
    @property
    def logprob_token_index(self) -> U32: ...
    @property
    def logprob_rank(self) -> I32: ...
    @property
    def logprob(self) -> F32: ...
    @property
    def top_id(self) -> I32: ...
    @property
    def top_logprob(self) -> F32: ...
    def commit(self) -> None: ...

class EngineChannel:
    """The engine's end of one connection. One thread. Everything raises HandleDead after close() and in a fork."""

    @staticmethod
    def accept(
        control: socket.socket,
        req_doorbell_fd: int,
        out_doorbell_fd: int,
        *,
        engine_index: int = ...,
        max_segment_bytes: int = ...,
        timeout_s: float = ...,
        crc: bool = ...,
        debug: bool = ...,
    ) -> EngineChannel:
        """Answers one HELLO with a new segment, or refuses it in words. Raises AttachError with the same words.

        `req_doorbell_fd` is a pipe's read end, `out_doorbell_fd` a write end; both are duplicated.
        """

    @property
    def connection_generation(self) -> int: ...
    @property
    def num_stream_slots(self) -> int: ...
    @property
    def frontend_pid(self) -> int: ...
    @property
    def frontend_index(self) -> int: ...
    @property
    def max_step_bytes(self) -> int:
        """A quarter of the OUT ring: the largest frame; write_step() splits above it."""

    @property
    def segment_fd(self) -> int: ...
    @property
    def peer_closed(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def doorbell_owed(self) -> bool: ...
    @property
    def counters(self) -> dict[str, int]: ...
    @property
    def control(self) -> socket.socket: ...
    @property
    def req_doorbell_fd(self) -> int: ...
    def poll_request(self) -> Request | None:
        """The next request, copied whole, then checked. Raises PeerCorrupt (no other method does)."""

    def release_requests(self) -> None: ...
    def new_cancels(self) -> bool:
        """Whether anything was cancelled since the last call; if not, at most requests received since are."""

    def cancelled(
        self, stream_slots: U32, generations: U32, out: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which of these requests the front end has cancelled: bool[n]."""

    def is_cancelled(self, stream_slot: int, slot_generation: int) -> bool:
        """Whether the front end has cancelled this request."""

    def claim_step(
        self,
        num_rows: int,
        *,
        num_token_ids: int | None = None,
        num_finished: int = 0,
        num_logprob_rows: int = 0,
        logprobs_width: int = 0,
    ) -> StepFrame | None:
        """None: no space. num_token_ids: rows carry several tokens each (num_tokens column). ValueError above
        max_step_bytes."""

    def write_step(
        self,
        stream_slot: U32,
        slot_generation: U32,
        token_id: I32,
        finish: Records | bytes | None = None,
        *,
        num_tokens: U32 | None = None,
        logprob_token_index: U32 | None = None,
        logprob_rank: I32 | None = None,
        logprob: F32 | None = None,
        top_id: I32 | None = None,
        top_logprob: F32 | None = None,
    ) -> bool:
        """Claim, fill and commit in one call, split with MORE if need be. False: no space, nothing written.

        Rows may be 0 (finish records alone). logprob_token_index ascends within token_id. Show it with publish().
        """

    def write_ready(self, record: Records | np.void) -> bool: ...
    def write_prompt_logprobs(
        self,
        stream_slot: int,
        slot_generation: int,
        start: int,
        rank: I32,
        logprob: F32,
        top_id: I32 | None = None,
        top_logprob: F32 | None = None,
    ) -> bool:
        """Positions [start, start + n); split with MORE if need be. False: no space, nothing written."""

    def publish(self) -> None:
        """Shows everything committed, in one exchange; remembers whether a doorbell is owed."""

    def ring(self) -> None:
        """Pays the doorbell if one is owed, and prefetches the next frame's lines. Call it after publish()."""

    def out_free_bytes(self) -> int: ...
    def arm_requests(self) -> bool:
        """True: no request and no new cancel, and the next of either rings: sleep on req_doorbell_fd."""

    def drain_doorbell(self) -> None: ...
    def count_in(self, page: StatsMap, peer: int) -> None:
        """Counts in block `peer` (the front end's index) of this process's stats page from now on."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

class ChannelStats(TypedDict):
    connection_generation: int
    sent_capacity: int
    sent_position: int
    sent_frames: int
    sent_records: int
    sent_full: int
    doorbells_sent: int
    doorbells_suppressed: int
    received_capacity: int
    received_position: int
    received_frames: int
    received_records: int
    cancels_sent: int
    sleeps: int
    hop_sum_ns: int
    hop_buckets: list[int]

class StatsMap:
    def __init__(self, fd: int, role: int, index: int, writable: bool) -> None: ...
    @property
    def role(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def pid(self) -> int:
        """The process that writes the page now (or wrote it last)."""

    @property
    def owner_is_running(self) -> bool:
        """Whether `pid` is still that process, told by its start time: not another to which the number has gone."""

    @property
    def writable(self) -> bool: ...
    @property
    def counters(self) -> npt.NDArray[np.uint64]:
        """The table's words, writable for the page's own process. Index: WORD_INDEX[name] + instance."""

    @property
    def ages(self) -> tuple[float, float]:
        """Seconds since the last heartbeat, and since the running step began (-1: none runs)."""

    def add(self, stat: str | int, amount: int = 1, instance: int = 0) -> None: ...
    def set(self, stat: str | int, value: int, instance: int = 0) -> None: ...
    def get(self, stat: str | int, instance: int = 0) -> int: ...
    def observe(self, stat: str | int, value: float, instance: int = 0) -> None:
        """One observation, in seconds or counts as the histogram's name says."""

    def observe_many(self, stat: str | int, values: npt.NDArray[np.float64], instance: int = 0) -> None: ...
    def channel(self, peer: int) -> ChannelStats: ...
    def channel_address(self, peer: int) -> int: ...

class Watch:
    """Another page's silence, counted in ticks of this process's own heartbeat."""

    @property
    def silence_s(self) -> float: ...
    @property
    def step_age_s(self) -> float: ...

class Heartbeat:
    """A native thread that writes heartbeat_ns and heartbeat_ticks into `page` once per interval."""

    def __init__(self, page: StatsMap, *, interval_s: float = 1.0) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def watch(self, page: StatsMap) -> Watch: ...
    def __enter__(self) -> Self:
        """start()"""

    def __exit__(self, *args: object) -> None:
        """stop()"""

def stats_table() -> list[tuple[str, str, int, int, int, float, tuple[float, ...]]]: ...
def sum_pages(pages: list[StatsMap]) -> npt.NDArray[np.uint64]: ...
