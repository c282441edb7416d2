"""KvEventsConfig: --kv-events-config, vLLM's JSON object."""

from typing import Literal

import msgspec


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names, defaults and meaning as in vLLM."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: zmq if enabled
    endpoint: str = "tcp://*:5557"  # bound if it has a wildcard or names a local path, else connected
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches queued for one slow subscriber; further ones it misses
    max_queue_size: int = 100_000  # batches that may wait to be encoded; further ones are lost, which a gap tells
    topic: str = ""

    @classmethod
    def from_json(cls, text: str) -> "KvEventsConfig":
        """Raises ValueError with one line that says what is wrong."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{error}; vLLM's JSON object is wanted, e.g. {EXAMPLE}") from None
        if min(config.buffer_steps, config.max_queue_size) < 1 or config.hwm < 0:
            raise ValueError("buffer_steps and max_queue_size must be at least 1, hwm at least 0")
        return config

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


EXAMPLE = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'
