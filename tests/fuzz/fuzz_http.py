"""Fuzzes a running server over HTTP, while a good request on another connection must be answered right all the time.

python -m tests.fuzz.fuzz_http SECONDS [SEED]; `make fuzz-http` runs it against native modules built with sanitizers.
A finding is printed with the seed and the case's number, which make the same bytes again: --case SEED NUMBER.
"""

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tests.fuzz.oracle import WrongAnswer, check_some, check_whole, parse
from tests.fuzz.random_http import Case, case_of
from tests.support.serving import ServerProcess, mock_server

NUM_CONNECTIONS = 12
ANSWER_DEADLINE_S = 60.0
PATIENCE_S = 0.25  # with bytes that may be no request: an answer need not come
ARGUMENTS = ["--max-model-len", "256", "--max-num-seqs", "8", "--max-queued", "64", "--max-body-bytes", "1048576"]
ARGUMENTS += ["--engine-restarts", "0", "--frontend-restarts", "0"]
CANARY_BODY = b'{"prompt":"hello","max_tokens":20,"temperature":0,"ignore_eos":true,"stream":true,"logprobs":2}'
CANARY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: canary\r\nConnection: close\r\n"
CANARY += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(CANARY_BODY), CANARY_BODY)


@contextlib.contextmanager
def fuzzed_server() -> Iterator[ServerProcess]:
    """A mock-engine server; with TOKRING_ASAN_PACKAGES, its native modules are the sanitized ones there."""
    packages = os.environ.get("TOKRING_ASAN_PACKAGES")
    if packages is None:
        with mock_server(*ARGUMENTS) as server:
            yield server
        return
    with tempfile.TemporaryDirectory() as directory:
        options = f"detect_leaks=0:abort_on_error=1:log_path={directory}/report"
        environment = {"PYTHONPATH": f"{packages}:{Path.cwd()}", "LD_PRELOAD": os.environ["TOKRING_ASAN_LIBRARIES"]}
        environment |= {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": f"{options}:print_stacktrace=1"}
        try:
            with mock_server(*ARGUMENTS, environment=environment) as server:
                assert _uses(server, packages), "the sanitized modules are not the ones that were loaded"
                yield server
        finally:
            for report in Path(directory).iterdir():
                sys.stderr.write(report.read_text(errors="replace"))
                raise WrongAnswer("a sanitizer reported")


def _uses(server: ServerProcess, packages: str) -> bool:
    maps = [Path(f"/proc/{child.pid}/maps").read_text() for child in server.children().values()]
    return all(str(Path(packages).resolve()) in text and "libasan" in text for text in maps)


class Fuzzer:
    """One run against one server."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.num_cases = 0
        self.num_canaries = 0
        self._server = server
        self._port = int(server.url.rpartition(":")[2])
        self._seed = seed
        self._numbers = itertools.count()
        self._num_lines = 0  # of the log, looked at

    async def run(self, seconds: float = float("inf"), num_cases: float = float("inf")) -> None:
        """Until the time is over or the cases are through. Raises WrongAnswer."""
        expected = await self._canary()
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            canary = group.create_task(self._watch(expected))
            workers = [group.create_task(self._work(end, num_cases)) for _ in range(NUM_CONNECTIONS)]
            await asyncio.wait(workers)
            canary.cancel()
        if await self._canary() != expected:
            raise WrongAnswer("the good request is not answered as at the start")
        self._check_server()

    async def _work(self, end: float, num_cases: float) -> None:
        while time.monotonic() < end and (number := next(self._numbers)) < num_cases:
            case = case_of(self._seed, number)
            try:
                await self._try(case)
            except (WrongAnswer, TimeoutError) as error:
                sent = b"".join(case.pieces)
                raise WrongAnswer(f"--case {self._seed} {number}: {error!r}\nsent: {sent[:3000]!r}") from None
            self.num_cases += 1

    async def _try(self, case: Case) -> None:
        if not case.is_whole or case.leaves:
            check_some(await self._exchange(case, PATIENCE_S))
            return
        data = await self._exchange(case, ANSWER_DEADLINE_S)
        self.statuses[check_whole(data)] += 1

    async def _exchange(self, case: Case, patience_s: float) -> bytes:
        """What came until the server closed, or until the patience was over where nothing need come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = b""
        try:
            for piece in case.pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            if not case.leaves:
                async with asyncio.timeout(patience_s):
                    while part := await reader.read(65_536):
                        data += part
        except ConnectionError:
            if case.is_whole:
                raise WrongAnswer("the connection was reset") from None
        except TimeoutError:
            if case.is_whole:
                raise WrongAnswer(f"no whole answer within {patience_s} s, only {data[:300]!r}") from None
        finally:
            writer.close()
        return data

    async def _watch(self, expected: list[Any]) -> None:
        while True:
            answer = await self._canary()
            if answer != expected:
                raise WrongAnswer(f"the good request got {answer}, at the start {expected}")
            self.num_canaries += 1
            self._check_server()
            await asyncio.sleep(0.05)

    async def _canary(self) -> list[Any]:
        """Answer to the good request; tried again where the server says that it is full."""
        while True:
            data = await self._exchange(Case((CANARY,), is_whole=True), ANSWER_DEADLINE_S)
            if check_whole(data) == 200:
                return content_of(data)
            await asyncio.sleep(0.05)

    def _check_server(self) -> None:
        if self._server.process.poll() is not None:
            raise WrongAnswer(f"the server ended:\n{self._server.log[-5000:]}")
        lines = self._server.lines[self._num_lines :]
        self._num_lines += len(lines)
        if any("Traceback" in line or "ERROR" in line for line in lines):
            text = "\n".join(self._server.lines[-60:])
            raise WrongAnswer(f"an exception in the log:\n{text}")


def content_of(data: bytes) -> list[Any]:
    """Text, tokens, logprobs and finish reasons of a stream, however many tokens are in one event."""
    events = [line[6:] for line in parse(data).body.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in orjson.loads(event)["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    columns = [[value for part in logprobs for value in part[name]] for name in ("tokens", "token_logprobs")]
    return [
        "".join(choice["text"] for choice in choices),
        *columns,
        [choice["finish_reason"] for choice in choices][-1],
    ]


def fuzz(seed: int, seconds: float = float("inf"), num_cases: float = float("inf")) -> Fuzzer:
    """Starts a server, fuzzes it, ends it. Raises WrongAnswer (in an exception group) at a finding."""
    with fuzzed_server() as server:
        fuzzer = Fuzzer(server, seed)
        asyncio.run(fuzzer.run(seconds, num_cases))
    return fuzzer


def main(arguments: list[str]) -> None:
    if arguments[0] == "--case":
        sys.stdout.buffer.write(b"".join(case_of(int(arguments[1]), int(arguments[2])).pieces))
        return
    seed = int(arguments[1]) if len(arguments) > 1 else int(time.time())
    print(f"fuzzing for {arguments[0]} s with seed {seed}", flush=True)
    fuzzer = fuzz(seed, seconds=float(arguments[0]))
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(fuzzer.statuses.items()))
    print(
        f"{fuzzer.num_cases} cases, {fuzzer.num_canaries} good requests between; whole requests by status: {statuses}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
