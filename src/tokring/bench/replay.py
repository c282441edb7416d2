"""play: the OUT frames of a recording through a ring between two processes, with no model."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokring.bench.transports.ring import OUT_BYTES, RECHECK_S, Wiring
from tokring.recording.file_format import RecordingError
from tokring.recording.recording import Recording
from tokring.recording.step_columns import StepColumns, frame_type, read_step
from tokring_ipc import EngineChannel, FrameType, FrontEndChannel, now_ns, req_ring_bytes

ATTACH_TIMEOUT_S = 30.0
FULL_RING_PAUSE_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the reader saw; CPU per frame of each side from process accounting."""

    frames: int
    rows: int
    bytes: int
    seconds: float
    frames_per_s: float
    hop_p50_us: float
    hop_p99_us: float
    writer_cpu_us: float
    reader_cpu_us: float
    doorbells_sent: int
    doorbells_suppressed: int


def recorded_steps(path: Path) -> list[StepColumns]:
    """Raises RecordingError, also if there is no step in it."""
    frames = (frame.data for frame in Recording(path).frames())
    steps = [read_step(data) for data in frames if frame_type(data) == FrameType.STEP]
    if not steps:
        raise RecordingError(f"recording {path}: no step is in it")
    return steps


def play(steps: list[StepColumns], *, is_full_speed: bool) -> Played:
    """Forks the writer; this process reads. A frame that was split when written counts as often as it arrives."""
    wiring = Wiring()
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    writer = os.fork()
    if writer == 0:
        code = 1
        try:
            _write_all(wiring, steps, is_full_speed)
            code = 0
        finally:
            os._exit(code)
    try:
        return _read_all(wiring, steps, writer, started)
    finally:
        wiring.close()


def _write_all(wiring: Wiring, steps: list[StepColumns], is_full_speed: bool) -> None:
    """Then waits until the reader has closed its end: a segment of a dead writer would be closed under its reader."""
    with wiring.accept() as channel:
        wiring.frontend_control.close()
        first_ns, started_ns = steps[0].publish_ns, now_ns()
        for step in steps:
            if not is_full_speed:
                time.sleep(max(0, step.publish_ns - first_ns - (now_ns() - started_ns)) / 1e9)
            while not _write(channel, step):
                time.sleep(FULL_RING_PAUSE_S)
            channel.publish()
            channel.ring()
        counted = channel.counters
        wiring.engine_control.send(
            json.dumps({name: counted[name] for name in ("doorbells_sent", "doorbells_suppressed")}).encode()
        )
        select.select([wiring.engine_control], [], [])


def _write(channel: EngineChannel, step: StepColumns) -> bool:
    sections: dict[str, Any] = {}
    if len(step.finish):
        sections["finish"] = step.finish
    if len(step.first_token) - 1 != len(step.token_id):
        sections["num_tokens"] = np.diff(step.first_token).astype(np.uint32)
    if step.logprobs is not None:
        columns = step.logprobs
        sections |= {
            "logprob_token_index": step.logprob_token,
            "logprob_rank": columns.rank,
            "logprob": columns.logprob,
        }
        sections |= {"top_id": columns.top_id, "top_logprob": columns.top_logprob}
    return channel.write_step(step.stream_slot, step.slot_generation, step.token_id, **sections)


def _read_all(wiring: Wiring, steps: list[StepColumns], writer: int, started: resource.struct_rusage) -> Played:
    slots = [column.max() for step in steps for column in (step.stream_slot, step.finish["stream_slot"]) if len(column)]
    channel = FrontEndChannel.connect(
        wiring.frontend_control,
        wiring.req_doorbell[1],
        wiring.out_doorbell[0],
        req_bytes=req_ring_bytes(1),
        out_bytes=OUT_BYTES,
        num_stream_slots=int(max(slots, default=0)) + 1,
        timeout_s=ATTACH_TIMEOUT_S,
    )
    num_rows = sum(len(step.stream_slot) for step in steps)
    num_finished = sum(len(step.finish) for step in steps)
    own, began_s = time.process_time(), time.monotonic()
    with channel:
        hops_ns, num_bytes = _take_frames(channel, num_rows, num_finished)
        seconds, reader_cpu_s = time.monotonic() - began_s, time.process_time() - own
        doorbells = json.loads(_last_message(wiring.frontend_control))
    wiring.frontend_control.shutdown(socket.SHUT_RDWR)
    os.waitpid(writer, 0)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    writer_cpu_s = ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime
    frames = len(hops_ns)
    return Played(
        frames=frames,
        rows=num_rows,
        bytes=num_bytes,
        seconds=seconds,
        frames_per_s=frames / seconds,
        hop_p50_us=float(np.percentile(hops_ns, 50)) / 1e3,
        hop_p99_us=float(np.percentile(hops_ns, 99)) / 1e3,
        writer_cpu_us=writer_cpu_s / frames * 1e6,
        reader_cpu_us=reader_cpu_s / frames * 1e6,
        **doorbells,
    )


def _take_frames(channel: FrontEndChannel, num_rows: int, num_finished: int) -> tuple[list[int], int]:
    """(publish to taking, in ns, of each frame; bytes of all) once every row and finish record has come."""
    doorbell = select.poll()
    doorbell.register(channel.out_doorbell_fd, select.POLLIN)
    hops_ns: list[int] = []
    num_bytes = 0
    while num_rows > 0 or num_finished > 0:
        frame = channel.poll()
        if frame is None:
            channel.release()
            if channel.arm():
                doorbell.poll(RECHECK_S * 1000)
                channel.drain_doorbell()
                if channel.peer_closed:
                    raise RuntimeError("the writing process has ended before its last frame")
            continue
        hops_ns.append(now_ns() - frame.publish_ns)
        num_bytes += frame.length
        num_rows -= frame.count
        num_finished -= frame.num_finished
    return hops_ns, num_bytes


def _last_message(control: socket.socket) -> bytes:
    control.setblocking(True)
    return control.recv(4096)
