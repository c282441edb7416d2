"""From logits to tokens. Every row stands alone: its result depends on no other row, nor on threads or machine."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokring_kernels import _cpu
from tokring_kernels.array import Array


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
    *,
    draw: int = 0,
    num_threads: int = 0,
) -> None:
    """Samples one token per row into out_token int32[m]; logits float32[m, V] are not changed.

    temperature f32[m]: below 1e-5 (0 included) the row is greedy: the largest logit, the lowest id on ties.
    Then, in this order: min_p f32[m] keeps tokens at least min_p times as likely as the likeliest (<= 0: off);
    top_k i32[m] keeps the k largest logits and what ties with the k-th (<= 0: off; 1: greedy); top_p f32[m] keeps the
    likeliest tokens of what is left until their share reaches top_p, ties included (>= 1: off; at least one stays).
    seed i64[m], choice u32[m] (which of n answers), position i64[m] and `draw` key a Philox4x32-10 generator: the same
    four give the same random number anywhere.
    finite bool[m]: False, with token -1, where a row holds NaN or +inf, or nothing but -inf.

    Probabilities are integers in units of 2^-30 of the likeliest token's, so that sums are exact: the token is the same
    on every instruction set and in reference.sample.
    """
    _cpu.sample(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        choice,
        position,
        out_token,
        finite,
        draw,
        num_threads,
    )


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
) -> None:
    """Penalises tokens already seen, in place, in the logits rows rows[i], vLLM's way.

    The history of rows[i] is token_ids[token_rows[i], :num_tokens[i]], its first num_prompt[i] ids the prompt.
    repetition (> 0; 1 = off) divides positive and multiplies negative logits of ids in prompt or output; frequency
    times the count in the output, then presence once, are subtracted for ids in the output. Ids outside the vocabulary
    are ignored. rows, token_rows, num_prompt, num_tokens: int32[n]; token_ids: int32[*, *]; the rest float32[n].
    """
    _cpu.apply_penalties(
        logits,
        rows,
        token_ids,
        token_rows,
        num_prompt,
        num_tokens,
        repetition,
        presence,
        frequency,
    )


def apply_bias(logits: Array, rows: Array, ids: Array, bias: Array) -> None:
    """logits[rows[i], ids[i]] += bias[i]; rows, ids: int32[n], bias: float32[n]; -inf forbids a token."""
    _cpu.apply_bias(logits, rows, ids, bias)


def apply_bitmask(logits: Array, mask: Array, rows: Array | None = None) -> None:
    """Sets logits to -inf where the mask's bit is 0: token t is bit t % 32 of word t // 32.

    mask: uint32 or int32[n, >= ceil(V / 32)]; row i belongs to logits row rows[i] (int32[n]), or to row i.
    """
    _cpu.apply_bitmask(logits, mask, rows)


def bitmask_of(ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """The bitmask row, uint32[ceil(vocab_size / 32)], that allows `ids` only; ids beyond the vocabulary are ignored."""
    allowed = np.fromiter(ids, dtype=np.int64)
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=bool)
    bits[allowed[(allowed >= 0) & (allowed < vocab_size)]] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


class Logprobs(NamedTuple):
    """Log-softmax of raw logits, natural logarithm."""

    chosen: NDArray[np.float32]  # [m]
    rank: NDArray[np.int32]  # [m], 1 = the likeliest, ties in the order of ids; 0 where the row is not finite
    top_ids: NDArray[np.int32]  # [m, k], likeliest first
    top: NDArray[np.float32]  # [m, k]


def logprobs(logits: Array, chosen: Array, k: int, *, num_threads: int = 0) -> Logprobs:
    """Log probabilities of chosen int32[m] and of the k likeliest tokens of each row of logits float32[m, V].

    Rows with NaN or +inf, or nothing but -inf, give NaN, rank 0 and ids -1. Raises ValueError if k exceeds V.
    """
    num_rows = len(chosen)
    result = Logprobs(
        chosen=np.empty(num_rows, np.float32),
        rank=np.empty(num_rows, np.int32),
        top_ids=np.empty((num_rows, k), np.int32),
        top=np.empty((num_rows, k), np.float32),
    )
    _cpu.logprobs(logits, chosen, result.chosen, result.rank, result.top_ids, result.top, num_threads)
    return result
