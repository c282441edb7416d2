"""Which architectures there are, by Hugging Face's model_type."""

from collections.abc import Callable

from tokring.checkpoint import ModelConfig
from tokring.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from tokring.models.errors import ModelError
from tokring.models.plan import DecoderPlan

ARCHITECTURES: dict[str, Callable[[ModelConfig], DecoderPlan]] = {
    "llama": llama.plan,
    "mistral": mistral.plan,
    "qwen2": qwen2.plan,
    "qwen3": qwen3.plan,
    "gemma2": gemma2.plan,
    "gemma3_text": gemma3.plan,
    "phi3": phi3.plan,
}


def plan_of(config: ModelConfig) -> DecoderPlan:
    """Raises ModelError for an architecture that isn't built."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"model type {config.architecture!r} is not supported; supported are {known}")
    return ARCHITECTURES[config.architecture](config)
