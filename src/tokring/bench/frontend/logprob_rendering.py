"""Top-20 logprobs from columns to bytes: the token path beside pydantic models, in this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from tokring.bench.frontend.pydantic_chunks import chunk_of, logprobs_of
from tokring.bench.frontend.runs import Series
from tokring.checkpoint import open_checkpoint
from tokring.server.token_path import Field, LogprobStyle, TokenTable, open_token_path
from tokring_ipc import EngineChannel, FrontEndChannel

NUM_LOGPROBS = 20
NUM_STREAMS = 64
TEMPLATE = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"',
    Field.TEXT,
    b'"},"logprobs":',
    Field.LOGPROBS,
    b',"finish_reason":null}]}',
)


def run_logprobs(repetitions: int, num_steps: int) -> list[Series]:
    """CPU microseconds per token: of the whole way from a frame to the bytes of its events, and of pydantic's."""
    tokenizer = open_checkpoint(None).load_tokenizer()
    table = TokenTable.from_tokenizer(tokenizer)
    vocab_size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([token]) for token in range(vocab_size)]
    ours, theirs = (Series(name, "logprobs", NUM_STREAMS) for name in ("tokring", "pydantic"))
    rng = np.random.default_rng(1)
    with ExitStack() as stack:
        engine, front_end = _channel(stack)
        path = open_token_path(table, NUM_STREAMS)
        stack.callback(path.release)
        for slot in range(NUM_STREAMS):
            connection = path.connect(chunked=True)
            path.open(
                slot,
                1,
                connection=connection,
                template=TEMPLATE,
                logprob_style=LogprobStyle.CHAT,
                num_logprobs=NUM_LOGPROBS,
            )
            path.attach(connection, -1)
        _ours(engine, front_end, path, [_every_token(vocab_size, step) for step in range(num_steps)])
        for _ in range(repetitions):
            steps = [_columns(rng, vocab_size) for _ in range(num_steps)]
            ours.us.append(_ours(engine, front_end, path, steps))
            theirs.us.append(_theirs(texts, steps))
    return [ours, theirs]


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _columns(rng: np.random.Generator, vocab_size: int) -> Columns:
    """token_id i32[n], logprob f32[n], top_id i32[n, 20], top_logprob f32[n, 20].

    Ids as frequent as words are (Zipf, exponent 1): low ids, which byte-pair tokenizers learn first, come most often.
    """
    top = np.exp(rng.random((NUM_STREAMS, NUM_LOGPROBS)) * np.log(vocab_size)).astype(np.int32)
    token = top[:, 0].copy()
    values = -np.sort(rng.exponential(3.0, (NUM_STREAMS, NUM_LOGPROBS)).astype(np.float32), axis=1)
    return token, values[:, 0].copy(), top, values


def _every_token(vocab_size: int, step: int) -> Columns:
    """Warms the path up: like pydantic's side, which is given every token's text ready made, it knows them then."""
    count = NUM_STREAMS * NUM_LOGPROBS
    top = ((np.arange(count) + step * count) % vocab_size).astype(np.int32).reshape(NUM_STREAMS, NUM_LOGPROBS)
    return top[:, 0].copy(), np.full(NUM_STREAMS, -1, np.float32), top, np.full(top.shape, -1.5, np.float32)


def _ours(engine: EngineChannel, front_end: FrontEndChannel, path: object, steps: list[Columns]) -> float:
    slots = np.arange(NUM_STREAMS, dtype=np.uint32)
    generations, ranks = np.ones(NUM_STREAMS, np.uint32), np.ones(NUM_STREAMS, np.int32)
    total_ns = 0
    for token, logprob, top_id, top_logprob in steps:
        written = engine.write_step(
            slots,
            generations,
            token,
            None,
            logprob_token_index=slots,
            logprob_rank=ranks,
            logprob=logprob,
            top_id=top_id,
            top_logprob=top_logprob,
        )
        assert written
        engine.publish()
        frame = front_end.poll()
        assert frame is not None
        begin = time.thread_time_ns()
        path.step(frame.address, frame.length, budget_us=10**6)  # type: ignore[attr-defined]
        outputs = path.outputs()  # type: ignore[attr-defined]
        total_ns += time.thread_time_ns() - begin
        assert len(outputs) <= NUM_STREAMS
        front_end.release()
    return total_ns / 1e3 / (len(steps) * NUM_STREAMS)


def _theirs(texts: list[str], steps: list[Columns]) -> float:
    num_tokens = 0
    begin = time.thread_time_ns()
    for token, logprob, top_id, top_logprob in steps[
        : max(1, len(steps) // 10)
    ]:  # each takes as long as twenty of ours
        columns = zip(token.tolist(), logprob.tolist(), top_id.tolist(), top_logprob.tolist(), strict=True)
        for one, value, ids, values in columns:
            chunk = chunk_of("chatcmpl-1", 1700000000, "m", texts[one], logprobs_of(texts, one, value, ids, values))
            f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()
            num_tokens += 1
    return (time.thread_time_ns() - begin) / 1e3 / num_tokens


def _channel(stack: ExitStack) -> tuple[EngineChannel, FrontEndChannel]:
    """Both ends in this process; the handshake needs a thread."""
    near, far = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    descriptors = [*os.pipe2(os.O_NONBLOCK), *os.pipe2(os.O_NONBLOCK)]
    for descriptor in descriptors:
        stack.callback(os.close, descriptor)
    req_read, req_write, out_read, out_write = descriptors
    accepted: list[EngineChannel] = []

    def accept() -> None:
        accepted.append(EngineChannel.accept(far, req_read, out_write, timeout_s=10.0))

    thread = _started(accept)
    front_end = FrontEndChannel.connect(near, req_write, out_read, num_stream_slots=NUM_STREAMS, timeout_s=10.0)
    thread.join()
    stack.callback(front_end.close)
    stack.callback(accepted[0].close)
    return accepted[0], front_end


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread
