"""docs/ipc-protocol.md states the layout; its tables must be the compiled ones."""

from __future__ import annotations

import re
from pathlib import Path

from tokring_ipc import _core

DOCUMENT = (Path(__file__).parents[2] / "docs" / "ipc-protocol.md").read_text()
STATS_ENUMS = {"ProcessPhase", "StepPhase", "Role"}  # of the stats pages, not of the protocol


def tables(title: str) -> dict[str, tuple[str, list[list[str]]]]:
    """Rows of every table below a line "**`Name`**title..."; by name, with the rest of the title line."""
    found = {}
    for match in re.finditer(rf"^\*\*`(\w+)`\*\*{title}\n\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in match.group(3).splitlines()]
        found[match.group(1)] = (match.group(2), rows[2:])
    return found


def test_every_struct_is_documented_field_by_field() -> None:
    stated = tables(r"(, \d+ bytes)")
    assert {name: int(re.findall(r"\d+", title)[0]) for name, (title, _) in stated.items()} == _core.struct_sizes()
    fields = [(name, row[0], row[1], int(row[2]), int(row[3])) for name, (_, rows) in stated.items() for row in rows]
    assert sorted(fields) == sorted(_core.field_table())


def test_every_enumeration_is_documented_value_by_value() -> None:
    stated = {name: {row[0]: int(row[1]) for row in rows} for name, (_, rows) in tables("()").items()}
    assert stated == {name: values for name, values in _core.enum_table().items() if name not in STATS_ENUMS}


def test_the_numbers_in_the_prose_are_the_compiled_ones() -> None:
    assert _core.SEGMENT_HEADER_BYTES == 4096
    assert _core.SEGMENT_CONTROL_OFFSET == 1024
    assert _core.DATA_ALIGNMENT == _core.MIN_RING_BYTES == 65536
    assert _core.FRAME_ALIGNMENT == 64
    assert _core.MAX_LOGPROBS == 20
    assert _core.MAX_STREAM_SLOTS == 1 << 20
    assert _core.MAX_CONTROL_MESSAGE_BYTES == 65536
    assert _core.SEGMENT_MAGIC.to_bytes(8, "little") == b"TOKRING1"
    assert _core.CONTROL_MAGIC.to_bytes(4, "little") == b"TOKC"


def test_every_memory_order_of_the_document_is_the_codes() -> None:
    """The order table's sites exist in the one place that has atomics."""
    ring = (Path(__file__).parents[2] / "ipc" / "include" / "tokring" / "ring.hpp").read_text()
    for site, order in {
        "exchange<std::memory_order_seq_cst>(ring_.write_position": "kPublish",
        "load<std::memory_order_seq_cst>(ring_.wake_at": "kPublishWakeAt",
        "load<std::memory_order_acquire>(ring_.read_position": "kSpace",
        "store<std::memory_order_release>(ring_.read_position": "kRelease",
        "exchange<std::memory_order_seq_cst>(ring_.wake_at": "kArm",
        "store<std::memory_order_relaxed>(ring_.wake_at": "kDisarm",
    }.items():
        assert re.search(re.escape(site) + rf"[^;]*Site::{order}\)", ring), site


def test_all_atomics_are_in_one_file() -> None:
    headers = (Path(__file__).parents[2] / "ipc").rglob("*.?pp")
    assert [path.name for path in headers if re.search(r"std::atomic(_ref|_thread_fence)?\b", path.read_text())] == [
        "atomics.hpp"
    ]
