"""Types and shapes of every tensor that onnx can infer, in all scopes; and the operators of which it infers nothing.

Transformers, decoders and U-Nets are exported with operators of whose outputs onnx infers nothing. Most are ONNX
Runtime's, of com.microsoft. Two of them stand in ONNX's own domain: SimplifiedLayerNormalization, and
LayerNormalization in front of opset 17; onnx's tools refuse those. GroupNormalization is ONNX's own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, defs, helper, shape_inference

from onnxq.graph.base import MICROSOFT, NodeRef
from onnxq.graph.index import find_opset
from onnxq.graph.light import keep_weights
from onnxq.graph.scopes import (
    OWN_DOMAINS,
    iterate_subgraphs,
    list_captures,
    replace_items,
    walk_graphs,
    walk_nodes,
)
from onnxq.graph.storage import omit_weights
from onnxq.sites import Indices

# Domains of operators that onnx or ONNX Runtime define; those of others come from libraries and plugins.
_USUAL = ("", "ai.onnx", "ai.onnx.ml", MICROSOFT)

# Operators that ONNX Runtime has in ONNX's domain, and the opset from which ONNX has them as well.
_BORROWED: Mapping[str, float] = {
    "LayerNormalization": 17,
    "SimplifiedLayerNormalization": math.inf,
}
# Functions of ONNX whose body depends on the node: onnx's inference looks into no such body.
_UNINFERRED = ("GroupNormalization",)
# A tensor that is nowhere: a Reshape to a shape of which nothing is known.
_NOWHERE = "onnxq/nowhere"


def is_custom(node: NodeProto | NodeRef) -> bool:
    """True for an operator that only a library or a plugin knows; TensorRT's plugins may stand in ONNX's domain."""
    if node.domain not in OWN_DOMAINS:
        return node.domain not in _USUAL
    # Functions that training lowers to nodes have dotted names, as ONNX's operators and plugins never do.
    return "." not in node.op_type and not (node.op_type in _BORROWED or defs.has(node.op_type))


def set_contrib_apart(model: ModelProto) -> None:
    """Give operators in ONNX's domain that onnx does not have that of com.microsoft, in place, for tools of onnx."""
    opset = find_opset(model)
    nodes = (node for node in walk_nodes(model.graph) if node.domain in OWN_DOMAINS)
    strange = [node for node in nodes if _BORROWED.get(node.op_type, 0) > opset or is_custom(node)]
    for node in strange:
        node.domain = MICROSOFT
    if strange and all(entry.domain != MICROSOFT for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


@dataclass(frozen=True)
class Contrib:
    """The float tensors of such an operator, all in one type but for those that are always float32.

    alike: outputs of the shape and type of input 0. typed: outputs -> the input whose type they have. wide: inputs and
    outputs in float32. packed: an input that is left out where input 0 holds what it would; output 0 is smaller then.
    """

    alike: Indices = (0,)
    typed: Mapping[int, int] = field(default_factory=dict)
    wide: tuple[Indices, Indices] = ((), ())
    packed: int = 0

    def list_sources(self, node: NodeProto | NodeRef) -> Iterator[tuple[int, int, bool]]:
        """Each output of a node that is known, the input whose type it has, and whether it has its shape as well."""
        inputs, outputs = _list_names(node)
        whole = self.packed < len(inputs) and bool(inputs[self.packed])
        for k, name in enumerate(outputs):
            source = 0 if k in self.alike else self.typed.get(k)
            if name and source is not None:
                # Without a cache to go on with, the one that is made has the type of what is computed.
                origin = source if source < len(inputs) and inputs[source] else 0
                yield k, origin, k in self.alike and whole


def _list_names(node: NodeProto | NodeRef) -> tuple[Sequence[str], Sequence[str]]:
    return (node.input, node.output) if isinstance(node, NodeProto) else (node.inputs, node.outputs)


# Results 1 and 2, mean and inverse deviation, are always float32; 3 is the sum with the skip.
_NORM = Contrib(wide=((), (1, 2)))
_SKIPPING = Contrib(alike=(0, 3), wide=((), (1, 2)))
_POINTWISE = Contrib()
_PRODUCT = Contrib(alike=(), typed={0: 0})
# By the schemas of ONNX Runtime 1.32.
OPERATORS: Mapping[str, Contrib] = {
    "SimplifiedLayerNormalization": _NORM,
    "LayerNormalization": _NORM,
    "SkipLayerNormalization": _SKIPPING,
    "SkipSimplifiedLayerNormalization": _SKIPPING,
    "EmbedLayerNormalization": Contrib(alike=(), typed={0: 2, 2: 2}),
    "GroupNormalization": _POINTWISE,
    "RotaryEmbedding": _POINTWISE,
    "Gelu": _POINTWISE,
    "FastGelu": _POINTWISE,
    "QuickGelu": _POINTWISE,
    "BiasGelu": _POINTWISE,
    "Attention": Contrib(alike=(), typed={0: 0, 1: 0}),
    "MultiHeadAttention": Contrib(typed={1: 6, 2: 7}, packed=1),
    # Inputs 12 and 13 are scales of quantized caches.
    "GroupQueryAttention": Contrib(typed={1: 3, 2: 4}, wide=((12, 13), ()), packed=1),
    "SparseAttention": Contrib(typed={1: 3, 2: 4}, packed=1),
    "LinearAttention": Contrib(alike=(), typed={0: 0, 1: 3}),
    "FusedMatMul": _PRODUCT,
    "MatMulNBits": _PRODUCT,
    "GatherBlockQuantized": Contrib(alike=(), typed={0: 2}),
    # Text, which nothing behind it may be calibrated on.
    "Tokenizer": _PRODUCT,
}


def find_contrib(node: NodeProto | NodeRef, opset: int) -> Contrib | None:
    """The entry of an operator of whose outputs onnx infers nothing; None for any other."""
    missing = node.op_type in _UNINFERRED or _BORROWED.get(node.op_type, 0) > opset
    own = node.domain == MICROSOFT or (node.domain in OWN_DOMAINS and missing)
    return OPERATORS.get(node.op_type) if own else None


def write_stand_ins(model: ModelProto) -> None:
    """Replace in place the nodes of which onnx infers nothing, or wrong shapes, by nodes of the same types and shapes.

    Only for inference: the model computes something else afterwards.
    """
    opset = find_opset(model)
    for _, graph in walk_graphs(model.graph):
        for node in graph.node:
            # onnx 1.23 infers the shape of all frequencies where the attribute is left out, whose default is half.
            if node.op_type == "STFT" and not any(a.name == "onesided" for a in node.attribute):
                node.attribute.append(helper.make_attribute("onesided", 1))
        known_nodes = [(node, find_contrib(node, opset)) for node in graph.node]
        if any(known is not None for _, known in known_nodes):
            nodes = (
                each
                for node, known in known_nodes
                for each in ([node] if known is None else _stand_in(node, known))
            )
            replace_items(graph.node, nodes)


def _stand_in(node: NodeProto, known: Contrib) -> Iterator[NodeProto]:
    for k, source, same in known.list_sources(node):
        read = [node.input[source]] if same else [node.input[source], _NOWHERE]
        yield helper.make_node("Identity" if same else "Reshape", read, [node.output[k]])


@keep_weights
def fix_sizes(proto: ModelProto, sizes: Mapping[str, Sequence[int]]) -> ModelProto:
    """A copy whose inputs have these shapes, without what was inferred before; a symbol is fixed wherever it stands.

    0: an axis that stays as it is.
    """
    result = deepcopy(proto)
    known: dict[str, int] = {}
    for value in result.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, sizes.get(value.name, ()), strict=False
        ):
            if size and dim.dim_param:
                known.setdefault(dim.dim_param, size)
            if size:
                dim.dim_value = size
    del result.graph.value_info[:]
    for value in result.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in known:
                dim.dim_value = known[dim.dim_param]
    return result


