"""Mistral: Llama with a sliding window on every layer."""

from tokring.models.llama import plan

__all__ = ["plan"]
