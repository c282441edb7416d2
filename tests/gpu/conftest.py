"""Tests that need a GPU; elsewhere they are skipped with the reason. `make test-gpu` runs them alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokring.engine.cuda.device import (
    DRIVER_LIBRARY,
    NoCuda,
    check_driver,
    check_packages,
    check_torch,
    check_torch_build,
    read_driver,
)


def why_no_gpu() -> str | None:
    """Why CUDA can't be used on this machine, None if it can."""
    try:
        driver = read_driver(DRIVER_LIBRARY)
        check_driver(driver)
        check_torch_build()
        check_packages(driver)
        check_torch()
    except NoCuda as reason:
        return str(reason)
    return None


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Iterator[None]:
    """Skips everything here without a GPU."""
    if reason := why_no_gpu():
        pytest.skip(f"not run: no GPU: {reason}")
    yield
