"""Which inputs and outputs of an operator have the type it computes in, by its ONNX schema."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import onnx
from onnx import TensorProto

from onnxq.graph.base import NodeRef
from onnxq.graph.index import GraphIndex
from onnxq.graph.precision.contrib import Contrib, find_contrib
from onnxq.sites import TensorId

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# Operators on graphs: what goes in and out of bodies stays float32, so that all branches agree.
CONTROL = ("If", "Loop", "Scan")
# ONNX Runtime computes it by its definition in other types than float32, and fails.
_FLOAT32_ONLY = ("AffineGrid",)
# Their values are those of their inputs: no type rounds them.
MOVES = frozenset(
    {
        "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Gather", "GatherElements",
        "GatherND", "Expand", "Tile", "Concat", "Split", "Pad", "DepthToSpace", "SpaceToDepth", "MaxPool", "Relu",
        "ReduceMax", "ReduceMin", "Max", "Min", "Abs", "Neg", "ScatterND", "ScatterElements", "Where", "Clip", "Trilu",
        "GlobalMaxPool",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Binding:
    """How the float32 inputs and outputs of a node follow the type that it computes in.

    inputs: TRUE for those that have the node's type, FALSE for those that are always float32, NONE for those of any
    type. able: the operator may compute in the narrow type at all.
    """

    able: bool
    inputs: tuple[bool | None, ...]


@lru_cache(maxsize=1024)
def _read_schema(op_type: str, opset: int, narrow: int) -> tuple[tuple[bool, ...], tuple[bool, ...], bool] | None:
    """For each formal input, then output: whether its type variable takes `narrow`; and whether the last repeats."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    wanted = "tensor(float16)" if narrow == TensorProto.FLOAT16 else "tensor(bfloat16)"
    takes = {one.type_param_str: wanted in one.allowed_type_strs for one in schema.type_constraints}
    repeats = bool(schema.inputs) and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    inputs = tuple(takes.get(formal.type_str, False) for formal in schema.inputs)
    return inputs, tuple(takes.get(formal.type_str, False) for formal in schema.outputs), repeats


def bind_types(index: GraphIndex, node: NodeRef, narrow: int, opset: int) -> Binding:
    """The binding of a node of a float32 graph. narrow: onnx.TensorProto.FLOAT16 or BFLOAT16."""
    fixed = Binding(False, tuple(False for _ in node.inputs))
    contrib = find_contrib(node, opset)
    if contrib is not None:
        return _bind_contrib(index, node, contrib)
    if node.domain or node.op_type in (*CONTROL, *_FLOAT32_ONLY):
        return fixed
    if node.op_type == "Cast":
        return Binding(node.attrs.get("to") == TensorProto.FLOAT, (None,))
    if node.op_type == "ConstantOfShape":
        return Binding(is_float32(index, TensorId(node.outputs[0], node.scope)), (None,))
    found = _read_schema(node.op_type, opset, narrow)
    # The second and third result of a LayerNormalization have the type of an attribute too.
    stashed = node.op_type == "LayerNormalization" and any(node.outputs[1:])
    if found is None or stashed or any(name in node.attrs for name in ("dtype", "output_dtype")):
        return fixed
    inputs, outputs, repeats = found
    follows: list[bool | None] = []
    for k, name in enumerate(node.inputs):
        formal = inputs[k] if k < len(inputs) else bool(repeats and inputs[-1])
        dtype = _find_dtype(index, name, node.scope)
        if dtype == 0 and name:
            return fixed
        follows.append(formal if dtype == TensorProto.FLOAT else None)
    made = [k for k, name in enumerate(node.outputs) if name]
    kinds = {k: index.dtype(TensorId(node.outputs[k], node.scope)) for k in made}
    if not all(kinds.values()):
        # Its readers cannot tell what they would get either, and stay float32 with it.
        return fixed
    floats = [k for k in made if kinds[k] == TensorProto.FLOAT]
    if not floats and follows.count(True) == 1:
        # Shape, ArgMax, IsNaN and their like take a tensor as it comes.
        return Binding(False, tuple(None for _ in follows))
    # A variadic output (Split) repeats the last formal one.
    able = bool(outputs) and all(outputs[min(k, len(outputs) - 1)] for k in floats)
    # One whose first float input is always float32, such as NonMaxSuppression, computes in that.
    able = able and next((one for one in follows if one is not None), bool(floats))
    return Binding(able, tuple(follows) if able else tuple(None if one is None else False for one in follows))


def _bind_contrib(index: GraphIndex, node: NodeRef, contrib: Contrib) -> Binding:
    """The binding of an operator of ONNX Runtime, where all types of its tensors are known."""
    kinds = [_find_dtype(index, name, node.scope) for name in node.inputs]
    always, made = contrib.wide
    known = all(kind or not name for kind, name in zip(kinds, node.inputs, strict=True))
    able = known and not any(node.outputs[k] for k in made if k < len(node.outputs))
    follows = tuple((able and k not in always) if kind == TensorProto.FLOAT else None for k, kind in enumerate(kinds))
    return Binding(able, follows)


def _find_dtype(index: GraphIndex, name: str, scope: str) -> int:
    tensor = index.resolve(name, scope) if name else None
    return 0 if tensor is None else index.dtype(tensor)


def is_float32(index: GraphIndex, tensor: TensorId | None) -> bool:
    """True for a tensor whose type is known to be float32."""
    return tensor is not None and index.dtype(tensor) == TensorProto.FLOAT
