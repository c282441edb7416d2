"""Native module; argument checks inside. Documented by the wrappers of this package."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokring_kernels.array import Array

BLOCK_SIZE: int
TILE_TOKENS: int

def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_table: Array,
    query_start: Array,
    seq_lens: Array,
    scale: float,
    out: Array,
    sliding_window: int,
    soft_cap: float,
    num_threads: int,
    key_scale: Array | None,
    value_scale: Array | None,
) -> None: ...
def write_kv(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    key_scale: Array | None,
    value_scale: Array | None,
) -> None: ...
def rms_norm(x: Array, weight: Array, epsilon: float, out: Array, num_threads: int) -> None: ...
def silu_mul(gate_up: Array, out: Array, num_threads: int) -> None: ...
def rope(x: Array, cosine: Array, sine: Array, positions: Array) -> None: ...
def sample(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    choice: Array,
    position: Array,
    out_token: Array,
    finite: Array,
    draw: int,
    num_threads: int,
) -> None: ...
def apply_penalties(
    logits: Array,
    rows: Array,
    token_ids: Array,
    token_rows: Array,
    num_prompt: Array,
    num_tokens: Array,
    repetition: Array,
    presence: Array,
    frequency: Array,
) -> None: ...
def apply_bias(logits: Array, rows: Array, ids: Array, bias: Array) -> None: ...
def apply_bitmask(logits: Array, mask: Array, rows: Array | None) -> None: ...
def logprobs(
    logits: Array,
    chosen: Array,
    chosen_logprob: Array,
    rank: Array,
    top_ids: Array,
    top_logprobs: Array,
    num_threads: int,
) -> None: ...
def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def supported_levels() -> list[str]: ...
def level() -> str: ...
def set_level(name: str) -> None: ...
def set_num_threads(num_threads: int, worker_nice: int, spin_us: int) -> None: ...
def num_threads() -> int: ...
def xor_words(words: Array) -> int: ...

class PackedLinear:
    def __init__(self, kind: str, rows: Array, k: int) -> None: ...
    def apply(self, x: Array, out: Array, activation_bits: int, num_threads: int) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class Decoder:
    def __init__(
        self,
        embedding: Array,
        final_norm: Array,
        head: PackedLinear,
        intermediate: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_epsilon: float,
        attention_scale: float,
        activation_bits: int,
    ) -> None: ...
    def add_layer(
        self,
        attention_norm: Array,
        query: PackedLinear,
        key: PackedLinear,
        value: PackedLinear,
        output: PackedLinear,
        mlp_norm: Array,
        gate: PackedLinear,
        up: PackedLinear,
        down: PackedLinear,
        cosine: Array,
        sine: Array,
        qkv_bias: Array | None,
        query_norm: Array | None,
        key_norm: Array | None,
        sliding_window: int,
    ) -> None: ...
    def set_cache(
        self,
        keys: Sequence[Array],
        values: Sequence[Array],
        key_scales: Sequence[Array | None],
        value_scales: Sequence[Array | None],
    ) -> None: ...
    def run(
        self,
        token_ids: Array,
        positions: Array,
        slot_mapping: Array,
        block_table: Array,
        query_start: Array,
        seq_lens: Array,
        logits_index: Array,
        logits: Array,
        num_threads: int,
    ) -> None: ...

class BlockPool:
    """Reference-counted KV blocks and an index of their content; see tokring.engine.block_pool.

    Ids are int64[n], or int32[n] where they come in; a chain is digests of 32 bytes, one after the other.
    """

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def references(self) -> NDArray[np.int32]: ...
    @property
    def cached(self) -> NDArray[np.bool_]: ...
    def allocate(self, count: int) -> NDArray[np.int64] | None: ...
    def share(self, blocks: Array) -> None: ...
    def release(self, blocks: Array) -> None: ...
    def find(self, chain: bytes, max_blocks: int) -> NDArray[np.int64]: ...
    def insert(self, chain: bytes, first: int, blocks: Array) -> None:
        """blocks[i], in use, holds what chain[first + i] stands for; content or blocks known already are skipped."""

    def forget(self, blocks: Array) -> None: ...
    def forget_all(self) -> None: ...
    def log_events(self) -> None:
        """From now on note every change of the index."""

    def take_events(self) -> bytes:
        """What was noted since the last call, 33 bytes each: 0 stored, 1 removed, 2 all cleared; then the digest."""

    def index_is_sound(self) -> bool: ...
    def stack(self) -> NDArray[np.int32]: ...
    def queue(self) -> NDArray[np.int32]: ...

class RowStore:
    """Borrows matrices [columns, R] of int64, int32 or float32: what belongs to row r is column r of each.

    record_offsets: for each column, matrix by matrix, where its bytes are in a row's record; -1: not in there.
    """

    def __init__(self, matrices: Sequence[Array], record_offsets: Sequence[int]) -> None: ...
    def put(self, row: int, record: bytes, values: tuple[int | float, ...]) -> None:
        """Write a row: the columns of its record, and those others, in order, of which these are the values."""

    def move(self, source: int, target: int) -> None:
        """Copy a row over another."""

class StepColumns:
    """Borrows columns by row (int32[R]; token_base, first_token_ns int64[R], stop_ids [8, R], block_ids [R, B],
    token_ids flat) and the step's buffers: step_rows int32[7, R + 1] (rows, num_scheduled, num_computed, query_start,
    seq_lens, sample_index, logits_index), step_tokens int32[2, T] (token_ids, positions), slot_mapping int64[T]."""

    def __init__(
        self,
        *,
        num_tokens: Array,
        num_computed: Array,
        num_scheduled: Array,
        last_token: Array,
        max_total: Array,
        token_base: Array,
        first_token_ns: Array,
        token_ids: Array,
        stop_ids: Array,
        block_ids: Array,
        num_blocks: Array,
        block_size: int,
        step_rows: Array,
        step_tokens: Array,
        slot_mapping: Array,
    ) -> None: ...
    def build(self, num_rows: int) -> tuple[int, int, int]:
        """Fill the step's buffers from rows with num_scheduled > 0; (requests, tokens, samples). ValueError: a bug."""

    def plan(self, num_rows: int, held: Array | None) -> tuple[int, list[int]]:
        """Schedule a token for rows that lack the KV of one, unless held (bool[num_rows]); their number, and the rows
        that lack more."""

    def grow(self, num_rows: int, pool: BlockPool) -> bool:
        """Give rows blocks for all their tokens; False (nothing done) if too few are free."""

    def advance(self) -> NDArray[np.int64]:
        """Count the step built last as computed; sample i appends -1 - i to its row. Their lengths before it."""

    def resolve(
        self, rows: Array, lengths: Array | None, token_ids: Array, num_stop_columns: int, now_ns: int
    ) -> tuple[list[int], int]:
        """Token lengths[i] (int64) of rows[i] is token_ids[i] (-1: none). Indices of those that end: by length, stop
        id, or no token; these rows are cut off behind it. Then how many have no token.
        lengths None: advance() comes with it; rows are those that sample in the step built last."""

    def admit(self, row: int, pool: BlockPool, chain: bytes, max_hits: int, num_blocks: int, spare: int) -> int:
        """Give an empty row its blocks: those that hold the beginning of `chain`, at most max_hits, shared; then new
        ones. The number of the former; -1, with nothing changed, unless `spare` blocks stay free."""

    def insert(self, row: int, pool: BlockPool, chain: bytes, first: int, stop: int) -> None:
        """Blocks [first, stop) of a row hold what the digests there of `chain` stand for; see BlockPool.insert."""

    def leave(self, row: int, last: int, pool: BlockPool) -> None:
        """Release a row's blocks; those of row `last` become the row's, where it is another."""

    def draft(
        self, num_rows: int, eligible: Array, rules: tuple[int, int, int], budget: int, pool: BlockPool
    ) -> NDArray[np.int32]:
        """Write drafts behind the tokens of decoding rows with eligible (int32[num_rows]): what followed the last
        earlier occurrence of the sequence's end. rules: (min_ngram, max_ngram, max_tokens). Returns int32[num_rows]:
        how many each has; num_tokens and num_scheduled count them."""

    def verify(
        self, rows: Array, num_drafts: Array, following: Array, num_stop_columns: int, token_ids: Array
    ) -> NDArray[np.int32]:
        """Accept the drafts of rows[i] that are what was sampled: token_ids[i], then num_drafts[i] of `following`.
        Returns how many; token_ids[i] becomes what was sampled behind the last accepted one."""

def sha256_chain(
    chain: bytes, root: bytes, token_ids: Array, num_tokens: int, block_size: int, use_instructions: bool = True
) -> bytes:
    """Digests of the full blocks of token_ids[:num_tokens] (int32), of which `chain` has the first: each the SHA-256 of
    the one before (of `root` at first) and the block's ids."""
