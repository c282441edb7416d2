"""Which compiled variants of attention the tests run: a few each time, all in `make check-cuda`."""

import os
from itertools import product

from tokring_kernels.cuda.attention import HEAD_DIMS

LONG = bool(os.environ.get("TOKRING_CUDA_LONG"))

Variant = tuple[str, int, str]  # element, head_dim, KV format
QUICK: list[Variant] = [("F16", 80, "fp8"), ("Bf16", 128, "int8")]
VARIANTS: list[Variant] = list(product(("Bf16", "F16"), HEAD_DIMS, ("same", "int8", "fp8"))) if LONG else QUICK
