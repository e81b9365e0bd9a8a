"""Nodes that do nothing in inference: Identity, Dropout, neutral arithmetic, a Cast to the same type, an empty Pad.

They hide patterns (x · Sigmoid(1·x)) and, between pairs, cost a float kernel. Whatever names a (sub)graph output stays.
"""

from __future__ import annotations

import numpy as np

from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.rewrites.pad import pad_amounts
from onnxq.passes.view import View
from onnxq.sites import TensorId

_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}


def remove_dead(proto: ModelLike, _ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Every such node bypassed, then nodes that nobody reads removed."""
    view, edit = View(proto), Edit(proto)
    alias: dict[TensorId, TensorId] = {}
    bypassed: dict[str, str] = {}
    for node in view.index.nodes:
        source = _source(view, node)
        if source is None or view.kept(node.result):
            continue
        # Of several in a row each repeats what the first of them reads.
        source = alias[node.result] = alias.get(source, source)
        edit.bypass(node, source)
        bypassed[node.name] = f"{node.name}: {node.op_type} that does nothing"
    before = {node.name for node in view.index.nodes}
    # Also where nothing was bypassed: the export leaves out what nobody reads.
    result = edit.export()
    removed = sorted(before - {node.name for node in View(result).index.nodes} - set(bypassed))
    changed = [*bypassed.values(), *(f"{name}: read by nobody" for name in removed)]
    return (result if changed else proto), PassReport("dead", tuple(changed))


def _source(view: View, node: NodeRef) -> TensorId | None:
    """The tensor a node merely repeats."""
    # A Dropout's mask, where somebody looks at it.
    extra = [view.output(node, k) for k in range(1, len(node.outputs)) if node.outputs[k]]
    if node.domain or any(view.index.consumers(out) or view.kept(out) for out in extra):
        return None
    x = view.tensor(node, 0)
    if node.op_type == "Identity":
        return x
    if node.op_type == "Dropout":
        return x if _inference(view, node) else None
    if node.op_type == "Cast" and x is not None:
        return x if view.index.dtype(x) == node.attrs.get("to") else None
    if node.op_type == "Pad":
        amounts = pad_amounts(view, node, None if x is None else view.rank(x))
        return x if amounts is not None and not any(amounts) else None
    return _neutral(view, node) if node.op_type in _NEUTRAL else None


def _inference(view: View, node: NodeRef) -> bool:
    """Since opset 12 an input says whether a Dropout trains; before it never did in an exported model."""
    if view.tensor(node, 2) is None:
        return True
    training = view.constant(node, 2)
    return training is not None and not np.any(training)


def _neutral(view: View, node: NodeRef) -> TensorId | None:
    # x - 0 and x / 1 are neutral, 0 - x and 1 / x are not.
    for k in (0, 1) if node.op_type in ("Mul", "Add") else (0,):
        constant, x = view.scalar(node, 1 - k), view.tensor(node, k)
        if constant is None or x is None or view.index.is_constant(x):
            continue
        if constant[0] == _NEUTRAL[node.op_type] and constant[1] <= view.least_rank(x):
            return x
    return None
