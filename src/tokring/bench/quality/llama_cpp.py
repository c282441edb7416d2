"""llama.cpp judged by the same reference: its perplexity tool reads our log-probabilities and measures itself.

The file (what `llama-perplexity --kl-divergence-base` names): "_logits_", uint32 window length, int32 vocabulary, int32
windows, the tokens as int32; then for every judged position float32 scale and minimum, and a uint16 a token,
log-probability = minimum + scale * value; log-probabilities more than 16 below the greatest count as that.
"""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from tokring.bench.quality.divergence import Figures
from tokring.bench.quality.forced import Windows

MAGIC = b"_logits_"
SPREAD = 16.0  # nats that the 65,536 steps of a row cover at most
NUMBER = r"\s*:\s*(-?[0-9.]+)"
DEADLINE_S = 3600.0


class LlamaCppError(Exception):
    """It could not judge itself, and why."""


def write_reference(file: IO[bytes], windows: Windows, reference: NDArray[np.float32]) -> None:
    """reference: log-probabilities [windows, judged positions, vocabulary]."""
    vocabulary = reference.shape[-1]
    file.write(MAGIC + struct.pack("<Iii", windows.length, vocabulary, windows.count))
    file.write(windows.token_ids.tobytes())
    width = 4 + 2 * ((vocabulary + 1) // 2)  # uint16: two float32 first, then an even number of tokens
    for window in reference:
        rows = np.zeros((len(window), width), np.uint16)
        greatest = window.max(axis=1, keepdims=True)
        least = np.maximum(window.min(axis=1, keepdims=True), greatest - np.float32(SPREAD))
        scale = (greatest - least) / np.float32(65535)
        rows[:, :4] = np.concatenate([scale, least], axis=1).astype(np.float32).view(np.uint16)
        rows[:, 4 : 4 + vocabulary] = np.rint(np.maximum(window - least, 0) / np.where(scale > 0, scale, 1))
        file.write(rows.tobytes())


def judge(program: Path, model: Path, reference: Path, windows: Windows, num_threads: int) -> Figures:
    """Runs the tool on a GGUF. Raises LlamaCppError."""
    command = [
        str(program), "--model", str(model), "--kl-divergence", "--kl-divergence-base", str(reference),
        "--ctx-size", str(windows.length), "--batch-size", str(windows.length), "--threads", str(num_threads),
    ]  # fmt: skip
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LlamaCppError(f"{program}: {error}") from None
    text = ended.stdout.decode(errors="replace")
    if ended.returncode:
        raise LlamaCppError(f"{program.name} ended with {ended.returncode}: {text.strip()[-200:]}")
    return read_figures(text, windows.count * len(windows.positions))


def read_figures(text: str, positions: int) -> Figures:
    """From what the tool prints at its end. Raises LlamaCppError if that is not there."""
    mean = re.search(r"Mean\s+KLD" + NUMBER + r"\s*±\s*([0-9.]+)", text)
    found = {name: re.search(name + NUMBER, text) for name in (r"Median\s+KLD", r"99\.0%\s+KLD", r"Maximum\s+KLD")}
    same_top = re.search(r"Same top p" + NUMBER, text)
    perplexity = re.search(r"Mean PPL\(Q\)" + NUMBER, text)
    median, p99, maximum = found.values()
    if not (mean and same_top and perplexity and median and p99 and maximum):
        raise LlamaCppError(f"its output has another form than was expected: {text.strip()[-200:]}")
    return Figures(
        kl_mean=float(mean[1]),
        kl_error=float(mean[2]),
        kl_median=float(median[1]),
        kl_p99=float(p99[1]),
        kl_max=float(maximum[1]),
        top1_agreement=float(same_top[1]) / 100,
        perplexity=float(perplexity[1]),
        positions=positions,
    )
