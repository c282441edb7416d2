"""What the state probes say: they read stats pages and flags only: no lock, no engine, whatever else goes on."""

from collections.abc import Callable, Mapping

import orjson

from tokring.server.front_end import FrontEnd, Phase

RETRY_AFTER_S = "2"
_OK = b'{"status":"ok"}'


def why_unhealthy(front_end: FrontEnd) -> str | None:
    """Why requests can't be served: loading, draining, hung or dead; None if they can."""
    if front_end.phase is not Phase.READY:
        return str(front_end.phase)
    return front_end.pages.why_engine_is_unhealthy(front_end.config.engine.step_timeout)


def why_not_alive(front_end: FrontEnd) -> str | None:
    """None as long as this process answers and its engine is not lost: a restart would help otherwise."""
    return "the engine is dead" if front_end.phase is Phase.ENGINE_DEAD else None


def why_not_started(front_end: FrontEnd) -> str | None:
    """None once start-up has ended, whatever came after."""
    ended = front_end.phase in (Phase.READY, Phase.DRAINING, Phase.ENGINE_RESTARTING, Phase.ENGINE_DEAD)
    return None if ended else str(front_end.phase)


# By path: the reason for a 503, or None for a 200.
STATE_PROBES: Mapping[str, Callable[[FrontEnd], str | None]] = {
    "/health": why_unhealthy,
    "/health/live": why_not_alive,
    "/health/ready": why_unhealthy,
    "/health/started": why_not_started,
    "/ping": why_unhealthy,
}


def probe_body(reason: str | None) -> bytes:
    """The JSON of a state probe's answer."""
    return _OK if reason is None else orjson.dumps({"status": "unavailable", "reason": reason})


# Answered without a key, counted and logged nowhere.
PROBES = frozenset((*STATE_PROBES, "/version", "/load", "/metrics"))
