"""Streams beside grammars that explode: a server with made-up steps, 32 streams, and requests that must be refused.

Phases without and with bombs alternate; a pair gives one ratio of the streams' inter-token latencies (p99).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

NUM_STREAMS = 32
STEP_MS = 10.0
BOMBS_AT_ONCE = 4
LEAST_GAPS = 10 * NUM_STREAMS  # in a phase, however short
MAX_TOKENS = 6000  # a minute of made-up steps: longer than a phase
START_TIMEOUT_S = 120.0
_READY = re.compile(r'ready after [0-9.]+ s: ([^\s"]+)')


def bombs() -> dict[str, dict[str, Any]]:
    """By name: request fields with a grammar that no server should compile."""
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    alternatives = [
        {"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {"type": "string"}}} for j in range(6)]}
        for i in range(10)
    ]
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(5000)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return {
        "a megabyte of grammar": {"structured_outputs": {"grammar": 'start: "' + "a" * 1_000_000 + '"'}},
        "a megabyte of regex": {"structured_outputs": {"regex": "a" * 1_000_000}},
        "a schema that is itself": _schema({"$ref": "#"}),
        "a circle of references": _schema(circle),
        "a product of alternatives": _schema({"allOf": alternatives}),
        "5,000 optional properties": _schema(wide),
        "a huge multiple": _schema({"type": "integer", "multipleOf": 999983}),
        "deep nesting": _schema({"allOf": [deep, {"$ref": "#"}]}),
        "a regex of nested counts": {"structured_outputs": {"regex": "(([a-z]{1,100}){1,100}){1,100}"}},
        "a regex of parentheses": {"structured_outputs": {"regex": "(" * 2000 + "a" + ")" * 2000}},
        "a rule that never ends": {"structured_outputs": {"grammar": 'start: a\na: "x" a\n'}},
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


@dataclass(slots=True)
class Refusal:
    """How one bomb was answered."""

    name: str
    status: int
    seconds: float
    message: str


@dataclass(slots=True)
class Outcome:
    """What was measured: one entry of the lists for each pair of phases."""

    p99_without_ms: list[float] = field(default_factory=list)
    p99_with_ms: list[float] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    num_broken_streams: int = 0  # that ended, or brought an error

    @property
    def ratios(self) -> list[float]:
        """p99 with bombs over p99 without, pair by pair."""
        return [b / a for a, b in zip(self.p99_without_ms, self.p99_with_ms, strict=True)]

    def summary(self) -> dict[str, Any]:
        """What --json writes."""
        names = sorted({refusal.name for refusal in self.refusals})
        by_name = {name: [r for r in self.refusals if r.name == name] for name in names}
        return {
            "itl_p99_ratio": round(float(np.median(self.ratios)), 3),
            "ratios": [round(ratio, 3) for ratio in self.ratios],
            "itl_p99_without_ms": [round(value, 2) for value in self.p99_without_ms],
            "itl_p99_with_ms": [round(value, 2) for value in self.p99_with_ms],
            "num_broken_streams": self.num_broken_streams,
            "bombs": {
                name: {
                    "sent": len(refusals),
                    "statuses": sorted({refusal.status for refusal in refusals}),
                    "message": refusals[-1].message,
                    "slowest_s": round(max(refusal.seconds for refusal in refusals), 2),
                }
                for name, refusals in by_name.items()
            },
        }


@contextlib.contextmanager
def server(model: str | None, extra: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server of its own. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-m", "tokring", "serve", "--port", "0", "--engine", "mock"]
    command += ["--mock-step-ms", str(STEP_MS), *(("--model", model) if model else ()), *extra]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace")
    assert process.stderr is not None
    reader = threading.Thread(target=process.stderr.read)  # its log must not fill the pipe
    try:
        for line in process.stderr:
            if found := _READY.search(line):
                break
        else:
            raise RuntimeError(f"the server ended with code {process.wait()} before it was ready")
        reader.start()
        yield found.group(1)
    finally:
        process.terminate()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stderr.close()


async def measure(url: str, *, num_pairs: int, phase_s: float, names: Collection[str] | None = None) -> Outcome:
    """Pairs of phases of phase_s each; then every bomb (of `names`, all by default) has been sent at least once."""
    outcome = Outcome()
    chosen = {name: fields for name, fields in bombs().items() if names is None or name in names}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(num_pairs):
            outcome.p99_without_ms.append(await _phase(session, outcome, phase_s, None))
            outcome.p99_with_ms.append(await _phase(session, outcome, phase_s, chosen))
    return outcome


async def _phase(
    session: aiohttp.ClientSession, outcome: Outcome, phase_s: float, chosen: dict[str, dict[str, Any]] | None
) -> float:
    """One phase: ITL p99 in ms over all streams, from when all of them run until it ends."""
    gaps: list[float] = []
    measuring = asyncio.Event()
    first_tokens = asyncio.Barrier(NUM_STREAMS + 1)
    streams = [asyncio.create_task(_stream(session, gaps, measuring, first_tokens)) for _ in range(NUM_STREAMS)]
    await asyncio.wait_for(first_tokens.wait(), START_TIMEOUT_S)
    measuring.set()
    if chosen is None:
        await asyncio.sleep(phase_s)
    else:
        await _send_bombs(session, outcome, phase_s, chosen)
    while len(gaps) < LEAST_GAPS and not all(stream.done() for stream in streams):
        await asyncio.sleep(0.01)
    measuring.clear()
    outcome.num_broken_streams += sum(stream.done() for stream in streams)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return float(np.percentile(gaps, 99)) * 1e3


async def _stream(
    session: aiohttp.ClientSession, gaps: list[float], measuring: asyncio.Event, first_tokens: asyncio.Barrier
) -> None:
    """Read a stream that ends only by being left; note the times between its chunks. Ends early if it breaks."""
    body = {"prompt": "On and on:", "stream": True, "ignore_eos": True, "max_tokens": MAX_TOKENS}
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        chunks = _chunk_times(response)
        last = await anext(chunks)
        await first_tokens.wait()
        async for now in chunks:
            if measuring.is_set():
                gaps.append(now - last)
            last = now


async def _chunk_times(response: aiohttp.ClientResponse) -> AsyncIterator[float]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield time.monotonic()


async def _send_bombs(
    session: aiohttp.ClientSession, outcome: Outcome, phase_s: float, chosen: dict[str, dict[str, Any]]
) -> None:
    """BOMBS_AT_ONCE at any time, until the time is over and each has been answered once."""
    end = time.monotonic() + phase_s
    queue = list(chosen)

    async def send() -> None:
        while queue or time.monotonic() < end:
            if not queue:
                queue.extend(chosen)
            name = queue.pop(0)
            started = time.monotonic()
            async with session.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 8, **chosen[name]}
            ) as response:
                message = (await response.json())["error"]["message"] if response.status >= 400 else ""
            outcome.refusals.append(Refusal(name, response.status, time.monotonic() - started, message))

    await asyncio.gather(*(send() for _ in range(BOMBS_AT_ONCE)))
