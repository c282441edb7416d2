"""Numpy twins of the kernels: what they compute, written to be read. Results are returned, not written to `out`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def widen(bits: NDArray[np.uint16]) -> F32:
    """bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: F32) -> NDArray[np.uint16]:
    """float32 to bfloat16 bits, rounding to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (np.where(np.isnan(x), bits | 0x400000, rounded) >> 16).astype(np.uint16)


def as_f32(x: NDArray[Any]) -> F32:
    """x itself, or its float32 values if it holds bfloat16 bits."""
    return widen(x) if x.dtype == np.uint16 else np.asarray(x, np.float32)


def cached(cache: NDArray[Any], scale: F32 | None) -> F32:
    """float32 values of a cache; int8 codes have a scale per vector."""
    return as_f32(cache) if scale is None else cache * scale[..., None]


def paged_attention(
    query: NDArray[Any],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    block_table: NDArray[np.int32],
    query_start: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    scale: float,
    *,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    key_scale: F32 | None = None,
    value_scale: F32 | None = None,
) -> NDArray[np.float64]:
    """float64[num_tokens, num_heads, head_dim]: softmax over the whole sequence at once, in float64."""
    queries = as_f32(query).astype(np.float64)
    all_keys, all_values = cached(key_cache, key_scale), cached(value_cache, value_scale)
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads = key_cache.shape[1]
    out = np.zeros(queries.shape)
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(query_start[seq], query_start[seq + 1])
        blocks = block_table[seq, : -(-seq_len // 16)]
        positions = np.arange(seq_len - (rows.stop - rows.start), seq_len)[:, None]
        keys_seen = np.arange(seq_len)[None, :]
        visible = keys_seen <= positions
        if sliding_window:
            visible &= keys_seen > positions - sliding_window
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            keys = all_keys[blocks, kv_head].reshape(-1, head_dim)[:seq_len]
            values = all_values[blocks, kv_head].reshape(-1, head_dim)[:seq_len]
            scores = queries[rows, head] @ keys.T.astype(np.float64) * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
            out[rows, head] = weights @ values / weights.sum(axis=1, keepdims=True)
    return out


def write_kv(
    key: NDArray[Any],
    value: NDArray[Any],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    slot_mapping: NDArray[np.int64],
    *,
    key_scale: F32 | None = None,
    value_scale: F32 | None = None,
) -> None:
    """Writes into the caches, and into their scales where they are int8."""
    for rows, cache, scales in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        if scales is not None:
            codes, scale_of = quantize_kv(as_f32(rows), "int8")
            for token, slot in enumerate(slot_mapping):
                if slot >= 0:
                    cache[slot // 16, :, slot % 16] = codes[token]
                    scales[slot // 16, :, slot % 16] = scale_of[token]
            continue
        same = rows.dtype == cache.dtype
        converted = rows if same else narrow(as_f32(rows)) if cache.dtype == np.uint16 else as_f32(rows)
        for token, slot in enumerate(slot_mapping):
            if slot >= 0:
                cache[slot // 16, :, slot % 16] = converted[token]


def rms_norm(x: NDArray[Any], weight: F32, epsilon: float) -> NDArray[np.float64]:
    """float64[num_tokens, width]."""
    wide = as_f32(x).astype(np.float64)
    scale: NDArray[np.float64] = 1.0 / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + epsilon)
    return wide * scale * weight


def rope(x: NDArray[Any], cosine: F32, sine: F32, positions: NDArray[np.integer]) -> F32:
    """float32 of x's shape."""
    out = as_f32(x).copy()
    half = cosine.shape[1]
    low, high = out[..., :half].copy(), out[..., half : 2 * half].copy()
    c, s = cosine[positions][:, None, :], sine[positions][:, None, :]
    out[..., :half] = low * c - high * s
    out[..., half : 2 * half] = high * c + low * s
    return out


def silu_mul(gate_up: NDArray[Any]) -> NDArray[np.float64]:
    """float64[num_tokens, width]."""
    gate, up = np.split(as_f32(gate_up).astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1.0 + np.exp(-gate)) * up


def gelu_tanh_mul(gate_up: NDArray[Any]) -> NDArray[np.float64]:
    """float64[num_tokens, width]."""
    gate, up = np.split(as_f32(gate_up).astype(np.float64), 2, axis=1)
    gelu: NDArray[np.float64] = 0.5 * gate * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)))
    return gelu * up


