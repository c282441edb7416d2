from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ipc.channel_pair import ChannelPair


@pytest.fixture
def pair() -> Iterator[ChannelPair]:
    with ChannelPair() as pair:
        yield pair
