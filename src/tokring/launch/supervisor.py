"""The supervisor: opens the port, starts front ends and engine, watches them, merges their logs, ends everything.

One thread (spawning must stay on the main thread: children die with the thread that started them), one selector, no
torch. `serve()` is the whole life of `tokring serve`.
"""

import contextlib
import enum
import logging
import math
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from tokring.config import Config, Device
from tokring.launch.announcement import curl_line
from tokring.launch.channel_repair import note_lost_channel, repair_channels
from tokring.launch.child import RELAYED_SIGNALS
from tokring.launch.child_process import ChildProcess, FatalError
from tokring.launch.children import Children, call_ready
from tokring.launch.file_size_limit import in_words
from tokring.launch.hang_watch import HangWatch
from tokring.launch.listeners import Listeners, open_listeners
from tokring.launch.reload import Reload
from tokring.launch.restarts import Restarts
from tokring.launch.server_log import ServerLog
from tokring.launch.service_manager import ServiceManager
from tokring.launch.signal_pipe import SignalPipe
from tokring.launch.spawner import Spawner
from tokring.launch.stats_pages import StatsPages
from tokring.process_title import set_process_title

log = logging.getLogger("tokring.launch")

START_KILL_GRACE_S = 1.0  # a child that is still loading gets this long after SIGTERM
DRAIN_KILL_GRACE_S = 3.0  # on top of --shutdown-timeout
FAILURE_KILL_GRACE_S = 4.0  # survivors end their streams with an error in this time
SIGNAL_ECHO_S = 0.5  # programs like timeout(1) signal both their child and its group: one wish, two signals
WATCH_INTERVAL_S = 1.0
MAX_PHASE_CHARS = 80


