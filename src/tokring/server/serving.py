"""serve(): the life of a front-end process: listen, load, attach to the engine, serve, drain."""

import asyncio
import logging
import math
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from tokring.config import Config
from tokring.launch.child import ChildSetup, SupervisorGone, SupervisorLink
from tokring.request_record import seed_source
from tokring.server.application import create_app
from tokring.server.engine_client import EngineClient
from tokring.server.front_end import FrontEnd, Phase, ServedModel, load_served_model
from tokring.server.listening import Listener
from tokring.server.reconnection import EngineConnection, in_thread
from tokring.server.server_pages import ServerPages
from tokring.server.stats import PageStats
from tokring.server.token_path import open_token_path
from tokring_ipc import Heartbeat, StatsPage

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Slots whose requests are answered but not yet finished by the engine (stop strings, disconnects) come on top.
SPARE_SLOT_SHARE = 4
ERROR_FLUSH_S = 2.0
SPARE_DESCRIPTORS = 64  # listening sockets, rings, pipes, files
RETIRE_POLL_S = 0.1
IDLE_GRACE_POLLS = 50  # what a connection without a request gets when its front end has been replaced
SWITCH_INTERVAL_S = 0.0002  # a call that drops the GIL beside a computing thread came back 5 ms late without it


async def serve(setup: ChildSetup, supervisor: SupervisorLink) -> int:
    """Serves until the supervisor says shutdown. Returns the exit code; raises if loading or attaching fails."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_descriptor_limit(setup.config)
    page = StatsPage.continue_(setup.stats_page)
    stats = PageStats(page)
    heartbeat = Heartbeat(page)
    heartbeat.start()
    front_end = FrontEnd(setup.config, stats, ServerPages.attach(setup.stats_pages, heartbeat))
    [ends] = setup.channels
    # At the start of the server a recording must begin; later a full disk ends the recording, not the server.
    connection = EngineConnection(front_end, ends, supervisor, must_record=setup.listens_at_once)
    retire = asyncio.Event()
    shutdown = _watch_supervisor(supervisor, front_end.api_keys.reload, connection.replace, retire)
    listener = Listener(create_app(front_end), setup.config.server)
    sockets = [socket.socket(fileno=fd) for fd in setup.listen_fds]
    if setup.listens_at_once:
        await listener.open(sockets)
    starting = asyncio.ensure_future(_start(front_end, setup, supervisor, connection))
    retiring = asyncio.ensure_future(_retire(retire, front_end, listener))
    try:
        waited: tuple[asyncio.Future[Any], ...] = (starting, shutdown, retiring)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            if not setup.listens_at_once and not retire.is_set():
                await listener.open(sockets)
            supervisor.send("ready")
            await asyncio.wait((shutdown, retiring), return_when=asyncio.FIRST_COMPLETED)
        if shutdown.done():
            await _drain(front_end, shutdown.result())
        return 0
    finally:
        starting.cancel()
        retiring.cancel()
        connection.close()
        if front_end.has_model:
            front_end.engine.close()
        if front_end.recording is not None:
            front_end.recording.close()
        await listener.close()
        if front_end.tracing is not None:
            front_end.tracing.close()
        heartbeat.stop()
        stats.close()


async def _start(
    front_end: FrontEnd, setup: ChildSetup, supervisor: SupervisorLink, connection: EngineConnection
) -> None:
    """Loads the text side in a thread and attaches to the engine."""
    _enter(front_end, Phase.LOADING_TOKENIZER, supervisor)
    model = await in_thread(partial(load_served_model, setup.config))
    logger.info("token path: %s (%s)", model.table.family, model.table.reason)
    engine = _new_engine_client(front_end, setup.config, model, setup.index, connection)
    front_end.loaded(model, engine)
    _enter(front_end, Phase.WAITING_FOR_ENGINE, supervisor)
    await connection.open()


def _enter(front_end: FrontEnd, phase: Phase, supervisor: SupervisorLink) -> None:
    front_end.phase = phase
    front_end.stats.phase(phase)
    supervisor.send("phase", phase=str(phase))


def _new_engine_client(
    front_end: FrontEnd, config: Config, model: ServedModel, index: int, connection: EngineConnection
) -> EngineClient:
    most = max_in_flight(config)
    num_stream_slots = most + most // SPARE_SLOT_SHARE + 16
    token_path = open_token_path(
        model.table,
        num_stream_slots,
        inter_token=front_end.stats.histogram("inter_token_latency_seconds"),
        first_token=front_end.stats.histogram("time_to_first_token_seconds"),
    )
    return EngineClient(
        token_path,
        num_stream_slots=num_stream_slots,
        max_in_flight=most,
        max_queued_tokens=config.server.max_queued_tokens // config.server.api_server_count,
        stats=front_end.stats,
        on_death=partial(_on_engine_death, front_end, connection),
        draw_seed=seed_source(config.model.seed, index % config.server.api_server_count),
        on_pause=partial(_on_engine_pause, front_end, connection) if config.num_engine_restarts else None,
    )


def _on_engine_death(front_end: FrontEnd, connection: EngineConnection, reason: str) -> None:
    logger.error("engine 0 is gone: %s; its requests end with an error", reason)
    front_end.engine_is_dead()
    front_end.stats.phase(front_end.phase)
    connection.lost(can_reconnect=False)


def _on_engine_pause(front_end: FrontEnd, connection: EngineConnection, reason: str) -> None:
    logger.warning("engine 0 is gone: %s; its requests wait for the next one", reason)
    front_end.engine_is_restarting()
    front_end.stats.phase(front_end.phase)
    connection.lost(can_reconnect=True)


def _watch_supervisor(
    supervisor: SupervisorLink,
    reload_keys: Callable[[], None],
    replace_channel: Callable[[Mapping[str, Any]], None],
    retire: asyncio.Event,
) -> "asyncio.Future[float]":
    """Done with the drain's deadline in seconds when the supervisor says shutdown; 0 if it is gone."""
    loop = asyncio.get_running_loop()
    shutdown: asyncio.Future[float] = loop.create_future()

    def on_message() -> None:
        deadline_s: float | None = None
        try:
            while (message := supervisor.receive()) is not None:
                if message.get("type") == "shutdown":
                    deadline_s = float(message.get("deadline_s", 0.0))
                elif message.get("type") == "reload_keys":
                    reload_keys()
                elif message.get("type") == "retire":
                    retire.set()
                elif message.get("type") == "channel":
                    replace_channel(message)
        except SupervisorGone:
            loop.remove_reader(supervisor.fileno())
            deadline_s = 0.0
        if deadline_s is not None and not shutdown.done():
            shutdown.set_result(deadline_s)

    loop.add_reader(supervisor.fileno(), on_message)
    return shutdown


