"""One run: a workload against one server, measured at the client."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tokring.bench import _native
from tokring.bench.serve.target import Target, TargetError, cpu_seconds
from tokring.bench.serve.workload import Prompt

PERCENTILES = (50, 90, 99)
SHOWN_ERROR = 300  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """concurrency: most requests at once (0: no bound); rate: Poisson arrivals a second (None: closed loop)."""

    concurrency: int
    rate: float | None
    ignore_eos: bool
    api: str  # "chat" or "completions"
    timeout_s: float

    @property
    def name(self) -> str:
        parts = [f"c{self.concurrency}"] if self.concurrency else []
        return "".join([*parts, *([f"r{self.rate:g}"] if self.rate is not None else [])]) or "all"


@dataclass(frozen=True, slots=True)
class Goal:
    """What goodput asks of a request, in ms; None: nothing. itl_ms is the mean time per token after the first."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Goal:
        """ "ttft:500,itl:50,e2el:5000", any of them. ValueError otherwise."""
        wanted: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition(":")
            if name not in ("ttft", "itl", "e2el"):
                raise ValueError(f"{name!r} is none of ttft, itl, e2el")
            wanted[f"{name}_ms"] = float(value)
        return cls(**wanted)

    def is_met(self, ttft_ms: float, itl_ms: float, e2el_ms: float) -> bool:
        pairs = ((self.ttft_ms, ttft_ms), (self.itl_ms, itl_ms), (self.e2el_ms, e2el_ms))
        return all(most is None or found <= most for most, found in pairs)


def request_bytes(target: Target, prompt: Prompt, load: Load) -> bytes:
    body: dict[str, Any] = {"model": target.model, "max_tokens": prompt.output_len, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.api == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt.text}]
    else:
        path, body["prompt"] = "/v1/completions", prompt.text
    data = orjson.dumps(body)
    head = (
        f"POST {target.path}{path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n"
    )
    if target.api_key:
        head += f"Authorization: Bearer {target.api_key}\r\n"
    return head.encode() + b"\r\n" + data


def measure(target: Target, prompts: Sequence[Prompt], due_ns: list[int], load: Load, goal: Goal) -> dict[str, Any]:
    """The figures of one run; TargetError if no request was answered."""
    client = _native.LoadClient(target.host, target.port)
    pids = target.processes()
    before = cpu_seconds(pids)
    client.run([request_bytes(target, prompt, load) for prompt in prompts], due_ns, load.concurrency, load.timeout_s)
    after = cpu_seconds(pids)
    answers = client.answers
    good = [answer for answer in answers if answer.status == 200 and answer.is_complete and answer.num_chunks]
    if not good:
        raise TargetError(f"{target.name}: no request was answered: {_first_error(answers)}")
    cpu_s = {name: after[name] - before.get(name, 0.0) for name in after}
    return _figures(answers, good, client.gaps_ns, cpu_s, goal)


def _figures(
    answers: Sequence[_native.Answer],
    good: Sequence[_native.Answer],
    gaps_ns: npt.NDArray[np.int64],
    cpu_s: Mapping[str, float],
    goal: Goal,
) -> dict[str, Any]:
    usages = [_usage(answer) for answer in good]
    num_output = sum(output for _, output in usages)
    num_chunks = sum(answer.num_chunks for answer in good)
    seconds = (max(answer.end_ns for answer in answers) - min(answer.sent_ns for answer in answers)) / 1e9
    ttft = np.array([answer.first_token_ns - answer.sent_ns for answer in good]) / 1e6
    e2el = np.array([answer.end_ns - answer.sent_ns for answer in good]) / 1e6
    after_first = np.array([answer.last_token_ns - answer.first_token_ns for answer in good]) / 1e6
    itl_mean = after_first / np.maximum(1, np.array([output for _, output in usages]) - 1)
    met = [goal.is_met(*times) for times in zip(ttft, itl_mean, e2el, strict=True)]
    row: dict[str, Any] = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "duration_s": round(seconds, 3),
        "input_tokens": sum(prompt for prompt, _ in usages),
        "output_tokens": num_output,
        "chunks_per_token": round(num_chunks / max(1, num_output), 3),
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": sum(prompt + output for prompt, output in usages) / seconds,
        "goodput_requests_per_s": sum(met) / seconds,
        "cpu_s": {name: round(used, 2) for name, used in cpu_s.items()},
        "cpu_us_per_token": sum(cpu_s.values()) * 1e6 / max(1, num_output) if cpu_s else None,
        **_percentiles("ttft_ms", ttft),
        **_percentiles("itl_ms", gaps_ns / 1e6),
        **_percentiles("tpot_ms", itl_mean),
        **_percentiles("e2el_ms", e2el),
    }
    if row["failed"]:
        row["first_error"] = _first_error(answers)
    return row


def _usage(answer: _native.Answer) -> tuple[int, int]:
    """(prompt, output) tokens as the server counts them; chunks where it does not say."""
    try:
        usage = orjson.loads(answer.last_event)["usage"]
        return int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return 0, answer.num_chunks


def _percentiles(name: str, values: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {}
    cuts = np.percentile(values, PERCENTILES)
    return {f"{name}_p{cut}": float(value) for cut, value in zip(PERCENTILES, cuts, strict=True)}


def _first_error(answers: Sequence[_native.Answer]) -> str:
    for answer in answers:
        if answer.status != 200:
            body = answer.body_start.decode(errors="replace")[:SHOWN_ERROR]
            return f"status {answer.status}: {body}" if answer.status else "the connection was refused or broke"
        if not answer.is_complete:
            return f"a stream broke off after {answer.num_chunks} chunks: {answer.last_event[-SHOWN_ERROR:]!r}"
    return "streams without text"


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over several runs, with "ranges"; counts of failures are added up, CPU by process averaged."""
    row: dict[str, Any] = {"runs": len(runs)}
    ranges: dict[str, list[float]] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs if run.get(name) is not None]
        if name == "failed":
            row[name] = sum(values)
        elif name == "cpu_s":
            row[name] = {title: round(statistics.mean(run[name].get(title, 0) for run in runs), 2) for title in value}
        elif isinstance(value, int | float):
            row[name] = statistics.median(values)
            ranges[name] = [min(values), max(values)]
    errors = [run["first_error"] for run in runs if "first_error" in run]
    if errors:
        row["first_error"] = errors[0]
    return {**row, "ranges": ranges}
