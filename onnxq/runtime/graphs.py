"""The graph that ONNX Runtime runs in place of a model's."""

from __future__ import annotations

from pathlib import Path

import onnx

from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, attach_weights
from onnxq.runtime.providers import CPU
from onnxq.runtime.session import Session


def optimize_graph(model: ModelLike | str | Path, *, layout: bool = True) -> onnx.ModelProto:
    """The graph ORT runs at its highest optimization level on this CPU: fused and integer kernels by op type.

    layout: False stops before tensors are laid out anew (NCHWc, NHWC): the same fusions, and every tensor that
    survives them still has its own name and axes.
    For looking at, not for shipping: it is bound to the machine. Raises ModelError when ORT refuses the model.
    """
    whole = model if isinstance(model, (str, Path)) else attach_weights(model)
    with ScratchFolder() as folder:
        path = folder / "optimized.onnx"
        Session(whole, layout=layout, threads=1, provider=CPU, save_optimized=path)
        return onnx.load(path)
