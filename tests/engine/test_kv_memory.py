"""Memory for the KV cache is what there is, or the start is refused with the remedy."""

import pytest

from tokring.engine.kv_memory import KvMemoryError, available_memory_bytes, check_available, num_kv_blocks


def test_one_sequence_must_fit() -> None:
    assert num_kv_blocks(bytes_per_block=10, block_size=16, max_model_len=160, memory_bytes=105) == 10
    with pytest.raises(KvMemoryError, match="--max-model-len 144 or less, or --kv-cache-memory-bytes 100 or more"):
        num_kv_blocks(bytes_per_block=10, block_size=16, max_model_len=160, memory_bytes=99)


def test_more_than_the_machine_has_is_refused() -> None:
    check_available(1 << 20, available_memory_bytes())
    with pytest.raises(KvMemoryError, match="smaller --kv-cache-memory-bytes"):
        check_available(1 << 60, available_memory_bytes())
