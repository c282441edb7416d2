"""Builds STEP frames byte by byte from the layout's words, for tests that need no ring."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np

STEP, MULTI_TOKEN, HAS_SECTIONS = 1, 1, 2
FINISH_SECTION, LOGPROBS_SECTION = 1, 2
STOP, LENGTH, ABORT = 1, 2, 3

Row = tuple[int, int, Sequence[int]]  # stream slot, slot generation, token ids
Logprob = tuple[float, Sequence[tuple[int, float]]]  # of the chosen token; (id, logprob) of the best


def padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def finish_record(slot: int, generation: int, reason: int = LENGTH, **fields: int) -> bytes:
    order = "error_code stop_id num_prompt_tokens num_cached_tokens num_output_tokens num_preemptions scheduled_ns"
    names = [*order.split(), "first_token_ns", "end_ns", "num_draft_tokens", "num_accepted_tokens"]
    assert set(fields) <= set(names)
    values = [fields.get(name, -1 if name == "stop_id" else 0) for name in names]
    return struct.pack("<IIHHiIIIIQQQII", slot, generation, reason, *values)


def logprobs_section(logprobs: Mapping[int, Logprob], width: int) -> bytes:
    rows = sorted(logprobs.items())
    top = [[*pairs, *[(-1, 0.0)] * (width - len(pairs))] for _, (_, pairs) in rows]
    columns = [
        np.array([index for index, _ in rows], np.uint32),
        np.ones(len(rows), np.int32),
        np.array([chosen for _, (chosen, _) in rows], np.float32),
        np.array([[token_id for token_id, _ in pairs] for pairs in top], np.int32),
        np.array([[value for _, value in pairs] for pairs in top], np.float32),
    ]
    payload = padded(b"".join(column.tobytes() for column in columns), 8)
    return struct.pack("<HHIII", LOGPROBS_SECTION, width, len(rows), len(payload), 0) + payload


def step_frame(
    rows: Sequence[Row] = (),
    finish: Sequence[bytes] = (),
    logprobs: Mapping[int, Logprob] | None = None,
    *,
    width: int = 0,
    publish_ns: int = 1,
    multi: bool | None = None,
) -> np.ndarray:
    """uint8 array holding the frame; keep it alive while its address is used."""
    if multi is None:
        multi = any(len(ids) != 1 for _, _, ids in rows)
    columns = [np.array([row[0] for row in rows], np.uint32), np.array([row[1] for row in rows], np.uint32)]
    if multi:
        columns.append(np.array([len(row[2]) for row in rows], np.uint32))
    columns.append(np.array([token_id for row in rows for token_id in row[2]], np.int32))
    body = b"".join(column.tobytes() for column in columns)
    sections = b""
    if finish:
        sections += struct.pack("<HHIII", FINISH_SECTION, 0, len(finish), 64 * len(finish), 0) + b"".join(finish)
    if logprobs:
        sections += logprobs_section(logprobs, width)
    flags = MULTI_TOKEN * multi + HAS_SECTIONS * bool(sections)
    if sections:
        body = padded(body, 8) + sections
    length = 32 + len(body)
    length += -length % 64
    header = struct.pack("<IHHQQII", length, STEP, flags, 0, publish_ns, len(rows), 0)
    return np.frombuffer(bytearray(padded(header + body, 64)), dtype=np.uint8)
