"""EngineConnection: the front end's channel to the engine, and to the next one when that has died."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokring.launch.child import NUM_SPARE_FDS, ChannelEnds, SupervisorLink
from tokring.recording.file_format import RecordingError
from tokring.recording.recording_channel import RecordingChannel
from tokring.recording.recording_writer import RecordingWriter
from tokring.server.engine_channel import Channel
from tokring.server.engine_connection import connect_engine
from tokring.server.front_end import FrontEnd
from tokring.step_rows import read_at_death
from tokring_ipc import AttachError, FrontEndChannel

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
NUM_CHANNEL_FDS = 6  # of one channel: control socket, segment, doorbells, and the channel's copies of those


class EngineConnection:
    """Connects at the start, and again whenever the supervisor sends the ends of a new channel."""

    def __init__(
        self, front_end: FrontEnd, ends: ChannelEnds, supervisor: SupervisorLink, *, must_record: bool = True
    ) -> None:
        """`must_record`: a recording that can't be written is an error, else it is left out."""
        # Whole process.
        self._front_end = front_end
        self._supervisor = supervisor
        self._must_record = must_record
        self._frontend, self._engine = ends.frontend, ends.engine  # indexes
        self._has_ends = asyncio.Event()
        self._has_ends.set()
        self._first_is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connecting: asyncio.Task[None] | None = None
        # This connection, and the one that comes next.
        self._number = 0  # counts the channels that we have been given
        self._ends: ChannelEnds | None = None
        self._next_ends: ChannelEnds | None = ends

    async def open(self) -> None:
        """Returns when an engine is ready. Raises AttachError or ConnectionError if none will be."""
        self._connecting = asyncio.ensure_future(self._keep_connected())
        await asyncio.wait((self._connecting, self._first_is_ready), return_when=asyncio.FIRST_COMPLETED)
        if self._connecting.done():
            self._connecting.result()

    def replace(self, message: Mapping[str, Any]) -> None:
        """A new channel: "fds" are this side's control socket and doorbells, and the step rows of an engine that died.

        An engine that dies before it is ready is followed by another call.
        """
        ends, step_rows = message["fds"][:3], message["fds"][3:]
        if self._front_end.has_model:
            engine = self._front_end.engine
            engine.engine_died("the supervisor has sent another channel")
            for fd in step_rows:
                at_death = read_at_death(fd, self._frontend)
                engine.note_deaths(at_death, is_fault=message["engine_died_by_itself"])
        for fd in step_rows:
            os.close(fd)
        self._supervisor.keep_fds(NUM_SPARE_FDS + NUM_CHANNEL_FDS)
        self._number = message["number"]
        if not ends:
            logger.error("no descriptors are left for another channel")
            self.lost(can_reconnect=True)
            return
        if self._next_ends is not None:  # never used
            os.close(self._next_ends.control_fd)
            close_doorbells(self._next_ends)
        control_fd, req_doorbell_fd, out_doorbell_fd = ends
        self._next_ends = ChannelEnds(
            frontend=self._frontend,
            engine=self._engine,
            control_fd=control_fd,
            req_doorbell_fd=req_doorbell_fd,
            out_doorbell_fd=out_doorbell_fd,
        )
        self._has_ends.set()

    def lost(self, *, can_reconnect: bool) -> None:
        """The channel has ended. If the engine lives on, the supervisor sends another or replaces this process."""
        self._supervisor.keep_fds(NUM_SPARE_FDS + NUM_CHANNEL_FDS)  # what was the channel's is not for clients
        if self._next_ends is not None:
            return  # it has sent another already, which would be taken for the one that has ended
        self._supervisor.send("channel_lost", number=self._number, can_reconnect=can_reconnect)

    async def _keep_connected(self) -> None:
        """One channel after the other, until the process ends; without restarts an error if the first one fails."""
        may_fail = self._front_end.config.num_engine_restarts > 0
        while True:
            await self._has_ends.wait()
            self._has_ends.clear()
            try:
                await self._connect()
            except (OSError, AttachError) as error:
                if not may_fail:
                    raise
                logger.warning("no channel to the engine: %s", error)
                self.lost(can_reconnect=True)
                continue
            num_resumed = self._front_end.engine.resume()
            if self._first_is_ready.done():
                logger.info("engine %d is back: it goes on with %d requests", self._engine, num_resumed)
            else:
                self._first_is_ready.set_result(None)

    async def _connect(self) -> None:
        if self._ends is not None:
            close_doorbells(self._ends)
            self._supervisor.keep_fds(NUM_SPARE_FDS + NUM_CHANNEL_FDS)
        ends, self._ends, self._next_ends = self._next_ends, self._next_ends, None
        assert ends is not None
        front_end, engine = self._front_end, self._front_end.engine
        channel = await connect_engine(
            ends, front_end.model.longest_prompt, engine.num_stream_slots, self._supervisor.lending_fds()
        )
        self._supervisor.keep_fds(NUM_SPARE_FDS)
        front_end.stats.count_channel(channel, ends.engine)
        front_end.engine_is_ready(await engine.attach(self._recorded(channel)))
        front_end.stats.phase(front_end.phase)

    def _recorded(self, channel: FrontEndChannel) -> Channel:
        """The channel, with --record through a writer. Raises RecordingError if it must record and cannot."""
        front_end, settings = self._front_end, self._front_end.config.server
        if settings.record is None:
            return channel
        if front_end.recording is None:
            try:
                front_end.recording = _open_recording(front_end, settings.record, self._frontend)
            except RecordingError as error:
                if self._must_record:
                    raise
                logger.error("%s; nothing is recorded", error)
                return channel
        return RecordingChannel(channel, front_end.recording, redact=settings.record_redact)

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()


def close_doorbells(ends: ChannelEnds) -> None:
    os.close(ends.req_doorbell_fd)
    os.close(ends.out_doorbell_fd)


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in a daemon thread: a shutdown while it blocks must not wait for it, as the loop's executor would."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def report(result: _Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(report, result, error)

    threading.Thread(target=run, name="start-up", daemon=True).start()
    return await done


def _open_recording(front_end: FrontEnd, path: str, index: int) -> RecordingWriter:
    """Raises RecordingError if the file cannot be written."""
    config = front_end.config
    metadata = {
        "frontend": index,
        "redacted": config.server.record_redact,
        "model": config.model.model,
        "tokenizer": config.model.tokenizer,
        "chat_template": config.model.chat_template,
        "generation_config": config.model.generation_config,
        "served_model_name": list(front_end.model_names),
        "max_model_len": config.model.max_model_len,
    }
    return RecordingWriter(
        Path(path + (f".frontend{index}" if index else "")), metadata, max_bytes=config.server.record_max_bytes
    )
