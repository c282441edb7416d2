"""Session: everything of an LLM that lives on the loop thread: engine process, channel, text side, running requests."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokring.config import Config
from tokring.offline.engine_process import EngineProcess
from tokring.offline.errors import EngineDied, OfflineError
from tokring.offline.output import RequestOutput, Usage
from tokring.offline.result import request_output
from tokring.server.engine_client import EngineClient
from tokring.server.engine_connection import connect_engine
from tokring.server.engine_limits import EngineLimits
from tokring.server.errors import ApiError
from tokring.server.front_end import ServedModel, load_served_model
from tokring.server.generation import Generation, Prompt, TextOptions
from tokring.server.stats import PageStats
from tokring.server.token_path import LogprobStyle, open_token_path
from tokring_ipc import AttachError, ControlMethod, PeerGone

DEATH_DELAY_S = 5.0  # the channel ends before the process is reaped
RING_FULL_PAUSE_S = 0.002
# Slots whose requests are complete but not yet finished by the engine (stop strings) come on top.
SPARE_SLOT_SHARE = 4


class Session:
    """Use on one loop: start(), generate() any number of times, also side by side, close()."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process: EngineProcess | None = None
        self._engine: EngineClient | None = None
        self._model: ServedModel | None = None
        self._limits: EngineLimits | None = None
        # Sequences handed to the engine at once: as many as it may run and queue.
        self._num_seats = config.engine.max_num_seqs + config.server.max_queued
        self._seats_taken = 0
        self._seat_freed = asyncio.Condition()

    @property
    def model(self) -> ServedModel:
        assert self._model is not None
        return self._model

    @property
    def limits(self) -> EngineLimits:
        assert self._limits is not None
        return self._limits

    @property
    def engine_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Spawns the engine, loads the text side beside it, connects. Raises OfflineError; close() all the same."""
        timeout_s = self._config.launch.startup_timeout
        process = self._process = EngineProcess(self._config)
        try:
            async with asyncio.timeout(timeout_s):
                self._model = await asyncio.to_thread(load_served_model, self._config)
                await self._connect(process, self._model)
        except TimeoutError:
            raise OfflineError(f"the engine is not ready within startup_timeout = {timeout_s:g} s") from None
        except (AttachError, ConnectionError) as error:
            raise await self._death(str(error)) from None

    async def _connect(self, process: EngineProcess, model: ServedModel) -> None:
        num_stream_slots = self._num_seats + self._num_seats // SPARE_SLOT_SHARE + 16
        stats = PageStats(process.page)
        self._engine = EngineClient(
            open_token_path(model.table, num_stream_slots),
            num_stream_slots=num_stream_slots,
            max_in_flight=num_stream_slots,
            stats=stats,
            on_death=lambda reason: None,  # every waiting request learns of it by its own error
        )
        ends = process.take_channel_ends()
        channel = await connect_engine(ends, model.longest_prompt, num_stream_slots)
        limits = await self._engine.attach(channel)
        self._limits = replace(limits, vocab_size=min(limits.vocab_size, model.encoder.vocab_size))

    async def close(self) -> None:
        """Ends what runs, the engine and everything it had. Idempotent."""
        if self._engine is not None:
            self._engine.end_all("The LLM is being closed.")
            self._engine.close()
        if self._process is not None:
            await self._process.close()
        if self._model is not None:
            self._model.encoder.close()

    async def generate(
        self, prompts: Sequence[Prompt], on_done: Callable[[RequestOutput], None]
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; `on_done` as each is complete. Raises EngineDied.

        On an error, or when cancelled, whatever still runs is cancelled in the engine.
        """
        outputs: dict[int, RequestOutput] = {}

        async def complete(index: int, prompt: Prompt) -> None:
            try:
                outputs[index] = await self._generate_one(prompt)
            finally:
                await self._give_back_seats(prompt.params.num_choices)
            on_done(outputs[index])

        try:
            async with asyncio.TaskGroup() as tasks:
                for index, prompt in enumerate(prompts):
                    await self._take_seats(prompt.params.num_choices)
                    tasks.create_task(complete(index, prompt))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [outputs[index] for index in range(len(prompts))]

    async def reset_prefix_cache(self) -> None:
        """Raises EngineDied."""
        assert self._engine is not None
        try:
            await self._engine.call(ControlMethod.RESET_PREFIX_CACHE)
        except PeerGone as error:
            raise await self._death(str(error)) from None

    async def _generate_one(self, prompt: Prompt) -> RequestOutput:
        assert self._engine is not None
        has_logprobs = prompt.params.logprobs is not None
        options = TextOptions(
            eos_ids=self.model.eos_ids,
            logprob_style=LogprobStyle.CHAT if has_logprobs else LogprobStyle.NONE,
            tokens_as_ids=True,
            return_token_ids=True,
        )
        while True:
            try:
                with Generation(self._engine, [prompt], options, time.monotonic_ns()) as generation:
                    generation.submit()
                    await generation.all_settled()
                    await generation.all_finished()
                    outcomes = [generation.outcome(choice, take=True) for choice in generation.choices]
                    return request_output(prompt, outcomes, generation.choices[0].stream, self.model.table)
            except ApiError as error:
                if error.code == "engine_dead":
                    raise await self._death(error.message) from None
                if error.code not in ("ring_full", "overloaded"):
                    usage = Usage(prompt_tokens=len(prompt.token_ids), completion_tokens=0, cached_tokens=0)
                    return RequestOutput(
                        prompt=prompt.text, prompt_token_ids=prompt.token_ids, usage=usage, error=error.message
                    )
            await asyncio.sleep(RING_FULL_PAUSE_S)

    async def _take_seats(self, count: int) -> None:
        """Waits for room in the engine's queue; a request wider than all of it goes alone."""
        async with self._seat_freed:
            await self._seat_freed.wait_for(
                lambda: not self._seats_taken or self._seats_taken + count <= self._num_seats
            )
            self._seats_taken += count

    async def _give_back_seats(self, count: int) -> None:
        self._seats_taken -= count
        async with self._seat_freed:
            self._seat_freed.notify_all()

    async def _death(self, otherwise: str) -> OfflineError:
        """The exception that says how the engine ended, once that is known."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_DELAY_S):
                return self._process.died(await asyncio.shield(self._process.exited))
        return EngineDied(f"the connection to the engine process is lost: {otherwise}")