@keep_weights
def infer_shapes(proto: ModelProto) -> ModelProto:
    """A copy with value_info from onnx.shape_inference with data propagation.

    The main graph's inputs and outputs stay as declared. Never fails: types that cannot be inferred stay unknown.
    """
    result = deepcopy(proto)
    # Shape inference serializes the model; weights would make that slow, and fail over 2 GB.
    light, _ = omit_weights(proto)
    write_stand_ins(light)
    _prepare_bodies(light.graph)
    try:
        inferred = shape_inference.infer_shapes(
            light, check_type=False, strict_mode=False, data_prop=True
        )
    # An operator's own inference function may raise anything; the model may run all the same.
    except Exception:
        return result
    for (scope, target), (_, source) in zip(
        walk_graphs(result.graph), walk_graphs(inferred.graph), strict=True
    ):
        replace_items(target.value_info, source.value_info)
        if scope:
            for old, new in zip(
                (*target.input, *target.output), (*source.input, *source.output), strict=True
            ):
                if new.type.WhichOneof("value"):
                    old.type.CopyFrom(new.type)
    return result


def _prepare_bodies(graph: GraphProto) -> None:
    """Give the bodies in a graph copies of the integers around them that they read, such as axes.

    Inference does not look further than the graph of a node for values. Branches of an If lose the shapes that are
    declared of their results: exporters guess, also the rank.
    """
    for node in graph.node:
        for _, body in iterate_subgraphs(node):
            reads = list_captures(body)
            body.initializer.extend(
                tensor
                for tensor in graph.initializer
                if tensor.data_type == TensorProto.INT64 and tensor.name in reads
            )
            _prepare_bodies(body)
            for value in body.output if node.op_type == "If" else ():
                if value.type.HasField("tensor_type"):
                    value.type.tensor_type.ClearField("shape")
