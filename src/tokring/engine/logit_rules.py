"""apply_rules: bias, allowed ids, bad words and minimum length of one request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokring.engine.request import LogitRules


def apply_rules(logits: NDArray[np.float32], rules: LogitRules, token_ids: NDArray[np.int32]) -> None:
    """Change one row's `logits` float32[vocab_size] in place, given the tokens so far (prompt, then output).

    Only requests with rules come here, so a loop over them costs the others nothing. The order is vLLM's; penalties
    follow, for all requests in one call.
    """
    if rules.allowed_ids is not None:
        _allow_only(logits, rules.allowed_ids)
    for word in rules.bad_words:
        _ban_word(logits, word, token_ids)
    if len(token_ids) < rules.min_total and rules.stop_ids is not None:
        logits[rules.stop_ids] = -np.inf
    if rules.bias_ids is not None and rules.bias is not None:
        np.add.at(logits, rules.bias_ids, rules.bias)


def _allow_only(logits: NDArray[np.float32], allowed_ids: NDArray[np.int32]) -> None:
    kept = logits[allowed_ids]
    logits.fill(-np.inf)
    logits[allowed_ids] = kept


def _ban_word(logits: NDArray[np.float32], word: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
    """Forbid the last token of `word` where all tokens before it have just been written."""
    start = len(word) - 1
    if len(token_ids) >= start and np.array_equal(token_ids[len(token_ids) - start :], word[:-1]):
        logits[word[-1]] = -np.inf
