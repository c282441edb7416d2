"""The compiled layout: its golden copy, its numpy dtypes, its stubs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np

import tokring_ipc
from tokring_ipc import FINISH_DTYPE, REQUEST_DTYPE, _core, enums

GOLDEN = Path(__file__).parent / "golden_layout.json"


def compiled_layout() -> dict[str, object]:
    structs: dict[str, dict[str, list[object]]] = {}
    for struct, field, type_, offset, count in _core.field_table():
        structs.setdefault(struct, {})[field] = [type_, offset, count]
    return {
        "layout_version": _core.LAYOUT_VERSION,
        "layout_hash": f"{_core.LAYOUT_HASH:#018x}",
        "sizes": _core.struct_sizes(),
        "structs": structs,
        "enums": {name: values for name, values in _core.enum_table().items() if not name.startswith("Stats")},
    }


def test_every_offset_is_as_recorded_so_that_a_change_is_deliberate() -> None:
    # After a deliberate change (and a new kLayoutVersion): python -m tests.ipc.test_layout
    assert compiled_layout() == json.loads(GOLDEN.read_text())


def test_structs_have_no_implicit_padding() -> None:
    for name, size in _core.struct_sizes().items():
        if name == "SegmentControl":
            continue  # 128 bytes a word, on purpose
        assert (
            sum(_core.struct_dtype(name)[field].itemsize for field in _core.struct_dtype(name).names or ()) == size
        ), name


def test_every_changing_word_has_its_own_128_bytes() -> None:
    offsets = [offset for struct, _, _, offset, _ in _core.field_table() if struct == "SegmentControl"]
    assert all(offset % 128 == 0 for offset in offsets)
    assert len(set(offsets)) == len(offsets)


def test_dtypes_have_the_compiled_sizes() -> None:
    assert REQUEST_DTYPE.itemsize == 144
    assert REQUEST_DTYPE["stop_ids"].shape == (8,)
    assert FINISH_DTYPE.itemsize == 64
    assert FINISH_DTYPE["end_ns"] == np.dtype("<u8")


def test_the_stub_of_the_enumerations_names_exactly_the_compiled_members() -> None:
    stub = ast.parse(Path(enums.__file__).with_suffix(".pyi").read_text())
    stated = {
        node.name: [
            target.id
            for item in node.body
            if isinstance(item, ast.Assign)
            for target in item.targets
            if isinstance(target, ast.Name)
        ]
        for node in stub.body
        if isinstance(node, ast.ClassDef)
    }
    assert stated == {name: list(values) for name, values in _core.enum_table().items()}


def test_the_stub_of_the_core_names_exactly_what_is_compiled() -> None:
    stub = ast.parse(Path(_core.__file__).parent.joinpath("_core.pyi").read_text())
    aliases = {"U8", "U32", "I32", "F32", "Records", "Buffer", "ChannelStats"}
    stated = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stated |= {
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert stated - aliases == {name for name in dir(_core) if not name.startswith("_")}
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and node.name not in aliases:
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {"__init__"}
            assert methods <= set(dir(getattr(_core, node.name))), node.name
            compiled = {name for name in vars(getattr(_core, node.name)) if not name.startswith("_")}
            assert compiled <= methods, node.name


def test_all_public_names_exist() -> None:
    assert [name for name in tokring_ipc.__all__ if not hasattr(tokring_ipc, name)] == []


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(compiled_layout(), indent=1) + "\n")
