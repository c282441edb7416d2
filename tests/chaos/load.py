"""The load and its oracle: each answer under disturbance is held against the one of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.catalogue import Asked, with_stop_string
from tests.chaos.client import FAST, SLOW, Answer, Exchange, exchange, read_answer, request_bytes

MOST_KEPT_FAILURES = 20
SHARE_OF_SLOW_READERS = 0.1


class OracleError(RuntimeError):
    """Undisturbed runs differ: this backend's answers depend on who runs beside, so there is nothing to hold on to."""


class Load:
    """Streams that ask for one thing after another, chosen at random."""

    def __init__(self, address: tuple[str, int], asked: Sequence[Asked], seed: int, *, pause_s: float = 0.0) -> None:
        """`pause_s`: how long a client rests after an answer."""
        self._address = address
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._asked = list(asked)
        self._expected: dict[str, Answer] = {}
        self.last_token_time = 0.0  # the event loop's
        self.counts: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.cut_off: list[tuple[Asked, Exchange, Answer]] = []  # to be explained by a front end's death
        self.num_output_tokens = 0

    # ---- the undisturbed run ----

    async def learn(self) -> None:
        """Fills the oracle: everything one by one, with stop strings found in the texts, then all at once, compared."""
        stopped = []
        for asked in self._asked:
            answer = await self._ask_undisturbed(asked)
            self._expected[asked.name] = answer
            if asked.name.startswith(("greedy", "seeded, n=2")) and (more := with_stop_string(asked, answer.texts[0])):
                self._expected[more.name] = await self._ask_undisturbed(more)
                stopped.append(more)
        self._asked += stopped
        again = await asyncio.gather(*(self._ask_undisturbed(asked) for asked in self._asked))
        different = [
            asked.name for asked, answer in zip(self._asked, again, strict=True) if answer != self._expected[asked.name]
        ]
        if different:
            raise OracleError(f"undisturbed, but in company, these answers differ: {', '.join(different)}")

    async def _ask_undisturbed(self, asked: Asked) -> Answer:
        done = await exchange(self._address, request_bytes(asked.route, asked.body))
        answer = read_answer(done, is_stream=asked.is_stream)
        if answer.error:
            raise OracleError(f"{asked.name}, undisturbed: {answer.error}; {done.body[:300]!r}")
        return answer

    @property
    def num_kinds(self) -> int:
        return len(self._asked)

    # ---- under disturbance ----

    async def run(self, num_streams: int, stop: asyncio.Event) -> None:
        """`num_streams` at any time, until `stop`; what runs then ends by itself."""
        async with asyncio.TaskGroup() as group:
            for number in range(num_streams):
                group.create_task(self._one_stream(stop, is_slow=number < num_streams * SHARE_OF_SLOW_READERS))

    async def _one_stream(self, stop: asyncio.Event, *, is_slow: bool) -> None:
        order = self._random.sample(self._asked, len(self._asked))
        for asked in itertools.cycle(order):
            if stop.is_set():
                return
            on_data = self._note_token if asked.is_stream and not is_slow else _note_nothing
            request = request_bytes(asked.route, asked.body)
            done = await exchange(self._address, request, SLOW if is_slow else FAST, on_data)
            answer = read_answer(done, is_stream=asked.is_stream)
            self._judge(asked, done, answer)
            self.counts["slow readers' answers"] += is_slow
            await asyncio.sleep(self._pause_s)

    def _note_token(self) -> None:
        self.last_token_time = asyncio.get_running_loop().time()

    def _judge(self, asked: Asked, done: Exchange, answer: Answer) -> None:
        self.counts["requests"] += 1
        if answer == self._expected[asked.name]:
            self.counts["right"] += 1
            self.num_output_tokens += answer.usage["completion_tokens"]
        elif not done.is_whole and (done.error or not done.body.endswith(b"\n\n") or "error" not in answer.error):
            self.cut_off.append((asked, done, answer))
        else:
            self._fail(asked, done, answer, "differs")

    def explain_cut_off(self, killed_ports: Sequence[tuple[float, frozenset[int]]]) -> None:
        """Connections whose front end was killed may break, but what came must be the right answer's beginning."""
        for asked, done, answer in self.cut_off:
            killed = any(done.port in ports and done.started <= when <= done.ended for when, ports in killed_ports)
            if not killed:
                self._fail(asked, done, answer, "broken, though its front end lived")
            elif not answer.starts_like(self._expected[asked.name]):
                self._fail(asked, done, answer, "broken with its front end, and what came before differs")
            else:
                self.counts["broken with their front end"] += 1
        self.cut_off.clear()

    def _fail(self, asked: Asked, done: Exchange, answer: Answer, why: str) -> None:
        self.counts["failures"] += 1
        if len(self.failures) < MOST_KEPT_FAILURES:
            expected = self._expected[asked.name]
            self.failures.append(
                {
                    "request": asked.name,
                    "why": why,
                    "status": done.status,
                    "error": answer.error or done.error,
                    "seconds": round(done.ended - done.started, 3),
                    "got": {"texts": answer.texts, "reasons": answer.reasons, "usage": answer.usage},
                    "expected": {"texts": expected.texts, "reasons": expected.reasons, "usage": expected.usage},
                    "end": done.body[-300:].decode("utf-8", "replace"),
                }
            )


def _note_nothing() -> None:
    pass
