"""The frozen configuration of a server: every option once, with its default, its check and its help text.

Flags, environment variables (`TOKRING_MAX_NUM_SEQS`), keys of `--config FILE.yaml`, `tokring serve --help` and the
JSON handed to child processes are all derived from the fields below. Flag spelling follows vLLM where the meaning is
the same. `tokring.options` reads the sources; nothing changes a Config once it is built.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from tokring.kv_events_config import KvEventsConfig
from tokring.speculative_config import SpeculativeConfig

Device = Literal["cpu", "cuda"]

BLOCK_SIZE = 16  # the attention kernels are written for it
LISTEN_BACKLOG = 2048
MOST_NUM_SEQS = 8192  # one step's tokens with logprobs must fit an OUT ring
MOST_QUEUED = 500_000  # with a quarter to spare they must fit the stream slots that the channel allows
MOST_FRONT_ENDS = 32


class ConfigError(ValueError):
    """A setting is unusable; the message names the flag, what was given and what would do."""


def option(default: Any, help: str, *, metavar: str | None = None) -> Any:
    """One configuration field: its default and its line in `--help`."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


def flag_of(name: str) -> str:
    """The command-line spelling of a field: max_num_seqs -> --max-num-seqs."""
    return "--" + name.replace("_", "-")


def field_types(section: type) -> dict[str, Any]:
    """Field name -> resolved annotation."""
    return get_type_hints(section)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model is served, under which names. Read by front end and engine."""

    model: str | None = option(
        None, "model to serve: a Hugging Face directory or a GGUF file (default: the small model that comes along)"
    )
    served_model_name: tuple[str, ...] = option(
        (), "name or names under which the API knows the model; the first one is reported", metavar="NAME"
    )
    tokenizer: str | None = option(None, "directory or tokenizer.json to use instead of the model's own tokenizer")
    chat_template: str | None = option(None, "file with a Jinja chat template, or the template itself")
    generation_config: str = option(
        "auto", "where default sampling values come from: 'auto' (the model), 'vllm' (neutral values) or a directory"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "number format of weights and, without --kv-cache-dtype, of the KV cache"
    )
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens (default: what the model allows)")
    seed: int | None = option(
        None,
        "seeds the requests that bring no seed: the same ones in the same order after a start get the same answers "
        "(default: a seed drawn for each)",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, "max_model_len", 2)
        check_at_least(self, "seed", 0)
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name: a name is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The EngineCore: what runs the model, how much at once, with how much memory."""

    engine: Literal["torch", "mock"] = option(
        "torch", "what runs the model; 'mock' needs no weights and makes up tokens"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "what computes; 'auto' takes a GPU if CUDA can be used, and the log says why if not"
    )
    cpu_threads: int | None = option(
        None,
        "threads that compute on the CPU (default: the usable cores, at most the CPU quota; less one where there are "
        "more than 4)",
        metavar="N",
    )
    cpu_fast: bool = option(
        False, "8-bit activations beside quantized weights on the CPU: faster in batches and prompts, less exact"
    )
    max_num_seqs: int = option(256, "most requests that run at once", metavar="N")
    max_num_batched_tokens: int | None = option(
        None, "token budget of one step; longer prompts are prefilled in chunks (default: 512, on a GPU 2048)"
    )
    max_num_prefill_tokens: int | None = option(
        None,
        "most prompt tokens in a step while requests decode: their next token waits for them (default: on the CPU by "
        "the model's size, on a GPU what is left of the token budget)",
        metavar="N",
    )
    block_size: int = option(BLOCK_SIZE, "tokens in one KV block")
    enable_prefix_caching: bool = option(True, "reuse KV blocks of equal prompt beginnings")
    prefix_caching_hash_algo: Literal["sha256", "blake2b"] = option(
        "sha256", "hash that KV blocks are found by; both are cryptographic, blake2b is faster without SHA instructions"
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "who is computed first: in order of arrival, or by the requests' priority (lowest value first)"
    )
    async_scheduling: bool = option(True, "schedule the next step while one executes, where the backend allows it")
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory for the KV cache (default: on a GPU by --gpu-memory-utilization; on the CPU a quarter of what is "
        "available, at most 4 GiB)",
        metavar="BYTES",
    )
    kv_cache_dtype: Literal["auto", "bf16", "int8", "fp8"] = option(
        "auto",
        "number format of the KV cache; 'auto' is that of the activations, int8 and fp8 (a scale for each vector) hold "
        "about twice the tokens at a small loss; what the backend lacks is refused",
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory for weights and KV cache together")
    hopper_attention: bool = option(
        True, "on a Hopper GPU compute prompts by the kernel made for it, where it agrees with the one for all GPUs"
    )
    tensor_parallel_size: int = option(1, "GPUs that share each layer; only 1 is built")
    kv_events_config: str | None = option(
        None, "publish the prefix cache's changes on vLLM's KV event wire: its JSON object (see docs)", metavar="JSON"
    )
    speculative_config: str | None = option(
        None,
        "draft tokens by looking up the end of a sequence in it; the text stays the same: vLLM's JSON object, e.g. "
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
        metavar="JSON",
    )
    step_timeout: float = option(
        60.0,
        "seconds after which a process that gives no sign of life, a step that does not end or an event loop that "
        "stands still is a hang: /health fails, the process is killed and another one started",
        metavar="S",
    )
    replay: str | None = option(
        None, "answer with a recording of --record instead of a model; equal requests get equal answers", metavar="FILE"
    )
    replay_speed: Literal["original", "full"] = option("original", "--replay: as recorded, or as fast as it goes")
    ipc_listen: str | None = option(
        None, "unix socket where front ends that are not tokring's own connect to the rings (same user)", metavar="PATH"
    )
    mock_step_ms: float = option(0.0, "--engine mock: time of one step in milliseconds", metavar="MS")
    mock_prefill_tokens_per_s: float = option(
        0.0, "--engine mock: prompt tokens computed per second, added to the step time (0: at no cost)", metavar="N"
    )

    mock_async: bool = option(False, "--engine mock: execute steps beside the step thread, as a device does")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, "max_num_seqs", 1)
        check_at_most(self, "max_num_seqs", MOST_NUM_SEQS)
        check_at_least(self, "max_num_batched_tokens", 1)
        check_at_least(self, "max_num_prefill_tokens", 2)  # half for each rule, see docs/scheduling.md
        check_at_least(self, "kv_cache_memory_bytes", 1)
        check_at_least(self, "mock_step_ms", 0)
        check_at_least(self, "mock_prefill_tokens_per_s", 0)
        check_positive(self, "step_timeout")
        check_json(self, "kv_events_config", KvEventsConfig.from_json)
        check_json(self, "speculative_config", SpeculativeConfig.from_json)
        if self.ipc_listen is not None and not 0 < len(self.ipc_listen.encode()) <= 107:
            raise ConfigError(f"--ipc-listen {self.ipc_listen}: a socket path has 1 to 107 bytes")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError(f"--cpu-threads {self.cpu_threads}: must be at least 1")
        if self.block_size != BLOCK_SIZE:
            raise ConfigError(f"--block-size {self.block_size}: only {BLOCK_SIZE} is supported")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: must be above 0 and at most 1")
        if self.tensor_parallel_size != 1:
            raise ConfigError(f"--tensor-parallel-size {self.tensor_parallel_size}: only 1 is supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The HTTP front ends."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 or :: for every interface")
    port: int = option(8000, "TCP port to listen on; 0 takes a free one")
    uds: str | None = option(
        None, "listen on a unix domain socket of this path instead of host and port", metavar="PATH"
    )
    api_server_count: int = option(1, "number of front-end processes", metavar="N")
    api_key: tuple[str, ...] = option(
        (), "keys of which a client must send one (every route but the probes)", metavar="KEY"
    )
    api_key_file: str | None = option(
        None, "file with one such key a line, read again on SIGHUP (which then does not end the server)", metavar="FILE"
    )
    admin_routes: bool = option(
        False, "serve /pause, /resume, /is_paused and /reset_prefix_cache, as vLLM does in its development mode"
    )
    root_path: str = option("", "path prefix that a proxy in front of the server strips", metavar="PATH")
    ssl_keyfile: str | None = option(None, "private key of the TLS certificate", metavar="FILE")
    ssl_certfile: str | None = option(None, "TLS certificate; serves https when given", metavar="FILE")
    ssl_ca_certs: str | None = option(None, "CA certificates that clients must be signed by", metavar="FILE")
    allowed_origins: tuple[str, ...] = option(("*",), "origins that browsers may call from (CORS)", metavar="ORIGIN")
    max_queued: int = option(
        1024, "requests that may wait beyond --max-num-seqs before new ones get a 503", metavar="N"
    )
    max_queued_tokens: int = option(
        1 << 20, "prompt tokens that may wait beyond what the KV cache holds before new requests get a 503", metavar="N"
    )
    stream_interval: int = option(1, "tokens in one event of a stream; the first and the last do not wait", metavar="N")
    request_timeout: float = option(
        60.0, "seconds a client gets to send a request's head, and as many to send its body", metavar="S"
    )
    max_body_bytes: int = option(8 << 20, "largest request body", metavar="BYTES")
    timeout_keep_alive: float = option(
        120.0, "seconds an idle connection is kept; longer than any proxy's", metavar="S"
    )
    record: str | None = option(
        None, "write what passes through the rings to this file (N front ends: FILE, FILE.frontend1, …)", metavar="FILE"
    )
    record_redact: bool = option(False, "--record: leave prompts out; their lengths and the answers stay")
    record_max_bytes: int = option(
        256 << 20, "--record: size of the file and the older FILE.1 together", metavar="BYTES"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send OpenTelemetry spans to this collector, by OTLP over HTTP (http://HOST:4318/v1/traces)",
        metavar="URL",
    )
    disable_access_log_for_endpoints: tuple[str, ...] = option((), "paths left out of the access log", metavar="PATH")

    def __post_init__(self) -> None:
        check_at_least(self, "api_server_count", 1)
        check_at_most(self, "api_server_count", MOST_FRONT_ENDS)
        check_at_least(self, "max_queued", 0)
        check_at_most(self, "max_queued", MOST_QUEUED)
        check_at_least(self, "max_queued_tokens", 0)
        check_at_least(self, "stream_interval", 1)
        check_positive(self, "request_timeout")
        check_at_least(self, "max_body_bytes", 1024)
        check_positive(self, "timeout_keep_alive")
        check_at_least(self, "record_max_bytes", 1 << 16)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: must be between 0 and 65535")
        if self.uds is not None and len(self.uds.encode()) > 107:
            raise ConfigError(f"--uds {self.uds}: longer than the 107 bytes a socket path may have")
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint {self.otlp_traces_endpoint}: must be an http:// or https:// URL (spans are "
                "sent by OTLP over HTTP, not gRPC)"
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path {self.root_path}: must begin with '/'")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key: a key is empty")
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The supervisor: start, stop and logs."""

    startup_timeout: float = option(600.0, "seconds until the server must be ready", metavar="S")
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM", metavar="S")
    engine_restarts: int = option(
        10, "engine deaths in a row, without a step between them, that are followed by a restart (0: none)", metavar="N"
    )
    frontend_restarts: int = option(
        10,
        "deaths in a row of one front end, without a request answered between them, that are followed by a restart "
        "(0: none)",
        metavar="N",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe log lines that are shown")
    log_format: Literal["text", "json"] = option("text", "log lines for people, or one JSON object a line")

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "startup_timeout")
        check_at_least(self, "shutdown_timeout", 0)
        check_at_least(self, "engine_restarts", 0)
        check_at_least(self, "frontend_restarts", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a server is told at start; the same object in supervisor, front ends and engine."""

    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)

    @property
    def num_engine_restarts(self) -> int:
        """--engine-restarts; a replay can't go on where it stopped."""
        return 0 if self.engine.replay is not None else self.launch.engine_restarts

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> "Config":
        """Raises msgspec.ValidationError on anything that to_json() would not have written."""
        return msgspec.json.decode(data, type=cls)


