"""EngineConfig: what EngineCore needs to know, resolved once at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one EngineCore, after the model and the memory have been looked at."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_queued: int = 1024
    max_num_batched_tokens: int = 512
    max_num_prefill_tokens: int = 1 << 30  # of them for prompts, while requests decode
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    hash_algorithm: Literal["sha256", "blake2b"] = "sha256"
    max_logprobs: int = 20  # at most vocab_size
    max_prompt_logprobs_per_step: int = 128  # prompt positions with logits: bounds the logits' memory and the frames
    max_intake_per_step: int = 64  # requests taken from all front ends together before the next step runs
    num_speculative_tokens: int = 0  # most drafts of a sequence in one step; 0: no speculation
    prompt_lookup_min: int = 2  # tokens at the end of a sequence that are looked up in it
    prompt_lookup_max: int = 4
    async_scheduling: bool = True  # schedule step N + 1 while step N executes, where the backend is asynchronous
    stalled_channel_s: float = 10.0  # a front end without ring space for so long loses its requests

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot run a single sequence."""
        object.__setattr__(self, "max_logprobs", min(self.max_logprobs, self.vocab_size))
        sizes = ("vocab_size", "max_model_len", "block_size", "max_num_seqs")
        for name in (*sizes, "max_num_batched_tokens", "max_num_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, not {self.block_size}")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {self.num_blocks * self.block_size} tokens, one sequence of max_model_len needs "
                f"{self.max_model_len}: use --max-model-len {self.num_blocks * self.block_size} or more memory"
            )

    @property
    def max_running(self) -> int:
        """Seats in the batch: a step must have a token for each running request."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of the block table."""
        return -(-self.max_model_len // self.block_size)
