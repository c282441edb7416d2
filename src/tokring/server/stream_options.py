"""stream_options and stream_interval: how often a stream says something, and whether it counts tokens."""

from tokring.server.api_types import GenerationFields
from tokring.server.errors import invalid_request

MAX_STREAM_INTERVAL = 1024  # more is taken as this many


def check_stream_options(body: GenerationFields) -> None:
    """Raises ApiError (400)."""
    if not body.stream and wants_usage(body):
        raise invalid_request("stream_options are only allowed with stream.", "stream_options")
    if body.stream_interval is not None and body.stream_interval < 1:
        raise invalid_request("stream_interval must be at least 1.", "stream_interval")


def wants_usage(body: GenerationFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def wants_continuous_usage(body: GenerationFields) -> bool:
    return wants_usage(body) and body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


def stream_interval_of(body: GenerationFields, least: int) -> int:
    """Tokens in one event: the server's --stream-interval (`least`), or more if the request asks for more."""
    return max(least, min(body.stream_interval or 1, MAX_STREAM_INTERVAL))
