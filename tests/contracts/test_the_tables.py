"""The tables of README.md name tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [line for line in (TESTS / "contracts" / "README.md").read_text(encoding="utf-8").splitlines() if "| " in line]


def named_tests() -> list[tuple[str, str]]:
    """(file, name) of every test that a row names."""
    found = []
    for row in ROWS:
        for item in row.rstrip("| ").rpartition(" | ")[2].split("; "):
            file, colon, names = item.partition(".py: ")
            if colon:
                found += [(file.strip() + ".py", name.strip()) for name in names.split(", ")]
    return found


def exists(file: str, name: str) -> bool:
    path = TESTS / file
    if not path.exists():
        return False
    pattern = (
        r"def test_" if name == "*" else rf"def test_{re.escape(name)}\(|class {re.escape(name)}|\b{name}\.TestCase"
    )
    return re.search(pattern, path.read_text(encoding="utf-8")) is not None


def test_every_test_that_a_row_names_exists() -> None:
    named = named_tests()
    assert len(named) > 150
    assert [f"{file}: {name}" for file, name in named if not exists(file, name)] == []


def test_all_thirteen_points_behind_a_proxy_have_a_row() -> None:
    points = {row.split("|")[1].strip() for row in ROWS}
    assert {str(point) for point in range(1, 14)} <= points
