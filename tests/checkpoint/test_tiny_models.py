"""The null models of benchmarks/make_tiny_model.py."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.make_tiny_model import make_tiny_model

from tokring.checkpoint import open_checkpoint


@pytest.mark.parametrize("vocab_size", [512, 49152])
def test_greedy_decoding_would_walk_the_cycle(tmp_path: Path, vocab_size: int) -> None:
    cycle = make_tiny_model(tmp_path, vocab_size=vocab_size)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.vocab_size == vocab_size and checkpoint.config.num_layers == 1

    def weight(name: str) -> np.ndarray:
        return (checkpoint.tensor(name).astype(np.uint32) << 16).view(np.float32)

    assert not weight("model.layers.0.self_attn.o_proj.weight").any()
    assert not weight("model.layers.0.mlp.down_proj.weight").any()
    start = len(cycle) - 20  # over the end of the cycle, too
    steps = [cycle[(start + step) % len(cycle)] for step in range(41)]
    logits = weight("model.embed_tokens.weight")[steps[:-1]] @ weight("lm_head.weight").T
    assert logits.argmax(axis=1).tolist() == steps[1:]


def test_every_token_of_the_cycle_is_plain_text(tmp_path: Path) -> None:
    cycle = make_tiny_model(tmp_path, vocab_size=512)
    tokenizer = open_checkpoint(str(tmp_path)).load_tokenizer()
    assert tokenizer.get_vocab_size() == 512
    assert len(cycle) == len(set(cycle)) > 200
    text = tokenizer.decode(cycle, skip_special_tokens=False)
    assert text.isascii() and text.isprintable()
    assert tokenizer.decode(tokenizer.encode("hello wörld 123").ids) == "hello wörld 123"


def test_a_vocabulary_that_would_lose_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="would lose single bytes"):
        make_tiny_model(tmp_path, vocab_size=100)
