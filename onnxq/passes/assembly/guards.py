"""Guards for tensors that must stay float: a Clip without bounds between a DequantizeLinear and its reader.

ORT quantizes on its own the nodes between a DequantizeLinear and a QuantizeLinear: Conv and Gemm (and MatMul + Add of
static shapes, which it makes a Gemm) with float weights get int8 weights per tensor; AveragePool and Softmax become
integer kernels slower than the float ones. Reshape, Transpose and MaxPool between do not stop it, it moves the
DequantizeLinear through them. A Clip without bounds stays in the graph and does stop it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.view import View
from onnxq.sites import Refusal, TensorId

# ORT moves a DequantizeLinear through these, or they keep integers integers.
_TRANSPARENT = frozenset(
    {
        "Reshape",
        "Transpose",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Identity",
        "MaxPool",
        "Slice",
        "Gather",
        "Expand",
        "DepthToSpace",
        "SpaceToDepth",
        "Resize",
        "ReduceMax",
        "ReduceMin",
        "Concat",
        "Split",
        "Tile",
    }
)
_REACH = 6


def guard_float(proto: ModelLike, nodes: Sequence[str]) -> tuple[ModelLike, PassReport]:
    """A copy in which ORT leaves these nodes float.

    For each of them, every computed input that comes from a DequantizeLinear (also through Reshape, Transpose, MaxPool
    and their like) gets one guard, shared by the named readers of the same tensor, when a QuantizeLinear follows within
    a few nodes; without one ORT does nothing by itself. Run it after the pairs are in.

    Raises ModelError for a node that is not there.
    """
    view = View(proto)
    edit, changed, skipped = Edit(proto), [], []
    guards: dict[tuple[TensorId, str], str] = {}
    for name in dict.fromkeys(nodes):
        node = view.index.node(name)
        inputs = [k for k in range(len(node.inputs)) if _from_pair(view, view.tensor(node, k))]
        if not inputs or not _is_quantized_behind(view, node):
            reason = "no pair in front of it" if not inputs else "no pair behind it"
            skipped.append(Refusal(name, f"needs no guard: {reason}", "", "guard", "R112"))
            continue
        for k in inputs:
            tensor = view.tensor(node, k)
            if tensor is None:
                continue
            key = (tensor, node.scope)
            if key not in guards:
                guards[key] = edit.insert_before(node, "Clip", (tensor.name,), {}, f"{tensor.name}/guard")
            edit.read(view.edge(node, k), guards[key])
        changed.append(f"{name}: kept float by a guard")
    return (edit.export() if changed else proto), PassReport("guard", tuple(changed), tuple(skipped))


def _from_pair(view: View, tensor: TensorId | None) -> bool:
    """True when a tensor is dequantized from something computed, directly or through nodes that pass it on."""
    for _ in range(_REACH):
        node = view.producer(tensor)
        if node is None:
            return False
        if node.op_type == "DequantizeLinear":
            return not view.is_constant(node, 0)
        if node.op_type not in _TRANSPARENT:
            return False
        tensor = view.tensor(node, 0)
    return False


def _is_quantized_behind(view: View, node: NodeRef) -> bool:
    """True when a QuantizeLinear is reached within a few nodes. Too many guards cost little, one too few accuracy."""
    front = [node]
    for _ in range(_REACH):
        edges = [edge for at in front for k in range(len(at.outputs)) for edge in _readers(view, at, k)]
        front = [view.index.node(name) for name in dict.fromkeys(edges)]
        if any(at.op_type == "QuantizeLinear" for at in front):
            return True
    return False


def _readers(view: View, node: NodeRef, k: int) -> list[str]:
    return [edge.node for edge in view.index.consumers(view.output(node, k))] if node.outputs[k] else []
