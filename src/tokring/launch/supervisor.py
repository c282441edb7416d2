"""The supervisor: opens the port, starts front ends and engine, watches them, merges their logs, ends everything.

One thread (spawning must stay on the main thread: children die with the thread that started them), one selector, no
torch. `Supervisor.run()` is the whole life of `tokring serve`.
"""

import contextlib
import enum
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from tokring import step_rows, vetted_grammars
from tokring.config import Config, ConfigError
from tokring.launch.announcement import curl_line
from tokring.launch.channel_wiring import ChannelWiring, fds_of
from tokring.launch.child import RELAYED_SIGNALS, StatsPageNames, configure_logging
from tokring.launch.child_process import ChildProcess, FatalError, Place, Role
from tokring.launch.death_cause import OomKills, is_own_fault
from tokring.launch.hang_watch import HangWatch, describe_threads
from tokring.launch.json_log import as_json_line
from tokring.launch.listeners import Listeners, open_listeners
from tokring.launch.log_merge import LineReader, LogSink
from tokring.launch.progress_bar import ProgressBar
from tokring.launch.restart_policy import RestartPolicy
from tokring.launch.service_manager import ServiceManager
from tokring.process_title import set_process_title
from tokring_ipc import ProcessPhase, StatsPage, page_name, server_prefix, sweep_stale
from tokring_ipc import Role as PageRole

log = logging.getLogger("tokring.launch")

PROGRESS_INTERVAL_S = 0.1
START_KILL_GRACE_S = 1.0  # a child that is still loading gets this long after SIGTERM
DRAIN_KILL_GRACE_S = 3.0  # on top of --shutdown-timeout
FAILURE_KILL_GRACE_S = 4.0  # survivors end their streams with an error in this time
SIGNAL_ECHO_S = 0.5  # programs like timeout(1) signal both their child and its group: one wish, two signals
REAP_TIMEOUT_S = 5.0
LOG_FLUSH_S = 2.0
NUM_SHOWN_TAIL_LINES = 8
GAUGES_OF_THE_LIVING = {
    "engine": ("num_requests_running", "num_requests_waiting", "step_started_ns", "kv_blocks_used"),
    "frontend": ("step_started_ns", "open_streams", "open_connections", "queued_requests", "stalled_connections"),
}
WATCH_INTERVAL_S = 1.0
MAX_MESSAGES_AT_ONCE = 16  # of one child, before others have their turn
MAX_PHASE_CHARS = 80
STACKS_GRACE_S = 1.0  # for a hung process to write its stacks, before it is killed
RECONNECT_AFTER_S = 1.0  # a channel ends a moment before its engine's death is known
RECONNECT_INTERVAL_S = 60.0  # whose channel is closed again so soon is itself the cause
STEADY_S = 10.0  # a process that was ready for so long did not die of its start