def decode_e4m3(codes: NDArray[np.uint8]) -> F32:
    """fp8 e4m3 bits (no infinities, NaN 0x7f and 0xff) to float32."""
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def quantize_kv(x: F32, kind: str) -> tuple[NDArray[Any], F32]:
    """Vectors x[..., D] as codes (int8, or fp8 e4m3 bits in uint8) and scales [...]: x = scale * value of the code."""
    largest = np.float32({"int8": 127, "fp8": 448}[kind])
    magnitude = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(largest, magnitude, out=np.zeros_like(magnitude), where=magnitude > 0)
    scaled = x * inverse
    if kind == "int8":
        return np.rint(scaled).astype(np.int8), (magnitude / largest)[..., 0]
    table = decode_e4m3(np.arange(127, dtype=np.uint8))
    middles = (table[1:] + table[:-1]) / 2
    low = np.searchsorted(middles, np.abs(scaled))  # a tie goes to the lower code first
    tied = np.append(middles, np.inf)[low] == np.abs(scaled)
    codes = low + (tied & (low % 2 == 1))
    return (codes | np.where(np.signbit(scaled), 128, 0)).astype(np.uint8), (magnitude / largest)[..., 0]


def dequantize(kind: str, rows: NDArray[np.uint8]) -> F32:
    """float32[n, k] of the GGUF rows uint8[n, k / 32 * block bytes]."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = rows.reshape(len(rows), -1, size)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (blocks[..., 2:].view(np.int8) * scale).reshape(len(rows), -1)
    nibbles = blocks[..., -16:]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32)
    minimum = -8 * scale if kind == "Q4_0" else blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    return (values * scale + minimum).reshape(len(rows), -1)


def quantize(x: F32, bits: int) -> F32:
    """x[m, k] rounded by blocks of 32 to `bits` (8 or 15) bits, as float32 again."""
    steps = np.float32({8: 127, 15: 127 * 128}[bits])
    blocks = x.reshape(len(x), -1, 32)
    magnitude = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(steps, magnitude, out=np.zeros_like(magnitude), where=magnitude >= np.float32(1e-30))
    return np.asarray((np.rint(blocks * inverse) * (magnitude / steps)).reshape(x.shape), np.float32)


def linear(weight: F32, x: F32) -> NDArray[np.float64]:
    """float64[m, n] = x[m, k] weight[n, k]^T."""
    return np.asarray(x.astype(np.float64) @ weight.astype(np.float64).T)


def exp_nonpositive(x: F32) -> F32:
    """exp for x <= 0, operation by operation as the kernels do it (exp.inc.hpp): the same bits."""
    f = np.float32
    clamped = np.maximum(x, f(-87.0))
    magic = f(12582912.0)
    n = (clamped * f(1.44269504088896341) + magic) - magic
    r = clamped - n * f(0.693359375)
    r = r - n * f(-2.12194440e-4)
    p = np.full_like(r, f(1.9875691500e-4))
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f(coefficient)
    p = (p * (r * r) + r) + f(1.0)
    power = ((n.astype(np.int32) + 127).astype(np.uint32) << 23).view(np.float32)
    return np.where(x < f(-87.0), f(0.0), p * power)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random words of a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, choice: int, position: int, draw: int) -> int:
    """64 random bits of one draw."""
    seed, position = seed & (2**64 - 1), position & (2**64 - 1)
    words = philox4x32((position & 0xFFFFFFFF, position >> 32, choice, draw), (seed & 0xFFFFFFFF, seed >> 32))
    return words[1] << 32 | words[0]


def sample(
    logits: F32,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    choice: int,
    position: int,
    draw: int = 0,
) -> int:
    """The token of one row float32[V], or -1 if it isn't finite: the very token the kernel gives."""
    temperature, top_p, min_p = (float(np.float32(value)) for value in (temperature, top_p, min_p))
    maximum = logits.max()
    if not np.isfinite(maximum):
        return -1
    if not temperature >= float(np.float32(1e-5)) or top_k == 1:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):
        scaled = (logits - maximum) * (np.float32(1.0) / np.float32(temperature))
    weights = np.rint(exp_nonpositive(scaled) * np.float32(2**30)).astype(np.int64)
    if 0 < top_k < len(logits):
        weights[logits < np.sort(logits)[-top_k]] = 0
    if min_p > 0:
        weights[weights < np.ceil(min(min_p, 1.0) * 2**30)] = 0
    if top_p < 1:
        target = max(1, int(np.ceil(top_p * float(weights.sum()))))
        descending = np.sort(weights)[::-1]
        weights[weights < descending[np.searchsorted(np.cumsum(descending), target)]] = 0
    ticket = random_bits(seed, choice, position, draw) * int(weights.sum()) >> 64
    return int(np.searchsorted(np.cumsum(weights), ticket, side="right"))


