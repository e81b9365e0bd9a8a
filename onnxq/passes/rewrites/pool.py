"""ReduceMean over all spatial axes becomes GlobalAveragePool, which has a quantized kernel in ORT; ReduceMean has none.

mean([2, 3]) without kept dims becomes GlobalAveragePool and Flatten (a passthrough on integers).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.view import SINGLE, View
from onnxq.sites import TensorId


def replace_reduce_mean(proto: ModelLike, _ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Every such ReduceMean over a float [N, C, spatial...] tensor of known rank that holds no squares."""
    view, edit, changed = View(proto), Edit(proto), []
    for node in view.index.nodes:
        x = find_pooled_axes(view, node)
        if x is None:
            continue
        if node.attrs.get("keepdims", 1):
            edit.become(node, "GlobalAveragePool", (x.name,), {})
        else:
            # The node's own name and output go to the last of the two.
            made = edit.insert_before(node, "GlobalAveragePool", (x.name,), {}, f"{node.outputs[0]}/pooled")
            edit.become(node, "Flatten", (made,), {"axis": 1})
        changed.append(f"{node.name}: GlobalAveragePool instead of ReduceMean")
    return edit.finish("pool", changed)


def find_pooled_axes(view: View, node: NodeRef) -> TensorId | None:
    """The tensor that a ReduceMean takes the mean of over all spatial axes; None for anything else."""
    if node.op_type != "ReduceMean" or node.domain:
        return None
    x = view.tensor(node, 0)
    rank = None if x is None else view.rank(x)
    # An attribute until opset 17, then an input.
    axes: Any = node.attrs.get("axes")
    if axes is None:
        axes = view.constant(node, 1)
    if x is None or rank is None or rank < 3 or axes is None or view.index.dtype(x) not in SINGLE:
        return None
    if _is_square(view, x):
        return None
    return x if sorted(int(a) % rank for a in np.asarray(axes).reshape(-1)) == list(range(2, rank)) else None


def _is_square(view: View, x: TensorId) -> bool:
    """True for squares: their mean is a step of a norm, which ORT makes one kernel of (RMSNorm, of rank 3 too)."""
    maker = view.producer(x, "Pow", "Mul")
    return maker is not None and (maker.op_type == "Pow" or maker.inputs[0] == maker.inputs[1])
