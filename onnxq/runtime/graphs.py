"""What ONNX Runtime makes of a model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from onnxq.runtime.session import Session


def optimized_graph(model: onnx.ModelProto | str | Path) -> onnx.ModelProto:
    """The graph ORT runs at its highest optimization level on this CPU: fused and integer kernels by op type.

    For looking at, not for shipping: it is bound to the machine. Raises ModelError when ORT refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        path = Path(folder) / "optimized.onnx"
        Session(model, threads=1, save_optimized=path)
        return onnx.load(path)
