"""The gated activations: gate_up [T, 2 * width] = [gate | up] -> out [T, width]."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tokring_kernels
from tokring.models.plan import Activation
from tokring.models.workspace import as_array

SQRT_2_OVER_PI = np.float32(0.7978845608028654)


def apply_activation(activation: Activation, gate_up: torch.Tensor, out: NDArray[Any]) -> None:
    """out = activation(gate) * up, computed in float32; `out` holds bfloat16 as bits."""
    if activation == "silu":
        tokring_kernels.silu_mul(as_array(gate_up), out)
        return
    result = gelu_tanh_mul(gate_up.float().numpy())
    out[...] = result if out.dtype == np.float32 else as_array(torch.from_numpy(result).bfloat16())


def gelu_tanh_mul(gate_up: NDArray[np.float32]) -> NDArray[np.float32]:
    """GELU's tanh form times up. In numpy: torch gives an element other bits in a vector's tail than in its body."""
    width = gate_up.shape[1] // 2
    gate = np.ascontiguousarray(gate_up[:, :width])
    inner = gate * gate
    inner *= gate
    inner *= np.float32(0.044715)
    inner += gate
    inner *= SQRT_2_OVER_PI
    np.tanh(inner, out=inner)
    inner += np.float32(1.0)
    inner *= gate
    inner *= np.float32(0.5)
    inner *= gate_up[:, width:]
    return inner
