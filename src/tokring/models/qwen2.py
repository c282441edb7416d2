"""Qwen2 and Qwen2.5: Llama with biases on q, k and v (found by name) and sometimes a window on the upper layers."""

from tokring.models.llama import plan

__all__ = ["plan"]
