"""Bombs over HTTP, beside streams: what `tokring bench bombs` measures, here without a clock."""

from tests.support.serving import tiny_model
from tokring.bench.bombs import bombs, measure, start_server

# Those that cost their compiler little; the others are refused in test_grammar_vetting.py.
CHEAP = {
    "a megabyte of grammar",
    "a megabyte of regex",
    "a schema that is itself",
    "a circle of references",
    "a regex of nested counts",
}


def test_bombs_are_refused_and_no_stream_breaks():
    assert CHEAP < set(bombs())
    with start_server(tiny_model()) as server:
        outcome = measure(server.port, num_pairs=1, phase_s=0.0, names=CHEAP)
    assert {refusal.name for refusal in outcome.refusals} == CHEAP
    assert [refusal for refusal in outcome.refusals if not 400 <= refusal.status < 500] == []
    assert [refusal for refusal in outcome.refusals if "cannot be used." in refusal.message] == []
    assert outcome.num_broken_streams == 0
    summary = outcome.summary()
    assert set(summary["bombs"]) == CHEAP and len(summary["ratios"]) == 1
