"""KvEventLog: what changed in the prefix cache, handed from the step thread to a publisher."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import tokring_kernels


class StoredBlocks(NamedTuple):
    """Blocks [first, first + n) of a chain of digests that may have become findable; token_ids int32 bytes of those."""

    chain: bytes
    first: int
    token_ids: bytes


class KvChanges(NamedTuple):
    """Changes between two flushes: `events` as BlockPool.take_events() says, and what its stored digests stand for."""

    events: bytes
    stored: list[StoredBlocks]


class ChangeSink(Protocol):
    """Takes changes at once; its own thread does the rest."""

    def publish(self, changes: KvChanges) -> None: ...


class KvEventLog:
    """Costs a step two native calls and a copy of the tokens of full blocks; all else is the sink's business."""

    def __init__(self, pool: tokring_kernels.BlockPool, block_size: int, sink: ChangeSink) -> None:
        pool.log_events()
        self._pool = pool
        self._block_size = block_size
        self._sink = sink
        self._stored: list[StoredBlocks] = []

    def note(self, chain: bytes, first: int, stop: int, token_ids: NDArray[np.int32]) -> None:
        """Blocks [first, stop) of the sequence token_ids, with its chain of digests, were offered to the cache."""
        tokens = token_ids[first * self._block_size : stop * self._block_size].tobytes()
        self._stored.append(StoredBlocks(chain, first, tokens))

    def flush(self) -> None:
        """Hand over what happened since the last time."""
        events = self._pool.take_events()
        if events:
            self._sink.publish(KvChanges(events, self._stored))
        if self._stored:
            self._stored = []
