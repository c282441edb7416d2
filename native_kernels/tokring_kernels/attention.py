"""Paged attention and the KV write. Cache layout: [num_blocks, num_kv_heads, 16, head_dim].

Caches hold float32, bfloat16 bits, or int8 codes with one float32 scale per cached vector (value = scale * code).
"""

from tokring_kernels import _cpu
from tokring_kernels.array import Array


def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_table: Array,
    query_start: Array,
    seq_lens: Array,
    scale: float,
    out: Array,
    *,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    num_threads: int = 0,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
) -> None:
    """Causal attention of a batch of sequences over their cached keys and values; decode and chunked prefill in one.

    query, out: [num_tokens, num_heads, head_dim] float32 or bfloat16 bits; the token stride is free (a slice of a fused
        qkv is fine). The tokens of sequence i are rows query_start[i] to query_start[i + 1], the last ones of its
        seq_lens[i] positions; their own keys and values are in the cache already (write_kv).
    key_cache, value_cache: [num_blocks, num_kv_heads, 16, head_dim], both float32, bfloat16 bits or int8. head_dim is
        a multiple of 8; num_heads a multiple of num_kv_heads.
    key_scale, value_scale: float32[num_blocks, num_kv_heads, 16], for int8 caches only.
    block_table: int32[num_seqs, >= ceil(seq_len / 16)]. query_start: int32[num_seqs + 1]. seq_lens: int32[num_seqs].
    sliding_window: a token sees that many positions, itself included; 0 = all. Blocks before it are not read.
    soft_cap: scores become cap * tanh(score / cap); 0 = none.
    num_threads: at most so many of the pool; 0 = all.

    Computes in float32. The bits of an output row depend on that row's query and its keys and values alone: not on the
    batch, the chunk, the block ids or the threads. Raises ValueError for bad arguments, out-of-range block ids too.
    """
    _cpu.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start,
        seq_lens,
        scale,
        out,
        sliding_window,
        soft_cap,
        num_threads,
        key_scale,
        value_scale,
    )


def write_kv(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    *,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
) -> None:
    """Writes each token's key and value to its cache slot; slot = block_id * 16 + offset, -1 = skip the token.

    key, value: [num_tokens, num_kv_heads, head_dim] float32 or bfloat16 bits, token stride free; slot_mapping:
    int64[num_tokens]. Converted to the cache's type, rounding to nearest even; an int8 cache gets
    scale = largest magnitude / 127 of each vector. Raises ValueError for bad arguments.
    """
    _cpu.write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