class State(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # asked to end: front ends finish what runs, then the engine ends
    FAILED = "failed"  # a child ended unasked


def serve(config: Config, environment: Mapping[str, str]) -> int:
    """Serves until told to stop. Returns the exit code: 0 after a drain, 1 after a failure, 128 + signal if forced.

    Raises ConfigError, before anything is started, if the server cannot listen.
    """
    set_process_title("supervisor")
    with contextlib.ExitStack() as stack:
        try:
            supervisor = set_up(config, environment, stack)
        except (OSError, RuntimeError) as error:  # no descriptors or memory; no threads
            print(f"tokring: error: can't start: {in_words(error)}", file=sys.stderr)
            return 1
        return supervisor.run()


def set_up(config: Config, environment: Mapping[str, str], stack: contextlib.ExitStack) -> "Supervisor":
    """All that a supervisor needs, without any child; `stack` releases it."""
    server_log = ServerLog(config.launch)
    service_manager = stack.enter_context(contextlib.closing(ServiceManager(environment)))
    stack.enter_context(server_log.taking_log_records())
    signals = stack.enter_context(SignalPipe(signals_to_handle(config)))
    listeners = stack.enter_context(contextlib.closing(open_listeners(config.server, environment)))
    # Twice as many as run: the front ends of a reload get the other half of the indexes.
    pages = stack.enter_context(StatsPages(2 * config.server.api_server_count))
    hang_watch = stack.enter_context(HangWatch(pages.supervisor, config.engine.step_timeout))
    for place, page in pages.items():
        hang_watch.add(place, page)
    return Supervisor(config, server_log, service_manager, signals, listeners, pages, hang_watch)


def signals_to_handle(config: Config) -> list[signal.Signals]:
    """A program started by nohup finds SIGHUP ignored and leaves it so, unless it is to do something else than end."""
    signals = [*RELAYED_SIGNALS, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and config.server.api_key_file is None:
        signals.remove(signal.SIGHUP)
    return signals


class Supervisor:
    """Runs one server. Use once."""

    def __init__(
        self,
        config: Config,
        server_log: ServerLog,
        service_manager: ServiceManager,
        signals: SignalPipe,
        listeners: Listeners,
        pages: StatsPages,
        hang_watch: HangWatch,
    ) -> None:
        # ---- whole process ----
        self._config = config
        self._log = server_log
        self._service_manager = service_manager
        self._signals = signals
        self._listeners = listeners
        self._pages = pages
        self._hang_watch = hang_watch
        self._selector = selectors.DefaultSelector()
        # ---- this run ----
        self._state = State.STARTING
        self._started = time.monotonic()
        self._was_serving = False  # once
        self._drain_started = 0.0  # time.monotonic()
        self._watch_due = 0.0  # time.monotonic()
        self._exit_code = 0
        self._children = Children(self._selector, server_log, self._on_message, self._on_exit)
        self._spawner = Spawner(config, pages, listeners.fds(), self._children)
        self._restarts = Restarts(config, pages, self._spawner, server_log)
        self._reload = Reload(
            config.server.api_server_count,
            self._children,
            self._spawner,
            self._restarts,
            pages,
            server_log,
            service_manager,
        )

    def run(self) -> int:
        """Returns the exit code; see serve()."""
        try:
            self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
            try:
                self._spawner.start_all()
            except OSError as error:
                log.error("can't start: %s", in_words(error))
                return 1
            log.info("listening on %s; loading", self._listeners.url)
            self._service_manager.starting("loading", self._config.launch.startup_timeout)
            while self._restarts.planned() or self._children.living():
                self._step()
        finally:
            self._children.kill_all()
            self._spawner.close()
            self._restarts.close()
            self._selector.close()
        return self._exit_code

    # ---- the loop ----

    def _step(self) -> None:
        """Waits for the next event or deadline and handles it."""
        call_ready(self._selector, self._wait_s())
        now = time.monotonic()
        if self._state is State.STARTING and now >= self._start_deadline:
            self._fail_start()
        if now >= self._watch_due:
            self._watch_due = now + WATCH_INTERVAL_S
            self._restarts.look_for_oom_kills()
            self._hang_watch.end_hung(self._children.living(), now)
        repair_channels(self._children, self._spawner, now)
        self._service_manager.alive(now)
        self._children.kill_late(now)
        if (cause := self._restarts.start_due(now)) is not None:
            self._give_up(cause)
        if self._state is State.STARTING:
            self._log.draw_progress(self._pages.of(("engine", 0)), now)

    def _wait_s(self) -> float:
        """Seconds until something is due by itself."""
        due = [self._watch_due, *self._children.due(), *self._restarts.planned().values()]
        if self._service_manager.due is not None:
            due.append(self._service_manager.due)
        if self._state is State.STARTING:
            due.append(self._start_deadline)
            if self._log.progress_due is not None:
                due.append(self._log.progress_due)
        return max(min(due) - time.monotonic(), 0)

    @property
    def _start_deadline(self) -> float:
        return self._started + self._config.launch.startup_timeout

    # ---- what children say ----

    def _on_message(self, child: ChildProcess, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "phase":
                child.phase = str(message.get("phase"))[:MAX_PHASE_CHARS]
                log.info("%s: %s", child.name, child.phase)
            case "device":
                self._spawner.settle_device(msgspec.convert(message.get("device"), Device))
            case "ready":
                self._on_ready(child)
            case "fatal":
                child.fatal = FatalError(str(message.get("error")), message.get("traceback"))
            case "channel_lost":
                note_lost_channel(child, message, time.monotonic())
            case "terminate":  # somebody sent SIGTERM to the child itself, or to every process at once
                self._drain(f"SIGTERM to {child.name}")
            case unknown:
                raise ValueError(f"unknown type {str(unknown)[:MAX_PHASE_CHARS]!r}")

    def _on_ready(self, child: ChildProcess) -> None:
        child.is_ready = True
        child.ready_since = time.monotonic()
        child.phase = "ready"
        if self._state is State.STARTING and all(other.is_ready for other in self._children.living()):
            self._announce()
        if child.ready_by < math.inf:
            child.ready_by = math.inf
            log.info("%s is ready after %.1f s", child.name, child.ready_since - child.spawned)
        if self._state is State.SERVING:
            self._reload.end_when_ready()

    def _announce(self) -> None:
        self._state = State.SERVING
        self._was_serving = True
        log.info("ready after %.1f s: %s", time.monotonic() - self._started, self._listeners.url)
        self._service_manager.ready(f"serving on {self._listeners.url}")
        if self._config.launch.log_format == "text":  # a log of JSON has no place for people
            self._log.print_for_copying(f"try it:\n  {curl_line(self._config, self._listeners.url)}\n")

    # ---- a process that has ended ----

    def _on_exit(self, child: ChildProcess) -> None:
        """Asked or not."""
        if self._state is State.SERVING and self._reload.is_about(child):
            self._reload.on_exit(child)
            return
        if self._is_needed(child) and self._restarts.plan(child):
            return
        if self._state is State.DRAINING:
            if child.exit_code != 0 and not child.was_killed:
                self._exit_code = self._exit_code or 1
                log.error("%s (pid %d) %s while ending", child.name, child.pid, child.describe_end())
            self._end_engine_after_frontends()
        elif self._state is not State.FAILED:
            self._fail(child)

    def _give_up(self, cause: str) -> None:
        """One that had died, for which there was work, can't be followed by another."""
        if self._state is State.DRAINING:
            self._exit_code = self._exit_code or 1
        else:
            self._end_all_after_failure()
        log.error("%s, again and again", cause)

    def _is_needed(self, child: ChildProcess) -> bool:
        """Whether there is work for another one. During a drain: for an engine, until a second signal."""
        is_refusal = child.fatal is not None and child.fatal.traceback is None
        if is_refusal and child.role == "engine":
            return False  # it would refuse again; a front end's file may come back, and others serve meanwhile
        if self._state is not State.DRAINING:
            return self._state is State.SERVING
        is_second_signal = child.was_killed and not child.is_hung
        has_work = self._was_serving and bool(self._children.living("frontend"))
        return child.role == "engine" and has_work and not is_second_signal

    # ---- the end ----

    def _drain(self, cause: str) -> None:
        """Front ends finish what runs within --shutdown-timeout, then the engine ends. Asked again: no effect."""
        if self._state in (State.DRAINING, State.FAILED):
            return
        was_serving = self._was_serving = self._state is State.SERVING
        self._state = State.DRAINING
        self._drain_started = time.monotonic()
        self._restarts.forget("frontend")
        deadline_s = self._config.launch.shutdown_timeout if was_serving else 0.0
        grace_s = deadline_s + (DRAIN_KILL_GRACE_S if was_serving else START_KILL_GRACE_S)
        log.info("%s: ending; running requests get %g s (a second signal ends at once)", cause, deadline_s)
        self._service_manager.stopping(f"draining after {cause}", grace_s + DRAIN_KILL_GRACE_S)
        for child in self._children.living("frontend"):
            self._children.ask_to_end(child, deadline_s, grace_s)
        self._end_engine_after_frontends()
        if not was_serving:
            for child in self._children.living("engine"):
                self._children.ask_to_end(child, 0.0, grace_s)

    def _end_engine_after_frontends(self) -> None:
        if not self._children.living("frontend"):
            self._restarts.forget()
            for child in self._children.living("engine"):
                if child.kill_at == math.inf:
                    self._children.ask_to_end(child, 0.0, DRAIN_KILL_GRACE_S)

    def _fail(self, child: ChildProcess) -> None:
        """A child ended unasked: says why and ends the others."""
        self._end_all_after_failure()
        if child.fatal is not None and child.fatal.traceback is None:
            log.error("%s", child.fatal.error)
            return
        log.error("%s (pid %d) %s; ending the server", child.name, child.pid, child.describe_end())
        self._log.print_last_words(child)

    def _fail_start(self) -> None:
        """The start-up deadline has passed: names who is late and where it stands."""
        late = [child for child in self._children.living() if not child.is_ready]
        self._end_all_after_failure()
        who = ", ".join(f"{child.name} (pid {child.pid}) is still {child.phase}" for child in late)
        log.error("not ready within --startup-timeout %g s: %s", self._config.launch.startup_timeout, who)

    def _end_all_after_failure(self) -> None:
        self._state = State.FAILED
        self._exit_code = 1
        self._service_manager.stopping("ending after a failure", FAILURE_KILL_GRACE_S)
        self._restarts.forget()
        for child in self._children.living():
            self._children.ask_to_end(child, 0.0, FAILURE_KILL_GRACE_S)

    # ---- signals ----

    def _on_signals(self) -> None:
        for number in self._signals.receive():
            if number == signal.SIGUSR2:
                self._on_wish_to_reload("SIGUSR2")
            elif number == signal.SIGHUP and self._config.server.api_key_file is not None:
                for child in self._children.living("frontend"):
                    child.send("reload_keys")
            elif number in RELAYED_SIGNALS:
                self._on_wish_to_end(signal.Signals(number))

    def _on_wish_to_reload(self, cause: str) -> None:
        if self._state is State.SERVING:
            self._reload.begin(cause)
            return
        log.warning("%s: no reload while the server is %s", cause, self._state.value)
        self._pages.supervisor.add("reloads_failed")

    def _on_wish_to_end(self, number: signal.Signals) -> None:
        """The first signal: drain. Any later one: end at once, unless it is the first one's echo."""
        if self._state in (State.STARTING, State.SERVING):
            self._drain(number.name)
        elif time.monotonic() >= self._drain_started + SIGNAL_ECHO_S:
            log.warning("%s: ending at once", number.name)
            self._restarts.forget()
            self._exit_code = self._exit_code or 128 + number
            for child in self._children.living():
                child.kill()
