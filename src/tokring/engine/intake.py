"""Intake: a request record from a front end becomes a Request, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.engine_config import EngineConfig
from tokring.engine.grammar_text import GRAMMAR_KINDS
from tokring.engine.prefix_cache import PrefixCache
from tokring.engine.request import GrammarText, LogitRules, Request
from tokring_ipc import REQUEST_DTYPE, ErrorCode, ExtensionKind, RequestFlag, RequestLimits

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
_NO_IDS: frozenset[int] = frozenset()
_NOTHING: dict[str, Any] = {}


class RequestFrame(Protocol):
    """What EngineChannel.poll_request returns: structurally sound, its values not looked at."""

    @property
    def stream_slot(self) -> int: ...
    @property
    def slot_generation(self) -> int: ...
    @property
    def record_bytes(self) -> bytes: ...
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
        self._limits = RequestLimits(
            vocab_size=config.vocab_size, max_model_len=config.max_model_len, max_logprobs=config.max_logprobs
        )
        self._prefix_cache = prefix_cache
        self._plain_root = prefix_cache.root()
        self._sequence = 0

    def accept(self, channel: int, frame: RequestFrame) -> Request:
        """Return the request described by `frame`; raises RefusedRequest naming the field that can't be served."""
        ids = frame.ids
        try:
            checked = self._limits.check(frame.record_bytes, ids)
        except ValueError as error:
            raise _invalid(str(error)) from None
        (
            record, stream_slot, slot_generation, parent_slot, flags, priority, deadline_ns, num_prompt, max_total,
            num_logprobs, num_prompt_logprobs, stop_ids, changes_logits, needs_tokens,
        ) = checked  # fmt: skip
        root, rare, is_special = self._plain_root, _NOTHING, needs_tokens
        items = frame.extensions
        if items or changes_logits:
            extensions = self._extensions(items)
            root = self._prefix_cache.root(extensions.get(ExtensionKind.CACHE_SALT, b""))
            rare = self._rare_fields(record, num_prompt, stop_ids, extensions, changes_logits=changes_logits)
            rules, logprob_ids = rare["rules"], rare["logprob_ids"]
            if logprob_ids is not None:
                num_logprobs = len(logprob_ids)
            if rare["grammar_text"] is not None or (rules is not None and rules.has_long_words):
                needs_tokens = True
            is_special = needs_tokens or rules is not None or logprob_ids is not None or len(rare["more_stop_ids"]) > 0
        self._sequence += 1
        use_prefix_cache = self._config.enable_prefix_caching and not flags & _SKIP_PREFIX_CACHE
        return Request(
            channel,
            record,
            stream_slot,
            slot_generation,
            parent_slot,
            deadline_ns,
            self._order(priority),
            num_prompt,
            max_total,
            num_logprobs,
            num_prompt_logprobs,
            stop_ids,
            root,
            use_prefix_cache,
            ids,
            self._prefix_cache.extend_chain(b"", root, ids, len(ids)) if use_prefix_cache else b"",
            needs_tokens,
            is_special,
            **rare,
        )

    def _rare_fields(
        self,
        record: bytes,
        num_prompt: int,
        stop_ids: tuple[int, ...],
        extensions: dict[int, bytes],
        *,
        changes_logits: bool,
    ) -> dict[str, Any]:
        """Fields of a Request that most leave at their defaults."""
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
        if len(ids) and (ids.min() < 0 or ids.max() >= self._config.vocab_size):
            raise _invalid(f"{name}: a token id is not in the vocabulary (0 to {self._config.vocab_size - 1})")

    def _extensions(self, items: Sequence[tuple[int, bytes]]) -> dict[int, bytes]:
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

    def _rules(
        self,
        record: bytes,
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
        values = np.frombuffer(record, REQUEST_DTYPE)[0]
        return LogitRules(
            repetition_penalty=float(values["repetition_penalty"]),
            presence_penalty=float(values["presence_penalty"]),
            frequency_penalty=float(values["frequency_penalty"]),
            bias_ids=bias_ids,
            bias=bias,
            allowed_ids=allowed_ids,
            bad_words=self._bad_words(extensions.get(ExtensionKind.BAD_WORDS)),
            min_total=num_prompt + int(values["min_tokens"]),
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
