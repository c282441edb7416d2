"""Reading and decoding request bodies: orjson, then msgspec; every fault is an ApiError that names the field."""

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web

from tokring.server.content_encoding import ENCODINGS, BadEncodingError, decompressed
from tokring.server.errors import ApiError, body_too_large, invalid_request
from tokring.server.json_text import JsonError, check_json_shape, load_checked_json
from tokring.server.middleware import FRONT_END, go_on

MAX_BYTES_ON_LOOP = 1 << 20  # a larger body is looked over in a thread
_FIELD = re.compile(r"`\$\.(?:sampling_params\.)?([A-Za-z0-9_]+)")
_MISSING = re.compile(r"missing required field `([A-Za-z0-9_]+)`")
_Body = TypeVar("_Body")


async def read_body(request: web.Request, kind: type[_Body]) -> _Body:
    """The JSON body as `kind`. Raises ApiError: 400, 408 (client too slow), 413, 415."""
    return convert(await read_object(request), kind)


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON body, an object. Raises ApiError like read_body."""
    data = await _read_bytes(request)
    try:
        if len(data) > MAX_BYTES_ON_LOOP:
            await asyncio.to_thread(check_json_shape, data)
        else:
            check_json_shape(data)
        value = load_checked_json(data)
    except JsonError as error:
        raise invalid_request(f"The request body is {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_request("The request body must be a JSON object.", code="invalid_json")
    return value


async def _read_bytes(request: web.Request) -> bytes:
    """The whole body, decompressed. Nothing of it is asked for or waited for if its head is reason to refuse it."""
    _check_content_type(request)
    encoding = _content_encoding(request)
    settings = request.app[FRONT_END].config.server
    timeout_s, max_bytes = settings.request_timeout, settings.max_body_bytes
    if request.content_length is not None and request.content_length > max_bytes:
        raise body_too_large(max_bytes)
    await go_on(request)
    try:
        async with asyncio.timeout(timeout_s):
            data = await request.read()
    except TimeoutError:
        raise ApiError(408, f"The request body was not complete within {timeout_s:g} seconds.") from None
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(max_bytes) from None
    except web.RequestPayloadError as error:
        raise invalid_request(f"The request body cannot be read: {error}.", code="invalid_body") from None
    return data if encoding is None else await _decompressed(data, encoding, max_bytes)


def convert(value: dict[str, Any], kind: type[_Body]) -> _Body:
    """Raises ApiError (400) naming the field that has the wrong type or is missing."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _FIELD.search(message) or _MISSING.search(message)
        raise invalid_request(message, found[1] if found else None, "invalid_type") from None


def _content_encoding(request: web.Request) -> str | None:
    """One of ENCODINGS; None: the body is not compressed. Raises ApiError (415) for others."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding in ("identity", ""):
        return None
    if encoding not in ENCODINGS:
        raise ApiError(415, f"The Content-Encoding must be {' or '.join(ENCODINGS)}, not {encoding[:40]!r}.")
    return encoding


async def _decompressed(data: bytes, encoding: str, max_bytes: int) -> bytes:
    try:
        body = await asyncio.to_thread(decompressed, data, encoding, max_bytes)
    except BadEncodingError as error:
        raise invalid_request(f"The request body cannot be read: {error}.", code="invalid_body") from None
    if body is None:
        raise body_too_large(max_bytes)
    return body


def _check_content_type(request: web.Request) -> None:
    """JSON, or nothing said. Forms and plain text are what a foreign page can send without a CORS preflight."""
    given = request.headers.get("Content-Type")
    if not given:
        return
    media_type, _, parameters = given.partition(";")
    media_type = media_type.strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, f"The Content-Type must be application/json, not {media_type[:80]!r}.")
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"The charset must be utf-8, not {charset[1][:40]!r}.")
