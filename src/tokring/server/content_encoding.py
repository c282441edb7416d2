"""Decompressing request bodies: when a handler wants one, and no further than its limit.

aiohttp would do it as bytes arrive, of refused requests too: two megabytes of a bomb cost the event loop seconds.
"""

import zlib

ENCODINGS = ("gzip", "deflate")
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS


class BadEncodingError(ValueError):
    """The body is not compressed as its head says; the message is fit for the client."""


def decompressed(data: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """The body, None if it is longer than `max_bytes`. `encoding`: of ENCODINGS. Raises BadEncodingError.

    Takes up to some ten milliseconds for the 8 MiB of the default limit, without the GIL: for a thread.
    """
    decoder = zlib.decompressobj(_window_bits(data, encoding))
    try:
        body = decoder.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise BadEncodingError(f"it is not {encoding}: {error}") from None
    if len(body) > max_bytes:
        return None
    if not decoder.eof:
        raise BadEncodingError(f"its {encoding} data ends too early")
    if decoder.unused_data:
        raise BadEncodingError(f"something follows its {encoding} data")
    return body


def _window_bits(data: bytes, encoding: str) -> int:
    """`deflate` is with zlib's head (RFC 9110); some clients send it bare."""
    if encoding == "gzip":
        return _GZIP_WINDOW_BITS
    has_head = data[:1] != b"" and data[0] & 0x0F == zlib.DEFLATED
    return zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS
