"""`python -m tokring.bench.frontend.rival fastapi|aiohttp FD`: the same streams the way such servers are usually built.

Tokens come from a timer into one asyncio queue per stream. fastapi: a pydantic model per chunk, as vLLM and its like
have; aiohttp: orjson and response.write.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokring.checkpoint import open_checkpoint

STORY = " Once upon a time there was a small server that sent its tokens one by one to whoever wanted to read them."


class TokenSource:
    """Puts the next token into every open queue, once a step, from when all streams of a run are there."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = itertools.cycle(token_ids)
        self._queues: dict[asyncio.Queue[int | None], int] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self, body: dict[str, Any]) -> asyncio.Queue[int | None]:
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._queues[queue] = body["max_tokens"]
        if len(self._queues) == int(body["user"]):
            self._task = asyncio.ensure_future(self._run(body["seed"] / 1e6))
        return queue

    async def _run(self, step_s: float) -> None:
        due = time.monotonic()
        while self._queues:
            token = next(self._token_ids)
            for queue in list(self._queues):
                queue.put_nowait(token)
                self._queues[queue] -= 1
                if not self._queues[queue]:
                    queue.put_nowait(None)
                    del self._queues[queue]
            due = max(due + step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


def aiohttp_app(tokenizer: Tokenizer, source: TokenSource) -> web.Application:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": int(time.time()), "model": "rival"}
        decoder = DecodeStream(skip_special_tokens=True)
        queue = source.open(body)
        while (token := await queue.get()) is not None:
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
        queue = source.open(body)
        created = int(time.time())
        while (token := await queue.get()) is not None:
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
    source = TokenSource(tokenizer.encode(STORY).ids)
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
