"""LoopThread: an event loop in a thread of its own, so that scripts, notebooks and threads can all wait for it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import uvloop

_Result = TypeVar("_Result")
JOIN_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines for callers in other threads. The thread is a daemon: it never holds up the interpreter's end."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokring offline", daemon=True)
        self._thread.start()

    def run(
        self,
        work: Coroutine[Any, Any, _Result],
        *,
        while_waiting: Callable[[], None] | None = None,
        interval_s: float = 0.1,
    ) -> _Result:
        """The coroutine's result or exception; `while_waiting` is called now and then in the caller's thread.

        A KeyboardInterrupt in the caller's thread cancels the coroutine.
        """
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while while_waiting is not None and not future.done():
                while_waiting()
                wait([future], timeout=interval_s)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the loop and the thread. Nothing may be running in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
