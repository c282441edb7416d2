"""CPU kernels of tokring: arrays in, arrays out. Knows neither torch nor the rest of tokring.

Arrays are numpy arrays, or anything that offers a CPU buffer by DLPack (torch tensors). bfloat16 is passed as its bits
in uint16. Nothing is converted or copied silently: a wrong dtype, shape or layout is a ValueError that names the
argument, what it must be and what it is. Long calls release the GIL. Every op has a numpy twin in `reference`.

The instruction set is chosen at run time; TOKRING_KERNELS_LEVEL=generic|avx2|avx512|avx512_vnni or `set_level` forces
one.
"""

from tokring_kernels._cpu import BLOCK_SIZE, TILE_TOKENS, BlockPool, RowStore, StepColumns, sha256_chain
from tokring_kernels.attention import paged_attention, write_kv
from tokring_kernels.decoder import Decoder, DecoderLayer
from tokring_kernels.elementwise import rms_norm, rope, silu_mul
from tokring_kernels.linear import PackedLinear
from tokring_kernels.runtime import level, num_threads, set_level, set_num_threads, supported_levels, xor_words
from tokring_kernels.sampling import (
    Logprobs,
    apply_bias,
    apply_bitmask,
    apply_penalties,
    bitmask_of,
    logprobs,
    sample,
)

__all__ = [
    "BLOCK_SIZE",
    "StepColumns",
    "TILE_TOKENS",
    "BlockPool",
    "Decoder",
    "DecoderLayer",
    "Logprobs",
    "PackedLinear",
    "RowStore",
    "apply_bias",
    "apply_bitmask",
    "apply_penalties",
    "bitmask_of",
    "level",
    "logprobs",
    "num_threads",
    "paged_attention",
    "rms_norm",
    "rope",
    "sample",
    "set_level",
    "set_num_threads",
    "sha256_chain",
    "silu_mul",
    "supported_levels",
    "write_kv",
    "xor_words",
]
