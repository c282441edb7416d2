"""ControlCalls: what front ends may ask of the engine beside requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from tokring.engine.core import EngineCore
from tokring_ipc import Call, CallStatus, ControlMethod, PeerGone

logger = logging.getLogger(__name__)


class ControlCalls:
    """Answers calls at once, between two steps; a caller that does not read its answers misses them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._methods: Mapping[ControlMethod | int, Callable[[], Any]] = {
            ControlMethod.RESET_PREFIX_CACHE: core.reset_prefix_cache,
            ControlMethod.PAUSE: core.pause,
            ControlMethod.RESUME: core.resume,
            ControlMethod.INSPECT: self._inspect,
        }

    def answer(self, call: Call, front_end: int) -> None:
        """Do what front end `front_end` asks and send the result; never raises for what the caller did."""
        method = self._methods.get(call.method)
        try:
            if call.method == ControlMethod.EXPLAIN:
                self._explain(call, front_end)
            elif method is None:
                call.refuse(CallStatus.UNKNOWN_METHOD, f"method {call.method} is not served by this engine")
            else:
                call.reply(method())
        except (PeerGone, BlockingIOError) as error:
            logger.warning("the answer to control call %s is lost: %s", call.method, error)

    def _explain(self, call: Call, front_end: int) -> None:
        match call.payload:
            case [int(stream_slot), int(slot_generation)]:
                asking = self._core.front_ends.get(front_end)
                call.reply(None if asking is None else asking.explain(stream_slot, slot_generation))
            case _:
                call.refuse(CallStatus.BAD_ARGUMENT, "EXPLAIN takes [stream_slot, slot_generation]")

    def _inspect(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        return {
            "running": scheduler.columns.num_rows,
            "waiting": scheduler.waiting.num_waiting,
            "deferred": scheduler.waiting.num_deferred,
            "blocks_used": scheduler.pool.num_blocks - scheduler.pool.num_free,
            "blocks_total": scheduler.pool.num_blocks,
            "blocks_cached": scheduler.pool.num_cached,
            "preemptions": scheduler.num_preemptions,
            "paused": self._core.is_paused,
            "runner": self._core.runner.name,
        }
