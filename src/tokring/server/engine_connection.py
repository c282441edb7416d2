"""connect_engine(): this process's end of the channel to one engine."""

import socket

from tokring.launch.child import ChannelEnds
from tokring_ipc import FrontEndChannel, req_ring_bytes

OUT_RING_BYTES = 4 << 20
ENGINE_START_TIMEOUT_S = 24 * 3600.0  # --startup-timeout, watched by who spawned the engine, is the one that counts


def connect_engine(ends: ChannelEnds, longest_prompt: int, num_stream_slots: int) -> FrontEndChannel:
    """Blocks until the engine answers, which it does once its model is loaded; `longest_prompt` in tokens.

    Takes over the control descriptor and duplicates the doorbells. Raises AttachError, also when the engine ends.
    """
    control = socket.socket(fileno=ends.control_fd)
    try:
        channel = FrontEndChannel.connect(
            control,
            ends.req_doorbell_fd,
            ends.out_doorbell_fd,
            req_bytes=req_ring_bytes(longest_prompt),
            out_bytes=OUT_RING_BYTES,
            num_stream_slots=num_stream_slots,
            timeout_s=ENGINE_START_TIMEOUT_S,
            frontend_index=ends.frontend,
        )
    except BaseException:
        control.close()
        raise
    control.setblocking(False)
    return channel
