"""Model files without torch: configuration, tokenizer, chat template and mapped weights, from two formats.

A Hugging Face directory (safetensors) and a GGUF file look the same from outside: `open_checkpoint`.
"""

from tokring.checkpoint.checkpoint import Checkpoint, model_name_of, open_checkpoint
from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.model_config import ModelConfig
from tokring.checkpoint.quantized_tensor import QuantizedTensor

__all__ = ["Checkpoint", "CheckpointError", "ModelConfig", "QuantizedTensor", "model_name_of", "open_checkpoint"]
