"""ScriptedEngine: the engine's end of a real channel, on a thread; a script tells which tokens it makes up."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokring_ipc import (
    FINISH_DTYPE,
    READY_DTYPE,
    CallStatus,
    ControlMethod,
    EngineChannel,
    ErrorCode,
    ExtensionKind,
    FinishReason,
    FrontEndChannel,
    PeerGone,
    now_ns,
    receive_calls,
)

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 8


@dataclass
class Running:
    """One request as the engine sees it."""

    slot: int
    generation: int
    prompt: list[int]
    script: list[int]
    max_tokens: int
    min_tokens: int
    stop_ids: set[int]
    num_logprobs: int
    record: np.void
    extensions: dict[int, bytes]
    num_done: int = 0
    first_token_ns: int = 0
    arrival_ns: int = field(default_factory=now_ns)


Script = Callable[[Running], list[int]]


class ScriptedEngine:
    """Generates `script(request)` token by token, all requests in step; honours cancel, stop ids, lengths, logprobs."""

    def __init__(self, script: Script, vocab_size: int) -> None:
        self.script = script
        self.refusal = ErrorCode.GRAMMAR  # of constraints that say refuse-me
        self._vocab_size = vocab_size
        self._control, self.frontend_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._req_read, self.req_write = os.pipe2(os.O_NONBLOCK)
        self.out_read, self._out_write = os.pipe2(os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._may_run = threading.Event()
        self._may_run.set()
        self._num_allowed = 0
        self.requests: list[Running] = []
        self.all_requests: list[Running] = []
        self.finished: list[tuple[int, FinishReason]] = []
        self.explains = True
        self.calls: list[ControlMethod | int] = []  # control calls but for EXPLAIN
        self.call_status: CallStatus | None = CallStatus.OK  # of the answers to them; None: none comes
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def connect(self, num_stream_slots: int) -> FrontEndChannel:
        """The front end's end."""
        channel = FrontEndChannel.connect(
            self.frontend_control, self.req_write, self.out_read, num_stream_slots=num_stream_slots, timeout_s=10.0
        )
        self.frontend_control.setblocking(False)
        return channel

    def hold(self) -> None:
        """No tokens from now on; cancels are still seen."""
        self._may_run.clear()

    def allow(self, num_steps: int) -> None:
        """While held: so many more steps with tokens."""
        self._num_allowed += num_steps

    def go_on(self) -> None:
        self._may_run.set()

    def die(self) -> None:
        """Ends like a killed process: the control socket closes without a word."""
        self._stopping.set()
        self._thread.join(10)

    def close(self) -> None:
        """Frees what is left of both ends."""
        self.die()
        self.frontend_control.close()
        os.close(self.req_write)
        os.close(self.out_read)

    def _run(self) -> None:
        channel = EngineChannel.accept(self._control, self._req_read, self._out_write, timeout_s=10.0)
        try:
            self._announce(channel)
            while not self._stopping.is_set():
                self._receive(channel)
                self._step(channel)
                self._answer_calls()
                channel.publish()
                channel.ring()
                self._stopping.wait(0.001 if self.requests else 0.002)
        finally:
            channel.close()
            self._control.close()
            os.close(self._req_read)
            os.close(self._out_write)

    def _answer_calls(self) -> None:
        """Says why a request was refused, if it does; of other calls it only takes note."""
        with contextlib.suppress(PeerGone):
            for call in receive_calls(self._control):
                if call.method != ControlMethod.EXPLAIN:
                    self.calls.append(call.method)
                    if self.call_status is not None:
                        call.refuse(self.call_status, "a script has no cache")
                elif self.explains:
                    call.reply("its text says refuse-me, in slot {} of generation {}".format(*call.payload))

    def _announce(self, channel: EngineChannel) -> None:
        ready = np.zeros(1, READY_DTYPE)
        ready["max_model_len"], ready["vocab_size"], ready["block_size"] = MAX_MODEL_LEN, self._vocab_size, 16
        ready["num_blocks"], ready["max_num_seqs"], ready["max_logprobs"] = 64, MAX_NUM_SEQS, 20
        assert channel.write_ready(ready)
        channel.publish()
        channel.ring()

    def _receive(self, channel: EngineChannel) -> None:
        while (request := channel.poll_request()) is not None:
            record = np.array(request.record).reshape(())[()]
            num_stop_ids = int(record["num_stop_ids"])
            running = Running(
                slot=int(record["stream_slot"]),
                generation=int(record["slot_generation"]),
                prompt=np.array(request.ids).tolist(),
                script=[],
                max_tokens=int(record["max_tokens"]),
                min_tokens=int(record["min_tokens"]),
                stop_ids=set(record["stop_ids"][:num_stop_ids].tolist()),
                num_logprobs=int(record["num_logprobs"]),
                record=record,
                extensions={int(kind): bytes(data) for kind, data in request.extensions},
                num_done=int(record["num_prior_output"]),
            )
            running.script = self.script(running)
            self.all_requests.append(running)
            if b"refuse-me" in running.extensions.get(int(ExtensionKind.GRAMMAR_JSON_SCHEMA), b""):
                self._finish(channel, running, FinishReason.ERROR, error=self.refusal)
                continue
            self.requests.append(running)
        channel.release_requests()

    def _step(self, channel: EngineChannel) -> None:
        for running in list(self.requests):
            slots, generations = np.array([running.slot], np.uint32), np.array([running.generation], np.uint32)
            if channel.cancelled(slots, generations)[0]:
                self._finish(channel, running, FinishReason.ABORT)
            elif self._may_run.is_set() or self._num_allowed:
                self._num_allowed -= 0 if self._may_run.is_set() else 1
                self._generate(channel, running)

    def _generate(self, channel: EngineChannel, running: Running) -> None:
        if running.num_done == 0 and int(running.record["num_prompt_logprobs"]) >= 0:
            self._write_prompt_logprobs(channel, running)
        token = running.script[running.num_done % len(running.script)]
        running.num_done += 1
        running.first_token_ns = running.first_token_ns or now_ns()
        reason = FinishReason.NONE
        if token in running.stop_ids and running.num_done > running.min_tokens:
            reason = FinishReason.STOP
        elif running.num_done >= running.max_tokens:
            reason = FinishReason.LENGTH
        self._finish(channel, running, reason, token=token)

    def _finish(
        self,
        channel: EngineChannel,
        running: Running,
        reason: FinishReason,
        *,
        token: int | None = None,
        error: ErrorCode = ErrorCode.NONE,
    ) -> None:
        """Writes one row: a token, a finish, or both."""
        count = 0 if token is None else 1
        finish = None
        if reason is not FinishReason.NONE:
            finish = np.zeros(1, FINISH_DTYPE)
            finish["stream_slot"], finish["slot_generation"] = running.slot, running.generation
            finish["reason"], finish["error_code"] = reason, error
            finish["stop_id"] = token if reason is FinishReason.STOP else -1
            finish["num_prompt_tokens"], finish["num_output_tokens"] = len(running.prompt), running.num_done
            finish["scheduled_ns"], finish["first_token_ns"] = running.arrival_ns, running.first_token_ns
            finish["end_ns"] = now_ns()
            if running in self.requests:
                self.requests.remove(running)
            self.finished.append((running.slot, reason))
        columns = self._logprobs(running, token) if token is not None and running.num_logprobs >= 0 else {}
        slots, generations = np.full(count, running.slot, np.uint32), np.full(count, running.generation, np.uint32)
        tokens = np.array([] if token is None else [token], np.int32)
        assert channel.write_step(slots, generations, tokens, finish, **columns)

    def _logprobs(self, running: Running, token: int) -> dict[str, np.ndarray]:
        """The chosen token with -0.25, then neighbours with falling logprobs."""
        width = running.num_logprobs
        top = [(token + step) % self._vocab_size for step in range(width)]
        return {
            "logprob_token_index": np.array([0], np.uint32),
            "logprob_rank": np.array([1], np.int32),
            "logprob": np.array([-0.25], np.float32),
            "top_id": np.array([top], np.int32).reshape(1, width),
            "top_logprob": np.array([[-0.25 - step for step in range(width)]], np.float32).reshape(1, width),
        }

    def _write_prompt_logprobs(self, channel: EngineChannel, running: Running) -> None:
        count, width = len(running.prompt) - 1, int(running.record["num_prompt_logprobs"])
        if count <= 0:
            return
        ids = np.array(running.prompt[1:], np.int32)
        top = np.stack([(ids + step) % self._vocab_size for step in range(width)], axis=1) if width else None
        falls = np.tile(np.array([-0.5 - step for step in range(width)], np.float32), (count, 1)) if width else None
        columns = {} if top is None else {"top_id": np.ascontiguousarray(top, np.int32), "top_logprob": falls}
        assert channel.write_prompt_logprobs(
            running.slot,
            running.generation,
            1,
            rank=np.ones(count, np.int32),
            logprob=np.full(count, -0.5, np.float32),
            **columns,
        )
