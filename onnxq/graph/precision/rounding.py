"""Narrow float types emulated in float32, to the bit: what an engine of these types computes, told without one.

ORT's CPU provider computes float16 operators in float32 and leaves out the Casts between two of them, so that nothing
is rounded there and nothing overflows (300·2 squared is 360000, not inf); of bfloat16 it has no operators. Here every
tensor of a narrow type is rounded to it where it is made, by two Casts, which ORT carries out.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto

from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.light import M, bare_proto, rebuild, store_of
from onnxq.graph.names import choose_name, list_names
from onnxq.graph.precision.binding import MOVES
from onnxq.graph.precision.contrib import is_custom
from onnxq.graph.precision.narrow import FLOAT, TYPE_NAMES, make_cast
from onnxq.graph.precision.widen import NARROW, widen_model
from onnxq.graph.scopes import rename_reads, walk_graphs
from onnxq.graph.shapes import infer_shapes
from onnxq.sites import TensorId


def emulate_types(model: M) -> M:
    """A copy with float32 inputs and outputs that computes in float32 and rounds as the types of `model` say.

    Nodes must be named. Their names stay; the tensors that they make before they are rounded get others.
    """
    index = get_index(infer_shapes(model))
    wide = widen_model(model)
    out = ModelProto()
    out.CopyFrom(bare_proto(wide))
    taken = list_names(out)
    for scope, graph in walk_graphs(out.graph):
        nodes = [*_round_inputs(graph, scope, index, taken)]
        for node in graph.node:
            nodes.append(node)
            nodes += _round_outputs(node, scope, index, taken)
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
    return rebuild(wide, out, store_of(wide))


def _round_inputs(graph: GraphProto, scope: str, index: GraphIndex, taken: set[str]) -> Iterator[NodeProto]:
    for value in graph.input:
        kind = index.dtype(TensorId(value.name, scope))
        if kind in NARROW and not scope:
            made = choose_name(f"{value.name}/rounded", taken)
            rename_reads(graph, {value.name: made})
            yield from _round_tensor(value.name, made, kind, taken)


def _round_outputs(node: NodeProto, scope: str, index: GraphIndex, taken: set[str]) -> list[NodeProto]:
    ref = index.node(node.name)
    # Operators that only know the narrow type still compute in it.
    exact = (ref.op_type in MOVES and not ref.domain) or is_custom(ref)
    found: list[NodeProto] = []
    for k, name in enumerate(node.output):
        kind = index.dtype(TensorId(ref.outputs[k], scope)) if name else 0
        if kind in NARROW and not exact and ref.op_type != "Constant":
            made = choose_name(f"{name}/exact", taken)
            node.output[k] = made
            found += _round_tensor(made, name, kind, taken)
    return found


def _round_tensor(source: str, target: str, kind: int, taken: set[str]) -> list[NodeProto]:
    narrow = choose_name(f"{target}/{TYPE_NAMES[kind]}", taken)
    return [
        make_cast(source, narrow, kind, choose_name(f"{target}/round", taken)),
        make_cast(narrow, target, FLOAT, choose_name(f"{target}/widen", taken)),
    ]
