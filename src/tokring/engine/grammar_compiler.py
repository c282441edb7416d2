"""GrammarCompiler: compiles the grammars of waiting requests beside the step thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokring.engine.grammar import Grammar, GrammarTokenizer
from tokring.engine.grammar_text import GrammarError, GrammarUnavailableError
from tokring.engine.grammar_vetting import Vetting
from tokring.engine.request import GrammarText, Request
from tokring.launch.scheduling import ask_for_long_slices
from tokring.vetted_grammars import VettedGrammars

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)
_NUM_THREADS = 4  # they mostly wait for their vetting jobs
_MAX_CACHED = 64
Refusal: TypeAlias = GrammarError | GrammarUnavailableError


class GrammarCompiler:
    """Threads that turn `request.grammar_text` into `request.grammar`; equal texts are compiled once."""

    def __init__(self, tokenizer: GrammarTokenizer, vetted: VettedGrammars | None = None) -> None:
        """`vetted`: what earlier engines have found to be good."""
        self.tokenizer = tokenizer
        self._vetted = vetted if vetted is not None else VettedGrammars()
        self._vetting = Vetting(tokenizer)
        self._jobs: queue.SimpleQueue[tuple[GrammarText, float] | None] = queue.SimpleQueue()  # text, when it came
        self._done: deque[tuple[GrammarText, LLMatcher | Refusal]] = deque()  # filled by the threads
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

    def take(self) -> list[tuple[Request, Refusal | None]]:
        """Requests whose grammar is ready (set by now), or is refused with that error."""
        ready: list[tuple[Request, Refusal | None]] = []
        while self._done:
            text, result = self._done.popleft()
            if not isinstance(
                result, GrammarError | GrammarUnavailableError
            ):  # a failure may have been the time it took
                self._remember(text, result)
            ready += [(request, self._give(request, result)) for request in self._waiting.pop(text, ())]
        return ready

    def close(self) -> None:
        """End threads and vetting process."""
        for _ in self._threads:
            self._jobs.put(None)
        self._vetting.close()

    def _give(self, request: Request, result: LLMatcher | Refusal) -> Refusal | None:
        if isinstance(result, GrammarError | GrammarUnavailableError):
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
        ask_for_long_slices()
        while (job := self._jobs.get()) is not None:
            text, came_at = job
            waited_s = time.monotonic() - max(came_at, self._vetting.ready_at)
            self._done.append((text, self._compile(text, waited_s)))

    def _compile(self, text: GrammarText, waited_s: float) -> LLMatcher | Refusal:
        try:
            matcher = self.tokenizer.compile(self._vetted_form(text, waited_s))
            # The first mask is the dearest one: every request begins with a copy of what it has found out.
            Grammar(self.tokenizer, matcher, ()).fill_mask(np.zeros(self.tokenizer.mask_words, np.uint32))
            return matcher
        except (GrammarError, GrammarUnavailableError) as error:
            return error
        except Exception as error:  # a thread that ends would leave its requests waiting for ever
            logger.exception("compiling a grammar failed")
            return GrammarError(str(error))

    def _vetted_form(self, text: GrammarText, waited_s: float) -> str:
        """In llguidance's language. Once in the life of a server: a request that goes on in the next engine is not
        judged again, and does not wait for what it has waited for before."""
        grammar = self._vetted.get(text.kind, text.text)
        if grammar is None:
            grammar = self._vetting.check(text.kind, text.text, waited_s)
            self._vetted.add(text.kind, text.text, grammar)
        return grammar
