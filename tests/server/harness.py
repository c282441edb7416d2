"""Harness: the whole front end in one process: aiohttp, a small tokenizer, and a ScriptedEngine behind real rings."""

import asyncio
import functools
import inspect
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import orjson
import uvloop
from tests.server.scripted_engine import Running, Script, ScriptedEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokring.config import Config, EngineSettings, ModelSettings, ServerSettings
from tokring.launch.child import StatsPageNames
from tokring.server.application import create_app
from tokring.server.chat_template import ChatTemplate
from tokring.server.engine_client import EngineClient
from tokring.server.front_end import FrontEnd, ServedModel
from tokring.server.listening import Listener
from tokring.server.prompt_encoder import PromptEncoder
from tokring.server.server_pages import ServerPages
from tokring.server.stats import PageStats
from tokring.server.token_path import TokenTable, open_token_path
from tokring.step_rows import RequestAtDeath
from tokring_ipc import Heartbeat, ProcessPhase, Role, StatsPage

MODEL = "tiny"
TIMEOUT_S = 20
STORY = " the cat sat on the mat and the dog ran to the man: naïve café 😀 end."
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of 300 tokens with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([STORY, "user assistant system hello world"] * 4, trainer)
    return tokenizer


@functools.cache
def tiny_table() -> TokenTable:
    return TokenTable.from_tokenizer(tiny_tokenizer())


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text).ids)


EOS_ID = ids_of("<|im_end|>")[0]


def tell_story(request: Running) -> list[int]:
    """The story, from another place for each seed and choice if the temperature is not 0."""
    ids = ids_of(STORY)
    if request.record["temperature"] == 0:
        return ids
    start = (int(request.record["seed"]) + int(request.record["choice_index"])) % len(ids)
    return ids[start:] + ids[:start]


def says(text: str) -> Script:
    """A script: this text, then end of text."""
    return lambda request: [*ids_of(text), EOS_ID]


class Answer:
    """A whole HTTP answer."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Payloads of the server-sent events."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        return [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def chunks(self) -> list[Any]:
        assert self.events[-1] == "[DONE]"
        return [orjson.loads(event) for event in self.events[:-1]]

    @property
    def text(self) -> str:
        """Text of choice 0, of a body or of a stream."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            choices = self.json["choices"]
            return [choice["text"] if "text" in choice else (choice["message"]["content"] or "") for choice in choices]
        found: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk.get("choices", []):
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                found[choice["index"]] = found.get(choice["index"], "") + piece
        return [found[index] for index in sorted(found)]

    @property
    def finish_reasons(self) -> list[str]:
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            return [choice["finish_reason"] for choice in self.json["choices"]]
        found = {}
        for chunk in self.chunks:
            for choice in chunk.get("choices", []):
                if choice["finish_reason"] is not None:
                    assert choice["index"] not in found
                    found[choice["index"]] = choice["finish_reason"]
        return [found[index] for index in sorted(found)]

    @property
    def error(self) -> Any:
        return self.json["error"]


