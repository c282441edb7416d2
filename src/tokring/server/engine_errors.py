"""What the engine's last word on a request means for its client."""

import time
from concurrent.futures import Future
from typing import Any

from tokring.server.stream import StreamError
from tokring.server.token_path import Finish
from tokring_ipc import ErrorCode, FinishReason

_OF_CODE = {
    ErrorCode.INVALID_REQUEST: StreamError(400, "The engine refused the request as invalid.", "invalid_request"),
    ErrorCode.DEADLINE: StreamError(408, "The request's deadline passed before work on it began.", "deadline_exceeded"),
    ErrorCode.GRAMMAR: StreamError(400, "The output constraint cannot be used.", "invalid_grammar"),
    ErrorCode.NOT_FINITE: StreamError(
        500, "The model's output was not finite (NaN); the request was ended.", "not_finite"
    ),
    ErrorCode.OUT_OF_MEMORY: StreamError(503, "The KV cache is too small for this request now.", "out_of_memory"),
    ErrorCode.POISON: StreamError(
        500, "The engine died whenever it worked on this request, at last on it alone; it is not tried again.", "poison"
    ),
    ErrorCode.OVERLOADED: StreamError(503, "The engine can't take the request now.", "overloaded"),
}
_EXPLAINED = tuple(_OF_CODE[code] for code in (ErrorCode.INVALID_REQUEST, ErrorCode.GRAMMAR, ErrorCode.OVERLOADED))
_INTERNAL = StreamError(500, "The engine had an error while it processed the request.", "engine_error")
POISON = _OF_CODE[ErrorCode.POISON]
ABORTED = StreamError(503, "The engine ended the request.", "aborted")
ENGINE_IS_GONE = StreamError(503, "The engine process has died; the request is lost. Try again later.", "engine_dead")
TOO_LARGE = "The request with its lists and constraint is too large"


def error_of_finish(finish: Finish | None) -> StreamError | None:
    """The error that a finish row stands for; None if it is an answer's regular end."""
    if finish is None:
        return _INTERNAL
    if finish.reason == FinishReason.ERROR:
        return _OF_CODE.get(ErrorCode(finish.error_code), _INTERNAL)
    return ABORTED if finish.reason == FinishReason.ABORT else None


def is_explained(error: StreamError) -> bool:
    """Whether the engine has more to say (ControlMethod.EXPLAIN)."""
    return error in _EXPLAINED


def explained(error: StreamError, answer: "Future[Any]") -> StreamError:
    """The error in the engine's words, if `answer` has come and holds any."""
    if answer.cancelled() or answer.exception() is not None or not isinstance(answer.result(), str):
        return error
    return StreamError(error.status, f"{error.message[:-1]}: {answer.result()}.", error.code)


def lost_finish(num_prompt_tokens: int, num_tokens: int) -> Finish:
    """What stands for the finish row of an engine that died before it wrote one."""
    return Finish(
        reason=FinishReason.ERROR,
        error_code=ErrorCode.NONE,
        stop_id=-1,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        num_output_tokens=num_tokens,
        num_preemptions=0,
        scheduled_ns=0,
        first_token_ns=0,
        end_ns=time.monotonic_ns(),
        num_draft_tokens=0,
        num_accepted_tokens=0,
    )
