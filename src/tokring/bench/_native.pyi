import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

class StepSource:
    """One step's columns, copied into native memory."""

    @staticmethod
    def of(
        stream_slot: npt.NDArray[np.uint32],
        slot_generation: npt.NDArray[np.uint32],
        token_id: npt.NDArray[np.int32],
        token_index: npt.NDArray[np.uint32],
        rank: npt.NDArray[np.int32],
        logprob: npt.NDArray[np.float32],
        top_id: npt.NDArray[np.int32],
        top_logprob: npt.NDArray[np.float32],
    ) -> StepSource: ...

class RingWriterLoop:
    """Engine's end of a channel; run() sends whole steps."""

    def __init__(self, control_fd: int, req_doorbell_fd: int, out_doorbell_fd: int, source: StepSource) -> None: ...
    def run(self, sent: Words, acked: Words, first: int, last: int, closed: bool, gap_ns: int) -> None: ...
    @property
    def doorbells_sent(self) -> int: ...
    @property
    def doorbells_suppressed(self) -> int: ...

class RingReaderLoop:
    """Front end's end of a channel; run() reads every byte, returns the sum of all 64-bit words behind the headers."""

    def __init__(self, control_fd: int, req_doorbell_fd: int, out_doorbell_fd: int, out_bytes: int) -> None: ...
    def run(self, delivered: Words, acked: Words, first: int, last: int) -> int: ...

class CopyLoop:
    """memcpy into `area` on one side, out of it on the other, `published` between them."""

    def __init__(self, area: npt.NDArray[np.uint8], published: Words, bytes: int) -> None: ...
    def write(self, sent: Words, acked: Words, first: int, last: int, gap_ns: int) -> None: ...
    def read(self, delivered: Words, acked: Words, first: int, last: int) -> None: ...

class SyscallCounter:
    """Seizes two processes by ptrace; run() follows them to their ends. RuntimeError where that is not allowed."""

    def __init__(self, writer_pid: int, reader_pid: int) -> None: ...
    def run(self, writer_counting: Words, reader_counting: Words) -> tuple[int, int]: ...

def yield_until(word: Words, value: int) -> int:
    """Waits without the GIL, yielding the core; returns this thread's CPU nanoseconds."""

def yield_for(ns: int) -> int: ...
def sleep_for(ns: int) -> int: ...
def acknowledge(word: Words, value: int) -> None: ...
def die_with_parent() -> None: ...

class StreamReader:
    """A client of many HTTP streams on 127.0.0.1, one connection per request; counts server-sent events."""

    def __init__(self, port: int, requests: list[bytes]) -> None: ...
    def read_until(self, events_per_stream: int, timeout_s: float) -> bool:
        """Reads until every stream has that many events or is closed; False if that takes longer. Without the GIL."""

    def take_gaps_us(self) -> list[int]:
        """Between two events of a stream, of all streams since the last call; 0 within one recv(2)."""

    @property
    def num_events(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_closed(self) -> int: ...

def send_steps(listen_fd: int, num_streams: int, num_steps: int, event: bytes, step_us: int) -> None:
    """The floor of a server of streams: accepts, then one send(2) of `event` per stream and step. Without the GIL."""

class Answer:
    """How one request went. Times are CLOCK_MONOTONIC ns, 0 = never; num_chunks counts events that carry text."""

    @property
    def sent_ns(self) -> int: ...
    @property
    def first_token_ns(self) -> int: ...
    @property
    def last_token_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def status(self) -> int: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def last_event(self) -> bytes: ...
    @property
    def body_start(self) -> bytes: ...

class LoadClient:
    """Streams requests from an HTTP/1.1 server at a numeric IPv4 address, each on a connection of its own."""

    def __init__(self, host: str, port: int) -> None: ...
    def run(self, requests: list[bytes], due_ns: list[int], concurrency: int, timeout_s: float) -> bool:
        """Sends each request when it is due (ns after the start), at most `concurrency` at once (0: no bound); False
        if not all are answered in time. Without the GIL. RuntimeError where an answer is not HTTP/1."""

    @property
    def answers(self) -> list[Answer]: ...
    @property
    def gaps_ns(self) -> npt.NDArray[np.int64]:
        """Times from one token chunk to the next, all streams together."""
