"""A page in Chromium that streams from the server on another origin (`make test-proxies`; elsewhere it is skipped)."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from tests.proxies.programs import needs
from tests.server.harness import Harness, running_server

pytestmark = pytest.mark.skipif(not os.environ.get("TOKRING_TEST_PROXIES"), reason="run by `make test-proxies`")
DEADLINE_S = 120  # a browser's first start on a loaded machine
NUM_TOKENS = 4
# Tells its own server of every chunk as it comes, and at the end of what a page may see of the answer.
PAGE = """<!doctype html><script>
const tell = (message) => fetch("/told", {method: "POST", body: JSON.stringify(message)});
(async () => {
  const headers = {"Content-Type": "application/json", "Authorization": "Bearer KEY"};
  const answer = await fetch("URL/v1/chat/completions", {method: "POST", headers, body: JSON.stringify(
    {messages: [{role: "user", content: "hello"}], max_tokens: 4, temperature: 0, stream: true})});
  await tell({status: answer.status, type: answer.headers.get("Content-Type"), id: answer.headers.get("X-Request-Id")});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) await tell({text: part.value});
  await tell({end: true});
})().catch((error) => tell({error: String(error)}));
</script>"""


class Page:
    """Serves the page from an origin of its own; `told` holds what the page says."""

    def __init__(self, html: str) -> None:
        self.told: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.url = ""
        self._html = html

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator["Page"]:
        app = web.Application()
        app.router.add_get("/", self._show)
        app.router.add_post("/told", self._listen)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(text=self._html, content_type="text/html")

    async def _listen(self, request: web.Request) -> web.Response:
        self.told.put_nowait(orjson.loads(await request.read()))
        return web.Response()

    async def text_until(self, part: str) -> str:
        """What the page has read up to and with `part`."""
        text = ""
        while part not in text:
            message = await self.told.get()
            assert "text" in message, message
            text += str(message["text"])
        return text


@contextlib.contextmanager
def chromium(url: str, directory: Path):  # type: ignore[no-untyped-def]
    """A headless browser on `url`, its profile in `directory`."""
    arguments = [needs("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    arguments += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={directory / 'profile'}", url]
    with (directory / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        browser.terminate()
        browser.wait(30)


async def stream_to_a_page(server: Harness, page: Page) -> None:
    """The next token is made only when the page has told of the one before: nothing on the way waits for more."""
    head = await page.told.get()
    assert head["status"] == 200 and head["type"] == "text/event-stream; charset=utf-8", head
    assert head["id"], "X-Request-Id is exposed to pages"
    for _ in range(NUM_TOKENS):
        server.engine.allow(1)
        assert '"content":"' in await page.text_until('"finish_reason":null}]}\n\n')
    server.engine.go_on()
    assert '"finish_reason":"length"' in await page.text_until("data: [DONE]\n\n")
    assert await page.told.get() == {"end": True}


def test_a_page_of_another_origin_reads_a_stream_piece_by_piece_with_a_key(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), running_server(api_key=("secret",)) as server:
            server.engine.hold()
            html = PAGE.replace("URL", server.url).replace("KEY", "secret")
            async with Page(html).served() as page:
                with chromium(page.url, tmp_path):
                    await stream_to_a_page(server, page)

    asyncio.run(run())


def test_a_page_of_an_origin_that_is_not_allowed_gets_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), running_server(allowed_origins=("http://good.example",)) as server:
            async with Page(PAGE.replace("URL", server.url)).served() as page:
                with chromium(page.url, tmp_path):
                    assert "Failed to fetch" in str((await page.told.get()).get("error"))
                assert server.engine.all_requests == []  # the preflight was all

    asyncio.run(run())
