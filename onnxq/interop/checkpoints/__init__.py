"""Checkpoints that other tools quantized, read from their bytes: those in safetensors, and GGUF."""

from onnxq.interop.checkpoints.base import Checkpoint, CheckpointWeight, InputScale, WeightCodes
from onnxq.interop.checkpoints.registry import open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointWeight",
    "InputScale",
    "WeightCodes",
    "open_checkpoint",
]
