"""FrontEnd: everything one front-end process holds, grouped by lifetime, and the phase it is in."""

import asyncio
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from tokring.checkpoint import Checkpoint, model_name_of, open_checkpoint
from tokring.config import Config
from tokring.recording.recording_writer import RecordingWriter
from tokring.server.api_keys import ApiKeys
from tokring.server.chat_template import ChatTemplate
from tokring.server.engine_client import EngineClient
from tokring.server.engine_limits import EngineLimits
from tokring.server.errors import model_not_found, unavailable
from tokring.server.prompt_encoder import PromptEncoder
from tokring.server.server_pages import ServerPages
from tokring.server.stats import FrontEndStats
from tokring.server.token_path import TokenTable
from tokring.server.tracing import Tracing

_REFUSAL_CODES = {"engine is dead": "engine_dead", "draining": "draining"}
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Phase(enum.StrEnum):
    """Where the process stands; what /health says while it is not ready."""

    STARTING = "starting"
    LOADING_TOKENIZER = "loading the tokenizer"
    WAITING_FOR_ENGINE = "waiting for the engine"
    READY = "ready"
    DRAINING = "draining"
    ENGINE_RESTARTING = "restarting the engine"
    ENGINE_DEAD = "engine is dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The text side of the model: read-only once loaded."""

    name: str
    encoder: PromptEncoder
    table: TokenTable
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    default_max_tokens: int | None
    longest_prompt: int  # tokens
    created: int = field(default_factory=lambda: int(time.time()))


def load_served_model(config: Config) -> ServedModel:
    """Opens the checkpoint and builds tokenizer, token table and chat template. Takes seconds: not for the loop."""
    settings = config.model
    checkpoint = open_checkpoint(settings.model, tokenizer=settings.tokenizer, chat_template=settings.chat_template)
    tokenizer = checkpoint.load_tokenizer()
    source = checkpoint.chat_template
    template = ChatTemplate(source, checkpoint.special_tokens) if source is not None else None
    defaults = _generation_defaults(config, checkpoint)
    max_new_tokens = defaults.get("max_new_tokens")
    return ServedModel(
        name=checkpoint.name,
        encoder=PromptEncoder(tokenizer, chat_template=template),
        table=TokenTable.from_tokenizer(tokenizer),
        eos_ids=checkpoint.eos_ids,
        sampling_defaults={key: defaults[key] for key in _SAMPLING_DEFAULTS if defaults.get(key) is not None},
        default_max_tokens=int(max_new_tokens) if max_new_tokens else None,
        longest_prompt=settings.max_model_len or checkpoint.config.max_position_embeddings,
    )


def _generation_defaults(config: Config, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """--generation-config: the model's own values, none, or those of another directory."""
    source = config.model.generation_config
    if source == "vllm":
        return {}
    if source == "auto":
        return checkpoint.generation_defaults
    defaults: dict[str, Any] = orjson.loads((Path(source) / "generation_config.json").read_bytes())
    return defaults


class FrontEnd:
    """State of the process. The HTTP handlers reach it through the application."""

    def __init__(self, config: Config, stats: FrontEndStats, pages: ServerPages) -> None:
        # Whole process.
        self.config = config
        self.stats = stats
        self.pages = pages
        self.started_ns = time.monotonic_ns()
        self.requests_in_progress = 0
        self.all_answered = asyncio.Event()  # set while no generation request is in progress
        self.all_answered.set()
        self.api_keys = ApiKeys(config.server)
        # --served-model-name, or the checkpoint's own name. Known before anything is loaded: it labels the metrics.
        self.model_names = config.model.served_model_name or (model_name_of(config.model.model),)
        endpoint = config.server.otlp_traces_endpoint
        self.tracing = Tracing(endpoint, self.model_names[0]) if endpoint else None
        # From loading on.
        self.phase = Phase.STARTING
        self.is_retiring = False  # another process has taken over; what is connected is served to its end
        self._model: ServedModel | None = None
        self._engine: EngineClient | None = None
        self._limits: EngineLimits | None = None
        self.recording: RecordingWriter | None = None

    # ---- phases ----

    def loaded(self, model: ServedModel, engine: EngineClient) -> None:
        self._model, self._engine = model, engine
        self.phase = Phase.WAITING_FOR_ENGINE

    def engine_is_ready(self, limits: EngineLimits) -> None:
        """Ids that only the engine's padded vocabulary has are no business of a client's."""
        vocab_size = min(limits.vocab_size, self.model.encoder.vocab_size)
        self._limits = replace(limits, vocab_size=vocab_size)
        if self.phase in (Phase.WAITING_FOR_ENGINE, Phase.ENGINE_RESTARTING):
            self.phase = Phase.READY

    def engine_is_restarting(self) -> None:
        if self.phase is Phase.READY:
            self.phase = Phase.ENGINE_RESTARTING

    def engine_is_dead(self) -> None:
        if self.phase is not Phase.DRAINING:
            self.phase = Phase.ENGINE_DEAD

    def drain(self) -> None:
        """No new requests from here on."""
        self.phase = Phase.DRAINING

    def check_ready(self) -> None:
        """Raises ApiError (503) with the reason unless requests can be served; between two engines they wait."""
        if self.phase in (Phase.READY, Phase.ENGINE_RESTARTING):
            return
        code = _REFUSAL_CODES.get(str(self.phase), "not_ready")
        raise unavailable(f"The server cannot take requests now: {self.phase}.", code)

    # ---- what handlers ask for; only after check_ready() ----

    @property
    def model(self) -> ServedModel:
        assert self._model is not None
        return self._model

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def engine(self) -> EngineClient:
        assert self._engine is not None
        return self._engine

    @property
    def limits(self) -> EngineLimits:
        assert self._limits is not None
        return self._limits

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with; the first one if the client gave none. Raises ApiError (404)."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise model_not_found(name)
        return name

    # ---- requests in progress, for the drain ----

    def __enter__(self) -> "FrontEnd":
        self.requests_in_progress += 1
        self.all_answered.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.requests_in_progress -= 1
        if self.requests_in_progress == 0:
            self.all_answered.set()
