"""CudaOps: the CUDA kernels as methods over device arrays. Every op is asynchronous on the launcher's stream.

An array is anything with `data_ptr()` (torch) or `__array_interface__` (numpy, under the CPU emulation) plus `dtype`
and `shape`; only its pointer and sizes are read, at each call, and nothing is copied or kept. In numpy bfloat16 is its
bits in uint16 and fp8 (e4m3) its bits in uint8. Arrays are contiguous unless a row stride is said to be free.

Letters of the shapes: T tokens of the step, R request rows, V vocabulary, H query heads, K key/value heads, D head_dim
(64, 80, 96, 128 or 256). `act` is the activations' dtype, bfloat16 or float16, the same in all arguments of a call.

Sizes that a captured graph must be able to change (how many rows sample, which words are scattered) are read from
device memory: a row number of -1 means "skip this entry".
"""

from __future__ import annotations

from typing import Any, Protocol

Array = Any  # see the module's docstring
Grid = tuple[int, int, int]


class Launcher(Protocol):
    """What runs a kernel: the driver through CuPy, or the CPU emulation."""

    def launch(
        self, source: str, kernel: str, grid: Grid, block: Grid, args: tuple[Any, ...], *, shared_bytes: int = 0
    ) -> None:
        """Launch `kernel` of native_kernels/cuda/<source>; int args are pointers, numpy scalars go by value."""
        ...


