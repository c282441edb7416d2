"""From changes of the prefix cache to one message on vLLM's KV event wire."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokring.engine.kv_event_log import KvChanges, StoredBlocks

DIGEST_BYTES = 32
EVENT_BYTES = 1 + DIGEST_BYTES
STORED, REMOVED, CLEARED = range(3)
# vLLM's name of the memory that the model itself reads, as opposed to a tier that blocks are moved out to.
MEDIUM = "GPU"


class _Block(NamedTuple):
    parent: bytes | None  # None: the first block of a sequence
    token_ids: list[int]


def encode_batch(changes: KvChanges, block_size: int, timestamp_s: float, rank: int) -> bytes:
    """Msgpack [ts, [event, …], rank]; events are arrays that begin with their name:

    ["BlockStored", hashes, parent hash, token ids, block size, lora id, medium, lora name]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]
    """
    blocks = _blocks_of(changes.stored, block_size)
    batch = [timestamp_s, _events(changes.events, blocks, block_size), rank]
    return msgspec.msgpack.encode(batch)


def block_hash(digest: bytes) -> int:
    """The number that stands for a block: the low 64 bits of its digest, as vLLM cuts them."""
    return int.from_bytes(digest[-8:], "big")


def _blocks_of(stored: list[StoredBlocks], block_size: int) -> dict[bytes, _Block]:
    """Digest -> what it stands for, of every block that was offered."""
    found: dict[bytes, _Block] = {}
    for chain, first, tokens in stored:
        token_ids = np.frombuffer(tokens, np.int32).reshape(-1, block_size)
        for index, row in enumerate(token_ids.tolist(), start=first):
            digest = _digest(chain, index)
            found[digest] = _Block(_digest(chain, index - 1) if index else None, row)
    return found


def _events(events: bytes, blocks: dict[bytes, _Block], block_size: int) -> list[list[Any]]:
    """Events in order; blocks of one sequence that were stored one after the other, or removed so, share one."""
    messages: list[list[Any]] = []
    last_kind, last_digest = -1, b""
    for start in range(0, len(events), EVENT_BYTES):
        kind, digest = events[start], events[start + 1 : start + EVENT_BYTES]
        if kind == STORED:
            block = blocks[digest]
            if last_kind == STORED and block.parent == last_digest:
                messages[-1][1].append(block_hash(digest))
                messages[-1][3].extend(block.token_ids)
            else:
                parent = None if block.parent is None else block_hash(block.parent)
                token_ids = list(block.token_ids)
                messages.append(
                    ["BlockStored", [block_hash(digest)], parent, token_ids, block_size, None, MEDIUM, None]
                )
        elif kind == REMOVED and last_kind == REMOVED:
            messages[-1][1].append(block_hash(digest))
        elif kind == REMOVED:
            messages.append(["BlockRemoved", [block_hash(digest)], MEDIUM])
        else:
            messages.append(["AllBlocksCleared"])
        last_kind, last_digest = kind, digest
    return messages


def _digest(chain: bytes, index: int) -> bytes:
    return chain[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
