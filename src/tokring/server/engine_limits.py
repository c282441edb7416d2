"""EngineLimits: what a front end must know of its engine to check requests."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine said in its READY record."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_logprobs: int
    block_size: int = 16
    num_blocks: int = 0

    @classmethod
    def of(cls, ready: Any) -> "EngineLimits":
        """Of the record as it came: READY_DTYPE."""
        return cls(**{item.name: int(ready[item.name]) for item in fields(cls)})
