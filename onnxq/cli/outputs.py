"""Default names of output files."""

from __future__ import annotations

from pathlib import Path


def name_beside(model: str, ending: str) -> Path:
    """The path of the model with another ending: `folder/name.onnx` -> `folder/name<ending>`."""
    path = Path(model)
    return path.with_name(path.name.removesuffix(".onnx") + ending)
