"""GrammarCompiler: compiles the grammars of waiting requests beside the step thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np

from tokring.engine.grammar import Grammar, GrammarTokenizer
from tokring.engine.grammar_text import GrammarError
from tokring.engine.grammar_vetting import Vetting
from tokring.engine.request import GrammarText, Request

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)
_NUM_THREADS = 4  # they mostly wait for their vetting jobs
_NICENESS = 15
_MAX_CACHED = 64


class GrammarCompiler:
    """Threads that turn `request.grammar_text` into `request.grammar`; equal texts are compiled once."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self.tokenizer = tokenizer
        self._vetting = Vetting(tokenizer)
        self._jobs: queue.SimpleQueue[tuple[GrammarText, float] | None] = queue.SimpleQueue()  # text, when it came
        self._done: deque[tuple[GrammarText, LLMatcher | GrammarError]] = deque()  # filled by the threads
        self._threads: list[threading.Thread] = []
        # step thread only
        self._waiting: dict[GrammarText, list[Request]] = {}
        self._cache: OrderedDict[GrammarText, LLMatcher] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Texts that are being compiled."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Have a request's grammar compiled; `take` tells when."""
        text = request.grammar_text
        assert text is not None
        if text in self._cache:
            self._done.append((text, self._cache[text]))
        elif text not in self._waiting:
            self._start_threads()
            self._jobs.put((text, time.monotonic()))
        self._waiting.setdefault(text, []).append(request)

    def take(self) -> list[tuple[Request, GrammarError | None]]:
        """Requests whose grammar is ready (set by now), or is refused with that error."""
        ready: list[tuple[Request, GrammarError | None]] = []
        while self._done:
            text, result = self._done.popleft()
            if not isinstance(result, GrammarError):  # a failure may have been the time it took
                self._remember(text, result)
            ready += [(request, self._give(request, result)) for request in self._waiting.pop(text, ())]
        return ready

    def close(self) -> None:
        """End threads and vetting process."""
        for _ in self._threads:
            self._jobs.put(None)
        self._vetting.close()

    def _give(self, request: Request, result: LLMatcher | GrammarError) -> GrammarError | None:
        if isinstance(result, GrammarError):
            return result
        grammar = Grammar(self.tokenizer, result.deep_copy(), request.eos_ids)
        prior = request.token_ids[request.num_prompt :].tolist()
        if prior and not grammar.accept(prior):
            return GrammarError("the prior output does not follow it")
        request.grammar = grammar
        return None

    def _remember(self, text: GrammarText, result: LLMatcher) -> None:
        self._cache[text] = result
        self._cache.move_to_end(text)
        if len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)

    def _start_threads(self) -> None:
        if not self._threads:
            for index in range(_NUM_THREADS):
                thread = threading.Thread(target=self._work, name=f"grammar-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work(self) -> None:
        # On Linux niceness belongs to the thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (job := self._jobs.get()) is not None:
            text, came_at = job
            waited_s = time.monotonic() - max(came_at, self._vetting.ready_at)
            self._done.append((text, self._compile(text, waited_s)))

    def _compile(self, text: GrammarText, waited_s: float) -> LLMatcher | GrammarError:
        try:
            matcher = self.tokenizer.compile(self._vetting.check(text.kind, text.text, waited_s))
            # The first mask is the dearest one: every request begins with a copy of what it has found out.
            Grammar(self.tokenizer, matcher, ()).fill_mask(np.zeros(self.tokenizer.mask_words, np.uint32))
            return matcher
        except GrammarError as error:
            return error
        except Exception as error:  # a thread that ends would leave its requests waiting for ever
            logger.exception("compiling a grammar failed")
            return GrammarError(str(error))
