"""tokring: an LLM inference server built on shared-memory token rings.

`tokring.LLM` is the same engine without a server, for scripts; it is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokring.offline import (
        LLM,
        CompletionOutput,
        EngineDied,
        OfflineError,
        ParameterError,
        PromptError,
        RequestOutput,
        SamplingParams,
        StructuredOutput,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineDied",
    "OfflineError",
    "ParameterError",
    "PromptError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    """Loads the offline part on first use: `import tokring` alone costs nothing."""
    if name in __all__:
        from tokring import offline

        return getattr(offline, name)
    raise AttributeError(f"module 'tokring' has no attribute {name!r}")
