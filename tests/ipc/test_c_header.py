"""tokring.h says what layout.hpp says; the example client in C gets its tokens from a real engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.test_engine_process import Served
from tests.support.tiny_hf import write_tiny_hf
from tokring_ipc import _core

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "ipc" / "examples" / "client.c"
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wno-sign-conversion"]
FLAGS += ["-I", str(ROOT / "ipc" / "include")]
C_TYPES = {"u2": "uint16_t", "u4": "uint32_t", "u8": "uint64_t", "i4": "int32_t", "i8": "int64_t", "f4": "float"}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None and not os.environ.get("CI"), reason="needs gcc")


def snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def static_asserts() -> Iterator[str]:
    """One line of C for each compiled field, struct, enumerator and number."""
    for structure, field, kind, offset, count in _core.field_table():
        member = f"((struct tokring_{snake(structure)}*)0)->{field}"
        element = f"{member}[0]" if count > 1 else member
        yield f'_Static_assert(offsetof(struct tokring_{snake(structure)}, {field}) == {offset}, "{field}");'
        yield f'_Static_assert(_Generic({element}, {C_TYPES[kind]}: 1, default: 0), "{field}");'
        yield f'_Static_assert(sizeof {member} == {int(kind[1]) * count}, "{field}");'
    for structure in {row[0] for row in _core.field_table()} - {"SegmentControl"}:
        size = _core.struct_dtype(structure).itemsize
        yield f'_Static_assert(sizeof(struct tokring_{snake(structure)}) == {size}, "{structure}");'
    for enumeration, members in _core.enum_table().items():
        for name, value in members.items():
            yield f'_Static_assert(TOKRING_{snake(enumeration).upper()}_{name} == {value}, "{name}");'
    numbers = {
        "LAYOUT_VERSION": _core.LAYOUT_VERSION,
        "LAYOUT_HASH": _core.LAYOUT_HASH,
        "SEGMENT_MAGIC": _core.SEGMENT_MAGIC,
        "CONTROL_MAGIC": _core.CONTROL_MAGIC,
        "AWAKE": _core.AWAKE,
        "CONTROL_OFFSET": _core.SEGMENT_CONTROL_OFFSET,
        "HEADER_BYTES": _core.SEGMENT_HEADER_BYTES,
        "DATA_ALIGNMENT": _core.DATA_ALIGNMENT,
    }
    for name, number in numbers.items():
        yield f'_Static_assert(TOKRING_{name} == {number}ull, "{name}");'


def test_the_c_header_has_the_compiled_layout(tmp_path: Path) -> None:
    source = tmp_path / "layout.c"
    text = ["#define _GNU_SOURCE", "#include <stddef.h>", '#include "tokring/tokring.h"', *static_asserts()]
    assert len(text) > 300
    source.write_text("\n".join(text) + "\n")
    subprocess.run(["gcc", *FLAGS, "-fsyntax-only", str(source)], check=True)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert len(CLIENT.read_text().splitlines()) <= 60
    program = tmp_path_factory.mktemp("client") / "client"
    subprocess.run(["gcc", *FLAGS, str(CLIENT), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A mock engine and the socket where it waits for foreign front ends."""
    folder = tmp_path_factory.mktemp("foreign")
    write_tiny_hf(folder / "model")
    path = folder / "ipc.sock"
    served = Served(folder / "model", ipc_listen=str(path))
    try:
        served.message("ready")
        yield served, path
    finally:
        served.close()


def run(client: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([client, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_c_client_prints_the_engines_tokens(client: Path, listening: tuple[Served, Path]) -> None:
    _, path = listening
    done = run(client, path, 12, 1, 2, 3)
    assert (done.returncode, done.stderr) == (0, "")
    tokens = [int(line) for line in done.stdout.split()]
    assert len(tokens) == 12
    assert run(client, path, 12, 1, 2, 3).stdout == done.stdout
    assert run(client, path, 5, 1, 2, 3).stdout.split() == done.stdout.split()[:5]


def test_a_client_after_64_others_is_still_served(client: Path, listening: tuple[Served, Path]) -> None:
    served, path = listening
    open_fds = f"/proc/{served.child.pid}/fd"
    run(client, path, 1, 1)
    before = len(os.listdir(open_fds))
    for _ in range(64):
        assert run(client, path, 1, 1).returncode == 0
    assert len(os.listdir(open_fds)) <= before + 8  # the last ones may not be gone yet


def test_the_socket_is_private_to_the_user(listening: tuple[Served, Path]) -> None:
    assert listening[1].stat().st_mode & 0o777 == 0o600


def test_a_client_without_server_says_why(client: Path, tmp_path: Path) -> None:
    done = run(client, tmp_path / "nobody.sock", 1, 1)
    assert done.returncode == 1
    assert "No such file" in done.stderr
