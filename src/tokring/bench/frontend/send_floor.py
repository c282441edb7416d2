"""`python -m tokring.bench.frontend.send_floor FD STREAMS STEPS BYTES STEP_US`: one send(2) per stream and step."""

import sys

from tokring.bench import _native

if __name__ == "__main__":
    listen_fd, num_streams, num_steps, event_bytes, step_us = map(int, sys.argv[1:])
    event = b"data: " + b"x" * max(0, event_bytes - 8) + b"\n\n"
    _native.send_steps(listen_fd, num_streams, num_steps, event, step_us)
