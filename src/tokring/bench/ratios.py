"""The ratios that the rings are held to, each from rows of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokring.bench.plan import BATCHES, NUM_LOGPROBS

Row = dict[str, Any]
_MATCHED = ("transport", "delivery", "waiting", "regime")


@dataclass(frozen=True, slots=True)
class Side:
    """One row of the run, and the figure taken from it."""

    transport: str
    delivery: str
    waiting: str
    regime: str
    size: int = 256
    logprobs: int = 0
    figure: str = "p50_us"

    def find(self, rows: Sequence[Row]) -> Row | None:
        for row in rows:
            size = row.get("batch", row.get("prompt_ids"))
            if size == self.size and row["logprobs"] == self.logprobs and self._is_kind_of(row):
                return row
        return None

    def _is_kind_of(self, row: Row) -> bool:
        return all(row[name] == getattr(self, name) for name in _MATCHED)

    def value(self, row: Row) -> float:
        if self.figure == "cpu_us":
            return float(row["writer_cpu_us"] + row["reader_cpu_us"])
        return float(row[self.figure])


@dataclass(frozen=True, slots=True)
class Ratio:
    """over / under, to be at least or at most `target`; None: only reported."""

    name: str
    over: Side
    under: Side
    meaning: str
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A ratio of one run; `value` None: not measured. `valid`: no row behind it was disturbed."""

    name: str
    value: float | None
    valid: bool
    meaning: str
    at_least: float | None
    at_most: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def ring(delivery: str, waiting: str, regime: str, size: int = 256, logprobs: int = 0, figure: str = "p50_us") -> Side:
    return Side("ring", delivery, waiting, regime, size, logprobs, figure)


def zmq(regime: str, size: int = 256, logprobs: int = 0, figure: str = "p50_us") -> Side:
    return Side("msgpack+zmq", "L2", "uvloop", regime, size, logprobs, figure)


def doorbell(regime: str, waiting: str = "uvloop") -> Side:
    return Side("doorbell alone", "L0", waiting, regime)


def seqpacket(waiting: str, regime: str, size: int = 256, logprobs: int = 0) -> Side:
    return Side("seqpacket", "L1", waiting, regime, size, logprobs)


_CLOSED = ring("L1", "uvloop", "closed")
_NATIVE = "native delivery: our columns, their objects"

