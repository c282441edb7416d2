"""`python -m tokring.bench.frontend.rival_engine FD`: the rivals' engine process: vLLM's step messages over a socket.

Reads lines `STREAMS TOKENS STEP_US` and answers each with TOKENS messages, one a step: four bytes of length, msgpack.
"""

import itertools
import socket
import sys
import time

import msgspec

from tokring.bench.vllm_messages import EngineCoreOutput, EngineCoreOutputs, request_id
from tokring.checkpoint import open_checkpoint

STORY = " Once upon a time there was a small server that sent its tokens one by one to whoever wanted to read them."
FINISHED = 1


def main(fd: int) -> None:
    token_ids = itertools.cycle(open_checkpoint(None).load_tokenizer().encode(STORY).ids)
    encode = msgspec.msgpack.Encoder().encode
    with socket.socket(fileno=fd) as channel, channel.makefile("rb") as commands:
        for command in commands:
            num_streams, num_tokens, step_us = map(int, command.split())
            due = time.monotonic()
            for step in range(num_tokens):
                reason = FINISHED if step == num_tokens - 1 else None
                token = next(token_ids)
                outputs = [
                    EngineCoreOutput(request_id(row), [token], finish_reason=reason) for row in range(num_streams)
                ]
                data = encode(EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic()))
                channel.sendall(len(data).to_bytes(4, "little") + data)
                due = max(due + step_us / 1e6, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
