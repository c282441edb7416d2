"""The kernels that ops.py launches: where each is, what it takes, how many registers it may use."""

from __future__ import annotations

from tokring_kernels.cuda.kernel import Kernel

ACTIVATIONS = ("bf16", "f16")
CACHES = ("int8", "fp8")  # or as the activations
_C_TYPES = {"bf16": "Bf16", "f16": "F16", "f32": "float", "int8": "Int8", "fp8": "Fp8"}


def _by_type(
    source: str,
    function: str,
    parameters: str,
    registers: int,
    names: tuple[str, ...],
    *types: tuple[str, ...],
    wide_loads: bool = True,
) -> dict[tuple[str, ...], Kernel]:
    """One kernel for each combination of element types, by these; names are the macros that the source wants."""
    return {
        kinds: Kernel(
            source,
            function,
            parameters,
            tuple((name, _C_TYPES[kind]) for name, kind in zip(names, kinds, strict=True)),
            max_registers=registers,
            wide_loads=wide_loads,
        )
        for kinds in types
    }


_RESIDUALS = tuple((act, residual) for act in ACTIVATIONS for residual in (act, "f32"))

# ---- by (activation, residual) ----
EMBED = _by_type("residual.cu", "embed", "pppiif", 40, ("ELEMENT", "RESIDUAL"), *_RESIDUALS)
ADD_RMS_NORM = _by_type("residual.cu", "add_rms_norm", "ppppppiff", 64, ("ELEMENT", "RESIDUAL"), *_RESIDUALS)
# ---- by (activation, cache) ----
ROPE_KV = _by_type(
    "rope_kv.cu",
    "rope_kv",
    "ppppppppppppiiiiiiff",
    64,
    ("ELEMENT", "CACHED"),
    *((act, cache) for act in ACTIVATIONS for cache in (act, *CACHES)),
    wide_loads=False,  # a lane holds pairs that rotate together: 32-bit accesses, neighbouring lanes side by side
)
# ---- by (activation,) ----
SILU_MUL = _by_type("elementwise.cu", "silu_mul", "ppi", 48, ("ELEMENT",), ("bf16",), ("f16",))
GELU_TANH_MUL = _by_type("elementwise.cu", "gelu_tanh_mul", "ppi", 48, ("ELEMENT",), ("bf16",), ("f16",))
WIDEN_LOGITS = _by_type("elementwise.cu", "widen_logits", "pplf", 48, ("ELEMENT",), ("bf16",), ("f16",))

CAP_LOGITS = Kernel("elementwise.cu", "cap_logits", "pplf", (("ELEMENT", "Bf16"),), max_registers=48, wide_loads=True)
SCATTER_METADATA = Kernel("state.cu", "scatter_metadata", "ppii", max_registers=40)
BEGIN_DECODE = Kernel("state.cu", "begin_decode", "ppppii", max_registers=40)
ADVANCE_DECODE = Kernel("state.cu", "advance_decode", "pppi", max_registers=40)
COUNT_HISTORY = Kernel("logits.cu", "count_history", "pppippi", max_registers=40)
NOTE_SAMPLED = Kernel("logits.cu", "note_sampled", "pppppii", max_registers=40)
APPLY_PENALTIES = Kernel("logits.cu", "apply_penalties", "pppppppi", max_registers=40)
APPLY_BIAS = Kernel("logits.cu", "apply_bias", "pppppiiii", max_registers=40)
BAN_WORDS = Kernel("logits.cu", "ban_words", "ppppppppiiii", max_registers=40)
APPLY_BITMASK = Kernel("logits.cu", "apply_bitmask", "ppppiiii", max_registers=40)
ROW_MAXIMA = Kernel("logits.cu", "row_maxima", "pppii", max_registers=48, wide_loads=True)
SAMPLE = Kernel("sampling.cu", "sample", "pppppppppppui", max_registers=64, wide_loads=True)
LOGPROBS = Kernel("logprobs.cu", "logprobs", "ppppppppii", max_registers=64, wide_loads=True)

# What rules, grammars and logprobs need, which steps without any never launch.
OF_SPECIAL_STEPS = (
    COUNT_HISTORY, NOTE_SAMPLED, APPLY_PENALTIES, APPLY_BIAS, BAN_WORDS, APPLY_BITMASK, ROW_MAXIMA, LOGPROBS
)  # fmt: skip

KERNELS: tuple[Kernel, ...] = (
    *EMBED.values(),
    *ADD_RMS_NORM.values(),
    *ROPE_KV.values(),
    *SILU_MUL.values(),
    *GELU_TANH_MUL.values(),
    *WIDEN_LOGITS.values(),
    CAP_LOGITS,
    SCATTER_METADATA,
    BEGIN_DECODE,
    ADVANCE_DECODE,
    COUNT_HISTORY,
    NOTE_SAMPLED,
    APPLY_PENALTIES,
    APPLY_BIAS,
    BAN_WORDS,
    APPLY_BITMASK,
    ROW_MAXIMA,
    SAMPLE,
    LOGPROBS,
)
