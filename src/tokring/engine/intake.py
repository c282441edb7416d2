"""Intake: a request record from a front end becomes a Request, or is refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.engine_config import EngineConfig
from tokring.engine.grammar_text import GRAMMAR_KINDS
from tokring.engine.prefix_cache import PrefixCache
from tokring.engine.request import GrammarText, LogitRules, RecordValues, Request
from tokring.engine.request_columns import NUM_INLINE_STOP_IDS
from tokring_ipc import REQUEST_DTYPE, ErrorCode, ExtensionKind, RequestFlag

NO_STREAM_SLOT = 0xFFFFFFFF
MAX_TEMPERATURE = 100.0
_SKIP_PREFIX_CACHE = int(RequestFlag.SKIP_PREFIX_CACHE)  # enum members are slow to look up and to combine
_MAX_PRIORITY = 1 << 20  # of order keys: priority << 40 | sequence number
_SERVED = frozenset(
    (
        ExtensionKind.STOP_IDS,
        ExtensionKind.LOGIT_BIAS,
        ExtensionKind.ALLOWED_IDS,
        ExtensionKind.BAD_WORDS,
        ExtensionKind.CACHE_SALT,
        ExtensionKind.LOGPROB_IDS,
        *GRAMMAR_KINDS,
    )
)

_NO_RULES = frozenset((ExtensionKind.STOP_IDS, ExtensionKind.CACHE_SALT, ExtensionKind.LOGPROB_IDS, *GRAMMAR_KINDS))
_NO_EXTENSIONS: dict[int, bytes] = {}
_NO_IDS: frozenset[int] = frozenset()
_NOTHING: dict[str, Any] = {}


def struct_code(dtype: np.dtype[Any]) -> str:
    """Return how `struct` names a number's type."""
    return {"i4": "i", "i8": "q", "u2": "H", "u4": "I", "u8": "Q", "f4": "f"}[dtype.str[1:]]


# Packed, without padding: ipc asserts the size. Several times quicker than numpy.
_RECORD = struct.Struct("<" + "".join(struct_code(REQUEST_DTYPE[name]) for name in RecordValues._fields[:-1]) + "32s")
_STOP_IDS = struct.Struct(f"<{NUM_INLINE_STOP_IDS}i")


class RequestFrame(Protocol):
    """What EngineChannel.poll_request returns: structurally sound, its values not looked at."""

    @property
    def stream_slot(self) -> int: ...
    @property
    def slot_generation(self) -> int: ...
    @property
    def record_bytes(self) -> bytes: ...
    @property
    def id_range(self) -> tuple[int, int]: ...
    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def extensions(self) -> Sequence[tuple[int, bytes]]: ...


