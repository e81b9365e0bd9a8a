"""Where results go, settled before the work begins so that nobody waits for a refusal."""

from __future__ import annotations

import os
from pathlib import Path

from onnxq.errors import OutputError


def beside(model: str, ending: str) -> Path:
    """`folder/name.onnx` -> `folder/name<ending>`."""
    path = Path(model)
    return path.with_name(path.name.removesuffix(".onnx") + ending)


def check_free(model: str, *outputs: str | Path | None, force: bool = False) -> None:
    """Raise OutputError for an output that is the input, exists without `force`, or has no folder to be in."""
    if not os.path.exists(model):
        return  # The model's own error says more than one about a folder beside it.
    wanted = [Path(output) for output in outputs if output is not None]
    for position, path in enumerate(wanted):
        if os.path.realpath(path) == os.path.realpath(model):
            raise OutputError(str(path), "is the input model, which is never overwritten", "choose another -o")
        if any(os.path.realpath(path) == os.path.realpath(other) for other in wanted[:position]):
            raise OutputError(str(path), "is asked for twice", "give the outputs different names")
        if path.is_dir():
            raise OutputError(str(path), "is a folder", "give a file name")
        if path.exists() and not force:
            raise OutputError(str(path), "exists", "choose another name, or overwrite it with --force")
        if not path.parent.is_dir():
            raise OutputError(str(path), f"there is no folder {path.parent}", "create it first")
