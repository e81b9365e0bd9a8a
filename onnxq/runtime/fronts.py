"""The part of a model in front of operators that ONNX Runtime does not have, such as plugins of TensorRT."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from onnx import NodeProto, helper

from onnxq.graph import ModelLike, ensure_opset, find_opset, infer_shapes, widen_model
from onnxq.graph.scopes import iterate_subgraphs, list_reads, walk_nodes
from onnxq.graph.shapes import is_custom
from onnxq.graph.subgraph import cut_front, join_rest, list_behind
from onnxq.runtime.faults import UnknownOperatorError
from onnxq.runtime.session import Session
from onnxq.sites import Names, NameSet

# ONNX Runtime's names of sizes that have none.
_NAMELESS = "unk__"


@dataclass(frozen=True, eq=False)
class Rest:
    """The part of a model that ONNX Runtime cannot run: the operators that it does not have, and all behind them.

    whole: the model. stops: the nodes that hold such operators -> the operators. nodes: these and those behind them.
    """

    whole: ModelLike
    stops: Mapping[str, str]
    nodes: NameSet

    @property
    def outputs(self) -> Names:
        """The outputs of the model that these nodes make."""
        results = {name for node in self._list_nodes() for name in node.output}
        return tuple(value.name for value in self.whole.graph.output if value.name in results)

    @property
    def reads(self) -> NameSet:
        """The tensors that these nodes read, at the border and behind it."""
        return frozenset(name for node in self._list_nodes() for name in list_reads(node))

    def count_ops(self) -> Mapping[str, int]:
        """How many of these nodes there are, by operator."""
        return Counter(node.op_type for node in self._list_nodes())

    def join(self, front: ModelLike) -> ModelLike:
        """The changed front with these nodes behind it again; they are brought to its opset."""
        whole = ensure_opset(self.whole, find_opset(front))
        return join_rest(front, whole, list_behind(whole, self.stops))

    def _list_nodes(self) -> Iterator[NodeProto]:
        return (node for node in self.whole.graph.node if node.name in self.nodes)


def find_front(model: ModelLike) -> tuple[ModelLike, Rest | None]:
    """The part of a model with named nodes that ONNX Runtime has the operators of, and the rest; None where all run.

    Raises UnknownOperatorError where it can run no node.
    """
    if not has_custom(model):
        return model, None
    rest = Rest(model, {}, frozenset())
    front = model
    types = {value.name: value for value in infer_shapes(model).graph.value_info}
    while True:
        try:
            # Of a float16 or bfloat16 model the float32 one is run.
            session = Session(widen_model(front), optimize=False)
            break
        except UnknownOperatorError as error:
            kinds = {node.name: _find_kind(node, error) for node in front.graph.node}
            unknown = {name: kind for name, kind in kinds.items() if kind}
            stops = {**rest.stops, **unknown}
            rest = replace(rest, stops=stops, nodes=list_behind(model, stops))
            front = cut_front(model, rest.nodes, types)
            # Nothing was found to cut off, or nothing is left in front.
            if not unknown or not front.graph.node:
                raise
    if not rest.stops:
        return model, None
    for value in session.outputs:
        # ORT knows types behind its own operators, of which ONNX's inference knows none.
        if value.dtype and value.name not in types:
            shape = value.shape and [
                None if isinstance(dim, str) and dim.startswith(_NAMELESS) else dim
                for dim in value.shape
            ]
            types[value.name] = helper.make_tensor_value_info(value.name, value.dtype, shape)
    return cut_front(model, rest.nodes, types), rest


def has_custom(model: ModelLike) -> bool:
    """True for a model with operators that only a library or a plugin knows."""
    return any(map(is_custom, walk_nodes(model.graph)))


def _find_kind(node: NodeProto, error: UnknownOperatorError) -> str:
    """The operator that ONNX Runtime does not have, where it is that of the node or of one in its bodies; else ""."""
    if node.name == error.node or (node.domain, node.op_type) == error.operator:
        return node.op_type
    inner = (_find_kind(each, error) for _, graph in iterate_subgraphs(node) for each in graph.node)
    return next(filter(None, inner), "")