class RefusedRequest(ValueError):
    """A record that can't run; becomes a finish row with this error code."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class Intake:
    """Checks every field of every record: front ends validate for their clients, the engine for its own life."""

    def __init__(self, config: EngineConfig, prefix_cache: PrefixCache) -> None:
        self._config = config
        self._prefix_cache = prefix_cache
        self._plain_root = prefix_cache.root()
        self._sequence = 0

    def accept(self, channel: int, frame: RequestFrame) -> Request:
        """Return the request described by `frame`; raises RefusedRequest naming the field that can't be served."""
        config = self._config
        record = RecordValues._make(_RECORD.unpack(frame.record_bytes))
        ids = frame.ids
        self._check_range("ids", *frame.id_range)
        num_prompt = len(ids) - record.num_prior_output
        self._check_lengths(record, num_prompt)
        self._check_numbers(record)
        stop_ids = self._inline_stop_ids(record)
        extensions = self._extensions(frame.extensions)
        rare = self._rare_fields(record, num_prompt, stop_ids, extensions)
        self._sequence += 1
        request = Request(
            channel=channel,
            stream_slot=record.stream_slot,
            slot_generation=record.slot_generation,
            record=record,
            order=self._order(record.priority),
            num_prompt=num_prompt,
            max_total=min(num_prompt + record.max_tokens, config.max_model_len),
            stop_ids=stop_ids,
            root=self._root(extensions),
            use_prefix_cache=config.enable_prefix_caching and not record.flags & _SKIP_PREFIX_CACHE,
            parent_slot=-1 if record.parent_slot in (NO_STREAM_SLOT, record.stream_slot) else record.parent_slot,
            token_ids=ids,
            # With prior output the prompt's logprobs are out already.
            num_prompt_logprobs=-1 if record.num_prior_output else record.num_prompt_logprobs,
            **rare,
        )
        if request.use_prefix_cache:
            request.chain = self._prefix_cache.extend_chain(b"", request.root, ids, len(ids))
        return request

    def _rare_fields(
        self, record: RecordValues, num_prompt: int, stop_ids: tuple[int, ...], extensions: dict[int, bytes]
    ) -> dict[str, Any]:
        """Fields of a Request that most leave at their defaults."""
        changes_logits = record.min_tokens or record.repetition_penalty != 1.0
        changes_logits = changes_logits or record.presence_penalty != 0.0 or record.frequency_penalty != 0.0
        if not changes_logits and not extensions:
            return _NOTHING
        more_stop_ids = self._ids_of(extensions, ExtensionKind.STOP_IDS)
        needs_rules = changes_logits or not extensions.keys() <= _NO_RULES
        return {
            "more_stop_ids": _NO_IDS if more_stop_ids is None else frozenset(more_stop_ids.tolist()),
            "logprob_ids": self._logprob_ids(extensions),
            "rules": self._rules(record, num_prompt, stop_ids, more_stop_ids, extensions) if needs_rules else None,
            "grammar_text": self._grammar_text(extensions),
        }

    def _order(self, priority: int) -> int:
        if self._config.scheduling_policy == "fcfs":
            return self._sequence
        return (max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY)) << 40) + self._sequence

    def _check_ids(self, name: str, ids: NDArray[np.int32]) -> None:
        if len(ids):
            self._check_range(name, int(ids.min()), int(ids.max()))

    def _check_range(self, name: str, least: int, most: int) -> None:
        if least < 0 or most >= self._config.vocab_size:
            raise _invalid(f"{name}: a token id is not in the vocabulary (0 to {self._config.vocab_size - 1})")

    def _check_lengths(self, record: RecordValues, num_prompt: int) -> None:
        if num_prompt < 1:
            raise _invalid(f"num_ids: {num_prompt + record.num_prior_output} ids hold no prompt token")
        longest = self._config.max_model_len - (record.max_tokens > 0)
        if num_prompt > longest:
            raise _invalid(f"num_ids: {num_prompt} prompt tokens, at most {longest} leave room for output")
        if record.num_prior_output and record.num_prior_output > record.max_tokens:
            raise _invalid(f"num_prior_output: {record.num_prior_output} is above max_tokens ({record.max_tokens})")
        if num_prompt + record.num_prior_output > self._config.max_model_len:
            raise _invalid(f"num_prior_output: prompt and prior output exceed {self._config.max_model_len} tokens")
        if record.min_tokens > record.max_tokens:
            raise _invalid(f"min_tokens: {record.min_tokens} is above max_tokens ({record.max_tokens})")

    def _check_numbers(self, record: RecordValues) -> None:
        # Written so that NaN fails every comparison.
        if not 0.0 <= record.temperature <= MAX_TEMPERATURE:
            raise _invalid(f"temperature: {record.temperature} is not between 0 and {MAX_TEMPERATURE}")
        if not 0.0 <= record.top_p <= 1.0 or not 0.0 <= record.min_p <= 1.0:
            raise _invalid(f"top_p {record.top_p} or min_p {record.min_p} is not between 0 and 1")
        if not 0.0 < record.repetition_penalty < math.inf:
            raise _invalid(f"repetition_penalty: {record.repetition_penalty} is not above 0 and finite")
        if not (abs(record.presence_penalty) < math.inf and abs(record.frequency_penalty) < math.inf):
            raise _invalid("presence_penalty or frequency_penalty is not finite")
        most = self._config.max_logprobs
        if not -1 <= record.num_logprobs <= most:
            raise _invalid(f"num_logprobs: {record.num_logprobs} is not between -1 and {most}")
        if not -1 <= record.num_prompt_logprobs <= most:
            raise _invalid(f"num_prompt_logprobs: {record.num_prompt_logprobs} is not between -1 and {most}")

    def _inline_stop_ids(self, record: RecordValues) -> tuple[int, ...]:
        if record.num_stop_ids > NUM_INLINE_STOP_IDS:
            raise _invalid(f"num_stop_ids: {record.num_stop_ids} is above {NUM_INLINE_STOP_IDS}")
        stop_ids = _STOP_IDS.unpack(record.stop_ids)[: record.num_stop_ids]
        for token_id in stop_ids:
            if not 0 <= token_id < self._config.vocab_size:
                raise _invalid(f"stop_ids: {token_id} is not in the vocabulary (0 to {self._config.vocab_size - 1})")
        return stop_ids

    def _extensions(self, items: Sequence[tuple[int, bytes]]) -> dict[int, bytes]:
        if not items:
            return _NO_EXTENSIONS
        extensions = {int(kind): bytes(data) for kind, data in items}
        for kind in extensions:
            if kind not in _SERVED:
                raise _invalid(f"extension kind {kind} is not served by this engine")
        return extensions

    def _ids_of(self, extensions: dict[int, bytes], kind: ExtensionKind) -> NDArray[np.int32] | None:
        data = extensions.get(kind)
        if data is None:
            return None
        if len(data) % 4:
            raise _invalid(f"{kind.name}: {len(data)} bytes are no list of 32-bit ids")
        ids = np.frombuffer(data, np.int32)
        self._check_ids(kind.name, ids)
        return ids

    def _grammar_text(self, extensions: dict[int, bytes]) -> GrammarText | None:
        kinds = [kind for kind in extensions if kind in GRAMMAR_KINDS]
        if not kinds:
            return None
        if len(kinds) > 1:
            raise _invalid("a request can have one grammar")
        return GrammarText(ExtensionKind(kinds[0]), extensions[kinds[0]])

    def _logprob_ids(self, extensions: dict[int, bytes]) -> NDArray[np.int32] | None:
        ids = self._ids_of(extensions, ExtensionKind.LOGPROB_IDS)
        if ids is not None and len(ids) > self._config.max_logprobs:
            raise _invalid(f"LOGPROB_IDS: {len(ids)} ids, at most {self._config.max_logprobs} are served")
        return ids

    def _root(self, extensions: dict[int, bytes]) -> bytes:
        if not extensions:
            return self._plain_root
        return self._prefix_cache.root(extensions.get(ExtensionKind.CACHE_SALT, b""))

    def _rules(
        self,
        record: RecordValues,
        num_prompt: int,
        stop_ids: tuple[int, ...],
        more_stop_ids: NDArray[np.int32] | None,
        extensions: dict[int, bytes],
    ) -> LogitRules:
        allowed_ids = self._ids_of(extensions, ExtensionKind.ALLOWED_IDS)
        if allowed_ids is not None and not len(allowed_ids):
            raise _invalid("ALLOWED_IDS: no id is allowed")
        bias_ids, bias = self._bias(extensions.get(ExtensionKind.LOGIT_BIAS))
        all_stop_ids = np.array(stop_ids, np.int32)
        if more_stop_ids is not None:
            all_stop_ids = np.concatenate((all_stop_ids, more_stop_ids))
        return LogitRules(
            repetition_penalty=record.repetition_penalty,
            presence_penalty=record.presence_penalty,
            frequency_penalty=record.frequency_penalty,
            bias_ids=bias_ids,
            bias=bias,
            allowed_ids=allowed_ids,
            bad_words=self._bad_words(extensions.get(ExtensionKind.BAD_WORDS)),
            min_total=num_prompt + record.min_tokens,
            stop_ids=all_stop_ids,
        )

    def _bias(self, data: bytes | None) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
        if data is None:
            return None, None
        if len(data) % 8:
            raise _invalid(f"LOGIT_BIAS: {len(data)} bytes are no pairs of ids and biases")
        half = len(data) // 2
        ids, bias = np.frombuffer(data, np.int32, half // 4), np.frombuffer(data, np.float32, offset=half)
        self._check_ids("LOGIT_BIAS", ids)
        if not np.isfinite(bias).all():
            raise _invalid("LOGIT_BIAS: a bias is not finite")
        return ids, bias

    def _bad_words(self, data: bytes | None) -> list[NDArray[np.int32]]:
        if data is None:
            return []
        words = np.frombuffer(data, np.uint32) if len(data) % 4 == 0 else np.zeros(0, np.uint32)
        count = int(words[0]) if len(words) else -1
        lengths = words[1 : 1 + count].astype(np.int64)
        ids = words[1 + count :].view(np.int32)
        if count < 0 or len(lengths) != count or int(lengths.sum()) != len(ids) or (lengths == 0).any():
            raise _invalid("BAD_WORDS: lengths and ids don't add up")
        self._check_ids("BAD_WORDS", ids)
        return np.split(ids, np.cumsum(lengths)[:-1]) if count else []


def _invalid(why: str) -> RefusedRequest:
    return RefusedRequest(ErrorCode.INVALID_REQUEST, why)
