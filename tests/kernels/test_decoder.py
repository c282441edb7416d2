"""The one-call decoder: right against numpy, and a token's logits its own."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokring_kernels import Decoder, DecoderLayer, PackedLinear, reference

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, DIM, LAYERS = 64, 96, 101, 4, 2, 16, 3
SHAPES = {
    "query": (HEADS * DIM, HIDDEN),
    "key": (KV_HEADS * DIM, HIDDEN),
    "value": (KV_HEADS * DIM, HIDDEN),
    "output": (HIDDEN, HEADS * DIM),
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "norm_epsilon": 1e-5, "attention_scale": DIM**-0.5}


def quantize_q8(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = weight.reshape(len(weight), -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    values = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=-1).reshape(len(weight), -1)


@dataclass
class Model:
    """A tiny random model, native and in numpy, with a cache of 40 blocks."""

    kind: str
    extras: bool  # biases, head norms, a sliding window
    cache: str = "f32"

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.packed: dict[tuple[int, str], PackedLinear] = {}
        self.weights: dict[tuple[int, str], NDArray[np.float32]] = {}
        for layer in range(-1, LAYERS):
            for name, shape in SHAPES.items():
                if (name == "head") == (layer == -1):
                    self._add((layer, name), (rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32))
        angles = np.arange(600)[:, None] * (10_000.0 ** -(np.arange(DIM // 2) * 2 / DIM))
        tables = {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
        ones = {"attention_norm": HIDDEN, "mlp_norm": HIDDEN}
        if self.extras:
            ones |= {"query_norm": DIM, "key_norm": DIM, "qkv_bias": (HEADS + 2 * KV_HEADS) * DIM}
        self.layers: list[dict[str, Any]] = [
            tables
            | {name: (1 + rng.normal(size=size) * 0.1).astype(np.float32) for name, size in ones.items()}
            | {"sliding_window": 20 if self.extras and layer == 1 else 0}
            for layer in range(LAYERS)
        ]
        self.embedding = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
        self.final_norm = np.ones(HIDDEN, np.float32)
        names = [name for name in SHAPES if name != "head"]
        self.decoder = Decoder(
            [
                DecoderLayer(**layer, **{name: self.packed[index, name] for name in names})
                for index, layer in enumerate(self.layers)
            ],
            embedding=self.embedding,
            final_norm=self.final_norm,
            head=self.packed[-1, "head"],
            head_dim=DIM,
            **SIZES,  # type: ignore[arg-type]
        )
        shape = (40, KV_HEADS, 16, DIM)
        kind, unused = {"f32": (np.float32, np.nan), "bf16": (np.uint16, 0x7FC0), "int8": (np.int8, 99)}[self.cache]
        self.caches = [[np.full(shape, unused, kind) for _ in range(LAYERS)] for _ in "kv"]
        scaled = "kv" if self.cache == "int8" else ""
        scales = [[np.full(shape[:3], np.nan, np.float32) for _ in range(LAYERS)] for _ in scaled]
        self.decoder.set_cache(*self.caches, *scales)

    def _add(self, key: tuple[int, str], weight: NDArray[np.float32]) -> None:
        if self.kind == "F32":
            self.packed[key], self.weights[key] = PackedLinear("F32", weight, weight.shape[1]), weight
        elif self.kind == "BF16":
            bits = reference.narrow(weight)
            self.packed[key] = PackedLinear("BF16", bits, weight.shape[1])
            self.weights[key] = reference.widen(bits)
        else:
            rows = quantize_q8(weight)
            self.packed[key] = PackedLinear("Q8_0", rows, weight.shape[1])
            self.weights[key] = reference.dequantize("Q8_0", rows)

    def expected(self, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
        def linear(layer: int, name: str, x: NDArray[np.float32]) -> NDArray[np.float64]:
            return reference.linear(self.weights[layer, name], x)

        sizes: dict[str, Any] = SIZES
        return reference.Decoder(self.embedding, self.final_norm, linear, self.layers, **sizes).logits(token_ids)

    def run(self, parts: list[tuple[NDArray[np.int32], int, NDArray[np.int32]]]) -> list[NDArray[np.float32]]:
        """One step of (all ids of a sequence, how many are computed already, its blocks); logits of every new token."""
        positions = [np.arange(computed, len(ids), dtype=np.int32) for ids, computed, _ in parts]
        slots = [blocks[p // 16] * 16 + p % 16 for p, (_, _, blocks) in zip(positions, parts, strict=True)]
        lengths = [len(p) for p in positions]
        table = np.full((len(parts), 40), -1, np.int32)
        for row, (_, _, blocks) in enumerate(parts):
            table[row, : len(blocks)] = blocks
        logits = np.empty((sum(lengths), VOCAB), np.float32)
        self.decoder.run(
            np.concatenate([ids[computed:] for ids, computed, _ in parts]),
            np.concatenate(positions),
            np.concatenate(slots).astype(np.int64),
            table,
            np.cumsum([0, *lengths]).astype(np.int32),
            np.array([len(ids) for ids, _, _ in parts], np.int32),
            np.arange(sum(lengths), dtype=np.int32),
            logits,
        )
        return np.split(logits, np.cumsum(lengths)[:-1])


def ids(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def blocks(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("extras", [False, True], ids=["llama", "extras"])
@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-4), ("Q8_0", 2e-3), ("BF16", 5e-2)])
def test_logits_equal_the_reference(level: str, kind: str, tolerance: float, extras: bool) -> None:
    model = Model(kind, extras)
    token_ids = ids(45)
    (logits,) = model.run([(token_ids, 0, blocks(7, 3, 11))])
    np.testing.assert_allclose(logits, model.expected(token_ids), atol=tolerance)


def test_an_int8_cache_costs_little(level: str) -> None:
    token_ids = ids(45)
    exact, coarse = (
        Model("Q8_0", extras=True, cache=c).run([(token_ids, 0, blocks(7, 3, 11))])[0] for c in ("f32", "int8")
    )
    error = np.linalg.norm(coarse - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.02


@pytest.mark.parametrize("cache", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "BF16"])
def test_a_token_has_the_same_logits_alone_batched_chunked_and_decoded(
    level: str, threads: int, kind: str, cache: str
) -> None:
    model = Model(kind, extras=True, cache=cache)
    sequences = [ids(45, 1), ids(30, 2), ids(7, 3)]
    homes = [blocks(7, 3, 11), blocks(20, 0), blocks(39)]
    whole = [model.run([(s, 0, home)])[0] for s, home in zip(sequences, homes, strict=True)]
    together = model.run(list(zip(sequences, [0, 0, 0], homes, strict=True)))
    assert all(np.array_equal(a, b) for a, b in zip(whole, together, strict=True))
    for chunk in (1, 5, 17):
        elsewhere = blocks(30, 31, 32)
        for start in range(0, 45, chunk):
            stop = min(start + chunk, 45)
            chunked, _ = model.run([(sequences[0][:stop], start, elsewhere), (sequences[2], 3, homes[2])])
            assert np.array_equal(chunked, whole[0][start:stop])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [VOCAB]}, r"token_ids\[0\] is 101, beyond the vocabulary of 101"),
        ({"positions": [600]}, r"positions\[0\] is 600, beyond the tables' 600"),
        ({"slot_mapping": [640]}, r"slot_mapping\[0\] is 640, beyond the cache's 640 slots"),
        ({"block_table": [[40]]}, r"block_table\[0\]\[0\] is 40, not a block of the cache"),
        ({"logits_index": [1]}, r"logits_index\[0\] is no token of this step"),
    ],
    ids=str,
)
def test_ids_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "token_ids": [0],
        "positions": [0],
        "slot_mapping": [0],
        "block_table": [[0]],
        "query_start": [0, 1],
        "seq_lens": [1],
        "logits_index": [0],
    }
    kinds = {"slot_mapping": np.int64}
    arrays = {name: np.array(value, kinds.get(name, np.int32)) for name, value in (arguments | change).items()}
    with pytest.raises(ValueError, match=message):
        Model("BF16", extras=False).decoder.run(**arrays, logits=np.empty((1, VOCAB), np.float32))


def test_weights_live_as_long_as_the_decoder() -> None:
    model = Model("Q8_0", extras=False)
    expected = model.run([(ids(5), 0, blocks(1))])[0]
    model.packed.clear()
    model.layers.clear()
    del model.embedding, model.final_norm
    assert np.array_equal(model.run([(ids(5), 0, blocks(1))])[0], expected)


def test_layers_that_do_not_fit_are_refused() -> None:
    model = Model("BF16", extras=False)
    names = [name for name in SHAPES if name != "head"]
    wrong = {name: model.packed[0, name] for name in names} | {"down": model.packed[0, "up"]}
    with pytest.raises(ValueError, match=r"down must be \[64, 96\], but is \[96, 64\]"):
        Decoder(
            [DecoderLayer(**model.layers[0], **wrong)],
            embedding=model.embedding,
            final_norm=model.final_norm,
            head=model.packed[-1, "head"],
            head_dim=DIM,
            **SIZES,  # type: ignore[arg-type]
        )