class Harness:
    """What a test talks to."""

    def __init__(self, front_end: FrontEnd, engine: ScriptedEngine, session: aiohttp.ClientSession, url: str) -> None:
        self.front_end = front_end
        self.engine = engine
        self.session = session
        self.url = url

    @property
    def client(self) -> EngineClient:
        return self.front_end.engine

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        return await self.request("POST", path, json=body, **options)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "temperature": 0, **fields})

    async def chat(self, content: Any = "hello", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
        return await self.post("/v1/chat/completions", body)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Polls; the test's own time-out is the limit."""
        while not condition():
            await asyncio.sleep(0.002)

    async def engine_dies(self, *suspects: Running) -> None:
        """The engine dies while it works on `suspects`."""
        self.engine.die()
        await self.until(lambda: not self.client.is_attached)
        os.close(self.engine.req_write)
        os.close(self.engine.out_read)
        self.client.note_deaths([RequestAtDeath(one.slot, one.generation, True, 0) for one in suspects], is_fault=True)

    async def next_engine(self) -> ScriptedEngine:
        """Another engine, held, that is sent what the last one left behind."""
        self.engine = ScriptedEngine(self.engine.script, tiny_tokenizer().get_vocab_size())
        self.engine.hold()
        self.front_end.engine_is_ready(await self.client.attach(self.engine.connect(self.client.num_stream_slots)))
        self.client.resume()
        return self.engine

    async def all_slots_are_free(self) -> None:
        await self.until(lambda: self.client.in_flight == 0)


@asynccontextmanager
async def running_server(
    script: Script = tell_story,
    *,
    max_in_flight: int = 32,
    restarts: bool = False,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    default_max_tokens: int | None = None,
    **server_settings: Any,
) -> AsyncIterator[Harness]:
    """A ready server on a free port. `restarts`: its requests outlive the engine until Harness.next_engine()."""
    prefix = f"/tokring.{os.getpid()}.{secrets.token_hex(4)}"
    names = StatsPageNames(
        supervisor=f"{prefix}.supervisor.0", frontend=(f"{prefix}.frontend.0",), engine=(f"{prefix}.engine.0",)
    )
    roles = ((names.supervisor, Role.SUPERVISOR), (names.frontend[0], Role.FRONTEND), (names.engine[0], Role.ENGINE))
    pages = [StatsPage.create(name, role, 0) for name, role in roles]
    heartbeats = [Heartbeat(page, interval_s=0.05) for page in pages[1:]]
    for heartbeat in heartbeats:
        heartbeat.start()
    pages[2].set("phase", int(ProcessPhase.READY))
    config = Config(
        model=ModelSettings(served_model_name=(MODEL,)),
        engine=EngineSettings(scheduling_policy=scheduling_policy),
        server=ServerSettings(**server_settings),
    )
    stats = PageStats(pages[1])
    front_end = FrontEnd(config, stats, ServerPages.attach(names, heartbeats[0]))
    listener = Listener(create_app(front_end), config.server)
    listening = socket.create_server(("127.0.0.1", 0))
    engine = ScriptedEngine(script, tiny_tokenizer().get_vocab_size())
    harness: Harness | None = None
    try:
        await listener.open([listening])
        port = listening.getsockname()[1]
        await _attach(front_end, engine, stats, max_in_flight, restarts, default_max_tokens)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session:
            scheme = "https" if config.server.ssl_certfile else "http"
            harness = Harness(front_end, engine, session, f"{scheme}://127.0.0.1:{port}")
            yield harness
    finally:
        front_end.engine.close()
        await listener.close()
        if front_end.tracing is not None:
            front_end.tracing.close()
        (harness.engine if harness is not None else engine).close()
        for heartbeat in heartbeats:
            heartbeat.stop()
        for page in pages:
            page.close()
            page.unlink()


async def _attach(
    front_end: FrontEnd,
    engine: ScriptedEngine,
    stats: PageStats,
    max_in_flight: int,
    restarts: bool,
    default_max_tokens: int | None,
) -> None:
    model = ServedModel(
        name=MODEL,
        encoder=PromptEncoder(tiny_tokenizer(), chat_template=ChatTemplate(CHATML, {})),
        table=tiny_table(),
        eos_ids=(EOS_ID,),
        sampling_defaults={},
        default_max_tokens=default_max_tokens,
        longest_prompt=512,
    )
    num_stream_slots = max_in_flight + 8
    token_path = open_token_path(
        model.table,
        num_stream_slots,
        inter_token=stats.histogram("inter_token_latency_seconds"),
        first_token=stats.histogram("time_to_first_token_seconds"),
    )
    client = EngineClient(
        token_path,
        num_stream_slots=num_stream_slots,
        max_in_flight=max_in_flight,
        max_queued_tokens=front_end.config.server.max_queued_tokens,
        stats=stats,
        on_death=lambda _: front_end.engine_is_dead(),
        on_pause=(lambda _: front_end.engine_is_restarting()) if restarts else None,
    )
    front_end.loaded(model, client)
    channel = engine.connect(num_stream_slots)
    front_end.engine_is_ready(await client.attach(channel))


def served(script: Script = tell_story, **options: Any) -> Callable[..., Callable[..., None]]:
    """Decorator: the test is a coroutine function and gets a Harness in front of its other arguments."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def run(*arguments: Any, **keywords: Any) -> None:
            async with asyncio.timeout(TIMEOUT_S), running_server(script, **options) as harness:
                await test(harness, *arguments, **keywords)

        def wrapper(*arguments: Any, **keywords: Any) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run(*arguments, **keywords))

        wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
        signature = inspect.signature(test)
        parameters = list(signature.parameters.values())[1:]  # what is left is pytest's to fill in
        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate
