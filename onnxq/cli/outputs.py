"""Where a command writes when it is not told."""

from __future__ import annotations

from pathlib import Path


def beside(model: str, ending: str) -> Path:
    """`folder/name.onnx` -> `folder/name<ending>`."""
    path = Path(model)
    return path.with_name(path.name.removesuffix(".onnx") + ending)
