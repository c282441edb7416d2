"""The file format of a recording: a header, then entries in the order in which a front end saw them.

Header (HEADER, then JSON, padded to 8 bytes): magic, format version, bytes of the JSON, layout hash of the rings
(frames are kept as they stood in the ring), CLOCK_MONOTONIC and UTC of the file's start, both in ns.
Entry (ENTRY, then payload, padded to 8 bytes): bytes of the whole entry, kind, padding bytes, CLOCK_MONOTONIC in ns.

    REQUEST    a RequestRecord, its token ids (i32), its extensions
    FRAME      one OUT frame as it stood in the ring
    CANCEL     stream slot, slot generation (u32 each)
    GAP        how many entries are missing here because the writer could not keep up (u64)
    CONNECTED  nothing: a new connection; the requests of the one before are over
"""

import enum
import struct

MAGIC = b"TOKRREC\0"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sIIQQQ")
ENTRY = struct.Struct("<IHHQ")
CANCEL = struct.Struct("<II")
GAP = struct.Struct("<Q")


class EntryKind(enum.IntEnum):
    REQUEST = 1
    FRAME = 2
    CANCEL = 3
    GAP = 4
    CONNECTED = 5


class RecordingError(Exception):
    """A recording cannot be read or written; one line for the user."""


def padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % 8)


def encode_entry(kind: EntryKind, time_ns: int, payload: bytes) -> bytes:
    pad = padding(len(payload))
    return ENTRY.pack(ENTRY.size + len(payload) + len(pad), kind, len(pad), time_ns) + payload + pad
