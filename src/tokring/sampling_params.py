"""SamplingParams: how one request's tokens are chosen, and when it ends; checked once, then frozen."""

import contextlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

# Bounds on everything a client can ask for; the table in docs/api.md is checked against these.
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_IDS = 64
MAX_LOGPROB_TOKEN_IDS = 20
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_STRUCTURED_OUTPUT_CHARS = 262_144
# Below this a temperature means greedy: 1 / temperature would overflow single precision on the way to the same answer.
GREEDY_TEMPERATURE = 1e-5
MAX_LENGTH = 2**31 - 1  # of max_tokens and min_tokens; no context is as long
MAX_CACHE_SALT_CHARS = 256

_WHOLE = ("n", "top_k", "min_tokens", "priority")
_WHOLE_OR_NONE = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_LISTS = ("stop", "stop_token_ids", "logprob_token_ids", "logit_bias", "allowed_token_ids", "bad_words")


class ParameterError(ValueError):
    """A value the client sent is of no use: `param` names the field, `message` says why and what would do."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


class StructuredKind(StrEnum):
    """What the text of a StructuredOutput is."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"  # text: a JSON list of strings
    GRAMMAR = "grammar"  # EBNF
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the output, compiled by the engine's grammar module; `param`: the field a client gave it in.

    `text`: of a JSON schema, a list of choices or a structural tag it is JSON. Raises ParameterError.
    """

    kind: StructuredKind
    text: str
    param: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", StructuredKind(self.kind))
        except ValueError:
            kinds = ", ".join(StructuredKind)
            raise ParameterError(self.param, f"{self.param}: {self.kind!r:.40} is none of {kinds}.") from None
        if not isinstance(self.text, str):
            raise ParameterError(self.param, f"{self.param}: the constraint must be text, not {_type_of(self.text)}.")
        _check_unicode(self.param, self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and ending of one request; field names and defaults are vLLM's.

    top_k: 0 or -1 = off. max_tokens None = whatever the context leaves. logprobs and prompt_logprobs: None = none,
    k = the chosen token and the k most likely. bad_words: token id sequences. Raises ParameterError.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _make_tuples(self)
        _check_types(self)
        _check_choices(self)
        _check_distribution(self)
        _check_length(self)
        _check_stops(self)
        _check_logprobs(self)
        _check_token_lists(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_choices(self) -> int:
        """Sequences to generate: best_of if it is given, else n."""
        return self.best_of or self.n

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ParameterError if any token id is not in [0, vocab_size), or none is allowed."""
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_ids("logit_bias", (token_id for token_id, _ in self.logit_bias), vocab_size)
        if self.allowed_token_ids is not None:
            count = len(self.allowed_token_ids)
            message = f"allowed_token_ids needs 1 to {vocab_size} ids, got {count}."
            _require(0 < count <= vocab_size, "allowed_token_ids", message)
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _check_ids("logprob_token_ids", self.logprob_token_ids, vocab_size)
        for word in self.bad_words:
            _check_ids("bad_words", word, vocab_size)