class CudaOps:
    """All ops of a decoder step but its matrix products. Holds no arrays; stateless but for the launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    # ---- the residual stream ----

    def embed(self, out: Array, token_ids: Array, table: Array, *, scale: float = 1.0) -> None:
        """out[t] = table[token_ids[t]] * scale.

        out: act or float32[T, width]; token_ids: int32[T]; table: act[V, width]. width % 8 == 0. Ids outside the
        vocabulary give zeros.
        """
        raise NotImplementedError

    def rms_norm(
        self,
        out: Array,
        x: Array,
        weight: Array,
        epsilon: float,
        *,
        weight_offset: float = 0.0,
        rows: Array | None = None,
    ) -> None:
        """out[i] = x[r] / sqrt(mean(x[r]^2) + epsilon) * (weight + weight_offset), r = rows[i] or i.

        out: act[n, width]; x: act or float32[T, width]; weight: act or float32[width] (offset 1: Gemma's files); rows:
        int32[n] or None (n = T), -1 skips. width % 8 == 0, at most 16,384. Computed in float32.
        """
        raise NotImplementedError

    def add_rms_norm(
        self,
        out: Array,
        residual: Array,
        branch: Array,
        weight: Array,
        epsilon: float,
        *,
        weight_offset: float = 0.0,
        branch_weight: Array | None = None,
        rows: Array | None = None,
    ) -> None:
        """residual += branch, then out = rms_norm(residual); with branch_weight (Gemma) the branch is normalised first.

        out, branch: act[., width]; residual: act or float32[T, width], in place; weights as in rms_norm (one dtype for
        both, weight_offset added to both). With rows: int32[n] (distinct not needed) out[i] is that of rows[i], -1
        skips, and residual is left as it was: for the final norm, of sampling tokens only.
        """
        raise NotImplementedError

    # ---- attention's input ----

    def rope_and_write_kv(
        self,
        query: Array,
        qkv: Array,
        key_cache: Array,
        value_cache: Array,
        cosine: Array,
        sine: Array,
        positions: Array,
        slot_mapping: Array,
        *,
        query_norm: Array | None = None,
        key_norm: Array | None = None,
        epsilon: float = 0.0,
        weight_offset: float = 0.0,
        key_scale: Array | None = None,
        value_scale: Array | None = None,
    ) -> None:
        """query = rope(q); key_cache, value_cache[slot] = rope(k), v; heads are RMS-normed first if norms are given.

        qkv: act[T, (H + 2 K) * D], row stride free, unchanged; query: act[T, H, D]. Pairs (i, i + rotary_dim / 2) of
        the first rotary_dim dimensions rotate, the others stay; rotary_dim % 4 == 0. cosine, sine: float32
        [num_positions, rotary_dim / 2]; positions: int32[T]. slot_mapping: int32[T] = block * 16 + offset; -1 caches
        nothing (the query is still written). query_norm, key_norm: act or float32[D], both of one dtype.
        Caches: [num_blocks, K, 16, D] of act, or of int8 or fp8 e4m3 with key_scale, value_scale: float32[num_blocks,
        K, 16], which get each vector's largest magnitude / 127 (int8) or / 448 (fp8): cached value * scale = value.
        """
        raise NotImplementedError

    # ---- paged attention ----

    def paged_decode(
        self,
        out: Array,
        query: Array,
        key_cache: Array,
        value_cache: Array,
        block_table: Array,
        sequence_lengths: Array,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        workspace: Array,
        key_scale: Array | None = None,
        value_scale: Array | None = None,
    ) -> None:
        """Attention of one token per request row, the last of its sequence.

        out, query: act[R, H, D]; caches and scales as rope_and_write_kv writes them; block_table: int32[R, W];
        sequence_lengths: int32[R], the token itself included; 0: the row is written as zeros.
        """
        raise NotImplementedError

    def paged_prefill(
        self,
        out: Array,
        query: Array,
        key_cache: Array,
        value_cache: Array,
        block_table: Array,
        query_starts: Array,
        sequence_lengths: Array,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        key_scale: Array | None = None,
        value_scale: Array | None = None,
    ) -> None:
        """Causal attention of runs of tokens that end their sequences; cached prefixes are seen.

        out, query: act[T, H, D]; request r's tokens are query_starts[r] : query_starts[r + 1] (int32[R + 1]) and its
        sequence is sequence_lengths[r] long with them; the rest as in paged_decode.
        """
        raise NotImplementedError

    # ---- the MLP ----

    def silu_mul(self, out: Array, gate_up: Array) -> None:
        """out = silu(gate) * up; gate_up: act[T, 2 * width] = [gate | up]; out: act[T, width]; width % 8 == 0."""
        raise NotImplementedError

    def gelu_tanh_mul(self, out: Array, gate_up: Array) -> None:
        """The same with GELU's tanh form."""
        raise NotImplementedError

    # ---- state on the device ----

    def scatter_metadata(self, state: Array, update: Array) -> None:
        """state[index] = value for each pair of `update`: the only host-to-device metadata of a step.

        state: int32[S], the arena of which all columns (block table, lengths, sampling parameters, ...) are views;
        floats travel as their bits, 64-bit values as two words. update: int32[1 + 2 * capacity]: the number of pairs
        n, then n (index, value) pairs with distinct indices; indices outside the arena are ignored.
        """
        raise NotImplementedError

    def begin_decode(self, slot_mapping: Array, sequence_lengths: Array, block_table: Array, positions: Array) -> None:
        """For rows with sequence_lengths[r] = n > 0: positions[r] = n - 1, slot_mapping[r] = the slot of that position.

        Rows with length 0 get position 0 and slot -1. slot_mapping, sequence_lengths, positions: int32[R];
        block_table: int32[R, W]. A position beyond W * 16 gets slot -1.
        """
        raise NotImplementedError

    def advance_decode(self, token_ids: Array, sequence_lengths: Array, sampled: Array) -> None:
        """After sampling: token_ids[r] = sampled[r] and sequence_lengths[r] += 1 where the length is positive.

        All int32[R]. A row whose sampled token is -1 gets token 0: it goes on until the host takes it out.
        """
        raise NotImplementedError

    # ---- logits before sampling ----
    # `rows` int32[m]: logits row i belongs to request row rows[i], whose parameters and counts apply; -1: row i is
    # left alone. None: row i is request row i.

    def widen_logits(self, out: Array, logits: Array, *, soft_cap: float = 0.0) -> None:
        """out = logits, or soft_cap * tanh(logits / soft_cap) if it is positive.

        out: float32[m, V]; logits: act or float32[m, V], may be `out` itself.
        """
        raise NotImplementedError

    def count_history(
        self, counts: Array, slots: Array, token_ids: Array, num_prompt: Array, num_tokens: Array
    ) -> None:
        """Fill the count rows of requests that join: first zeroed, then counted.

        counts: uint32 or int32[num_slots, V], 1 = seen in the prompt, + 2 for every time in the output. Entry i fills
        counts[slots[i]] (int32[n], distinct, -1 skips) with token_ids[i, :num_tokens[i]] (int32[n, stride], row stride
        free), of which the first num_prompt[i] are the prompt. Ids outside the vocabulary are ignored.
        """
        raise NotImplementedError

    def count_sampled(self, counts: Array, slots: Array, sampled: Array) -> None:
        """counts[slots[r], sampled[r]] += 2 where neither is -1; slots, sampled: int32[R]."""
        raise NotImplementedError

    def apply_penalties(
        self,
        logits: Array,
        counts: Array,
        slots: Array,
        repetition: Array,
        presence: Array,
        frequency: Array,
        *,
        rows: Array | None = None,
    ) -> None:
        """Penalise tokens already seen, in place: the same bits as tokring_kernels.apply_penalties.

        logits: float32[m, V]; counts as in count_history; slots: int32[R], -1: no penalties; repetition, presence,
        frequency: float32[R].
        """
        raise NotImplementedError

    def apply_bias(self, logits: Array, entry_rows: Array, ids: Array, bias: Array) -> None:
        """logits[entry_rows[i], ids[i]] += bias[i]; -inf forbids a token; row -1 skips the entry.

        logits: float32[m, V]; entry_rows, ids: int32[n]; bias: float32[n].
        """
        raise NotImplementedError

    def ban_words(
        self,
        logits: Array,
        words: Array,
        word_starts: Array,
        word_rows: Array,
        history: Array,
        num_tokens: Array,
        *,
        history_rows: Array | None = None,
    ) -> None:
        """Forbid the last token of word i in logits row word_rows[i] where all tokens before it have just been written.

        words: int32[total]; word i is words[word_starts[i] : word_starts[i + 1]], word_starts: int32[n + 1], word_rows:
        int32[n], -1 skips. The tokens so far of logits row r are history[h, : num_tokens[h]], h = history_rows[r] or r;
        history: int32[R, stride], num_tokens: int32[R].
        """
        raise NotImplementedError

    def apply_bitmask(self, logits: Array, mask: Array, mask_rows: Array | None = None) -> None:
        """logits = -inf where the mask's bit is 0: token t is bit t % 32 of word t // 32.

        logits: float32[m, V]; mask: uint32 or int32[n, >= ceil(V / 32)]; mask row i belongs to logits row mask_rows[i]
        (int32[n], -1 skips), or to row i. Serves allowed ids and grammars.
        """
        raise NotImplementedError

    # ---- sampling ----

    @staticmethod
    def sample_workspace_bytes(num_rows: int) -> int:
        """Size of the scratch that sample and logprobs need for logits of so many rows; 16-byte aligned."""
        raise NotImplementedError

    def sample(
        self,
        logits: Array,
        temperature: Array,
        top_k: Array,
        top_p: Array,
        min_p: Array,
        seed: Array,
        choice: Array,
        position: Array,
        out_token: Array,
        workspace: Array,
        *,
        draw: int = 0,
        rows: Array | None = None,
    ) -> None:
        """One token per row into out_token: the very token that tokring_kernels.sample gives, with the same randomness.

        logits: float32[m, V], unchanged. Parameters by request row, as in tokring_kernels.sample: temperature, top_p,
        min_p float32[R], top_k int32[R], seed int64[R], choice int32 or uint32[R]; position int32[R] is the number of
        tokens before the sampled one, in decode sequence_lengths itself. out_token: int32[R], at the request row.
        Token -1: the row holds NaN or +inf, or nothing but -inf.
        """
        raise NotImplementedError

    def logprobs(
        self,
        logits: Array,
        chosen: Array,
        out_logprob: Array,
        out_rank: Array,
        out_top_id: Array,
        out_top_logprob: Array,
        workspace: Array,
        *,
        entries: Array | None = None,
    ) -> None:
        """Log-softmax of `chosen` and of the k likeliest tokens, of raw logits.

        chosen: int32[n], -1 (nothing was sampled) gives NaN and rank 0 for the chosen token only. Entry i is of logits
        row entries[i] (int32[n], -1 skips), or of row i. out_logprob float32[n]; out_rank int32[n], 1 = the likeliest,
        ties in the order of ids; out_top_id int32[n, k], out_top_logprob float32[n, k], likeliest first, k <= 32 and
        k <= V. Rows with NaN or +inf, or nothing but -inf, give NaN, rank 0 and ids -1.
        """
        raise NotImplementedError
