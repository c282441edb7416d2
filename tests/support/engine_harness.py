"""EngineHarness: requests through an EngineCore in this process, without rings, processes or a real model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.fake_channel import FakeChannel, Stream
from tests.support.toy_runner import ToyRunner
from tokring.engine.core import EngineCore
from tokring.engine.engine_config import EngineConfig
from tokring.engine.model_runner import ModelRunner


class EngineHarness:
    """An engine with `num_channels` fake front ends; `run()` steps until nothing is left to do."""

    def __init__(self, runner: ModelRunner | None = None, *, num_channels: int = 1, **config: Any) -> None:
        self.runner = runner if runner is not None else ToyRunner(block_size=config.get("block_size", 16))
        defaults = {"vocab_size": self.runner.vocab_size, "max_model_len": 256, "num_blocks": 64, "max_num_seqs": 16}
        self.config = EngineConfig(**(defaults | config))
        self.runner.allocate_kv_cache(self.config.num_blocks)
        self.core = EngineCore(self.config, self.runner)
        self.channels = [FakeChannel() for _ in range(num_channels)]
        for index, channel in enumerate(self.channels):
            self.core.attach(index, channel)

    @property
    def channel(self) -> FakeChannel:
        """Return the first front end."""
        return self.channels[0]

    def submit(self, ids: Sequence[int], **fields: Any) -> Stream:
        """Submit to the first front end; see FakeChannel.submit."""
        return self.channel.submit(ids, **fields)

    def run(self, max_steps: int = 10_000) -> int:
        """Step until all is done; returns the number of steps that computed something."""
        steps = 0
        for _ in range(max_steps):
            steps += self.core.step()
            if not self.core.has_work and not any(channel._requests for channel in self.channels):
                return steps
        raise AssertionError(f"work is left after {max_steps} steps")

    def finish(self, deadline_s: float = 30.0) -> None:
        """Step until all is done, waiting for compilers of grammars, too."""
        deadline = time.monotonic() + deadline_s
        while self.core.has_work or any(channel._requests for channel in self.channels):
            if not self.core.step():
                time.sleep(0.001)  # a compiler thread works
            assert time.monotonic() < deadline, "work is left"

    def generate(self, ids: Sequence[int], **fields: Any) -> list[int]:
        """Token ids of one request, run alone to its end."""
        stream = self.submit(ids, **fields)
        self.run()
        return stream.token_ids

    def check_nothing_left(self) -> None:
        """All blocks free, no rows, no waiting requests, indexes consistent."""
        scheduler = self.core.scheduler
        assert scheduler.columns.num_rows == 0 and scheduler.waiting.num_waiting == 0
        assert scheduler.pool.num_free == self.config.num_blocks
        assert not scheduler.table.num_blocks.any()
        assert scheduler.columns.num_special == scheduler.columns.num_with_logprobs == 0
        scheduler.pool.check()

    def check_consistent(self) -> None:
        """Reference counts are exactly what the block tables hold."""
        scheduler = self.core.scheduler
        counts = np.zeros(self.config.num_blocks, np.int32)
        for row in range(scheduler.columns.num_rows):
            np.add.at(counts, scheduler.table.row(row), 1)
        assert np.array_equal(counts, scheduler.pool.references)
        scheduler.pool.check()
