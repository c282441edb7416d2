"""`python -m tokring.engine` with the mock backend over real rings, with this test as supervisor and front end."""

import os
import socket
import time

import numpy as np
import pytest

from tests.support.fake_channel import FakeChannel
from tests.support.serving import wait_until
from tests.support.tiny_hf import write_tiny_hf
from tokring.config import Config, EngineSettings, ModelSettings, ServerSettings
from tokring.launch.channel_wiring import ChannelWiring
from tokring.launch.child import StatsPageNames
from tokring.launch.child_process import ChildProcess
from tokring_ipc import (
    CallRefused,
    ControlCaller,
    ControlMethod,
    ErrorCode,
    FinishReason,
    FrontEndChannel,
    Role,
    StatsPage,
    page_name,
    server_prefix,
)

DEADLINE_S = 30.0


class Served:
    """One mock engine with one attached front end."""

    def __init__(self, model, *, max_queued=1024, **engine):
        prefix = server_prefix()
        names = StatsPageNames(
            supervisor=page_name(prefix, Role.SUPERVISOR, 0),
            frontend=(page_name(prefix, Role.FRONTEND, 0),),
            engine=(page_name(prefix, Role.ENGINE, 0),),
        )
        self.page = StatsPage.create(names.engine[0], Role.ENGINE, 0)
        self.wiring = ChannelWiring.create(0, 0)
        config = Config(
            model=ModelSettings(model=str(model), max_model_len=128),
            engine=EngineSettings(engine="mock", **engine),
            server=ServerSettings(max_queued=max_queued),
        )
        self.child = ChildProcess.spawn("engine", 0, config, names, [self.wiring.engine_ends])
        self.wiring.close_ends(self.wiring.engine_ends)

    def attach(self):
        ends = self.wiring.frontend_ends
        self.control = socket.socket(fileno=os.dup(ends.control_fd))
        self.channel = FrontEndChannel.connect(
            self.control, ends.req_doorbell_fd, ends.out_doorbell_fd, num_stream_slots=64, timeout_s=DEADLINE_S
        )

    def next_frame(self):
        deadline = time.monotonic() + DEADLINE_S
        while (frame := self.channel.poll()) is None:
            if self.channel.arm():
                assert time.monotonic() < deadline, "the engine sends nothing"
                time.sleep(0.001)
        return frame

    def call(self, method, payload=None):
        """The answer to a control call."""
        if not hasattr(self, "caller"):
            self.caller = ControlCaller(self.control)
        future = self.caller.call(method, payload)
        deadline = time.monotonic() + DEADLINE_S
        while not future.done() and time.monotonic() < deadline:
            self.caller.on_readable()
        return future.result(0)

    def message(self, kind):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            message = self.child.receive()
            if message is None:
                time.sleep(0.001)
            elif message["type"] == kind:
                return message
            else:
                assert message["type"] != "fatal", message
        raise AssertionError(f"no {kind!r} message")

    def exit_code(self):
        return self.child.process.wait(DEADLINE_S)

    def close(self):
        if self.child.process.poll() is None:
            self.child.kill()
            self.child.reap()
        self.child.close()
        self.wiring.close()
        if hasattr(self, "channel"):
            self.channel.close()
            self.control.close()
        self.page.unlink()
        self.page.close()


@pytest.fixture
def served(tmp_path):
    write_tiny_hf(tmp_path)
    engine = Served(tmp_path, max_num_seqs=8)
    yield engine
    engine.close()


def submit(channel, ids, **fields):
    """Submit through the real ring what FakeChannel would submit."""
    fake = FakeChannel()
    fake.submit(ids, **fields)
    frame = fake.poll_request()
    assert channel.submit(np.array([frame.record]), frame.ids)


