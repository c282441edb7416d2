"""Every kernel test runs at every instruction-set level this processor has."""

from collections.abc import Iterator

import pytest

import tokring_kernels


@pytest.fixture(params=tokring_kernels.supported_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = tokring_kernels.level()
    tokring_kernels.set_level(request.param)
    yield request.param
    tokring_kernels.set_level(before)


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"{n}threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = tokring_kernels.num_threads()
    tokring_kernels.set_num_threads(request.param)
    yield request.param
    tokring_kernels.set_num_threads(before)
