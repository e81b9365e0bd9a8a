"""The graph that ONNX Runtime runs in place of a model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, attach_weights
from onnxq.graph.light import list_libraries
from onnxq.runtime.session import Session


def optimize_graph(
    model: ModelLike | str | Path, *, layout: bool = True, libraries: Sequence[str] = ()
) -> onnx.ModelProto:
    """The graph ORT runs at its highest optimization level on this CPU: fused and integer kernels by op type.

    layout: False stops before tensors are laid out anew (NCHWc, NHWC): the same fusions, and every tensor that
    survives them still has its own name and axes. libraries: as of `Session`.
    For looking at, not for shipping: it is bound to the machine. Raises ModelError when ORT refuses the model.
    """
    if not isinstance(model, (str, Path)):
        # Stubs would come back in the file, and nobody could read them.
        model, libraries = attach_weights(model), (*list_libraries(model), *libraries)
    with ScratchFolder() as folder:
        path = folder / "optimized.onnx"
        Session(model, layout=layout, threads=1, save_optimized=path, libraries=libraries, provider="")
        return onnx.load(path)
