"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, for every failure."""

from collections.abc import Mapping
from http import HTTPStatus

import orjson

MAX_MESSAGE_CHARS = 2000
RETRY_AFTER_S = 5  # of a 503 for which no better guess is known

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that is answered with an error: HTTP status, and the fields of OpenAI's error object.

    Every 503 says when to come back: proxies look for `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    def body(self) -> bytes:
        """The error object as JSON."""
        return error_body(self.status, self.message, param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an error object; lone surrogates and overlong messages are made harmless."""
    error = {
        "message": clean_text(message),
        "type": _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": None if param is None else clean_text(param),
        "code": code or _default_code(status),
    }
    return orjson.dumps({"error": error})


def clean_text(text: str) -> str:
    """Text fit for an error message: at most MAX_MESSAGE_CHARS, and encodable as UTF-8."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = text[:MAX_MESSAGE_CHARS] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def _default_code(status: int) -> str | None:
    try:
        return HTTPStatus(status).name.lower()
    except ValueError:
        return None


def invalid_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    """A documented field this server does not honour: refused, never silently ignored."""
    return ApiError(400, f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model `{model[:200]}` does not exist.", param="model", code="model_not_found")


def context_length_exceeded(max_model_len: int, detail: str, param: str) -> ApiError:
    """The phrase at the beginning is what proxies match to try a model with a longer context."""
    message = f"This model's maximum context length is {max_model_len} tokens. {detail}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")


def overloaded(reason: str, retry_after_s: int, code: str = "overloaded") -> ApiError:
    return ApiError(503, reason, code=code, headers={"Retry-After": str(max(1, retry_after_s))})


def unavailable(reason: str, code: str = "unavailable") -> ApiError:
    """The server cannot take requests now: loading, draining, or its engine is gone."""
    return ApiError(503, reason, code=code)


def internal_error() -> ApiError:
    return ApiError(500, "The server had an error while it processed the request.", code="internal_error")
