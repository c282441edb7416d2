"""connect_engine(): this process's end of the channel to one engine."""

import asyncio
import contextlib
import socket

from tokring.launch.child import ChannelEnds
from tokring_ipc import FrontEndChannel, req_ring_bytes

OUT_RING_BYTES = 4 << 20


async def connect_engine(
    ends: ChannelEnds,
    longest_prompt: int,
    num_stream_slots: int,
    lending_fds: contextlib.AbstractContextManager[None] | None = None,
) -> FrontEndChannel:
    """Returns when the engine answers, which it does once its model is loaded; `longest_prompt` in tokens.

    Takes over the control descriptor and duplicates the doorbells. `lending_fds`: within it there is room for the
    channel's descriptors. Raises AttachError, also when the engine ends. For how long, is for the caller to say.
    """
    control = socket.socket(fileno=ends.control_fd)
    try:
        control.setblocking(False)
        req_bytes = req_ring_bytes(longest_prompt)
        FrontEndChannel.say_hello(
            control,
            req_bytes=req_bytes,
            out_bytes=OUT_RING_BYTES,
            num_stream_slots=num_stream_slots,
            frontend_index=ends.frontend,
        )
        await _readable(control)
        with lending_fds or contextlib.nullcontext():
            return FrontEndChannel.connect(
                control,
                ends.req_doorbell_fd,
                ends.out_doorbell_fd,
                req_bytes=req_bytes,
                out_bytes=OUT_RING_BYTES,
                num_stream_slots=num_stream_slots,
                has_said_hello=True,
            )
    except BaseException:
        control.close()
        raise


async def _readable(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(control.fileno(), is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(control.fileno())
