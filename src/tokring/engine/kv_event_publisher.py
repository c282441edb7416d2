"""KvEventPublisher: a thread that sends KV events over ZMQ, and sends them again to those who missed some."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from tokring.config import ConfigError
from tokring.engine.kv_event_batch import encode_batch
from tokring.engine.kv_event_log import KvChanges
from tokring.kv_events_config import KvEventsConfig

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

SEQUENCE_BYTES = 8  # big-endian
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES  # -1, with an empty payload
END_TIMEOUT_S = 1.0


class KvEventPublisher:
    """PUB: (topic, sequence number, batch). Replay (ROUTER): a request holds the first sequence number that is wanted;
    answers are (b"", sequence number, batch), the last one (b"", -1, b"").
    """

    def __init__(self, config: KvEventsConfig, block_size: int, rank: int = 0) -> None:
        """Binds or connects. Raises ConfigError if pyzmq is missing or an endpoint can't be used."""
        try:
            import zmq
        except ImportError:
            raise ConfigError("--kv-events-config needs the package pyzmq: pip install 'tokring[kv-events]'") from None
        self._zmq = zmq
        self._topic = config.topic.encode()
        self._block_size = block_size
        self._rank = rank
        # Between the step thread and ours: a deque's append and popleft are atomic.
        self._waiting: deque[tuple[float, KvChanges] | None] = deque()
        self._max_waiting = config.max_queue_size
        self._num_lost = 0  # written by the step thread
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Our thread's.
        self._sequence = 0
        self._num_lost_seen = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._publisher = self._open(zmq.PUB, config.endpoint, config.hwm)
        self._replay = None if config.replay_endpoint is None else self._open(zmq.ROUTER, config.replay_endpoint, 0)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, changes: KvChanges) -> None:
        """Called by the step thread. What does not fit is lost: the next sequence number tells of the gap."""
        if len(self._waiting) >= self._max_waiting:
            self._num_lost += 1
            return
        self._waiting.append((time.time(), changes))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Sends what waits, within a second, and ends."""
        self._waiting.append(None)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(END_TIMEOUT_S)

    def __enter__(self) -> KvEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, hwm)
        socket.setsockopt(self._zmq.LINGER, int(END_TIMEOUT_S * 1000))
        try:
            if kind == self._zmq.ROUTER or "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://"):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: endpoint {endpoint} can't be used: {error}") from None
        return socket

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake_fd, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if not self._send_waiting():
                break
            if self._replay is not None and self._replay in ready:
                self._answer_replay(self._replay)
        self._context.destroy(linger=int(END_TIMEOUT_S * 1000))
        os.close(self._wake_fd)

    def _send_waiting(self) -> bool:
        """Sends all that waits; False at the end."""
        while self._waiting:
            item = self._waiting.popleft()
            if item is None:
                return False
            timestamp_s, changes = item
            self._skip_lost()
            payload = encode_batch(changes, self._block_size, timestamp_s, self._rank)
            self._sent.append((self._sequence, payload))
            self._publisher.send_multipart((self._topic, _as_bytes(self._sequence), payload))
            self._sequence += 1
        return True

    def _skip_lost(self) -> None:
        num_lost = self._num_lost - self._num_lost_seen
        if num_lost:
            logger.warning("%d batches of KV events are lost: their publisher was too slow", num_lost)
            self._num_lost_seen += num_lost
            self._sequence += num_lost

    def _answer_replay(self, socket: zmq.Socket[bytes]) -> None:
        client, *frames = socket.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != SEQUENCE_BYTES:
            logger.warning("a request for the replay of KV events is no (b'', 8-byte sequence number): ignored")
            return
        first = int.from_bytes(frames[1], "big")
        for sequence, payload in self._sent:
            if sequence >= first:
                socket.send_multipart((client, b"", _as_bytes(sequence), payload))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))


def _as_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
