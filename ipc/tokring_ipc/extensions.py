"""Typed extensions of a request: a header and a payload padded to 8 bytes, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokring_ipc import _core
from tokring_ipc.enums import ExtensionKind

_HEADER = _core.struct_dtype("ExtensionHeader")


def encode_extensions(items: Sequence[tuple[ExtensionKind | int, bytes]]) -> bytes:
    """The bytes that follow a request's ids; a multiple of 8. What each kind's payload holds: docs/ipc-protocol.md."""
    parts: list[bytes] = []
    for kind, payload in items:
        header = np.zeros((), _HEADER)
        header["kind"] = int(kind)
        header["bytes"] = len(payload)
        parts += [header.tobytes(), payload, b"\0" * (-len(payload) % 8)]
    return b"".join(parts)


def decode_extensions(data: bytes) -> list[tuple[ExtensionKind, bytes]]:
    """The inverse of encode_extensions. Raises ValueError on anything it would not have written."""
    items: list[tuple[ExtensionKind, bytes]] = []
    offset = 0
    while offset < len(data):
        if len(data) - offset < _HEADER.itemsize:
            raise ValueError(f"half an extension header at byte {offset} of {len(data)}")
        header = np.frombuffer(data, _HEADER, count=1, offset=offset)[0]
        offset += _HEADER.itemsize
        size = int(header["bytes"])
        padded = (size + 7) // 8 * 8
        if padded > len(data) - offset:
            raise ValueError(f"an extension of {size} bytes ends beyond the {len(data)} bytes given")
        items.append((ExtensionKind(int(header["kind"])), bytes(data[offset : offset + size])))
        offset += padded
    return items