def test_a_request_is_served_counted_and_the_engine_ends_when_told(served):
    served.message("ready")
    served.attach()
    ready = served.next_frame()
    assert ready.ready["max_model_len"] == 128 and ready.ready["max_num_seqs"] == 8
    served.channel.release()
    submit(served.channel, [1, 2, 3], max_tokens=5)
    tokens = []
    finish = None
    while finish is None:
        frame = served.next_frame()
        tokens += frame.token_id.tolist()
        if len(frame.finish):
            finish = frame.finish[0].copy()
        del frame
        served.channel.release()
    assert len(tokens) == 5 and finish["reason"] == FinishReason.LENGTH and finish["num_prompt_tokens"] == 3
    wait_until(lambda: served.page.read()["steps"] == 5, "the last step is counted, after its tokens are out")
    stats = served.page.read()
    assert stats["num_requests_intake"] == 1 and stats["kv_blocks_total"] >= 8
    served.child.send("shutdown", deadline_s=5.0)
    assert served.exit_code() == 0


def test_a_front_end_that_dies_leaves_an_engine_that_is_idle(served):
    served.message("ready")
    served.attach()
    served.next_frame()
    submit(served.channel, [1, 2, 3], max_tokens=100)
    served.channel.close()
    served.control.shutdown(socket.SHUT_RDWR)
    served.child.send("shutdown", deadline_s=20.0)
    assert served.exit_code() == 0


def test_control_calls_reset_pause_resume_and_inspect(served):
    served.message("ready")
    served.attach()
    served.next_frame()
    served.channel.release()
    call = served.call
    call(ControlMethod.PAUSE)
    submit(served.channel, list(range(1, 21)), max_tokens=2)
    while call(ControlMethod.INSPECT)["waiting"] == 0:
        pass
    state = call(ControlMethod.INSPECT)
    assert state["paused"] and state["running"] == 0 and served.channel.poll() is None
    call(ControlMethod.RESUME)
    while not len(served.next_frame().finish):
        pass
    served.channel.release()
    assert call(ControlMethod.INSPECT)["blocks_cached"] == 1
    call(ControlMethod.RESET_PREFIX_CACHE)
    assert call(ControlMethod.INSPECT)["blocks_cached"] == 0
    with pytest.raises(CallRefused, match="not served"):
        call(ControlMethod.PROFILE)
    assert call(ControlMethod.EXPLAIN, [0, 1]) is None  # nothing was refused
    submit(served.channel, [1, 1_000_000], max_tokens=2)
    finish = served.next_frame().finish[0].copy()
    served.channel.release()
    assert finish["error_code"] == ErrorCode.INVALID_REQUEST
    request = [int(finish["stream_slot"]), int(finish["slot_generation"])]
    assert "not in the vocabulary" in call(ControlMethod.EXPLAIN, request)
    assert call(ControlMethod.EXPLAIN, request) is None  # told once
    for nonsense in (None, 7, [1], ["a", "b"], [1, 2, 3]):
        with pytest.raises(CallRefused, match="EXPLAIN takes"):
            call(ControlMethod.EXPLAIN, nonsense)


def test_a_paused_engine_with_a_full_queue_hears_who_resumes(tmp_path):
    write_tiny_hf(tmp_path)
    engine = Served(tmp_path, max_num_seqs=8, max_queued=2)
    try:
        engine.message("ready")
        engine.attach()
        engine.next_frame()
        engine.channel.release()
        engine.call(ControlMethod.PAUSE)
        for first in range(12):
            submit(engine.channel, [1 + first], max_tokens=2)
        while engine.call(ControlMethod.INSPECT)["waiting"] < 10:
            pass  # the last two stay in the ring
        engine.call(ControlMethod.RESUME)
        num_finished = 0
        while num_finished < 12:
            num_finished += len(engine.next_frame().finish)
            engine.channel.release()
        assert not engine.call(ControlMethod.INSPECT)["paused"]
    finally:
        engine.close()


def test_an_engine_whose_model_is_missing_says_so_in_one_line(tmp_path):
    engine = Served(tmp_path / "nowhere")
    try:
        assert "nowhere" in engine.message("fatal")["error"]
        assert engine.exit_code() == 1
    finally:
        engine.close()
