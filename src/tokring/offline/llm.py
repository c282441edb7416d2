"""LLM: generate and chat from a script, on the same engine process and rings as the server."""

import json
import os
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any

from tokring.config import Config, ConfigError, ServerSettings, config_from_options, flag_of
from tokring.offline.errors import OfflineError
from tokring.offline.loop_thread import LoopThread
from tokring.offline.output import RequestOutput
from tokring.offline.progress import Progress
from tokring.offline.prompts import (
    Message,
    PromptInput,
    as_list_of_conversations,
    as_list_of_prompts,
    encode_conversations,
    encode_prompts,
    fit_prompts,
)
from tokring.offline.session import Session
from tokring.sampling_params import SamplingParams
from tokring.server.generation import Prompt

_Encoding = Coroutine[Any, Any, list[tuple[list[int], str | None]]]


class LLM:
    """A model loaded into an engine process of its own.

        with LLM("path/to/model", max_num_seqs=64) as llm:
            for output in llm.generate(["One", "Two"], SamplingParams(max_tokens=16)):
                print(output.outputs[0].text)

    Options are those of `tokring serve` that concern model, engine and start (max_model_len=…, dtype=…, …). Without
    `with`, close() or the end of the program ends the engine. Thread-safe; not usable in a forked child.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Loads the model (None: the small one that comes along). Raises ConfigError, CheckpointError, OfflineError."""
        config = offline_config(model, options)
        self._owner_pid = os.getpid()
        self._thread = LoopThread()
        self._session: Session = self._thread.run(_new_session(config))
        # Also at the interpreter's end, if nobody closes it.
        self._finalizer = weakref.finalize(self, _close, self._owner_pid, self._thread, self._session)
        try:
            self._thread.run(self._session.start())
        except BaseException:
            self.close()
            raise

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._session.engine_pid

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._session.limits.max_model_len

    def default_sampling_params(self) -> SamplingParams:
        """The model's own: what is used where none are given."""
        model = self._session.model
        return SamplingParams(**model.sampling_defaults, max_tokens=model.default_max_tokens)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt (text, token ids, or a mapping with either), in order.

        The bar is drawn on standard error if that is a terminal. Raises PromptError or ParameterError before anything
        is submitted, EngineDied; an error of one request alone is in its output.
        """
        given = as_list_of_prompts(prompts)
        return self._generate(
            len(given), encode_prompts(given, self._checked_session().model.encoder), sampling_params, progress_bar
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """Like generate(), for one conversation or several, rendered by the model's chat template."""
        given = as_list_of_conversations(messages)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        encoding = encode_conversations(given, options, self._checked_session().model.encoder)
        return self._generate(len(given), encoding, sampling_params, progress_bar)

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefix cache, also while other threads generate. True, as vLLM's if it did. Raises EngineDied."""
        self._thread.run(self._checked_session().reset_prefix_cache())
        return True

    def close(self) -> None:
        """Ends the engine; whatever other threads still generate ends with an error. Idempotent."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        count: int,
        encoding: _Encoding,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress_bar: bool,
    ) -> list[RequestOutput]:
        params = self._params_of(count, sampling_params, encoding)
        prompts: list[Prompt] = fit_prompts(self._thread.run(encoding), params, self._session.limits)
        with Progress(count, is_shown=progress_bar) as progress:
            return self._thread.run(self._session.generate(prompts, progress.count), while_waiting=progress.draw)

    def _params_of(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None, encoding: _Encoding
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_sampling_params()] * count
        try:
            if len(given) != count:
                raise ValueError(f"{count} prompts, but {len(given)} sampling_params: give one, or one for each prompt")
            for item in given:
                if not isinstance(item, SamplingParams):
                    raise TypeError(f"sampling_params must be SamplingParams, not {type(item).__name__}")
        except BaseException:
            encoding.close()
            raise
        return list(given)

    def _checked_session(self) -> Session:
        if os.getpid() != self._owner_pid:
            raise OfflineError("this LLM belongs to the parent of this forked process; make a new one here")
        if not self._finalizer.alive:
            raise OfflineError("this LLM is closed")
        return self._session


def offline_config(model: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Config:
    """The Config of an engine without front ends. Raises ConfigError, also for options that only a server has."""
    server_only = {item.name for item in fields(ServerSettings)} - {"max_queued"}
    for name in options:
        if name in server_only:
            raise ConfigError(f"{flag_of(name)} means nothing without a server")
    given = {"log_level": "warning", **options}
    for name, value in options.items():
        if isinstance(value, Mapping):  # as vLLM's LLM takes speculative_config
            given[name] = json.dumps(value)
    return config_from_options({**given, "model": None if model is None else os.fspath(model)})


async def _new_session(config: Config) -> Session:
    return Session(config)


def _close(owner_pid: int, thread: LoopThread, session: Session) -> None:
    if os.getpid() != owner_pid:  # a forked child's exit must not end its parent's engine
        return
    try:
        thread.run(session.close())
    finally:
        thread.close()
