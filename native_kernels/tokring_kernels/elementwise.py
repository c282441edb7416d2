"""RMSNorm, rotary embedding and SiLU * mul of token rows. Computed in float32, whatever the arrays hold."""

from tokring_kernels import _cpu
from tokring_kernels.array import Array


def rms_norm(x: Array, weight: Array, epsilon: float, out: Array, *, num_threads: int = 0) -> None:
    """out = x / sqrt(mean(x^2) + epsilon) * weight, row by row.

    x, out: [num_tokens, width] float32 or bfloat16 bits, row stride free; weight: float32[width].
    """
    _cpu.rms_norm(x, weight, epsilon, out, num_threads)


def rope(x: Array, cosine: Array, sine: Array, positions: Array) -> None:
    """Rotates the heads of x in place: pairs (i, i + rotary_dim / 2), the layout of Hugging Face checkpoints.

    x: [num_tokens, num_heads, head_dim] float32 or bfloat16 bits, token stride free; cosine, sine: float32
    [num_positions, rotary_dim / 2] tables; positions: int32 or int64[num_tokens]. Dimensions after rotary_dim stay.
    """
    _cpu.rope(x, cosine, sine, positions)


def silu_mul(gate_up: Array, out: Array, *, num_threads: int = 0) -> None:
    """out = silu(gate) * up, where gate_up = [gate | up].

    gate_up: [num_tokens, 2 * width], out: [num_tokens, width], float32 or bfloat16 bits, row stride free.
    """
    _cpu.silu_mul(gate_up, out, num_threads)
