"""What FrontEnd reserves in a real ring is enough for the largest step, however small the ring."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair
from tokring.engine.front_end import FrontEnd
from tokring.engine.sampling import Logprobs
from tokring_ipc import ErrorCode

WIDTH = 20
SLACK = 128  # bytes: no frame is smaller than 64


@pytest.mark.parametrize("out_bytes", [1 << 17, 1 << 18, 1 << 22])
@pytest.mark.parametrize("num_rows", [16, 100, 256])
def test_the_space_that_is_reserved_holds_all_rows_with_logprobs_and_finish_rows(out_bytes, num_rows):
    with ChannelPair(out_bytes=out_bytes) as pair:
        front_end = FrontEnd(0, pair.engine, num_rows, WIDTH, prompt_positions=128)
        reserved = front_end.step_bytes(logprobs=True, prompt_logprobs=False)
        assert front_end.step_bytes(logprobs=True, prompt_logprobs=True) <= out_bytes, "no such ring is accepted"
        while (surplus := pair.engine.out_free_bytes() - reserved) > SLACK:
            num_tokens = 1 if surplus < 1024 else (min(surplus, 1 << 14) - 512) // 12
            slots = np.zeros(num_tokens, np.uint32)
            assert pair.engine.write_step(slots, slots + 1, np.zeros(num_tokens, np.int32))
        assert front_end.has_space(1, logprobs=True, prompt_logprobs=False)
        for slot in range(256):
            front_end.refuse(slot, 1, ErrorCode.INVALID_REQUEST, 1, "a test")
        rows = np.arange(num_rows, dtype=np.int32)
        top_id, top_logprob = np.zeros((num_rows, WIDTH), np.int32), np.zeros((num_rows, WIDTH), np.float32)
        logprobs = Logprobs(rows, rows + 1, np.zeros(num_rows, np.float32), top_id, top_logprob)
        slots = rows.astype(np.uint32)
        assert front_end.write(slots, slots + 1, rows, logprobs)
        assert not front_end.owes
