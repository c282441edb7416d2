"""Merge rules of a sentencepiece BPE vocabulary, which stores scores instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def merges_from_scores(
    vocabulary: Mapping[str, int], scores: np.ndarray[Any, Any], is_normal: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first; equal scores by the ids of the halves.

    sentencepiece joins the neighbours whose union has the highest score, which is what ordered merges do.
    `scores` f32[n] and `is_normal` bool[n] by id: control and byte tokens are never made by merging.
    """
    normal = is_normal.tolist()
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, number in vocabulary.items():
        if not normal[number]:
            continue
        score = -float(scores[number])
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None and normal[left] and normal[right]:
                ranked.append((score, left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
