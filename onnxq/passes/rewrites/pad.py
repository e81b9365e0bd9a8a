"""A constant zero Pad in front of a Conv moves into the Conv's own pads.

Pad between pairs is a float kernel in ORT, and a pair on each side of it costs more than the convolution. AveragePool
is left alone: it counts its own padding differently from a padded input unless count_include_pad is set.
"""

from __future__ import annotations

import numpy as np

from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.view import View
from onnxq.sites import TensorId


def fold_pad(proto: ModelLike, _ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Every Pad of zeros along spatial axes that only Convs read."""
    view, edit, changed = View(proto), Edit(proto), []
    for node in view.index.nodes:
        match = _match(view, node)
        if match is None:
            continue
        x, convs, amounts = match
        for conv in convs:
            edit.read(view.edge(conv, 0), x.name)
            edit.attrs(conv, {"pads": _sum(conv, amounts), "auto_pad": None})
            changed.append(f"{conv.name}: pads of {node.name}")
        edit.remove(node)
    return edit.finish("pad", changed)


def _match(view: View, node: NodeRef) -> tuple[TensorId, tuple[NodeRef, ...], tuple[int, ...]] | None:
    """(padded tensor, the Convs, spatial amounts: begins, then ends) of a Pad that can go."""
    if node.op_type != "Pad" or node.domain or node.attrs.get("mode", "constant") != "constant":
        return None
    x, out = view.tensor(node, 0), node.result
    readers = view.index.consumers(out)
    if x is None or not readers or view.kept(out) or any(edge.scope != node.scope or edge.index for edge in readers):
        return None
    convs = tuple(view.index.node(edge.node) for edge in readers)
    # SAME pads by the size that the Pad changes.
    if any(conv.op_type != "Conv" or conv.domain or _auto_pad(conv) not in ("NOTSET", "VALID") for conv in convs):
        return None
    amounts = pad_amounts(view, node, _rank(view, convs))
    if amounts is None or not pads_with_zero(view, node):
        return None
    half = len(amounts) // 2
    spatial = (*amounts[2:half], *amounts[half + 2 :])
    # A Conv pads neither batch nor channels, and crops nothing.
    if any(amounts[k] for k in (0, 1, half, half + 1)) or min(spatial) < 0:
        return None
    return x, convs, spatial


def _auto_pad(conv: NodeRef) -> str:
    return str(conv.attrs.get("auto_pad", "NOTSET"))


def _rank(view: View, convs: tuple[NodeRef, ...]) -> int | None:
    """The rank of the padded tensor, from the weights that read it."""
    weights = (view.tensor(conv, 1) for conv in convs)
    ranks = (view.rank(weight) for weight in weights if weight is not None)
    return next((rank for rank in ranks if rank is not None), None)


def pad_amounts(view: View, node: NodeRef, rank: int | None) -> tuple[int, ...] | None:
    """The constant amounts of a Pad as [begin of every axis, end of every axis], None when computed or unclear."""
    given = node.attrs.get("pads")
    if given is None:
        given = view.constant(node, 1)
    if given is None:
        return None
    values = [int(v) for v in np.asarray(given).reshape(-1)]
    # Since opset 18 an input may say which axes the amounts are of.
    if view.tensor(node, 3) is None:
        return tuple(values) if rank is None or len(values) == 2 * rank else None
    axes = view.constant(node, 3)
    if axes is None or rank is None or len(values) != 2 * axes.size:
        return None
    full = [0] * (2 * rank)
    for i, axis in enumerate(int(a) for a in axes.reshape(-1)):
        full[axis % rank], full[rank + axis % rank] = values[i], values[axes.size + i]
    return tuple(full)


def pads_with_zero(view: View, node: NodeRef) -> bool:
    """True when a Pad's value is the constant zero, given, left out or an attribute of old opsets."""
    if view.tensor(node, 2) is None:
        return float(node.attrs.get("value", 0.0)) == 0.0
    value = view.constant(node, 2)
    return value is not None and bool(np.all(value == 0))


def _sum(conv: NodeRef, amounts: tuple[int, ...]) -> list[int]:
    own = conv.attrs.get("pads") if _auto_pad(conv) == "NOTSET" else None
    return [a + b for a, b in zip(own or [0] * len(amounts), amounts, strict=True)]
