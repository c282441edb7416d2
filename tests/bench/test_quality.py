"""`tokring bench quality`: distributions against a reference, read as a prompt and token by token."""

import io
import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_gguf import write_tiny_gguf
from tokring.bench.quality.divergence import Divergence, log_softmax
from tokring.bench.quality.forced import Windows
from tokring.bench.quality.llama_cpp import LlamaCppError, read_figures, write_reference
from tokring.cli import main

WINDOW = 16
# The last lines of the tool, as it prints them.
TOLD = """\
====== Perplexity statistics ======
Mean PPL(Q)                   :  21.984020 ±   0.530000
Mean PPL(base)                :  22.004459 ±   0.510000
Mean PPL(Q)/PPL(base)         :   0.999071 ±   0.000100
====== KL divergence statistics ======
Mean    KLD:   0.012500 ±   0.000700
Maximum KLD:   0.420000
99.9%   KLD:   0.300000
99.0%   KLD:   0.110000
Median  KLD:   0.004000
====== Token probability statistics ======
Same top p: 95.276 ± 1.200 %
"""


def test_a_text_is_cut_into_windows_whose_second_half_is_judged() -> None:
    windows = Windows(list(range(100, 137)), WINDOW, bos_id=1)
    assert (windows.count, windows.length, list(windows.positions)) == (2, 16, [8, 9, 10, 11, 12, 13, 14])
    assert windows.token_ids[:, 0].tolist() == [1, 1] and windows.token_ids[1, 1] == 117
    assert windows.targets[0].tolist() == [109, 110, 111, 112, 113, 114, 115]
    with pytest.raises(ValueError, match="15 tokens are no window of 16"):
        Windows(list(range(15)), WINDOW, None)


def test_divergence_is_that_of_the_textbook_and_blind_to_shifts() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.6, 0.3]], np.float32)) + np.float32(7)
    divergence = Divergence()
    divergence.add(reference, other, np.array([0, 1], np.int32))
    found = divergence.figures()
    first = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert found.kl_mean == pytest.approx(first / 2, rel=1e-5) and found.kl_max == pytest.approx(first, rel=1e-5)
    assert (found.top1_agreement, found.positions) == (0.5, 2)
    assert found.perplexity == pytest.approx((0.25 * 0.6) ** -0.5, rel=1e-5)


def test_the_reference_file_holds_log_probabilities_as_the_tool_reads_them() -> None:
    windows = Windows(list(range(2 * WINDOW)), WINDOW, None)
    vocabulary = 5  # odd: a row is padded
    logits = np.random.default_rng(0).normal(0, 9, (14, vocabulary)).astype(np.float32)
    reference = log_softmax(logits).astype(np.float32).reshape(2, 7, vocabulary)
    file = io.BytesIO()
    write_reference(file, windows, reference)
    data = file.getvalue()
    assert data[:8] == b"_logits_"
    assert np.frombuffer(data, np.int32, 3, 8).tolist() == [WINDOW, vocabulary, 2]
    assert np.frombuffer(data, np.int32, 2 * WINDOW, 20).tolist() == list(range(2 * WINDOW))
    rows = np.frombuffer(data, np.uint16, offset=20 + 4 * 2 * WINDOW).reshape(14, 4 + 6)
    scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
    found = least[:, None] + scale[:, None] * rows[:, 4 : 4 + vocabulary]
    clipped = np.maximum(reference, reference.max(axis=2, keepdims=True) - 16).reshape(14, vocabulary)
    assert (clipped > reference.reshape(14, vocabulary)).any()
    np.testing.assert_allclose(found, clipped, atol=16 / 65535)


def test_figures_are_read_from_the_tools_last_lines() -> None:
    found = read_figures(TOLD, 127)
    assert (found.kl_mean, found.kl_error, found.kl_median) == (0.0125, 0.0007, 0.004)
    assert (found.kl_p99, found.kl_max, found.perplexity, found.positions) == (0.11, 0.42, 21.98402, 127)
    assert found.top1_agreement == pytest.approx(0.95276)
    with pytest.raises(LlamaCppError, match="another form"):
        read_figures(TOLD.replace("Mean    KLD", "Average"), 127)


def test_the_command_judges_every_variant_both_ways_and_llama_cpp_on_the_same_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text, outcome = tmp_path / "tiny.gguf", tmp_path / "text", tmp_path / "out.json"
    write_tiny_gguf(model, kind="Q4_1")
    text.write_text("a fixed text of some words, read by all: 0123456789 " * 3)
    tool = tmp_path / "llama-perplexity"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "path = sys.argv[sys.argv.index('--kl-divergence-base') + 1]\n"
        "assert open(path, 'rb').read(8) == b'_logits_' and sys.argv[sys.argv.index('--ctx-size') + 1] == '16'\n"
        f"print({TOLD!r})\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    arguments = ["bench", "quality", str(model), "--text", str(text), "--window", str(WINDOW), "--json", str(outcome)]
    assert main([*arguments, "--llama-perplexity", str(tool)]) == 0
    found = {(row["who"], row["as"]): row for row in json.loads(outcome.read_text())["rows"]}
    assert found["--dtype float32", "prompt"]["kl_max"] < 1e-6
    for who in ("default", "--dtype bfloat16"):
        prompt, generated = found[who, "prompt"], found[who, "generated"]
        assert 1e-9 < prompt["kl_mean"] < 1e-2 and prompt["positions"] == generated["positions"] >= 14
        assert generated["kl_mean"] == pytest.approx(prompt["kl_mean"], rel=0.5)
    assert found["llama.cpp", "prompt"]["kl_mean"] == 0.0125
    assert "same top-1" in capsys.readouterr().out


def test_judging_loads_no_torch(tmp_path: Path) -> None:
    """pyproject.toml exempts its import of the engine from the rule that the program's own process never does."""
    model, text = tmp_path / "tiny.gguf", tmp_path / "text"
    write_tiny_gguf(model, kind="Q4_1")
    text.write_text("a fixed text of some words")
    program = (
        "import sys; from tokring.cli import main; "
        f"main(['bench', 'quality', {str(model)!r}, '--text', {str(text)!r}, '--window', '8', '--quick']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=100).returncode == 0
