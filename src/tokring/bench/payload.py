"""The data that crosses, in every form a transport wants it: columns, plain Python objects, vLLM's messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.bench import vllm_messages
from tokring.bench.case import Case, Delivery, Direction

VOCABULARY = 150_000
Rows = list[tuple[Any, ...]]


class StepPayload:
    """One engine step: a token for each of `size` requests, perhaps with the logprobs of the best `num_logprobs`.

    Columns are those of a STEP frame. A row as Python object: (stream_slot, [token_id], finish_reason or None), with
    logprobs also rank, logprob, [top ids], [top logprobs].
    """

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(1)
        self.case = case
        rows, width = case.size, case.num_logprobs
        self.stream_slot = np.arange(rows, dtype=np.uint32)
        self.slot_generation = np.ones(rows, dtype=np.uint32)
        self.token_id = random.integers(0, VOCABULARY, rows, dtype=np.int32)
        logprob_rows = rows if width else 0
        self.token_index = np.arange(logprob_rows, dtype=np.uint32)
        self.rank = np.ones(logprob_rows, dtype=np.int32)
        self.top_id = random.integers(0, VOCABULARY, (logprob_rows, width), dtype=np.int32)
        self.top_logprob = -np.sort(random.random((logprob_rows, width), dtype=np.float32))
        self.logprob = self.top_logprob[:, 0].copy() if width else np.empty(0, dtype=np.float32)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """In the order of the frame; without logprobs the first three only."""
        ids = (self.stream_slot, self.slot_generation, self.token_id)
        if not self.case.num_logprobs:
            return ids
        return (*ids, self.token_index, self.rank, self.logprob, self.top_id, self.top_logprob)

    def rows(self) -> Rows:
        return rows_of_columns(self.columns())

    def message(self) -> Any:
        return vllm_messages.step_message(self.token_id, self.rank, self.logprob, self.top_id, self.top_logprob)

    @staticmethod
    def message_type() -> type:
        return vllm_messages.step_message_type()

    @staticmethod
    def rows_of_message(message: Any) -> Rows:
        return vllm_messages.rows_of_step(message)


class RequestPayload:
    """One request of `size` prompt ids, sampling parameters at their defaults. As an object: (request_id, [ids])."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ids = np.random.default_rng(2).integers(0, VOCABULARY, case.size, dtype=np.int32)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return (self.ids,)

    def rows(self) -> Rows:
        return [(0, self.ids.tolist())]

    def message(self) -> Any:
        return vllm_messages.request_message(self.ids.tolist())

    @staticmethod
    def message_type() -> type:
        return vllm_messages.request_message_type()

    @staticmethod
    def rows_of_message(message: Any) -> Rows:
        return [(0, list(message.prompt_token_ids))]


Payload = StepPayload | RequestPayload


def make_payload(case: Case) -> Payload:
    return StepPayload(case) if case.direction == Direction.STEP else RequestPayload(case)


def rows_of_columns(columns: tuple[npt.NDArray[Any], ...]) -> Rows:
    """A Python object per request from a step's columns, by the fastest way numpy has."""
    slots, _, tokens, *logprobs = columns
    ids = [[token] for token in tokens.tolist()]
    nothing = [None] * len(ids)
    if not logprobs:
        return list(zip(slots.tolist(), ids, nothing, strict=True))
    _, rank, logprob, top_id, top_logprob = logprobs
    return list(
        zip(
            slots.tolist(),
            ids,
            nothing,
            rank.tolist(),
            logprob.tolist(),
            top_id.tolist(),
            top_logprob.tolist(),
            strict=True,
        )
    )


def expected_us(case: Case, delivery: Delivery) -> float:
    """About what a step takes by a slow transport: only to choose how many steps a run has."""
    if case.direction == Direction.REQUEST:
        return 100 + case.size * 0.1
    if delivery == Delivery.OBJECTS:
        return 150 + case.size * (16.0 if case.num_logprobs else 1.0)
    return 60.0
