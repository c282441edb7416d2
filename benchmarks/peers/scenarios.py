"""The scenarios: which servers meet under which load, and by which factor ours is asked to be better."""

from __future__ import annotations

from dataclasses import dataclass, replace

FAST = "tokring --cpu-fast"  # measured beside "tokring" where that option exists

# Every ratio is > 1 where the first server of a pair is better.
METRICS = {
    "output tok/s": ("output_tokens_per_s", True),
    "TTFT p50": ("ttft_ms_p50", False),
    "ITL p99": ("itl_ms_p99", False),
    "CPU/token": ("cpu_us_per_token", False),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """`asked`: the least ratio wanted, by metric."""

    ours: str
    peer: str
    asked: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Closed loop; lengths in tokens. `rounds`: requests a stream makes in one run."""

    name: str
    about: str
    pairs: tuple[Pair, ...]
    streams: int
    input_len: int = 128
    output_len: int = 128
    prefix_len: int = 0  # shared by all prompts
    rounds: int = 2
    is_tiny: bool = False

    @property
    def servers(self) -> tuple[str, ...]:
        """Ours and theirs in turn, each once."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in (pair.ours, pair.peer)))

    @property
    def tokens_per_slot(self) -> int:
        """Context that a server with a fixed one for each stream needs; some to spare for its template."""
        return self.prefix_len + self.input_len + self.output_len + 64


TOKENS, LATENCY, CPU = "output tok/s", "ITL p99", "CPU/token"

SCENARIOS = (
    Scenario(
        name="1-stream",
        about="one stream, 128 tokens in and out",
        pairs=(
            Pair("tokring", "llama.cpp", ((TOKENS, 2.0),)),
            Pair("tokring bf16", "vLLM bf16", ((TOKENS, 2.5),)),
            Pair("tokring bf16", "llama.cpp bf16", ((TOKENS, 1.5),)),
        ),
        streams=1,
        rounds=4,
    ),
    Scenario(
        name="8-streams",
        about="8 streams, 128 tokens in and out",
        pairs=(
            Pair("tokring", "vLLM bf16", ((TOKENS, 4.0), (LATENCY, 1.0))),
            Pair("tokring", "llama.cpp", ((TOKENS, 4.0), (LATENCY, 1.0))),
        ),
        streams=8,
    ),
    Scenario(
        name="32-streams",
        about="32 streams, 128 tokens in and out",
        pairs=(
            Pair("tokring", "vLLM bf16", ((TOKENS, 3.5), (LATENCY, 1.0))),
            Pair("tokring", "llama.cpp", ((TOKENS, 6.0), (LATENCY, 1.0))),
        ),
        streams=32,
    ),
    Scenario(
        name="long-prompts",
        about="8 streams, 1,024 tokens in, 128 out",
        pairs=(Pair("tokring", "vLLM bf16", (("TTFT p50", 2.0),)), Pair("tokring", "llama.cpp", (("TTFT p50", 2.0),))),
        streams=8,
        input_len=1024,
    ),
    Scenario(
        name="shared-prefix",
        about="8 streams, 1,024 tokens that all share and 128 of their own in, 128 out",
        pairs=(Pair("tokring", "vLLM bf16", ((TOKENS, 2.0),)), Pair("tokring", "llama.cpp", ((TOKENS, 2.0),))),
        streams=8,
        prefix_len=1024,
    ),
    Scenario(
        name="tiny-64",
        about="a model of one layer and 512 tokens: only overhead is left; 64 streams",
        pairs=(Pair("tokring", "vLLM", ((TOKENS, 15.0), (CPU, 15.0))),),
        streams=64,
        is_tiny=True,
    ),
    Scenario(
        name="tiny-256",
        about="the same with 256 streams",
        pairs=(Pair("tokring", "vLLM", ((TOKENS, 15.0), (CPU, 15.0))),),
        streams=256,
        is_tiny=True,
    ),
)


def with_fast(scenario: Scenario) -> Scenario:
    """With FAST beside the default, asked for nothing."""
    fast = tuple(Pair(FAST, pair.peer) for pair in scenario.pairs if pair.ours == "tokring")
    return replace(scenario, pairs=scenario.pairs + fast)
