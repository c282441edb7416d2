"""benchmarks/peers: what a scenario starts, how its servers are compared, and that nothing of them is left."""

import json
import sys
from io import StringIO
from pathlib import Path

import psutil
import pytest
from benchmarks.peers import servers
from benchmarks.peers.install import guard_tile_configuration
from benchmarks.peers.places import PeerError
from benchmarks.peers.report import print_report, ratios_of
from benchmarks.peers.run import Bench
from benchmarks.peers.scenarios import FAST, SCENARIOS, Pair, Scenario, with_fast
from benchmarks.peers.servers import Fleet, Launch
from benchmarks.start_time import summary
from rich.console import Console

SCENARIO = Scenario(
    name="two",
    about="",
    pairs=(Pair("ours", "a", (("output tok/s", 2.0), ("ITL p99", 1.0))), Pair("ours", "b"), Pair("other", "a")),
    streams=4,
)


def row(server: str, tokens: float, ttft: float, itl: float, cpu: float | None) -> dict[str, object]:
    return {
        "server": server, "output_tokens_per_s": tokens, "ttft_ms_p50": ttft, "itl_ms_p99": itl,
        "cpu_us_per_token": cpu, "chunks_per_token": 1.0, "failed": 0,
    }  # fmt: skip


def test_ratios_are_above_one_where_ours_is_better_and_missing_servers_are_left_out() -> None:
    rows = [row("ours", 300, 10, 5, 40), row("a", 100, 40, 4, None), row("other", 50, 40, 8, 1)]
    first, second = ratios_of(SCENARIO, rows)
    assert first["ratios"] == {"output tok/s": 3.0, "TTFT p50": 4.0, "ITL p99": 0.8, "CPU/token": None}
    assert (second["ours"], second["peer"], second["ratios"]["output tok/s"]) == ("other", "a", 0.5)
    console = Console(width=160, record=True, file=StringIO())
    print_report(console, [{"name": "two", "rows": rows, "ratios": [first, second]}])
    assert "output tok/s ≥ 2: yes, ITL p99 ≥ 1: no" in console.export_text()


def test_ours_and_theirs_take_turns_and_fast_stands_beside_the_default() -> None:
    assert SCENARIO.servers == ("ours", "a", "b", "other")
    for scenario in SCENARIOS:
        fast = with_fast(scenario)
        theirs = {pair.peer for pair in scenario.pairs if pair.ours == "tokring"}
        assert {pair.peer for pair in fast.pairs if pair.ours == FAST} == theirs
        assert all(not pair.asked for pair in fast.pairs if pair.ours == FAST)


def test_the_tile_configuration_is_guarded_once(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text("    tc.rows[0] = 8;\n    _tile_loadconfig(&tc);\n    done = true;\n")
    guard_tile_configuration(source)
    guarded = source.read_text()
    assert 'asm volatile("" ::: "memory");\n    _tile_loadconfig(&tc);\n' in guarded
    guard_tile_configuration(source)
    assert source.read_text() == guarded


def test_peers_that_are_not_installed_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "VLLM", tmp_path)
    monkeypatch.setattr(servers, "LLAMA_CPP_TOOLS", tmp_path)
    scenario = Scenario(name="theirs", about="", pairs=(Pair("vLLM bf16", "llama.cpp"),), streams=1)
    monkeypatch.setattr(servers.weights, "bfloat16_directory", lambda: tmp_path)
    monkeypatch.setattr(servers.weights, "stored", lambda: tmp_path)
    bench = Bench(Console(quiet=True), [], quick=True, repetitions=1)
    with Fleet() as fleet:
        assert bench.measure(scenario, fleet) is None
    assert {name: "python -m benchmarks.peers.install" in why for name, why in bench.skipped.items()} == {
        "vLLM bf16": True,
        "llama.cpp": True,
    }


def test_a_scenario_is_measured_and_its_servers_end_with_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LOGS", tmp_path)
    mock = (sys.executable, "-m", "tokring", "serve", "--engine", "mock", "--port", "{port}")
    monkeypatch.setattr(servers, "embedded", lambda name, *_: Launch(name, mock))
    scenario = Scenario(name="mock", about="", pairs=(Pair("ours", "theirs", (("TTFT p50", 1.0),)),), streams=2)
    bench = Bench(Console(quiet=True), [], quick=True, repetitions=1)
    with Fleet() as fleet:
        measured = bench.measure(scenario, fleet)
        pids = [
            child.pid for server in fleet.running.values() for child in psutil.Process(server.process.pid).children()
        ]
    assert measured is not None and bench.skipped == {}
    assert [found["server"] for found in measured["rows"]] == ["ours", "theirs"]
    assert all(found["output_tokens"] == 2 * 32 and not found["failed"] for found in measured["rows"])
    assert measured["ratios"][0]["ratios"]["CPU/token"] is not None
    json.dumps(measured)
    assert len(pids) >= 4 and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_server_that_ends_at_start_is_named_with_its_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LOGS", tmp_path)
    program = "print('ValueError: no such flag'); print('bye'); raise SystemExit(3)"
    with Fleet() as fleet, pytest.raises(PeerError, match="theirs ended with 3 at start: ValueError: no such flag"):
        fleet.ensure(Launch("theirs", (sys.executable, "-c", program)))
    assert not fleet.running


def test_starts_are_summed_up_by_medians_and_a_process_that_was_not_seen_counts_as_none() -> None:
    starts = [
        {"seconds": 2.0, "cpu_s": {"engine": 1.0}},
        {"seconds": 9.0, "cpu_s": {"engine": 3.0, "frontend": 0.5}},
        {"seconds": 3.0, "cpu_s": {"engine": 2.0}},
    ]
    assert summary(starts) == {
        "starts": 3,
        "seconds": 3.0,
        "range": [2.0, 9.0],
        "cpu_s": {"engine": 2.0, "frontend": 0.0},
    }
