"""The engine without a server: LLM is the entrance, everything else supports it."""

import os

# Before tokenizers is imported: its thread pool would compete with the engine for cores, and warn after every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokring.offline.errors import EngineDied, OfflineError, PromptError  # noqa: E402
from tokring.offline.llm import LLM  # noqa: E402
from tokring.offline.output import CompletionOutput, Logprob, RequestOutput, Usage  # noqa: E402
from tokring.sampling_params import ParameterError, SamplingParams, StructuredOutput  # noqa: E402

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineDied",
    "Logprob",
    "OfflineError",
    "ParameterError",
    "PromptError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "Usage",
]
