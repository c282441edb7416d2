"""`python -m tokring.bench.frontend.rival fastapi|aiohttp FD`: the same streams the way such servers are usually built.

Tokens come from another process (rival_engine.py) in vLLM's step messages, into one asyncio queue per stream. fastapi:
a pydantic model per chunk, as vLLM and its like have; aiohttp: orjson and response.write.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import orjson
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokring.bench.vllm_messages import EngineCoreOutput, EngineCoreOutputs, request_id
from tokring.checkpoint import open_checkpoint


class TokenSource:
    """The engine's outputs by stream, from when all streams of a run are there."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._queues: dict[str, asyncio.Queue[EngineCoreOutput]] = {}
        self._task: asyncio.Task[None] | None = None

    async def tokens(self, body: dict[str, Any]) -> AsyncIterator[int]:
        """The token ids of one stream."""
        queue: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        self._queues[request_id(len(self._queues))] = queue
        if self._task is None:
            self._task = asyncio.ensure_future(self._receive())
        if len(self._queues) == int(body["user"]):
            self._channel.sendall(f"{body['user']} {body['max_tokens']} {body['seed']}\n".encode())
        while True:
            output = await queue.get()
            for token in output.new_token_ids:
                yield token
            if output.finish_reason is not None:
                return

    async def _receive(self) -> None:
        reader, _writer = await asyncio.open_connection(sock=self._channel.dup(), limit=1 << 22)
        decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            outputs = decode(await reader.readexactly(size)).outputs
            for output in outputs:
                self._queues[output.request_id].put_nowait(output)
            if outputs[0].finish_reason is not None:
                self._queues.clear()


def aiohttp_app(tokenizer: Tokenizer, source: TokenSource) -> web.Application:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": int(time.time()), "model": "rival"}
        decoder = DecodeStream(skip_special_tokens=True)
        async for token in source.tokens(body):
            delta = {"content": decoder.step(tokenizer, token) or ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            await response.write(b"data: " + orjson.dumps({**head, "choices": [choice]}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def empty(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/empty", empty)
    return app


def fastapi_app(tokenizer: Tokenizer, source: TokenSource) -> Any:
    from fastapi import FastAPI
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import StreamingResponse

    from tokring.bench.frontend.pydantic_chunks import Chunk, chunk_of

    async def events(body: dict[str, Any]) -> AsyncIterator[str]:
        decoder = DecodeStream(skip_special_tokens=True)
        created = int(time.time())
        async for token in source.tokens(body):
            chunk: Chunk = chunk_of("chatcmpl-1", created, "rival", decoder.step(tokenizer, token) or "")
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        yield "data: [DONE]\n\n"

    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(events(body), media_type="text/event-stream")

    @app.get("/empty")
    async def empty() -> str:
        return "ok"

    return app


def main(kind: str, listen_fd: int) -> None:
    import uvloop

    listening = socket.socket(fileno=listen_fd)
    tokenizer = open_checkpoint(None).load_tokenizer()
    near, far = socket.socketpair()
    engine = [sys.executable, "-m", "tokring.bench.frontend.rival_engine", str(far.fileno())]
    subprocess.Popen(engine, stdin=subprocess.DEVNULL, pass_fds=[far.fileno()])  # ends with the other end's closing
    far.close()
    source = TokenSource(near)
    if kind == "aiohttp":
        loop = uvloop.new_event_loop()
        web.run_app(aiohttp_app(tokenizer, source), sock=listening, print=None, access_log=None, loop=loop)
        return
    import uvicorn

    config = uvicorn.Config(
        fastapi_app(tokenizer, source), loop="uvloop", http="auto", access_log=False, log_level="error"
    )
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