def parse_logit_bias(value: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's {"token id": bias} as pairs; raises ParameterError on a key that is no plain decimal number."""
    if not value:
        return ()
    if len(value) > MAX_LOGIT_BIAS:
        raise ParameterError(
            "logit_bias", f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed."
        )
    return tuple((_bias_key(key), float(bias)) for key, bias in value.items())


def _bias_key(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ParameterError("logit_bias", f"logit_bias keys must be token ids (decimal numbers), not {key[:40]!r}.")
    return int(key)


def _make_tuples(params: SamplingParams) -> None:
    """Takes what scripts like to give: one stop string, lists, a mapping of biases."""
    if isinstance(params.stop, str):
        object.__setattr__(params, "stop", (params.stop,))
    if isinstance(params.logit_bias, Mapping):
        object.__setattr__(params, "logit_bias", tuple(params.logit_bias.items()))
    for name in _LISTS:
        value = getattr(params, name)
        if not isinstance(value, tuple) and (value is not None or name != "allowed_token_ids"):
            if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
                raise ParameterError(name, f"{name} must be a list, not {_type_of(value)}.")
            object.__setattr__(params, name, tuple(value or ()))
    for word in params.bad_words:
        if isinstance(word, str) or not isinstance(word, Iterable):
            raise ParameterError("bad_words", f"each of bad_words must be a list of token ids, not {_type_of(word)}.")
    if any(not isinstance(word, tuple) for word in params.bad_words):
        object.__setattr__(params, "bad_words", tuple(map(tuple, params.bad_words)))


def _check_types(params: SamplingParams) -> None:
    """Numbers become int and float, so that what is checked is what the engine is told."""
    for name in _WHOLE:
        _make_whole(params, name)
    for name in _WHOLE_OR_NONE:
        if getattr(params, name) is not None:
            _make_whole(params, name)
    for name in _NUMBERS:
        value = getattr(params, name)
        if type(value) is not float:
            object.__setattr__(params, name, _number(name, value))
    for text in params.stop:
        _require(isinstance(text, str), "stop", f"stop must be text, not {_type_of(text)}.")
        _check_unicode("stop", text)
    if params.cache_salt is not None:
        _require(isinstance(params.cache_salt, str), "cache_salt", "cache_salt must be text.")
        _check_unicode("cache_salt", params.cache_salt)
    constraint = params.structured_output
    if constraint is not None and not isinstance(constraint, StructuredOutput):
        raise ParameterError(
            "structured_output", f"structured_output must be a StructuredOutput, not {_type_of(constraint)}."
        )
    if params.logit_bias:
        object.__setattr__(params, "logit_bias", tuple(map(_bias_pair, params.logit_bias)))


def _make_whole(params: SamplingParams, name: str) -> None:
    value = getattr(params, name)
    if type(value) is not int:
        try:
            object.__setattr__(params, name, int(operator.index(value)))
        except TypeError:
            raise ParameterError(name, f"{name} must be a whole number, not {value!r:.40}.") from None


def _number(param: str, value: Any) -> float:
    if isinstance(value, Real):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise ParameterError(param, f"{param} must be a number, not {_type_of(value)}.")


def _bias_pair(pair: Any) -> tuple[int, float]:
    try:
        token_id, bias = pair
    except (TypeError, ValueError):
        raise ParameterError("logit_bias", "logit_bias must map token ids to biases.") from None
    return token_id, _number("logit_bias", bias)


def _check_unicode(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParameterError(param, f"{param} is not valid Unicode: it has a lone surrogate.") from None


def _type_of(value: Any) -> str:
    return type(value).__name__


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise ParameterError(param, message)


def _check_range(param: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN neither
        got = f"{value:.10g}" if abs(value) < 1e300 or isinstance(value, float) else "a huge number"
        raise ParameterError(param, f"{param} must be between {low:.10g} and {high:.10g}, got {got}.")


def _check_choices(params: SamplingParams) -> None:
    _check_range("n", params.n, 1, MAX_CHOICES)
    if params.best_of is None:
        return
    _check_range("best_of", params.best_of, 1, MAX_CHOICES)
    _require(params.best_of >= params.n, "best_of", f"best_of ({params.best_of}) must be at least n ({params.n}).")


def _check_distribution(params: SamplingParams) -> None:
    _check_range("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _check_range("top_p", params.top_p, 0, 1)
    _check_range("min_p", params.min_p, 0, 1)
    _require(params.top_k >= -1, "top_k", "top_k must be -1 or 0 (off), or at least 1.")
    _check_range("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None:
        _require(-(2**63) <= params.seed < 2**63, "seed", "seed must fit a signed 64-bit integer.")
    _require(-(2**31) <= params.priority < 2**31, "priority", "priority must fit a signed 32-bit integer.")


def _check_length(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        _check_range("max_tokens", params.max_tokens, 1, MAX_LENGTH)
    _check_range("min_tokens", params.min_tokens, 0, MAX_LENGTH)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ParameterError(
            "min_tokens", f"min_tokens ({params.min_tokens}) must not be above max_tokens ({params.max_tokens})."
        )


def _check_stops(params: SamplingParams) -> None:
    count = len(params.stop)
    _require(count <= MAX_STOP_STRINGS, "stop", f"stop has {count} strings; at most {MAX_STOP_STRINGS} are allowed.")
    for text in params.stop:
        _require(text != "", "stop", "stop must not contain an empty string.")
        _require(
            len(text) <= MAX_STOP_STRING_CHARS,
            "stop",
            f"a string of stop is longer than {MAX_STOP_STRING_CHARS} characters.",
        )
    count = len(params.stop_token_ids)
    _require(
        count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {count}."
    )


def _check_logprobs(params: SamplingParams) -> None:
    if params.logprobs is not None:
        _check_range("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.prompt_logprobs is not None:
        _check_range("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    count = len(params.logprob_token_ids)
    _require(count <= MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS} ids, got {count}.")
    _require(count == 0 or params.logprobs is not None, "logprob_token_ids", "logprob_token_ids needs logprobs.")


def _check_token_lists(params: SamplingParams) -> None:
    for _, bias in params.logit_bias:
        _check_range("logit_bias", bias, -100, 100)
    _require(
        len(params.logit_bias) <= MAX_LOGIT_BIAS,
        "logit_bias",
        f"at most {MAX_LOGIT_BIAS} logit_bias entries are allowed.",
    )
    _require(len(params.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} bad_words are allowed.")
    for word in params.bad_words:
        _require(
            0 < len(word) <= MAX_BAD_WORD_IDS, "bad_words", f"each of bad_words must be 1 to {MAX_BAD_WORD_IDS} tokens."
        )
    if params.cache_salt is not None:
        _require(
            0 < len(params.cache_salt) <= MAX_CACHE_SALT_CHARS,
            "cache_salt",
            f"cache_salt must be 1 to {MAX_CACHE_SALT_CHARS} characters.",
        )
    if params.structured_output is not None:
        _require(
            len(params.structured_output.text) <= MAX_STRUCTURED_OUTPUT_CHARS,
            params.structured_output.param,
            f"the constraint is longer than {MAX_STRUCTURED_OUTPUT_CHARS} characters.",
        )


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if type(token_id) is not int and not isinstance(token_id, Integral):
            raise ParameterError(param, f"{param}: token ids must be whole numbers, not {token_id!r:.40}.")
        if not 0 <= token_id < vocab_size:
            raise ParameterError(
                param, f"{param}: token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})."
            )
