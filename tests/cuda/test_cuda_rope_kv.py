"""rope_and_write_kv equals the numpy reference: norms of heads, rotation, caches of every kind."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda.arrays import ACTIVATIONS, QUANTIZED, UNWRITTEN, assert_near, int32, normal, unwritten, widened

from tokring_kernels import reference
from tokring_kernels.cuda.launcher import EmulatedLauncher
from tokring_kernels.cuda.ops import CudaOps

NUM_HEADS, NUM_KV_HEADS, BLOCKS = 6, 2, 3
SLOTS = int32(40, 15, -1, 16, 0)  # token 2 is not cached
POSITIONS = int32(7, 0, 3, 90, 12)


@pytest.fixture
def ops(launcher: EmulatedLauncher) -> CudaOps:
    return CudaOps(launcher)


class Case:
    def __init__(self, head_dim: int, act: str, *, rotary_dim: int | None = None, normed: bool = False) -> None:
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        self.act, self.head_dim = act, head_dim
        self.qkv = normal(5, heads * head_dim + 64, kind=act)[:, : heads * head_dim]  # rows of a wider array
        self.cosine, self.sine = (
            normal(100, (rotary_dim or head_dim) // 2),
            normal(100, (rotary_dim or head_dim) // 2, seed=1),
        )
        self.query_norm, self.key_norm = (
            (normal(head_dim, seed=2), normal(head_dim, seed=3)) if normed else (None, None)
        )
        self.query = unwritten(5, NUM_HEADS, head_dim, kind=act)

    def run(self, ops: CudaOps, keys: NDArray[Any], values: NDArray[Any], **scales: Any) -> None:
        ops.rope_and_write_kv(
            self.query,
            self.qkv,
            keys,
            values,
            self.cosine,
            self.sine,
            POSITIONS,
            SLOTS,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            epsilon=1e-6,
            weight_offset=0.5,
            **scales,
        )

    def expected(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """query, key, value as float32."""
        heads = widened(np.ascontiguousarray(self.qkv)).reshape(5, -1, self.head_dim)
        query, key, value = np.split(heads, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=1)
        return self._rotated(query, self.query_norm), self._rotated(key, self.key_norm), value

    def _rotated(self, x: NDArray[Any], norm: NDArray[Any] | None) -> NDArray[Any]:
        if norm is not None:
            flat = np.ascontiguousarray(x).reshape(-1, self.head_dim)
            x = reference.rms_norm(flat, norm + np.float32(0.5), 1e-6).astype(np.float32).reshape(x.shape)
        return reference.rope(x, self.cosine, self.sine, POSITIONS)


def at_slots(cache: NDArray[Any]) -> NDArray[Any]:
    """The cached vectors of tokens 0, 1, 3, 4: [4, kv_heads, ...]."""
    slots = SLOTS[SLOTS >= 0]
    return cache[slots // 16, :, slots % 16]


def untouched(cache: NDArray[Any], before: NDArray[Any]) -> bool:
    """Whether all other slots hold what they held."""
    others = np.ones((BLOCKS, 16), bool)
    slots = SLOTS[SLOTS >= 0]
    others[slots // 16, slots % 16] = False
    return np.array_equal(cache.swapaxes(1, 2)[others], before.swapaxes(1, 2)[others])


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "normed"),
    [
        (64, 64, False),
        (80, 80, True),
        (96, 48, False),
        (128, 128, True),
        (128, 32, True),
        (256, 64, False),
        (256, 256, True),
    ],
)
def test_queries_rotate_and_keys_and_values_are_cached(
    ops: CudaOps, act: str, head_dim: int, rotary_dim: int, normed: bool
) -> None:
    case = Case(head_dim, act, rotary_dim=rotary_dim, normed=normed)
    guarded = [unwritten(1 + BLOCKS, NUM_KV_HEADS, 16, head_dim, kind=act) for _ in range(2)]
    keys, values = (cache[1:] for cache in guarded)
    before = keys.copy()
    case.run(ops, keys, values)
    query, key, value = case.expected()
    assert_near(case.query, query, act)
    assert_near(at_slots(keys), key[SLOTS >= 0], act)
    np.testing.assert_array_equal(widened(at_slots(values)), value[SLOTS >= 0])
    assert untouched(keys, before) and untouched(values, before)
    for cache in guarded:  # slot -1 would stand in front
        assert (widened(cache[0]) == UNWRITTEN).all()


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_a_quantized_cache_holds_codes_and_a_scale_for_each_vector(ops: CudaOps, kind: str, head_dim: int) -> None:
    case = Case(head_dim, "bf16")
    case.qkv[1, NUM_HEADS * head_dim :] = 0  # a vector of zeros has scale 0
    dtype = np.int8 if kind == "int8" else np.uint8
    keys, values = (np.full((BLOCKS, NUM_KV_HEADS, 16, head_dim), 99, dtype) for _ in range(2))
    scales = [unwritten(BLOCKS, NUM_KV_HEADS, 16) for _ in range(2)]
    before, scale_before = keys.copy(), scales[0].copy()
    case.run(ops, keys, values, key_scale=scales[0], value_scale=scales[1])
    for cache, scale, exact in zip((keys, values), scales, case.expected()[1:], strict=True):
        exact = exact[SLOTS >= 0]
        codes, found_scale = reference.quantize_kv(exact, kind)
        np.testing.assert_allclose(at_slots(scale), found_scale, rtol=1e-6)
        near = np.abs(at_slots(cache).astype(np.int32) - codes.astype(np.int32))
        assert near.max() <= 1 and (near > 0).mean() < 0.01  # float32 against float32: ties may fall to either side
        assert untouched(cache, before) and untouched(scale, scale_before)


def test_e4m3_rounds_to_nearest_even_and_saturates(ops: CudaOps) -> None:
    """Every bfloat16 from 0 to 448, its largest fixed so that the scale is 1."""
    values = np.unique(
        np.concatenate([np.linspace(0, 448, 500), 2.0 ** np.arange(-12, 9), 3 * 2.0 ** np.arange(-11, 8)])
    )
    bits = np.unique(reference.narrow(values.astype(np.float32)))
    head_dim = 64
    tokens = -(-len(bits) // (head_dim - 1))
    vectors = np.zeros((tokens, head_dim), np.uint16)
    vectors[:, 1:].flat[: len(bits)] = bits
    vectors[:, 1::2] |= 0x8000  # every other one negative
    vectors[:, 0] = reference.narrow(np.float32([448.0]))
    qkv = np.tile(vectors, (1, 3))
    cosine, sine = np.ones((1, 32), np.float32), np.zeros((1, 32), np.float32)
    keys, value_cache = (np.zeros((-(-tokens // 16), 1, 16, head_dim), np.uint8) for _ in range(2))
    scales = [np.zeros((len(keys), 1, 16), np.float32) for _ in range(2)]
    ops.rope_and_write_kv(
        np.zeros((tokens, 1, head_dim), np.uint16),
        qkv,
        keys,
        value_cache,
        cosine,
        sine,
        np.zeros(tokens, np.int32),
        np.arange(tokens, dtype=np.int32),
        key_scale=scales[0],
        value_scale=scales[1],
    )
    found = reference.decode_e4m3(value_cache.reshape(-1, head_dim)[:tokens])
    table = reference.decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    exact = reference.widen(vectors).astype(np.float64)
    distance = np.abs(np.abs(exact)[..., None] - table)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    even = nearest & ((np.arange(127) % 2 == 0) | (nearest.sum(axis=-1, keepdims=True) == 1))
    np.testing.assert_array_equal(np.abs(found), table[even.argmax(axis=-1)])
    assert (np.signbit(found) == np.signbit(exact)).all() and (scales[1].reshape(-1)[:tokens] == 1).all()
