"""The gated activations: gate_up [T, 2 * width] = [gate | up] -> out [T, width], float32."""

import numpy as np

import tokring_kernels
from tokring.models.linear import Float32
from tokring.models.plan import Activation

SQRT_2_OVER_PI = np.float32(0.7978845608028654)


def apply_activation(activation: Activation, gate_up: Float32, out: Float32) -> None:
    """out = activation(gate) * up."""
    if activation == "silu":
        tokring_kernels.silu_mul(gate_up, out)
    else:
        gelu_tanh_mul(gate_up, out)


def gelu_tanh_mul(gate_up: Float32, out: Float32) -> None:
    """GELU's tanh form times up. numpy's tanh gives an element the same bits wherever it stands; torch's doesn't."""
    width = out.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    np.multiply(gate, gate, out=out)
    out *= gate
    out *= np.float32(0.044715)
    out += gate
    out *= SQRT_2_OVER_PI
    np.tanh(out, out=out)
    out += np.float32(1.0)
    out *= gate
    out *= np.float32(0.5)
    out *= up
