"""Channels that were lost while both their ends live."""

import logging
import math
from typing import Any

from tokring.launch.child_process import ChildProcess
from tokring.launch.children import Children
from tokring.launch.spawner import Spawner

log = logging.getLogger("tokring.launch")

RECONNECT_AFTER_S = 1.0  # a channel ends a moment before its engine's death is known
RECONNECT_INTERVAL_S = 60.0  # whose channel is closed again so soon is itself the cause


def note_lost_channel(child: ChildProcess, message: dict[str, Any], now: float) -> None:
    """A front end says that its channel has ended; `message` tells which one, and whether it could use another."""
    if message.get("number") == child.channel_number:
        child.can_reconnect = message.get("can_reconnect") is True
        child.reconnect_at = min(child.reconnect_at, now + RECONNECT_AFTER_S)


def repair_channels(children: Children, spawner: Spawner, now: float) -> None:
    """Front ends whose channel has ended though the engine lives get another one, once; those that lose that one
    too, or cannot go on with another, are killed, and followed by others."""
    for child in [child for child in children.living("frontend") if now >= child.reconnect_at]:
        child.reconnect_at = math.inf
        engine = next((engine for engine in children.living("engine") if engine.is_ready), None)
        if engine is None:
            continue  # the next one's channel follows
        if not child.can_reconnect or now < child.reconnected + RECONNECT_INTERVAL_S:
            log.error("%s (pid %d) has lost its channel to an engine that lives: killed", child.name, child.pid)
            child.kill()
            continue
        log.error("%s (pid %d) has lost its channel to an engine that lives: it gets another", child.name, child.pid)
        try:
            spawner.rewire(child, engine)
        except OSError as error:
            log.error("%s (pid %d) can't get another channel now: %s", child.name, child.pid, error)
            child.reconnect_at = now + RECONNECT_AFTER_S
        else:
            child.reconnected = now