FILE_OPTIONS = (
    ("engine", "replay"),
    ("server", "api_key_file"),
    ("server", "ssl_keyfile"),
    ("server", "ssl_certfile"),
    ("server", "ssl_ca_certs"),
)


def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order of `--help`."""
    return field_types(Config)


def config_from_options(options: dict[str, Any]) -> Config:
    """Builds the Config from flat option values (field name -> value); what is missing keeps its default.

    Raises ConfigError for an unknown name or an unusable value.
    """
    left = dict(options)
    built = {}
    for section_name, section in sections().items():
        names = [item.name for item in fields(section) if item.name in left]
        built[section_name] = section(**{name: left.pop(name) for name in names})
    if left:
        raise ConfigError(f"unknown option {flag_of(next(iter(left)))}")
    config = Config(**built)
    check_files(config)
    return config


def check_files(config: Config) -> None:
    """Refuses names of files that do not exist, and of what is none. At the start only, not where a later process
    decodes the Config: an engine is to be followed by another one also while a file that it never reads is being
    replaced."""
    for section, name in FILE_OPTIONS:
        path = getattr(getattr(config, section), name)
        if path is not None and not Path(path).is_file():
            why = "not a regular file" if Path(path).exists() else "no such file"
            raise ConfigError(f"{flag_of(name)} {path}: {why}")


def check_choices(settings: Any) -> None:
    """Refuses values outside a Literal annotation."""
    for name, annotation in field_types(type(settings)).items():
        if get_origin(annotation) is Literal and getattr(settings, name) not in get_args(annotation):
            allowed = ", ".join(map(str, get_args(annotation)))
            raise ConfigError(f"{flag_of(name)} {getattr(settings, name)}: must be one of {allowed}")


def check_at_least(settings: Any, name: str, least: float) -> None:
    """Refuses a number below `least`, infinity and NaN; None means "not given" and passes."""
    value = getattr(settings, name)
    if value is not None and not isinstance(value, int | float):
        raise ConfigError(f"{flag_of(name)} {value}: must be a number")
    if value is not None and not (value >= least and math.isfinite(value)):
        raise ConfigError(f"{flag_of(name)} {value}: must be at least {least}")


def check_at_most(settings: Any, name: str, most: float) -> None:
    value = getattr(settings, name)
    if value is not None and value > most:
        raise ConfigError(f"{flag_of(name)} {value}: must be at most {most}")


def check_json(settings: Any, name: str, parse: Callable[[str], object]) -> None:
    """Refuses a JSON text that its parser does not take; None means "not given" and passes."""
    text = getattr(settings, name)
    if text is None:
        return
    try:
        parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag_of(name)}: {error}") from None


def check_positive(settings: Any, name: str) -> None:
    value = getattr(settings, name)
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{flag_of(name)} {value}: must be above 0")
