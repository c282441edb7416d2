"""The protocol, model-checked: the sound model holds, and every mutant of it is caught."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "ipc" / "model" / "check.py"
spec = importlib.util.spec_from_file_location("ring_model_check", CHECK)
assert spec is not None and spec.loader is not None
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None and not os.environ.get("CI"), reason="needs the Debian package spin"
)


@pytest.mark.parametrize(
    "configuration",
    [configuration for configuration in check.CONFIGURATIONS if not configuration.long],
    ids=lambda configuration: "-".join(configuration.defines) or "no-crash",
)
def test_the_sound_model_holds_and_each_mutant_fails(configuration: object) -> None:
    assert check.as_it_must_be(configuration)