def apply_penalties(
    logits: F32,
    prompt: NDArray[np.int32],
    output: NDArray[np.int32],
    repetition: float,
    presence: float,
    frequency: float,
) -> F32:
    """One row float32[V], penalised."""
    size = len(logits)
    in_prompt = np.bincount(prompt[(prompt >= 0) & (prompt < size)], minlength=size)
    in_output = np.bincount(output[(output >= 0) & (output < size)], minlength=size)
    factor = np.float32(repetition)
    repeated = np.where(logits > 0, logits / factor, logits * factor)
    out = np.where((in_prompt > 0) | (in_output > 0), repeated, logits)
    out = out - np.float32(frequency) * in_output.astype(np.float32)
    out -= np.float32(presence) * (in_output > 0).astype(np.float32)
    return np.asarray(out, np.float32)


def logprobs(logits: F32, chosen: int, k: int) -> tuple[float, int, NDArray[np.int64], NDArray[np.float64]]:
    """Of one row: the chosen token's log probability and rank, the k likeliest ids and their log probabilities."""
    wide = logits.astype(np.float64)
    top = wide.max()
    normalised = wide - (np.log(np.exp(wide - top).sum()) + top)
    order = np.argsort(-wide, kind="stable")
    return float(normalised[chosen]), int(np.nonzero(order == chosen)[0][0]) + 1, order[:k], normalised[order[:k]]


class Decoder:
    """A Llama-shaped decoder in float64 arithmetic on float32 weights; see tokring_kernels.Decoder.

    linear(layer, name, x) computes x W^T for the layer's matrix of that name ("query", ..., "down"), or for "head".
    """

    def __init__(
        self,
        embedding: F32,
        final_norm: F32,
        linear: Callable[[int, str, F32], NDArray[np.float64]],
        layers: Sequence[Mapping[str, Any]],
        *,
        num_heads: int,
        num_kv_heads: int,
        norm_epsilon: float,
        attention_scale: float,
    ) -> None:
        self.embedding, self.final_norm, self.linear, self.layers = embedding, final_norm, linear, layers
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.norm_epsilon, self.attention_scale = norm_epsilon, attention_scale

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """float64[T, vocab_size] of one whole sequence, no cache."""
        hidden = self.embedding[token_ids].astype(np.float64)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attention(index, layer, self._norm(hidden, layer["attention_norm"]))
            normed = self._norm(hidden, layer["mlp_norm"])
            both = [self.linear(index, name, normed) for name in ("gate", "up")]
            hidden = hidden + self.linear(index, "down", silu_mul(np.concatenate(both, axis=1)).astype(np.float32))
        return self.linear(-1, "head", self._norm(hidden, self.final_norm))

    def _norm(self, x: NDArray[Any], weight: F32) -> F32:
        return rms_norm(x, weight, self.norm_epsilon).astype(np.float32)

    def _attention(self, index: int, layer: Mapping[str, Any], normed: F32) -> NDArray[np.float64]:
        length = len(normed)
        qkv = np.concatenate([self.linear(index, name, normed) for name in ("query", "key", "value")], axis=1)
        if layer.get("qkv_bias") is not None:
            qkv = qkv + layer["qkv_bias"]
        heads = qkv.astype(np.float32).reshape(length, self.num_heads + 2 * self.num_kv_heads, -1)
        split = (self.num_heads, self.num_heads + self.num_kv_heads)
        rotated = []
        for part, name in zip(np.split(heads, split, axis=1)[:2], ("query_norm", "key_norm"), strict=True):
            if layer.get(name) is not None:
                part = self._norm(part.reshape(-1, part.shape[2]), layer[name]).reshape(part.shape)
            rotated.append(rope(part, layer["cosine"], layer["sine"], np.arange(length)))
        num_blocks = -(-length // 16)
        caches = [np.zeros((num_blocks, self.num_kv_heads, 16, heads.shape[2]), np.float32) for _ in range(2)]
        write_kv(rotated[1], heads[:, split[1] :], caches[0], caches[1], np.arange(length))
        attended = paged_attention(
            rotated[0],
            caches[0],
            caches[1],
            np.arange(num_blocks, dtype=np.int32)[None],
            np.array([0, length], np.int32),
            np.array([length], np.int32),
            self.attention_scale,
            sliding_window=layer.get("sliding_window", 0),
        )
        return self.linear(index, "output", attended.reshape(length, -1).astype(np.float32))
