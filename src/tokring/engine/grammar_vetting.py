"""Vetting: a grammar is compiled in a throw-away process first, which may die of it: of time, of memory, of a bug.

`python -m tokring.engine.grammar_vetting` loads the tokenizer once and forks for every job it gets.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np

from tokring.engine.grammar import Grammar, GrammarTokenizer
from tokring.engine.grammar_text import (
    MAX_GRAMMAR_BYTES,
    GrammarError,
    GrammarUnavailableError,
    llguidance_grammar,
)
from tokring.launch.scheduling import ask_for_long_slices
from tokring_ipc import ExtensionKind

logger = logging.getLogger(__name__)
CPU_LIMIT_S = 2  # what a grammar is judged by: CPU time does not run while others have the cores
WAIT_LIMIT_S = 8.0  # of real time, the wait for a turn included
REPLY_GRACE_S = 1.0  # of these, for a job to end and for what becomes of it to be told
OWN_FAULT_S = 1.0  # CPU time: who has had less when the real time is over was kept waiting by others
JOB_NICE = 9  # above the engine's: its steps and the front ends go first, and a usual grammar is still soon done
SHORT_JOB_S = 0.1  # CPU time: who takes longer is no usual grammar and goes on at the lowest priority
SILENCE_LIMIT_S = 4.0  # real time: a process that takes no job for so long has been stopped, or hangs
START_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 96 << 20  # above what the process has when the job starts
WALK_TOKENS = 64
_UNSATISFIABLE = "no output satisfies it"
_KEPT_WAITING = f"not compiled within {WAIT_LIMIT_S:g} s: the machine is too busy"
_HEADER = struct.Struct("<IIf")  # kind, bytes of text, seconds left
_CPU_CLOCK = 2  # with a process's id above it: the clock of its CPU time, see clock_getcpuclockid(3)


class Vetting:
    """The engine's side. `check` blocks: it is called by compiler threads, several at once."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # of the three below
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self.ready_at = 0.0  # time.monotonic() at which the process last became ready

    def check(self, kind: ExtensionKind, text: bytes, waited_s: float = 0.0) -> str:
        """Return the grammar in llguidance's language, known to compile within the limits.

        `waited_s`, the time it has waited for its turn, counts against WAIT_LIMIT_S. Raises GrammarError if the grammar
        is at fault, GrammarUnavailableError if it could not be tried.
        """
        if len(text) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"{len(text)} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")
        ends = time.monotonic() + WAIT_LIMIT_S - waited_s
        if ends <= time.monotonic():
            raise GrammarUnavailableError(f"not compiled within {WAIT_LIMIT_S:g} s: other grammars were before it")
        for _ in range(2):
            answer = self._try(kind, text, max(ends - REPLY_GRACE_S - time.monotonic(), 1e-3))
            if answer is not None:  # None: what was to answer has been killed by somebody else
                break
        else:
            raise GrammarUnavailableError("the process that compiles it on trial was killed twice")
        if "error" in answer:
            raise GrammarError(answer["error"])
        if "unavailable" in answer:
            raise GrammarUnavailableError(answer["unavailable"])
        return answer["grammar"]

    def _try(self, kind: ExtensionKind, text: bytes, left_s: float) -> dict[str, str] | None:
        """One job's answer; None if it ended without one."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = self._send_job(theirs)
            ends = time.monotonic() + left_s
            try:
                if not self._is_taken(ours, process, left_s + REPLY_GRACE_S):
                    return None
                left_s = max(ends - time.monotonic(), 1e-3)
                reply = _ask(ours, _HEADER.pack(kind, len(text), left_s) + text, left_s + REPLY_GRACE_S)
            except TimeoutError:
                raise GrammarUnavailableError(_KEPT_WAITING) from None
            except OSError:
                return None
        answer: dict[str, str] | None = json.loads(reply) if reply else None
        return answer

    def _is_taken(self, job: socket.socket, process: subprocess.Popen[bytes], limit_s: float) -> bool:
        """Wait until the process has taken the job; False if it has died, or takes none and is killed for that."""
        job.settimeout(min(limit_s, SILENCE_LIMIT_S))
        try:
            return bool(job.recv(1))
        except TimeoutError:
            if limit_s < SILENCE_LIMIT_S:
                raise
        logger.error("process %d, which vets grammars, took no job for %g s: killed", process.pid, SILENCE_LIMIT_S)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # else the next job would be given to it
            process.wait(REPLY_GRACE_S)
        return False

    def close(self) -> None:
        """End the process, for good: a compiler thread that still has a job starts no other."""
        with self._lock:
            self._is_closed = True
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._control = None

    def _send_job(self, job: socket.socket) -> subprocess.Popen[bytes]:
        """Hand a job to the process, which is started if there is none."""
        with self._lock:
            if self._is_closed:
                raise GrammarUnavailableError("the engine is ending")
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None and self._process is not None
            with contextlib.suppress(OSError):  # it has just died: the job's socket ends without an answer
                socket.send_fds(self._control, [b"j"], [job.fileno()])
            return self._process

    def _start(self) -> None:
        """Start the process and wait until it has the tokenizer."""
        if self._control is not None:
            self._control.close()  # its process died
        started = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokring.engine.grammar_vetting", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(START_LIMIT_S)
        setup = {
            "tokenizer": self._tokenizer.tokenizer_json,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_ids": self._tokenizer.eos_ids,
        }
        data = json.dumps(setup).encode()
        try:
            ours.sendall(_HEADER.pack(0, len(data), 0.0) + data)
            ready = ours.recv(1)
        except OSError as error:
            raise GrammarUnavailableError(f"the process that vets grammars did not start: {error}") from error
        if ready != b"r":
            raise GrammarUnavailableError("the process that vets grammars died while it started")
        self.ready_at = time.monotonic()
        logger.info("grammars are vetted by process %d, ready in %.1f s", self._process.pid, self.ready_at - started)


def _ask(connection: socket.socket, question: bytes, limit_s: float) -> bytes:
    """Send, and receive until the end; raises TimeoutError once limit_s are over in all."""
    deadline = time.monotonic() + limit_s
    connection.settimeout(limit_s)
    connection.sendall(question)
    parts: list[bytes] = []
    while True:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _receive_message(connection: socket.socket) -> tuple[int, bytes, float]:
    kind, num_bytes, left_s = _HEADER.unpack(_receive_exactly(connection, _HEADER.size))
    return kind, _receive_exactly(connection, num_bytes), left_s


# ---- the process ----


def main(control: socket.socket) -> None:
    """Fork a job for every socket that arrives; end with the engine, whose end of `control` closes then."""
    setup = json.loads(_receive_message(control)[1])
    tokenizer = GrammarTokenizer(setup["tokenizer"], setup["vocab_size"], setup["eos_ids"])
    jobs: dict[int, socket.socket] = {}  # by pid
    signal.signal(signal.SIGCHLD, lambda *_: _end_jobs(jobs))
    control.sendall(b"r")
    while True:
        control.settimeout(SHORT_JOB_S / 4 if jobs else None)
        try:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            _slow_down_long(jobs)
            continue
        if not data:
            return
        for fd in fds:
            job = socket.socket(fileno=fd)
            with contextlib.suppress(OSError):  # nobody waits for it any more
                job.send(b"t")  # taken
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # not before it is in `jobs`
            pid = os.fork()
            if pid == 0:
                for other in (control, *jobs.values()):
                    other.close()
                _run_job(job, tokenizer)
            jobs[pid] = job
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _slow_down_long(jobs: dict[int, socket.socket]) -> None:
    """Jobs that are seen to be no usual ones go on at the lowest priority."""
    for pid in tuple(jobs):
        cpu_clock = ~pid << 3 | _CPU_CLOCK
        with contextlib.suppress(OSError):  # it has just ended
            if time.clock_gettime(cpu_clock) > SHORT_JOB_S:
                os.setpriority(os.PRIO_PROCESS, pid, 19)


def _end_jobs(jobs: dict[int, socket.socket]) -> None:
    """Close the sockets of jobs that have ended, and answer for those that were ended by a limit.

    Python runs this between two instructions of the main thread, wherever it is.
    """
    while jobs:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with jobs.pop(pid) as job:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            # SIGKILL: not by these limits, but by hand or because memory is short.
            if number not in (0, signal.SIGKILL):
                with contextlib.suppress(OSError):
                    job.sendall(json.dumps(_judgement(number, usage.ru_utime + usage.ru_stime)).encode())


def _judgement(number: int, cpu_s: float) -> dict[str, str]:
    """The answer for a job that was ended by this signal."""
    if number == signal.SIGALRM and cpu_s < OWN_FAULT_S:
        return {"unavailable": _KEPT_WAITING}
    if number in (signal.SIGALRM, signal.SIGXCPU):
        return {"error": f"compiling it takes more than {CPU_LIMIT_S} s of CPU time, or {WAIT_LIMIT_S:g} s in all"}
    name = signal.Signals(number).name
    return {"error": f"compiling it takes more than {MEMORY_LIMIT_BYTES >> 20} MiB, or fails ({name})"}


def _run_job(job: socket.socket, tokenizer: GrammarTokenizer) -> None:
    """Answer one job and exit."""
    try:
        os.nice(JOB_NICE)
        ask_for_long_slices()
        _limit_resources()
        kind, text, left_s = _receive_message(job)
        signal.setitimer(signal.ITIMER_REAL, left_s)  # nobody waits any longer: SIGALRM ends it
        try:
            grammar = vet(ExtensionKind(kind), text, tokenizer)
            answer = {"grammar": grammar}
        except GrammarError as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = _judgement(signal.SIGABRT, 0.0)
        except BaseException as error:  # a bug that this grammar meets; a panic of the library is no Exception
            answer = {"error": f"compiling it fails ({type(error).__name__})"}
        job.sendall(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _limit_resources() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its death is expected, and said in the engine's words
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    limit = size + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The first limit ends it by SIGXCPU, which tells whose fault it is; the second one by SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def vet(kind: ExtensionKind, text: bytes, tokenizer: GrammarTokenizer) -> str:
    """Translate, compile, and write some tokens on trial; raises GrammarError if one of them fails or takes long."""
    try:
        grammar = llguidance_grammar(kind, text.decode())
    except UnicodeDecodeError as error:
        raise GrammarError(f"not UTF-8: {error}") from None
    matcher = tokenizer.compile(grammar)
    for seed in (None, 1):
        _walk(Grammar(tokenizer, matcher.deep_copy(), tokenizer.eos_ids), tokenizer, seed)
    return grammar


def _walk(grammar: Grammar, tokenizer: GrammarTokenizer, seed: int | None) -> None:
    """Write up to WALK_TOKENS tokens: random ones, or without a seed the lowest ids (punctuation, as a rule)."""
    choose = random.Random(seed)
    mask = np.zeros(tokenizer.mask_words, np.uint32)
    eos_ids = set(tokenizer.eos_ids)
    for _ in range(WALK_TOKENS):
        grammar.fill_mask(mask)
        if grammar.failure is not None:
            raise GrammarError(_reason(grammar.failure))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, list(eos_ids))]
        if not len(allowed):
            if not grammar.is_accepting:
                raise GrammarError(_UNSATISFIABLE)
            return
        grammar.accept([int(allowed[0] if seed is None else allowed[choose.randrange(len(allowed))])])
        if grammar.failure is not None:
            raise GrammarError(_reason(grammar.failure))
        if grammar.is_complete:
            return


def _reason(failure: str) -> str:
    return _UNSATISFIABLE if failure.startswith("NoExtension") else failure


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
