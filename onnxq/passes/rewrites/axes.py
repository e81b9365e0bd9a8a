"""The axes of Pad, Resize and CenterCropPad written out: amounts, scales and sizes of every axis, as before opset 18.

ONNX Runtime's layout optimizer (1.32) moves Transposes through Pad and Resize, and permutes their amounts as if they
were of every axis: beside int8 convolutions a run fails, or pads the wrong axes. CenterCropPad is a
function of Pad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.view import View


def write_axes(proto: ModelLike, _ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Write out the axes of every Pad, Resize and CenterCropPad that names constant ones of a tensor of known rank."""
    view, edit, changed = View(proto), Edit(proto), []
    for node in view.index.nodes:
        amounts = _find_amounts(view, node)
        if amounts is None:
            continue
        inputs = list(node.inputs[:3] if node.op_type == "Pad" else node.inputs)
        inputs[amounts.input] = _write_amounts(view, edit, node, amounts)
        edit.become(node, node.op_type, inputs, {key: node.attrs[key] for key in node.attrs if key != "axes"})
        changed.append(f"{node.name}: {node.op_type} of all axes")
    return edit.finish("axes", changed)


@dataclass(frozen=True, eq=False)
class _Amounts:
    """Numbers that an input gives for some axes.

    places: of its entries among those of all axes. rest: entries of all axes where it gives none; None: the sizes that
    the tensor has.
    """

    input: int
    places: NDArray[np.int64]
    rest: NDArray[Any] | None


def _find_amounts(view: View, node: NodeRef) -> _Amounts | None:
    """The numbers of a node that names axes; None for other nodes, and where they cannot be written out."""
    data = view.tensor(node, 0)
    rank = (
        None
        if data is None or node.domain or node.op_type not in ("Pad", "Resize", "CenterCropPad")
        else view.rank(data)
    )
    axes = view.constant(node, 3) if node.op_type == "Pad" else node.attrs.get("axes")
    if not rank or axes is None:
        return None
    places = np.asarray(axes, np.int64).reshape(-1) % rank
    if node.op_type == "Pad":
        return _Amounts(1, np.concatenate([places, places + rank]), np.zeros(2 * rank, np.int64))
    if node.op_type == "CenterCropPad":
        return _Amounts(1, places, _read_sizes(view, node))
    # A common scale is chosen among the axes that are named, and regions have amounts of their own.
    if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if node.attrs.get("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    if view.tensor(node, 2) is not None:
        return _Amounts(2, places, np.ones(rank, np.float32))
    return _Amounts(3, places, _read_sizes(view, node))


def _read_sizes(view: View, node: NodeRef) -> NDArray[np.int64] | None:
    data = view.tensor(node, 0)
    shape = None if data is None else view.index.shape(data)
    fixed = [dim for dim in shape or () if isinstance(dim, int)]
    return np.asarray(fixed, np.int64) if shape is not None and len(fixed) == len(shape) else None


def _write_amounts(view: View, edit: Edit, node: NodeRef, amounts: _Amounts) -> str:
    """The name of the tensor with the entries of all axes."""
    given, name = view.constant(node, amounts.input), f"{node.name}/amounts"
    if given is not None and amounts.rest is not None:
        full = amounts.rest.astype(given.dtype)
        full[amounts.places] = given.reshape(-1)
        return edit.constant(node.scope, name, full)
    places = edit.constant(node.scope, f"{name}/places", amounts.places)
    rest = (
        edit.insert_before(node, "Shape", [node.inputs[0]], {}, f"{name}/sizes")
        if amounts.rest is None
        else edit.constant(node.scope, f"{name}/rest", amounts.rest)
    )
    return edit.insert_before(node, "ScatterElements", [rest, places, node.inputs[amounts.input]], {"axis": 0}, name)
