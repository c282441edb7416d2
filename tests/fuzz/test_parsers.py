"""Short runs of the fuzz targets of files, templates and grammars, the same each time; long ones: make fuzz-…"""

import logging

import pytest

from tests.fuzz import fuzz_files, fuzz_schemas, fuzz_templates
from tests.fuzz.campaign import Finding, campaign


def test_damaged_model_files_are_read_or_refused() -> None:
    outcomes = campaign(fuzz_files.case, seed=1, num_cases=150)
    assert outcomes["gguf refused"] and outcomes["safetensors refused"] and outcomes["gguf read"]


def test_hostile_chat_templates_render_or_are_refused() -> None:
    outcomes = campaign(fuzz_templates.case, seed=1, num_cases=300)
    assert outcomes["refused"] and outcomes["rendered"]


def test_random_grammars_compile_or_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        outcomes = campaign(fuzz_schemas.case, seed=1, num_cases=40)
    assert outcomes["json_schema compiled"] and sum(outcomes.values()) == 40
    assert caplog.text == ""


def test_a_finding_names_its_seed() -> None:
    with pytest.raises(Finding, match="case 5000015: ZeroDivisionError"):
        campaign(lambda rng: str(1 // 0), seed=5, num_cases=3)