class State(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # asked to end: front ends finish what runs, then the engine ends
    FAILED = "failed"  # a child ended unasked


class Supervisor:
    """Runs one server. Use once."""

    def __init__(self, config: Config, environment: Mapping[str, str]) -> None:
        # ---- whole process ----
        self._config = config
        self._environment = environment
        self._selector = selectors.DefaultSelector()
        self._service_manager = ServiceManager(environment)
        self._sink = LogSink(sys.stderr.fileno())
        self._is_terminal = sys.stderr.isatty()
        self._progress = ProgressBar("loading weights")
        self._progress_due = time.monotonic()
        self._pages: list[StatsPage] = []
        self._vetted_grammars_fd = -1  # for one engine after the other
        # ---- this run ----
        self._state = State.STARTING
        self._children: list[ChildProcess] = []
        self._listeners: Listeners | None = None
        self._started = time.monotonic()
        self._exit_code = 0
        self._drain_started = 0.0  # time.monotonic()
        self._kill_deadline: dict[int, float] = {}  # pid -> when it is killed if it still lives
        self._page_names: StatsPageNames | None = None
        self._was_serving = False  # once
        # ---- restarts ----
        self._policies: dict[Place, RestartPolicy] = {("engine", 0): RestartPolicy(config.num_engine_restarts)}
        for index in range(2 * config.server.api_server_count):
            self._policies["frontend", index] = RestartPolicy(config.launch.frontend_restarts)
        self._next_start: dict[Place, float] = {}  # time.monotonic(), after a death
        self._ready_deadline: dict[int, float] = {}  # pid -> when a restarted one is killed if it is not ready
        # ---- reload ----
        self._newcomers: list[ChildProcess] = []  # front ends that replace the others once all of them are ready
        self._is_reload_wanted = False  # another one, once the last one is over
        # ---- hangs ----
        self._hang_watch: HangWatch | None = None
        self._watch_due = 0.0  # time.monotonic()
        self._oom_kills = OomKills()
        # ---- channels that were lost while both ends live ----
        self._reconnect_due: dict[int, float] = {}  # pid of the front end -> time.monotonic()
        # ---- this engine process, or the last one ----
        self._engine_died_by_itself = False
        self._step_rows_fd = -1  # what it is computing; read by front ends when it has died

    def run(self) -> int:
        """Serves until told to stop. Returns the exit code: 0 after a drain, 1 after a failure, 128 + signal if forced.

        Raises ConfigError, before anything is started, if the server cannot listen.
        """
        set_process_title("supervisor")
        with contextlib.ExitStack() as stack:
            stack.callback(self._sink.close, LOG_FLUSH_S)
            stack.callback(self._service_manager.close)
            stack.enter_context(self._logging_to_sink())
            stack.enter_context(self._signals_to_selector())
            self._listeners = open_listeners(self._config.server, self._environment)
            stack.callback(self._listeners.close)
            self._page_names = self._create_pages()
            stack.callback(self._remove_pages)
            self._hang_watch = stack.enter_context(self._watch_for_hangs())
            self._vetted_grammars_fd = vetted_grammars.create()
            stack.callback(os.close, self._vetted_grammars_fd)
            stack.callback(self._kill_all)
            self._spawn_all(self._page_names)
            log.info("listening on %s; loading", self._listeners.url)
            self._service_manager.starting("loading", self._config.launch.startup_timeout)
            while self._next_start or self._living():
                self._step()
        return self._exit_code

    # ---- start ----

    def _create_pages(self) -> StatsPageNames:
        """Creates every process's stats page; they outlive the process that writes them."""
        removed = sweep_stale()
        if removed:
            log.info("removed %d stats pages of servers that were killed", len(removed))
        prefix = server_prefix()
        num_frontends = self._config.server.api_server_count
        names = StatsPageNames(
            supervisor=page_name(prefix, PageRole.SUPERVISOR, 0),
            # Twice as many as run: those of a reload get the other half of the indexes.
            frontend=tuple(page_name(prefix, PageRole.FRONTEND, index) for index in range(2 * num_frontends)),
            engine=(page_name(prefix, PageRole.ENGINE, 0),),
        )
        try:
            self._pages.append(StatsPage.create(names.supervisor, PageRole.SUPERVISOR, 0))
            for role, of_role in ((PageRole.FRONTEND, names.frontend), (PageRole.ENGINE, names.engine)):
                self._pages.extend(StatsPage.create(name, role, index) for index, name in enumerate(of_role))
        except OSError as error:
            self._remove_pages()
            raise ConfigError(f"cannot create the stats pages in /dev/shm: {error}") from None
        return names

    def _watch_for_hangs(self) -> HangWatch:
        watch = HangWatch(self._supervisor_page, self._config.engine.step_timeout)
        for place in self._policies:
            watch.add(place, self._page_of(*place))
        return watch

    def _spawn_all(self, page_names: StatsPageNames) -> None:
        """Starts the front ends, so that the port answers at once, and the engine."""
        assert self._listeners is not None
        num_frontends = self._config.server.api_server_count
        wirings = [ChannelWiring.create(frontend, 0) for frontend in range(num_frontends)]
        try:
            for index, wiring in enumerate(wirings):
                ends = [wiring.frontend_ends]
                fds = self._listeners.fds()
                self._watch(ChildProcess.spawn("frontend", index, self._config, page_names, ends, fds))
                wiring.close_ends(wiring.frontend_ends)
            self._spawn_engine(wirings)
        finally:
            for wiring in wirings:
                wiring.close()

    def _spawn_engine(self, wirings: Sequence[ChannelWiring]) -> None:
        assert self._page_names is not None
        self._step_rows_fd = step_rows.create(self._config.engine.max_num_seqs)
        ends = [wiring.engine_ends for wiring in wirings]
        self._watch(
            ChildProcess.spawn(
                "engine",
                0,
                self._config,
                self._page_names,
                ends,
                step_rows_fd=self._step_rows_fd,
                vetted_grammars_fd=self._vetted_grammars_fd,
            )
        )

    @property
    def _supervisor_page(self) -> StatsPage:
        return self._pages[0]

    @property
    def _engine_page(self) -> StatsPage:
        return self._pages[-1]

    def _page_of(self, role: Role, index: int) -> StatsPage:
        return self._pages[1 + index] if role == "frontend" else self._engine_page

    def _progress_of(self, role: Role, index: int) -> int:
        """Grows with the work that the processes of one place get done: steps, or requests answered."""
        page = self._page_of(role, index)
        return page.get("steps") if role == "engine" else int(page.read().array("http_requests").sum())

    def _watch(self, child: ChildProcess) -> None:
        """Registers all descriptors of a child with the loop."""
        child.progress_at_spawn = self._progress_of(child.role, child.index)
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_exit(child))
        self._selector.register(child.link, selectors.EVENT_READ, lambda: self._on_message(child))
        for reader in (child.stdout, child.stderr):
            self._selector.register(reader.fd, selectors.EVENT_READ, self._log_reader(reader))

    def _log_reader(self, reader: LineReader) -> Callable[[], None]:
        return lambda: self._copy_lines(reader)

    # ---- the loop ----

    def _step(self) -> None:
        """Waits for the next event or deadline and handles it."""
        for key, _ in self._selector.select(self._wait_s()):
            if key.fd in self._selector.get_map():  # not unregistered by an event before it
                key.data()
        now = time.monotonic()
        if self._state is State.STARTING and now >= self._started + self._config.launch.startup_timeout:
            self._fail_start()
        if now >= self._watch_due:
            self._watch_due = now + WATCH_INTERVAL_S
            self._oom_kills.look()
            self._look_for_hangs(now)
        self._reconnect(now)
        self._service_manager.alive(now)
        for child in self._children:
            if not child.has_exited and now >= self._kill_deadline.get(child.pid, now + 1):
                if not child.is_hung:
                    log.warning("%s (pid %d) did not end in time: killed", child.name, child.pid)
                self._kill_deadline.pop(child.pid)
                child.kill()
            elif not child.has_exited and now >= self._ready_deadline.get(child.pid, now + 1):
                log.error("%s (pid %d) is still %s: killed", child.name, child.pid, child.phase)
                self._ready_deadline.pop(child.pid)
                child.kill()
        for role, index in [place for place, due in self._next_start.items() if now >= due]:
            del self._next_start[role, index]
            if role == "engine":
                self._restart_engine()
            else:
                self._restart_frontend(index)
        self._draw_progress(now)

    def _look_for_hangs(self, now: float) -> None:
        """A hang is a death that has to be brought about: its stacks go into the log, then it is killed."""
        assert self._hang_watch is not None
        for child in self._living():
            # What the watch saw of its predecessor, or of its start, must have passed.
            was_ready_s = now - child.ready_since if child.is_ready else 0.0
            if child.is_hung or child.pid in self._kill_deadline or was_ready_s <= self._hang_watch.timeout_s:
                continue
            reason = self._hang_watch.why_hung((child.role, child.index))
            if reason is None:
                continue
            child.is_hung = True
            self._supervisor_page.add("hung_processes")
            log.error("%s (pid %d) %s (--step-timeout): it is killed", child.name, child.pid, reason)
            for line in describe_threads(child.pid):
                log.error("%s: %s", child.name, line)
            child.show_stacks()
            self._kill_deadline[child.pid] = now + STACKS_GRACE_S

    def _wait_s(self) -> float:
        """Seconds until something is due by itself."""
        due = [
            self._watch_due,
            *self._kill_deadline.values(),
            *self._ready_deadline.values(),
            *self._next_start.values(),
            *self._reconnect_due.values(),
        ]
        if self._service_manager.due is not None:
            due.append(self._service_manager.due)
        if self._state is State.STARTING:
            due.append(self._started + self._config.launch.startup_timeout)
            if self._is_terminal:
                due.append(self._progress_due)
        return max(min(due) - time.monotonic(), 0)

    def _on_message(self, child: ChildProcess) -> None:
        """A bounded number of messages: whoever floods us keeps nobody else waiting."""
        try:
            for _ in range(MAX_MESSAGES_AT_ONCE):
                if (message := child.receive()) is None:
                    return
                self._handle(child, message)
        except ValueError as error:  # no process of ours sends such a thing
            if not child.was_killed:
                log.error("%s (pid %d) sent what is no message: %s; it is killed", child.name, child.pid, error)
                child.kill()

    def _handle(self, child: ChildProcess, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "phase":
                child.phase = str(message.get("phase"))[:MAX_PHASE_CHARS]
                log.info("%s: %s", child.name, child.phase)
            case "ready":
                child.is_ready = True
                child.ready_since = time.monotonic()
                child.phase = "ready"
                self._announce_when_ready()
                self._end_reload_when_ready()
                if self._ready_deadline.pop(child.pid, None) is not None:
                    log.info("%s is back after %.1f s", child.name, time.monotonic() - child.spawned)
            case "fatal":
                child.fatal = FatalError(str(message.get("error")), message.get("traceback"))
            case "channel_lost":
                if message.get("number") == child.channel_number:
                    child.can_reconnect = message.get("can_reconnect") is True
                    self._reconnect_due.setdefault(child.pid, time.monotonic() + RECONNECT_AFTER_S)
            case "terminate":  # somebody sent SIGTERM to the child itself, or to every process at once
                self._drain(f"SIGTERM to {child.name}")
            case unknown:
                raise ValueError(f"unknown type {str(unknown)[:MAX_PHASE_CHARS]!r}")

    def _announce_when_ready(self) -> None:
        if self._state is not State.STARTING or not all(child.is_ready for child in self._children):
            return
        assert self._listeners is not None
        self._state = State.SERVING
        self._was_serving = True
        seconds = time.monotonic() - self._started
        log.info("ready after %.1f s: %s", seconds, self._listeners.url)
        self._service_manager.ready(f"serving on {self._listeners.url}")
        # Without a tag, so that it can be copied as it stands.
        self._sink.write(f"try it:\n  {curl_line(self._config, self._listeners.url)}\n".encode())

    def _on_exit(self, child: ChildProcess) -> None:
        """A child's process has ended, asked or not."""
        child.reap()
        self._on_message(child)  # its last words
        for reader in (child.stdout, child.stderr):
            self._copy_lines(reader)
        for watched in (child.pidfd, child.link, child.stdout.fd, child.stderr.fd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(watched)
        self._kill_deadline.pop(child.pid, None)
        self._ready_deadline.pop(child.pid, None)
        self._reconnect_due.pop(child.pid, None)
        child.close()
        if self._state is State.SERVING and (child.is_retiring or child in self._newcomers):
            self._on_exit_during_reload(child)
        elif (back_off_s := self._back_off_s(child)) is not None:
            self._plan_restart(child, back_off_s)
        elif self._state is State.DRAINING:
            if child.exit_code != 0 and not child.was_killed:
                self._exit_code = self._exit_code or 1
                log.error("%s (pid %d) %s while ending", child.name, child.pid, child.describe_end())
            self._end_engine_after_frontends()
        elif self._state is not State.FAILED:
            self._fail(child)

    # ---- a process that died ----

    def _back_off_s(self, child: ChildProcess) -> float | None:
        """Seconds until another process takes its place; None: none does."""
        is_refusal = child.fatal is not None and child.fatal.traceback is None  # it would refuse again
        if not self._is_needed(child) or is_refusal:
            return None
        was_steady = child.is_ready and time.monotonic() - child.spawned >= STEADY_S
        progress = self._progress_of(child.role, child.index)
        made_progress = was_steady or progress > child.progress_at_spawn
        return self._policies[child.role, child.index].back_off_s(made_progress=made_progress)

    def _is_needed(self, child: ChildProcess) -> bool:
        """Whether there is work for another one. During a drain: for an engine, until a second signal."""
        if self._state is State.DRAINING:
            is_second_signal = child.was_killed and not child.is_hung
            return (
                child.role == "engine" and self._was_serving and bool(self._living("frontend")) and not is_second_signal
            )
        return self._state is State.SERVING

    def _plan_restart(self, child: ChildProcess, back_off_s: float) -> None:
        """Says why, once."""
        self._children.remove(child)
        if child.role == "engine":
            assert child.exit_code is not None
            self._engine_died_by_itself = is_own_fault(
                child.exit_code, was_hung=child.is_hung, oom_kills=self._oom_kills
            )
        page = self._page_of(child.role, child.index)
        page.set("phase", ProcessPhase.STARTING)
        for gauge in GAUGES_OF_THE_LIVING[child.role]:
            page.set(gauge, 0)
        when = f"in {back_off_s:g} s" if back_off_s else "now"
        log.error("%s (pid %d) %s; another one starts %s", child.name, child.pid, child.describe_end(), when)
        self._show_last_words(child)
        self._next_start[child.role, child.index] = time.monotonic() + back_off_s

    def _restart_engine(self) -> None:
        """A new engine on new channels; each front end gets its ends, and what the dead engine was computing."""
        self._supervisor_page.add("engine_restarts")
        old_rows_fd = self._step_rows_fd
        front_ends = self._living("frontend")
        wirings = [ChannelWiring.create(child.index, 0) for child in front_ends]
        try:
            self._spawn_engine(wirings)
            self._expect_ready(self._children[-1])
            for child, wiring in zip(front_ends, wirings, strict=True):
                fds = (*fds_of(wiring.frontend_ends), old_rows_fd)
                child.send_channel(fds, engine_died_by_itself=self._engine_died_by_itself)
                self._reconnect_due.pop(child.pid, None)  # of the channel to the dead engine
        finally:
            os.close(old_rows_fd)
            for wiring in wirings:
                wiring.close()

    def _restart_frontend(self, index: int) -> None:
        self._supervisor_page.add("frontend_restarts")
        self._add_frontend(index)

    def _add_frontend(self, index: int) -> ChildProcess:
        """A new front end on the same sockets; the engine gets its end of their channel. If there is no engine now,
        the next one's follows."""
        assert self._listeners is not None and self._page_names is not None
        wiring = ChannelWiring.create(index, 0)
        ends, fds = [wiring.frontend_ends], self._listeners.fds()
        try:
            child = ChildProcess.spawn(
                "frontend", index, self._config, self._page_names, ends, fds, listens_at_once=False
            )
            self._watch(child)
            self._expect_ready(child)
            for engine in self._living("engine"):
                engine.send_fds(fds_of(wiring.engine_ends), "channel", frontend=index)
            return child
        finally:
            wiring.close()

    def _expect_ready(self, child: ChildProcess) -> None:
        self._ready_deadline[child.pid] = child.spawned + self._config.launch.startup_timeout

    def _reconnect(self, now: float) -> None:
        """Front ends whose channel has ended though the engine lives get another one, once; those that lose that one
        too, or cannot go on with another, are killed, and followed by others."""
        for child in [
            child for child in self._living("frontend") if now >= self._reconnect_due.get(child.pid, now + 1)
        ]:
            del self._reconnect_due[child.pid]
            engine = next((engine for engine in self._living("engine") if engine.is_ready), None)
            if engine is None:
                continue  # the next one's channel follows
            if not child.can_reconnect or now < child.reconnected + RECONNECT_INTERVAL_S:
                log.error("%s (pid %d) has lost its channel to an engine that lives: killed", child.name, child.pid)
                child.kill()
                continue
            log.error(
                "%s (pid %d) has lost its channel to an engine that lives: it gets another", child.name, child.pid
            )
            child.reconnected = now
            wiring = ChannelWiring.create(child.index, engine.index)
            engine.send_fds(fds_of(wiring.engine_ends), "channel", frontend=child.index)
            child.send_channel(fds_of(wiring.frontend_ends), engine_died_by_itself=False)
            wiring.close()

    # ---- reload ----

    def _reload(self, cause: str) -> None:
        """Starts as many new front ends as there are places; engine and listening sockets stay."""
        if self._state is not State.SERVING:
            log.warning("%s: no reload while the server is %s", cause, self._state.value)
            self._supervisor_page.add("reloads_failed")
            return
        if self._newcomers or any(child.is_retiring for child in self._living("frontend")):
            log.info("%s: the next reload starts when the front ends that the last one replaced have ended", cause)
            self._is_reload_wanted = True
            return
        count = self._config.server.api_server_count
        taken = {child.index for child in self._living("frontend")} | {index for _, index in self._next_start}
        first = count if min(taken, default=0) < count else 0
        log.info("%s: starting %d new front ends", cause, count)
        self._service_manager.reloading()
        self._newcomers = [self._add_frontend(index) for index in range(first, first + count)]

    def _end_reload_when_ready(self) -> None:
        """The old front ends accept no more and end with their last connection."""
        if not self._newcomers or not all(child.is_ready for child in self._newcomers):
            return
        for place in [place for place in self._next_start if place[0] == "frontend"]:
            del self._next_start[place]  # of an old one that had died
        for child in self._living("frontend"):
            if child not in self._newcomers:
                self._retire(child)
        self._newcomers = []
        self._supervisor_page.add("reloads")
        log.info("reloaded: new front ends serve, the old ones end with their last connection")
        self._service_manager.ready("reloaded")

    def _retire(self, child: ChildProcess) -> None:
        """It may already have connections, also if it has not said that it is ready."""
        if not child.is_retiring:
            child.is_retiring = True
            child.send("retire")

    def _on_exit_during_reload(self, child: ChildProcess) -> None:
        """An old front end is done; or a new one failed, then all new ones end and the old ones go on."""
        self._children.remove(child)
        page = self._page_of(child.role, child.index)
        page.set("phase", ProcessPhase.STOPPED)
        for gauge in GAUGES_OF_THE_LIVING[child.role]:
            page.set(gauge, 0)
        if child in self._newcomers:
            log.error("reload failed: %s (pid %d) %s", child.name, child.pid, child.describe_end())
            if child.fatal is not None and child.fatal.traceback is None:
                log.error("%s", child.fatal.error)
            self._show_last_words(child)
            self._supervisor_page.add("reloads_failed")
            for other in self._newcomers:
                self._retire(other)
            self._newcomers = []
            self._service_manager.ready("the last reload failed; the old front ends serve")
        elif child.exit_code != 0 and not child.was_killed:
            log.error("%s (pid %d) %s while ending", child.name, child.pid, child.describe_end())
        else:
            log.info("%s (pid %d) has ended", child.name, child.pid)
        if self._is_reload_wanted and not any(other.is_retiring for other in self._living("frontend")):
            self._is_reload_wanted = False
            self._reload("reload again")

    # ---- the end ----

    def _drain(self, cause: str) -> None:
        """Front ends finish what runs within --shutdown-timeout, then the engine ends. Asked again: no effect."""
        if self._state in (State.DRAINING, State.FAILED):
            return
        was_serving = self._was_serving = self._state is State.SERVING
        self._state = State.DRAINING
        self._drain_started = time.monotonic()
        for place in [place for place in self._next_start if place[0] == "frontend"]:
            del self._next_start[place]
        deadline_s = self._config.launch.shutdown_timeout if was_serving else 0.0
        grace_s = deadline_s + (DRAIN_KILL_GRACE_S if was_serving else START_KILL_GRACE_S)
        log.info("%s: ending; running requests get %g s (a second signal ends at once)", cause, deadline_s)
        self._service_manager.stopping(f"draining after {cause}", grace_s + DRAIN_KILL_GRACE_S)
        for child in self._living("frontend"):
            self._ask_to_end(child, deadline_s, grace_s)
        self._end_engine_after_frontends()
        if not was_serving:
            for child in self._living("engine"):
                self._ask_to_end(child, 0.0, grace_s)

    def _end_engine_after_frontends(self) -> None:
        if not self._living("frontend"):
            self._next_start.clear()
            for child in self._living("engine"):
                if child.pid not in self._kill_deadline:
                    self._ask_to_end(child, 0.0, DRAIN_KILL_GRACE_S)

    def _fail(self, child: ChildProcess) -> None:
        """A child ended unasked: says why and ends the others."""
        self._end_all_after_failure()
        if child.fatal is not None and child.fatal.traceback is None:
            log.error("%s", child.fatal.error)
            return
        log.error("%s (pid %d) %s; ending the server", child.name, child.pid, child.describe_end())
        self._show_last_words(child)

    def _show_last_words(self, child: ChildProcess) -> None:
        if child.fatal is not None and child.fatal.traceback is not None:
            self._print(child.fatal.traceback)
        elif child.stderr.tail:
            last_lines = list(child.stderr.tail)[-NUM_SHOWN_TAIL_LINES:]
            log.error("its last words:\n%s", "\n".join(f"    {line}" for line in last_lines))

    def _fail_start(self) -> None:
        """The start-up deadline has passed: names who is late and where it stands."""
        self._end_all_after_failure()
        late = ", ".join(
            f"{child.name} (pid {child.pid}) is still {child.phase}" for child in self._children if not child.is_ready
        )
        log.error("not ready within --startup-timeout %g s: %s", self._config.launch.startup_timeout, late)

    def _end_all_after_failure(self) -> None:
        self._state = State.FAILED
        self._exit_code = 1
        self._service_manager.stopping("ending after a failure", FAILURE_KILL_GRACE_S)
        self._next_start.clear()
        for child in self._living():
            self._ask_to_end(child, 0.0, FAILURE_KILL_GRACE_S)

    def _ask_to_end(self, child: ChildProcess, deadline_s: float, kill_after_s: float) -> None:
        child.send("shutdown", deadline_s=deadline_s)
        self._kill_deadline[child.pid] = time.monotonic() + kill_after_s

    def _living(self, role: str | None = None) -> list[ChildProcess]:
        return [child for child in self._children if not child.has_exited and role in (None, child.role)]

    def _kill_all(self) -> None:
        """On every way out: no child outlives the supervisor."""
        for child in self._living():
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when that lets go
                child.process.wait(REAP_TIMEOUT_S)
            child.close()

    def _remove_pages(self) -> None:
        for page in self._pages:
            page.close()
            page.unlink()
        self._pages.clear()

    # ---- signals ----

    @contextlib.contextmanager
    def _signals_to_selector(self) -> Iterator[None]:
        """Delivers signals as bytes in a pipe that the loop reads.

        Afterwards they are ignored: the process is about to exit, and a late one must not change its exit code.
        """
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A program started by nohup finds SIGHUP ignored and leaves it so, unless it is to do something else than end.
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and self._config.server.api_key_file is None
        ignored = {signal.SIGHUP} if is_ignored else set()
        handled = [number for number in (*RELAYED_SIGNALS, signal.SIGUSR2) if number not in ignored]
        for number in handled:
            signal.signal(number, ignore_signal)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        self._selector.register(read_fd, selectors.EVENT_READ, lambda: self._on_signals(os.read(read_fd, 64)))
        try:
            yield
        finally:
            self._selector.unregister(read_fd)
            signal.set_wakeup_fd(-1)
            for number in handled:
                signal.signal(number, signal.SIG_IGN)
            os.close(read_fd)
            os.close(write_fd)

    def _on_signals(self, numbers: bytes) -> None:
        """First signal: drain. Any later one: end at once, unless it is the first one's echo."""
        for number in numbers:
            if number == signal.SIGUSR2:
                self._reload("SIGUSR2")
            if number not in RELAYED_SIGNALS:
                continue
            name = signal.Signals(number).name
            if number == signal.SIGHUP and self._config.server.api_key_file is not None:
                for child in self._living("frontend"):
                    child.send("reload_keys")
                continue
            if self._state in (State.STARTING, State.SERVING):
                self._drain(name)
                continue
            if time.monotonic() < self._drain_started + SIGNAL_ECHO_S:
                continue
            log.warning("%s: ending at once", name)
            self._next_start.clear()
            self._exit_code = self._exit_code or 128 + number
            for child in self._living():
                child.kill()

    # ---- log ----

    @contextlib.contextmanager
    def _logging_to_sink(self) -> Iterator[None]:
        """The supervisor's own log lines go the same way as its children's."""
        configure_logging(self._config.launch, "supervisor")
        handler = logging.getLogger().handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        old_stream = handler.setStream(SinkStream(self._print))
        try:
            yield
        finally:
            handler.setStream(old_stream or sys.stderr)

    def _print(self, text: str) -> None:
        tag = f"supervisor {os.getpid()}"
        lines = [line.encode(errors="replace") for line in text.splitlines()]
        if self._config.launch.log_format == "json":
            tagged = [as_json_line(tag, line) for line in lines]
        else:
            tagged = [f"[{tag}] ".encode() + line for line in lines]
        self._sink.write(self._progress.clear() + b"".join(line + b"\n" for line in tagged))

    def _copy_lines(self, reader: LineReader) -> None:
        lines, closed = reader.read_lines()
        if lines:
            self._sink.write(self._progress.clear() + lines)
        if closed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(reader.fd)

    def _draw_progress(self, now: float) -> None:
        """Redraws the bar on a terminal while the engine loads."""
        if self._state is State.STARTING and self._is_terminal and now >= self._progress_due:
            self._progress_due = now + PROGRESS_INTERVAL_S
            counters = self._engine_page.read()
            self._sink.write(self._progress.render(counters["load_done_bytes"], counters["load_total_bytes"]))


class SinkStream:
    """Lets a logging.StreamHandler write through a function."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self.write = write_line

    def flush(self) -> None:
        """Nothing is held back here."""


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor tells the loop; the handler has nothing to do."""
