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

from tokring_kernels.cuda import catalogue
from tokring_kernels.cuda.arrays import Array, address, expect, kind, row_stride, size_in_bytes
from tokring_kernels.cuda.attention import HEAD_DIMS
from tokring_kernels.cuda.kernel import Kernel, Size
from tokring_kernels.cuda.launcher import Launcher

MAX_WIDTH = 16_384
MAX_VOCAB = 1 << 20
MAX_TOP_LOGPROBS = 32
TAIL = 64  # logits.cu: kTail
_ACT = "bf16 f16"
_ROW_PARTS, _PART_BYTES = 16, 8  # logits.cuh: kRowParts, PartMaximum
_PART_LOGITS = 4096  # logits.cu: kPartLogits


class CudaOps:
    """All ops of a decoder step but its matrix products and paged attention (attention.py). It holds no arrays.

    Every op raises ValueError for an array of the wrong dtype, shape or layout, before anything is launched.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def prepare_special_steps(self) -> None:
        """Compile and load what only rules, grammars and logprobs launch, so that the first such step need not."""
        self._launcher.prepare(catalogue.OF_SPECIAL_STEPS)

    def _launch(self, kernel: Kernel, grid: Size, threads: int, *arguments: float) -> None:
        self._launcher.launch(kernel, grid, (threads,), 0, kernel.arguments(*arguments))

    # ---- the residual stream ----

    def embed(self, out: Array, token_ids: Array, table: Array, *, scale: float = 1.0) -> None:
        """out[t] = table[token_ids[t]] * scale.

        out: act or float32[T, width]; token_ids: int32[T]; table: act[V, width]. width % 8 == 0. Ids outside the
        vocabulary give zeros.
        """
        tokens, width = out.shape
        act, vocab_size = kind(table), table.shape[0]
        expect("table", table, _ACT, None, width)
        expect("out", out, f"{act} f32", None, _width(width))
        expect("token_ids", token_ids, "i32", tokens)
        self._launch(
            catalogue.EMBED[act, kind(out)],
            (tokens, -(-width // 1024)),
            128,
            *(address(out), address(token_ids), address(table), width, vocab_size, scale),
        )

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
        self._add_rms_norm(out, x, None, weight, epsilon, weight_offset, None, rows)

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
        expect("branch", branch, kind(out), *residual.shape)
        self._add_rms_norm(out, residual, branch, weight, epsilon, weight_offset, branch_weight, rows)

    def _add_rms_norm(
        self,
        out: Array,
        residual: Array,
        branch: Array | None,
        weight: Array,
        epsilon: float,
        weight_offset: float,
        branch_weight: Array | None,
        rows: Array | None,
    ) -> None:
        count, width = out.shape
        act = kind(out)
        expect("out", out, _ACT, None, _width(width))
        expect(
            "residual" if branch is not None else "x", residual, f"{act} f32", count if rows is None else None, width
        )
        expect("weight", weight, "f32", width)
        expect("branch_weight", branch_weight, "f32", width)
        expect("rows", rows, "i32", count)
        self._launch(
            catalogue.ADD_RMS_NORM[act, kind(residual)],
            (count,),
            min(1024, -(-width // 256) * 32),
            *(address(out), address(residual), address(branch), address(weight), address(branch_weight), address(rows)),
            *(width, epsilon, weight_offset),
        )

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
        tokens, num_heads, head_dim = query.shape
        act, cached, num_kv_heads = kind(query), kind(key_cache), key_cache.shape[1]
        expect("query", query, _ACT, tokens, num_heads, head_dim)
        expect("qkv", qkv, act, tokens, (num_heads + 2 * num_kv_heads) * head_dim, rows_strided=True)
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, but is {head_dim}")
        blocks, quantized = key_cache.shape[0], cached in catalogue.CACHES
        expect("key_cache", key_cache, f"{act} int8 fp8", None, num_kv_heads, 16, head_dim)
        expect("value_cache", value_cache, cached, *key_cache.shape)
        if quantized != (key_scale is not None) or quantized != (value_scale is not None):
            raise ValueError(
                f"a cache of {key_cache.dtype} {'needs' if quantized else 'takes no'} key_scale, value_scale"
            )
        expect("key_scale", key_scale, "f32", blocks, num_kv_heads, 16)
        expect("value_scale", value_scale, "f32", blocks, num_kv_heads, 16)
        rotary_dim = 2 * cosine.shape[1]
        if rotary_dim % 4 or rotary_dim > head_dim:
            raise ValueError(f"the rotary dimension must be a multiple of 4 up to {head_dim}, but is {rotary_dim}")
        expect("cosine", cosine, "f32", None, None)
        expect("sine", sine, "f32", *cosine.shape)
        expect("positions", positions, "i32", tokens)
        expect("slot_mapping", slot_mapping, "i32", tokens)
        expect("query_norm", query_norm, "f32", head_dim)
        expect("key_norm", key_norm, "f32", head_dim)
        self._launch(
            catalogue.ROPE_KV[act, cached],
            (-(-tokens * (num_heads + 2 * num_kv_heads) // 4),),
            128,
            *(address(query), address(qkv), address(key_cache), address(value_cache)),
            *(address(key_scale), address(value_scale), address(cosine), address(sine)),
            *(address(positions), address(slot_mapping), address(query_norm), address(key_norm)),
            *(tokens, num_heads, num_kv_heads, head_dim, rotary_dim, row_stride(qkv), epsilon, weight_offset),
        )

    # ---- the MLP ----

    def silu_mul(self, out: Array, gate_up: Array) -> None:
        """out = silu(gate) * up; gate_up: act[T, 2 * width] = [gate | up]; out: act[T, width]; width % 8 == 0."""
        self._gated(catalogue.SILU_MUL, out, gate_up)

    def gelu_tanh_mul(self, out: Array, gate_up: Array) -> None:
        """The same with GELU's tanh form."""
        self._gated(catalogue.GELU_TANH_MUL, out, gate_up)

    def _gated(self, kernels: dict[tuple[str, ...], Kernel], out: Array, gate_up: Array) -> None:
        tokens, width = out.shape
        expect("out", out, _ACT, tokens, _width(width, limit=None))
        expect("gate_up", gate_up, kind(out), tokens, 2 * width)
        grid = (tokens, -(-width // 2048))
        self._launch(kernels[(kind(out),)], grid, 256, address(out), address(gate_up), width)

    # ---- state on the device ----

    def scatter_metadata(self, state: Array, update: Array) -> None:
        """state[index] = value for each pair of `update`: the only host-to-device metadata of a step.

        state: int32[S], the arena of which all columns (block table, lengths, sampling parameters, ...) are views;
        floats travel as their bits, 64-bit values as two words. update: int32[1 + 2 * capacity]: the number of pairs
        n, then n (index, value) pairs with distinct indices; indices outside the arena are ignored.
        """
        expect("state", state, "i32", None)
        expect("update", update, "i32", None)
        capacity = (update.shape[0] - 1) // 2
        self._launch(
            catalogue.SCATTER_METADATA,
            (min(-(-capacity // 256), 64),),
            256,
            *(address(state), address(update), state.shape[0], capacity),
        )

    def begin_decode(self, slot_mapping: Array, sequence_lengths: Array, block_table: Array, positions: Array) -> None:
        """For rows with sequence_lengths[r] = n > 0: positions[r] = n - 1, slot_mapping[r] = the slot of that position.

        Rows with length 0 get position 0 and slot -1. slot_mapping, sequence_lengths, positions: int32[R];
        block_table: int32[R, W]. A position beyond W * 16 gets slot -1.
        """
        rows, width = block_table.shape
        expect("block_table", block_table, "i32", rows, width)
        for name, array in (("slot_mapping", slot_mapping), ("sequence_lengths", sequence_lengths)):
            expect(name, array, "i32", rows)
        expect("positions", positions, "i32", rows)
        arrays = (slot_mapping, positions, sequence_lengths, block_table)
        self._launch(catalogue.BEGIN_DECODE, (-(-rows // 256),), 256, *map(address, arrays), rows, width)

    def advance_decode(self, token_ids: Array, sequence_lengths: Array, sampled: Array) -> None:
        """After sampling: token_ids[r] = sampled[r] and sequence_lengths[r] += 1 where the length is positive.

        All int32[R]. A row whose sampled token is -1 gets token 0: it goes on until the host takes it out.
        """
        rows = token_ids.shape[0]
        for name, array in (("token_ids", token_ids), ("sequence_lengths", sequence_lengths), ("sampled", sampled)):
            expect(name, array, "i32", rows)
        arrays = (token_ids, sequence_lengths, sampled)
        self._launch(catalogue.ADVANCE_DECODE, (-(-rows // 256),), 256, *map(address, arrays), rows)

    # ---- logits before sampling ----
    # `rows` int32[m]: logits row i belongs to request row rows[i], whose parameters and counts apply; -1: row i is
    # left alone. None: row i is request row i.

    def widen_logits(self, out: Array, logits: Array, *, soft_cap: float = 0.0) -> None:
        """out = logits, or soft_cap * tanh(logits / soft_cap) if it is positive.

        out: float32[m, V]; logits: act or float32[m, V], may be `out` itself.
        """
        expect("out", out, "f32", None, None)
        expect("logits", logits, f"{_ACT} f32", *out.shape)
        count = out.shape[0] * out.shape[1]
        arguments = (address(out), address(logits), count, soft_cap)
        kernel = catalogue.CAP_LOGITS if kind(logits) == "f32" else catalogue.WIDEN_LOGITS[(kind(logits),)]
        self._launch(kernel, (-(-count // 2048),), 256, *arguments)

    def count_history(
        self, counts: Array, slots: Array, token_ids: Array, num_prompt: Array, num_tokens: Array
    ) -> None:
        """Fill the count rows of requests that join: first zeroed, then counted.

        counts: uint32 or int32[num_slots, V], 1 = seen in the prompt, + 2 for every time in the output. Entry i fills
        counts[slots[i]] (int32[n], distinct, -1 skips) with token_ids[i, :num_tokens[i]] (int32[n, stride], row stride
        free), of which the first num_prompt[i] are the prompt. Ids outside the vocabulary are ignored.
        """
        entries, vocab_size = token_ids.shape[0], counts.shape[1]
        expect("counts", counts, "i32", None, None)
        expect("token_ids", token_ids, "i32", entries, None, rows_strided=True)
        for name, array in (("slots", slots), ("num_prompt", num_prompt), ("num_tokens", num_tokens)):
            expect(name, array, "i32", entries)
        self._launch(
            catalogue.COUNT_HISTORY,
            (entries,),
            1024,
            *(address(counts), address(slots), address(token_ids), row_stride(token_ids)),
            *(address(num_prompt), address(num_tokens), vocab_size),
        )

    def note_sampled(self, counts: Array, tails: Array, slots: Array, lengths: Array, sampled: Array) -> None:
        """Behind sample, for lanes r with slots[r] >= 0, lengths[r] > 0 and a token: count it, put it behind the tail.

        counts[slot, sampled[r]] += 2 as in count_history; tails: int32[num_slots, 64] holds the latest tokens of each
        slot, that of position p at p % 64; slots, lengths (tokens before the sampled one), sampled: int32[R].
        """
        lanes = slots.shape[0]
        expect("counts", counts, "i32", None, None)
        expect("tails", tails, "i32", counts.shape[0], TAIL)
        for name, array in (("slots", slots), ("lengths", lengths), ("sampled", sampled)):
            expect(name, array, "i32", lanes)
        arrays = (counts, tails, slots, lengths, sampled)
        self._launch(catalogue.NOTE_SAMPLED, (-(-lanes // 256),), 256, *map(address, arrays), lanes, counts.shape[1])

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
        num_rows, vocab_size = _logits_shape(logits)
        requests = slots.shape[0]
        expect("counts", counts, "i32", None, vocab_size)
        expect("slots", slots, "i32", requests)
        for name, array in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
            expect(name, array, "f32", requests)
        _expect_rows(rows, num_rows, requests)
        arrays = (logits, counts, slots, repetition, presence, frequency, rows)
        grid = (num_rows, -(-vocab_size // _PART_LOGITS))
        self._launch(catalogue.APPLY_PENALTIES, grid, 256, *map(address, arrays), vocab_size)

    # The next three take entries by lane; logits_rows int32[R]: the logits row of lane r, -1: none. None: it is row r.

    def apply_bias(
        self, logits: Array, lanes: Array, ids: Array, bias: Array, *, logits_rows: Array | None = None
    ) -> None:
        """logits[row of lanes[i], ids[i]] += bias[i]; -inf forbids a token; a lane without a row skips the entry.

        logits: float32[m, V]; lanes, ids: int32[n]; bias: float32[n].
        """
        num_rows, vocab_size = _logits_shape(logits)
        entries = ids.shape[0]
        expect("lanes", lanes, "i32", entries)
        expect("ids", ids, "i32", entries)
        expect("bias", bias, "f32", entries)
        expect("logits_rows", logits_rows, "i32", None)
        arrays = (logits, lanes, ids, bias, logits_rows)
        sizes = (entries, _num_lanes(logits_rows, num_rows), num_rows, vocab_size)
        self._launch(catalogue.APPLY_BIAS, (-(-entries // 256),), 256, *map(address, arrays), *sizes)

    def ban_words(
        self,
        logits: Array,
        words: Array,
        word_starts: Array,
        lanes: Array,
        tails: Array,
        slots: Array,
        lengths: Array,
        *,
        logits_rows: Array | None = None,
    ) -> None:
        """Forbid the last token of word i to lane lanes[i] where all tokens before it have just been written.

        words: int32[total]; word i is words[word_starts[i] : word_starts[i + 1]], at most 65 tokens (longer ones are
        left alone); word_starts: int32[n + 1]; lanes: int32[n]. tails, slots, lengths: as in note_sampled.
        """
        num_rows, vocab_size = _logits_shape(logits)
        num_words, num_lanes = lanes.shape[0], slots.shape[0]
        expect("words", words, "i32", None)
        expect("word_starts", word_starts, "i32", num_words + 1)
        expect("lanes", lanes, "i32", num_words)
        expect("tails", tails, "i32", None, TAIL)
        expect("slots", slots, "i32", num_lanes)
        expect("lengths", lengths, "i32", num_lanes)
        expect("logits_rows", logits_rows, "i32", num_lanes)
        arrays = (logits, words, word_starts, lanes, tails, slots, lengths, logits_rows)
        sizes = (num_words, num_lanes, num_rows, vocab_size)
        self._launch(catalogue.BAN_WORDS, (-(-num_words // 256),), 256, *map(address, arrays), *sizes)

    def apply_bitmask(
        self, logits: Array, mask: Array, lanes: Array | None = None, *, logits_rows: Array | None = None
    ) -> None:
        """logits = -inf where the mask's bit is 0: token t is bit t % 32 of word t // 32.

        logits: float32[m, V]; mask: uint32 or int32[n, >= ceil(V / 32)]; mask row i belongs to lane lanes[i]
        (int32[n]), or to lane i. Serves allowed ids and grammars.
        """
        num_rows, vocab_size = _logits_shape(logits)
        masks, words = mask.shape
        expect("mask", mask, "i32", None, None, rows_strided=True)
        if words * 32 < vocab_size:
            raise ValueError(f"mask has {words} words a row, but {vocab_size} tokens need {-(-vocab_size // 32)}")
        expect("lanes", lanes, "i32", masks)
        expect("logits_rows", logits_rows, "i32", None)
        self._launch(
            catalogue.APPLY_BITMASK,
            (masks, -(-vocab_size // _PART_LOGITS)),
            256,
            *(address(logits), address(mask), address(lanes), address(logits_rows)),
            *(row_stride(mask), _num_lanes(logits_rows, num_rows), num_rows, vocab_size),
        )

    # ---- sampling ----

    @staticmethod
    def sample_workspace_bytes(num_rows: int) -> int:
        """Size of the scratch that sample and logprobs need for logits of so many rows; 16-byte aligned."""
        return num_rows * _ROW_PARTS * _PART_BYTES

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
        Token -1: the row holds NaN or +inf; -2: nothing but -inf.
        """
        num_rows, vocab_size = _logits_shape(logits)
        requests = out_token.shape[0]
        for name, array, wanted in (
            ("out_token", out_token, "i32"),
            ("temperature", temperature, "f32"),
            ("top_k", top_k, "i32"),
            ("top_p", top_p, "f32"),
            ("min_p", min_p, "f32"),
            ("seed", seed, "i64"),
            ("choice", choice, "i32"),
            ("position", position, "i32"),
        ):
            expect(name, array, wanted, requests)
        _expect_rows(rows, num_rows, requests)
        self._row_maxima(workspace, logits, num_rows, rows, False)
        arrays = (out_token, logits, workspace, rows, temperature, top_k, top_p, min_p, seed, choice, position)
        self._launch(catalogue.SAMPLE, (num_rows,), 1024, *map(address, arrays), draw, vocab_size)

    def _row_maxima(self, workspace: Array, logits: Array, num_entries: int, rows: Array | None, gathers: bool) -> None:
        needed = self.sample_workspace_bytes(num_entries)
        if size_in_bytes(workspace) < needed:
            raise ValueError(f"workspace has {size_in_bytes(workspace)} bytes, but {num_entries} rows need {needed}")
        arguments = (address(workspace), address(logits), address(rows), int(gathers), logits.shape[1])
        self._launch(catalogue.ROW_MAXIMA, (num_entries, _ROW_PARTS), 256, *arguments)

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
        num_rows, vocab_size = _logits_shape(logits)
        count, k = out_top_id.shape
        if k > min(MAX_TOP_LOGPROBS, vocab_size):
            raise ValueError(f"k is {k}, but must be at most {min(MAX_TOP_LOGPROBS, vocab_size)}")
        expect("chosen", chosen, "i32", count)
        expect("out_logprob", out_logprob, "f32", count)
        expect("out_rank", out_rank, "i32", count)
        expect("out_top_id", out_top_id, "i32", count, k)
        expect("out_top_logprob", out_top_logprob, "f32", count, k)
        expect("entries", entries, "i32", count)
        if entries is None and count != num_rows:
            raise ValueError(f"without entries each of the {num_rows} rows needs one place in the outputs, not {count}")
        self._row_maxima(workspace, logits, count, entries, entries is not None)
        arrays = (out_logprob, out_rank, out_top_id, out_top_logprob, logits, workspace, chosen, entries)
        self._launch(catalogue.LOGPROBS, (count,), 1024, *map(address, arrays), k, vocab_size)


def _width(width: int, limit: int | None = MAX_WIDTH) -> int:
    if width % 8 or (limit is not None and width > limit):
        raise ValueError(f"the width must be a multiple of 8{f' up to {limit}' if limit else ''}, but is {width}")
    return width


def _logits_shape(logits: Array) -> tuple[int, int]:
    expect("logits", logits, "f32", None, None)
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"logits must have 1 to {MAX_VOCAB} columns, but have {vocab_size}")
    return num_rows, vocab_size


def _num_lanes(logits_rows: Array | None, num_rows: int) -> int:
    return num_rows if logits_rows is None else int(logits_rows.shape[0])


def _expect_rows(rows: Array | None, num_rows: int, requests: int) -> None:
    expect("rows", rows, "i32", num_rows)
    if rows is None and num_rows > requests:
        raise ValueError(f"without rows {num_rows} rows of logits need as many requests, but there are {requests}")
