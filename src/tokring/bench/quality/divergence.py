"""Divergence: how one model's next-token distributions differ from a reference's, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """KL(reference || model) in nats over all judged positions; perplexity of the text itself."""

    kl_mean: float
    kl_error: float  # standard error of the mean
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float  # share of positions where both find the same token likeliest
    perplexity: float
    positions: int


class Divergence:
    """Collects positions; `reference` gives log-probabilities, `logits` may be shifted by any constant a row."""

    def __init__(self) -> None:
        self._kl: list[Float64] = []
        self._agrees: list[NDArray[np.bool_]] = []
        self._surprise: list[Float64] = []

    def add(self, reference: NDArray[np.float32], logits: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
        """[n, vocabulary] of both and the n tokens that follow in the text."""
        log_q = log_softmax(logits)
        log_p = reference.astype(np.float64)
        self._kl.append(np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=1), 0.0))
        self._agrees.append(log_p.argmax(axis=1) == log_q.argmax(axis=1))
        self._surprise.append(-log_q[np.arange(len(targets)), targets])

    def figures(self) -> Figures:
        kl = np.concatenate(self._kl)
        return Figures(
            kl_mean=float(kl.mean()),
            kl_error=float(kl.std() / np.sqrt(len(kl))),
            kl_median=float(np.median(kl)),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(kl.max()),
            top1_agreement=float(np.concatenate(self._agrees).mean()),
            perplexity=float(np.exp(np.concatenate(self._surprise).mean())),
            positions=len(kl),
        )


def log_softmax(logits: NDArray[np.float32]) -> Float64:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