# By the names under which they are published.
NAMED = (
    Ratio("closed_vs_doorbell", _CLOSED, doorbell("closed"), "reader asleep in uvloop", at_most=1.8),
    Ratio("vs_zmq_asyncio", zmq("closed"), _CLOSED, f"closed, {_NATIVE}", at_least=15),
    Ratio(
        "vs_zmq_asyncio_logprobs",
        zmq("closed", logprobs=NUM_LOGPROBS),
        ring("L1", "uvloop", "closed", logprobs=NUM_LOGPROBS),
        f"closed, top-5 logprobs, {_NATIVE}",
        at_least=150,
    ),
    Ratio(
        "vs_zmq_asyncio_batch1",
        zmq("closed", size=1),
        ring("L1", "uvloop", "closed", size=1),
        f"closed, batch 1, {_NATIVE}",
        at_least=10,
    ),
    Ratio(
        "saturated_vs_zmq",
        zmq("saturated", figure="us_per_step"),
        ring("L0", "polling", "saturated", figure="us_per_step"),
        "steps per second, our bytes read natively, their objects",
        at_least=100,
    ),
    Ratio("vs_seqpacket", seqpacket("uvloop", "closed"), _CLOSED, "closed, the same columns, both L1", at_least=1.15),
    Ratio(
        "vs_seqpacket_polling",
        seqpacket("polling", "hot"),
        ring("L1", "polling", "hot"),
        "polling, the same columns, both L1",
        at_least=3,
    ),
    Ratio(
        "cpu_vs_zmq",
        zmq("paced1ms", figure="cpu_us"),
        ring("L1", "uvloop", "paced1ms", figure="cpu_us"),
        "CPU of both sides a step, paced 1 ms",
        at_least=5,
    ),
    Ratio(
        "vs_zmq_asyncio_tuples",
        zmq("closed"),
        ring("L2", "uvloop", "closed"),
        "closed, both one Python object per request",
        at_least=8,
    ),
    Ratio(
        "prompt128k_vs_zmq",
        Side("msgpack+zmq", "L2", "blocking", "closed", 131_072),
        ring("L1", "blocking", "closed", 131_072),
        "one prompt of 128k ids to the engine, every id looked at",
        at_least=20,
    ),
    Ratio("paced1ms_vs_zmq", zmq("paced1ms"), ring("L1", "uvloop", "paced1ms"), f"paced 1 ms, {_NATIVE}", at_least=8),
)
FURTHER = (
    Ratio(
        "vs_zmq_asyncio_tuples_logprobs",
        zmq("closed", logprobs=NUM_LOGPROBS),
        ring("L2", "uvloop", "closed", logprobs=NUM_LOGPROBS),
        "closed, top-5 logprobs, both one Python object per request",
        at_least=20,
    ),
    Ratio(
        "saturated_vs_zmq_tuples",
        zmq("saturated", figure="us_per_step"),
        ring("L2", "uvloop", "saturated", figure="us_per_step"),
        "steps per second, both one Python object per request",
        at_least=8,
    ),
    Ratio(
        "vs_seqpacket_logprobs_batch1024",
        seqpacket("uvloop", "closed", 1024, NUM_LOGPROBS),
        ring("L1", "uvloop", "closed", 1024, NUM_LOGPROBS),
        "closed, top-5 logprobs, batch 1024, both L1",
        at_least=2,
    ),
    Ratio(
        "doorbell_vs_zmq_asyncio",
        zmq("closed"),
        doorbell("closed"),
        "closed, the doorbell alone: more than this no transport that wakes a sleeper can reach here",
    ),
    *(
        Ratio(
            f"vs_zmq_asyncio{name}_at_once",
            zmq("at once", size, logprobs),
            ring("L1", "uvloop", "at once", size, logprobs),
            f"next step right after the acknowledgement, {_NATIVE}",
        )
        for name, size, logprobs in (("", 256, 0), ("_logprobs", 256, NUM_LOGPROBS), ("_batch1", 1, 0))
    ),
    Ratio(
        "at_once_vs_doorbell",
        ring("L1", "uvloop", "at once"),
        doorbell("at once"),
        "next step right after the acknowledgement, reader in uvloop",
    ),
    Ratio("paced1ms_vs_doorbell", ring("L1", "uvloop", "paced1ms"), doorbell("paced1ms"), "paced 1 ms", at_most=2),
    Ratio("paced10ms_vs_zmq", zmq("paced10ms"), ring("L1", "uvloop", "paced10ms"), f"paced 10 ms, {_NATIVE}"),
    Ratio(
        "closed_vs_blocking_doorbell",
        ring("L1", "uvloop", "closed"),
        doorbell("closed", "blocking"),
        "our reader in uvloop, the doorbell's in read(2)",
    ),
    Ratio(
        "vs_zmq_blocking",
        Side("msgpack+zmq", "L2", "blocking", "closed"),
        _CLOSED,
        f"closed, their reader in a plain blocking loop, {_NATIVE}",
    ),
    *(
        Ratio(
            f"hot_vs_memcpy_batch{batch}",
            ring("L0", "polling", "hot", batch),
            Side("memcpy", "L0", "polling", "hot", batch),
            f"batch {batch}, L0",
            at_most=1.25 if batch >= 256 else 1.5,
        )
        for batch in BATCHES
    ),
)


def named_ratios(rows: Sequence[Row]) -> list[Result]:
    """The published ones; hot_vs_memcpy is the worst of its batches, idle_cpu_percent a figure."""
    return [_hot_vs_memcpy(rows), *(evaluate(ratio, rows) for ratio in NAMED), _idle(rows)]


def further_ratios(rows: Sequence[Row]) -> list[Result]:
    return [evaluate(ratio, rows) for ratio in FURTHER]


def evaluate(ratio: Ratio, rows: Sequence[Row]) -> Result:
    over, under = ratio.over.find(rows), ratio.under.find(rows)
    value, valid = None, False
    if over is not None and under is not None:
        value = round(ratio.over.value(over) / max(ratio.under.value(under), 1e-9), 3)
        valid = bool(over["valid"] and under["valid"])
    return Result(ratio.name, value, valid, ratio.meaning, ratio.at_least, ratio.at_most)


def _hot_vs_memcpy(rows: Sequence[Row]) -> Result:
    batches = [evaluate(ratio, rows) for ratio in FURTHER if ratio.name.startswith("hot_vs_memcpy_batch")]
    measured = [result for result in batches if result.value is not None]
    worst = max(measured, key=lambda result: result.value or 0.0, default=None)
    meaning = "hot, L0, the worst batch; at most 1.25 from batch 256 on, 1.5 below"
    if worst is None:
        return Result("hot_vs_memcpy", None, False, meaning, None, 1.25)
    return Result("hot_vs_memcpy", worst.value, worst.valid, f"{meaning}; here {worst.meaning}", None, worst.at_most)


def _idle(rows: Sequence[Row]) -> Result:
    row = ring("L1", "uvloop", "idle", 1).find(rows)
    meaning = "CPU of both processes of an idle channel, reader asleep in uvloop"
    value = None if row is None else float(row["cpu_percent"])
    # Process accounting leaves others out: no disturbance makes it invalid.
    return Result("idle_cpu_percent", value, value is not None, meaning, None, 0.5)
