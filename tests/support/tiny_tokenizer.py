"""A tiny byte-level BPE tokenizer: three special tokens, 256 bytes, some merges."""

import functools
import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2
VOCAB_SIZE = 400
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = """The capital of France is Paris. It is not far from there to where they are, and the other one is here.
What is the answer to this question? That would be 42, I think; then again the reader is right and the writer is not.
A ring carries tokens from the engine to the front end, one frame for each step, and the front end writes the text.
Every morning the old keeper climbed the stairs of the lighthouse, trimmed the lamp, looked over the grey water and
counted the ships; some were late, others had been lost in the storm, but most came home before the evening bells."""


@functools.cache
def tiny_tokenizer_json() -> str:
    """The text of its tokenizer.json; the same on every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()


def tiny_tokenizer() -> Tokenizer:
    """A fresh one on every call."""
    return Tokenizer.from_str(tiny_tokenizer_json())


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens by id, merges as "left right"), as a GGUF stores them."""
    model: dict[str, Any] = json.loads(tiny_tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]
