"""Rewrites for targets that take a whole graph in integers: masks that a scale can hold, Splits as Slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onnxq.graph import NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.patterns import Edit, View, is_op
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import Edge, TensorId

# Operators between the constants of a mask and the Softmax that reads it.
_MASKING = frozenset(
    ("Add", "And", "Cast", "Concat", "Div", "Equal", "Expand", "Flatten", "Gather", "Identity", "Mul", "Neg", "Reshape",
     "Slice", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where")
)  # fmt: skip
# From here on a value means "never", and what stands for it: behind a softmax e**-64 is nothing in float32, either. A
# range that holds it has steps of .001 in 16 bits; one that holds -3e38 has nothing else.
_NEVER, _FAR = 1e3, 64.0


def bound_masks(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Give masks in front of a Softmax a finite value that a scale can hold beside the scores."""
    view, edit, changed = View(state.model), Edit(state.model), dict[Edge, str]()
    for softmax in view.index.nodes:
        for edge in _find_far_constants(view, softmax) if is_op(softmax, "Softmax") else ():
            value = view.find_constant(view.index.find_node(edge.node), edge.index)
            if value is not None and edge not in changed:
                bounded = np.where(np.abs(value) > _NEVER, np.sign(value) * _FAR, value).astype(value.dtype)
                edit.set_constant(view, edge, bounded)
                changed[edge] = f"{edge.node}: {value.min():.3g} becomes {-_FAR:g}"
    return edit.finish_pass(state, "masks", list(changed.values()))


def _find_far_constants(view: View, softmax: NodeRef) -> Iterator[Edge]:
    """The inputs that read a constant with values beyond any score, behind operators of a mask."""
    pending, seen = [softmax], {softmax.name}
    while pending:
        node = pending.pop()
        for edge in node.list_edges():
            tensor = view.find_tensor(node, edge.index)
            value = None if tensor is None else view.find_constant(node, edge.index)
            if value is not None:
                # Scores themselves may be scaled by large numbers, but a mask of ones and zeros by a negative one.
                scales = node.op_type == "Div" or (node.op_type == "Mul" and np.max(value, initial=-1.0) > 0)
                if value.dtype.kind == "f" and value.size and np.abs(value).max() > _NEVER and not scales:
                    yield edge
                continue
            maker = None if tensor is None else view.index.find_producer(tensor)
            masks = maker is not None and maker.op_type in _MASKING and not view.kept(maker.result)
            if maker is not None and masks and maker.name not in seen:
                seen.add(maker.name)
                pending.append(maker)


def cut_splits(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Make every Split of constant sizes as many Slices, each of which has one result to quantize."""
    view, edit, changed = View(state.model), Edit(state.model), []
    for node in view.index.nodes:
        sizes = _read_sizes(view, node) if is_op(node, "Split") else None
        if sizes is None or any(view.kept(view.output(node, k)) for k in range(len(node.outputs)) if node.outputs[k]):
            continue
        axis = edit.add_constant(node.scope, f"{node.name}/axis", np.asarray([node.attrs.get("axis", 0)], np.int64))
        ends = np.cumsum(sizes)
        for k, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
            if not node.outputs[k]:
                continue
            bounds = [
                edit.add_constant(node.scope, f"{node.outputs[k]}/{part}", np.asarray([at], np.int64))
                for part, at in (("start", start), ("end", end))
            ]
            part = edit.insert_before(node, "Slice", [node.inputs[0], *bounds, axis], {}, f"{node.outputs[k]}/part")
            edit.redirect(TensorId(node.outputs[k], node.scope), part)
        edit.remove_node(node)
        changed.append(f"{node.name}: {len(sizes)} Slices instead of a Split")
    return edit.finish_pass(state, "splits", changed)


def _read_sizes(view: View, node: NodeRef) -> np.ndarray | None:
    """The sizes of a Split's results; None where they are not known."""
    given = node.attrs.get("split")
    if given is None:
        given = view.find_constant(node, 1)
    if given is not None:
        return np.asarray(given, np.int64)
    if any(node.inputs[1:]):  # computed ones
        return None
    data, count = view.find_tensor(node, 0), len(node.outputs)
    shape = None if data is None else view.index.find_shape(data)
    size = None if shape is None else shape[node.attrs.get("axis", 0)]
    if not isinstance(size, int):
        return None
    largest = -(-size // count)
    return np.asarray([min(largest, size - k * largest) for k in range(count)], np.int64)
