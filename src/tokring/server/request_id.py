"""Ids of requests: taken from the client or made here; on every answer, in logs, and in the answer's `id`."""

import itertools
import re
import secrets

from aiohttp import web

from tokring.server.errors import ApiError

REQUEST_ID = "X-Request-Id"
_KNOWN: web.RequestKey[str] = web.RequestKey("request_id", str)
_PREFIX = secrets.token_hex(8)  # one draw for the process: each is a system call
_numbers = itertools.count()
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def new_request_id() -> str:
    return f"{_PREFIX}{next(_numbers):016x}"


def request_id_of(request: web.Request) -> str:
    """The client's X-Request-Id if it is harmless, else one of ours. Nothing is keyed by it: duplicates are fine."""
    known = request.get(_KNOWN)
    if known is None:
        given = request.headers.get(REQUEST_ID)
        known = given if given and _SAFE_ID.fullmatch(given) else new_request_id()
        request[_KNOWN] = known
    return known


def answer_id(request: web.Request, prefix: str, given: str | None) -> str:
    """The `id` of an answer: from the body's request_id, else from the header. Raises ApiError (400) for an odd one."""
    if given is None:
        return prefix + request_id_of(request)
    if not _SAFE_ID.fullmatch(given):
        raise ApiError(400, "request_id must be 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -", param="request_id")
    return prefix + given