async def _retire(told: asyncio.Event, front_end: FrontEnd, listener: Listener) -> None:
    """Told that others have taken over: accepts no more, and is done when every connection has ended.

    Requests on open connections are answered as ever, with `Connection: close`. Idle connections get some time before
    they are closed: a client that is about to use one is not to find it gone.
    """
    await told.wait()
    front_end.is_retiring = True
    listener.stop_accepting()
    # A connection counts from its first turn of the loop on, with TLS from the end of its handshake on.
    num_polls = -IDLE_GRACE_POLLS if listener.uses_tls else 0
    is_over = False
    while not is_over or num_polls < 0:
        await asyncio.sleep(RETIRE_POLL_S)
        num_polls += 1
        is_over = not listener.close_idle(IDLE_GRACE_POLLS) and not front_end.requests_in_progress


async def _drain(front_end: FrontEnd, deadline_s: float) -> None:
    """Refuses new requests, lets the others finish until the deadline, then ends them with an error event."""
    front_end.drain()
    front_end.stats.phase(front_end.phase)
    if await _all_answered(front_end, deadline_s):
        return
    logger.warning("shutdown: %d requests are ended before they are complete", front_end.requests_in_progress)
    if front_end.has_model:
        front_end.engine.end_all("The server is shutting down.")
    if not await _all_answered(front_end, ERROR_FLUSH_S):
        logger.warning("shutdown: %d clients do not read their last bytes", front_end.requests_in_progress)


async def _all_answered(front_end: FrontEnd, timeout_s: float) -> bool:
    if front_end.all_answered.is_set():  # wait_for(…, 0) would not look
        return True
    try:
        await asyncio.wait_for(front_end.all_answered.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


def max_in_flight(config: Config) -> int:
    """Most requests of one front end."""
    return math.ceil((config.engine.max_num_seqs + config.server.max_queued) / config.server.api_server_count)


def raise_descriptor_limit(config: Config) -> None:
    """A stream takes two descriptors: the transport's and the token path's own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = 2 * max_in_flight(config) + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logger.warning(
            "the hard limit of open files is %d, the requests that may be in flight can need %d; connections beyond "
            "the limit are reset (ulimit -Hn)",
            hard,
            wanted,
        )
