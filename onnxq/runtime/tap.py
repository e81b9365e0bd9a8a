"""Taps, a copy of a model whose inner tensors are outputs too, and the shapes that tensors really have by them.

If      the other branch gives a dummy (by default zero-size), so a branch that did not run can be told
Loop    the values of all iterations come out stacked along a new first axis; they must have one shape
Scan    likewise
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxq.arrays import Shape
from onnxq.errors import ModelError, suggest_names
from onnxq.graph import FLOAT_TENSORS, GraphIndex, LightModel, ModelLike, get_index
from onnxq.graph.identity import hash_graph
from onnxq.graph.light import bare_proto, find_provider, is_large_model, rebuild
from onnxq.graph.names import choose_name, list_names, name_nodes
from onnxq.graph.scopes import iterate_subgraphs, join_scope, list_defined, walk_graphs
from onnxq.graph.storage import omit_weights, restore_weights
from onnxq.graph.subgraph import remove_unneeded
from onnxq.runtime.session import Feeds, Session, optimize_graph
from onnxq.sites import Refusal, Refusals, TensorId, is_within

# Attributes of Scan with an entry for each scan output.
_SCAN_LISTS = ("scan_output_axes", "scan_output_directions")


class Tapped(NamedTuple):
    """A model with taps."""

    # For ORT only: its new outputs have no declared type.
    proto: ModelLike
    # The output that carries each tensor.
    outputs: dict[TensorId, str]
    refusals: Refusals


@dataclass(frozen=True)
class Probe:
    """The value given for a tapped tensor: itself, or the result of the operator `op_type` on it."""

    op_type: str = "Identity"
    # Of the result, 0 for the tensor's own.
    dtype: int = 0
    # The dummy of a branch that does not run.
    absent: Shape = ()
    # False refuses tensors of bodies that iterate, whose results would have to be of one shape to be stacked.
    loops: bool = True


def tap_tensors(
    model: ModelLike, tensors: Iterable[TensorId], *, only: bool = False, probe: Probe = Probe()
) -> Tapped:
    """A copy of the model that gives these tensors as outputs too; with `only`, instead of its own outputs.

    Tensors that cannot be led out (subgraphs of unknown operators, an If inside a Loop, unknown types) come back as
    refusals. Raises ModelError for a tensor the model does not have. Nodes must be named (see name_nodes).
    """
    index = get_index(model)
    proto = bare_proto(model)
    wanted = list(dict.fromkeys(tensors))
    known = {scope: list_defined(graph) for scope, graph in walk_graphs(proto.graph)}
    for tensor in wanted:
        inside = known.get(tensor.scope, ())
        if tensor.name not in inside:
            near = suggest_names(tensor.name, inside)
            raise ModelError(tensor, "the model has no such tensor", near, code="Q116")
    copy, weights = omit_weights(proto)
    main = copy.graph
    work = _TapWriter(index, probe, list_names(proto))
    for tensor in wanted:
        work.by_scope[tensor.scope].append(tensor)
    lifted = work.lift_scope(main, "")
    if only:
        del main.output[:]
    present = {value.name for value in main.output}
    for item in lifted:
        if item.name not in present:
            present.add(item.name)
            main.output.append(ValueInfoProto(name=item.name))
    if only:
        # ORT computes every node, needed or not.
        remove_unneeded(main)
    names = {item.tensor: item.name for item in lifted}
    tapped = rebuild(model, restore_weights(copy, weights))
    return Tapped(
        tapped,
        {tensor: names[tensor] for tensor in wanted if tensor in names},
        tuple(work.refusals),
    )


def lay_out_convolutions(model: ModelLike) -> ModelLike:
    """The model with convolutions in the memory layout of this CPU's kernels, every tensor still under its name.

    With every tensor an output nothing is fused, so that a tensor's bits do not depend on which are tapped. The model
    itself where there is nothing to lay out, where it has bodies, is too large to be held twice or runs elsewhere.
    """
    nodes = bare_proto(model).graph.node
    if (
        not any(node.op_type == "Conv" for node in nodes)
        or len(get_index(model).scopes) > 1
        or is_large_model(model)
        or find_provider(model)
    ):
        return model
    tensors = [TensorId(name) for node in nodes for name in node.output if name]
    try:
        # ORT writes out a HardSwish as nodes without names.
        optimized = optimize_graph(tap_tensors(model, tensors, only=True).proto, fuse_pairs=False)
        return rebuild(model, name_nodes(optimized))
    except ModelError:
        return model


@dataclass(frozen=True)
class _Lifted:
    """A probe's result as seen in some scope: its name, type and rank there, and whether an If stands in between."""

    tensor: TensorId
    name: str
    dtype: int
    conditional: bool = False
    # 1 where it is not known.
    rank: int = 1


@dataclass
class _TapWriter:
    index: GraphIndex
    probe: Probe
    taken: set[str]
    by_scope: defaultdict[str, list[TensorId]] = field(default_factory=lambda: defaultdict(list))
    refusals: list[Refusal] = field(default_factory=list)

    def lift_scope(self, graph: GraphProto, scope: str) -> list[_Lifted]:
        """Everything wanted in this scope and below it, as tensors of this scope."""
        items = []
        for node in list(graph.node):
            for label, subgraph in iterate_subgraphs(node):
                inner = join_scope(scope, node.name, label)
                if any(is_within(other, inner) for other in self.by_scope):
                    for item in self.lift_scope(subgraph, inner):
                        items.append(self._lead_out(node, label, subgraph, item, inner))
        items += [self._tap_own(graph, tensor) for tensor in self.by_scope.get(scope, ())]
        return [item for item in items if item is not None]

    def _tap_own(self, graph: GraphProto, tensor: TensorId) -> _Lifted | None:
        op_type = self.probe.op_type
        dtype = self.probe.dtype or self.index.find_dtype(tensor)
        # A tensor of the main graph can be made an output as it is.
        if tensor.scope == "" and op_type == "Identity":
            return _Lifted(tensor, tensor.name, dtype)
        if not dtype:
            fix = "run shape inference first"
            self.refusals.append(Refusal(str(tensor), "its type is unknown", fix, "tap", "R107"))
            return None
        name = self._choose_name(f"{tensor.name}/{op_type}")
        graph.node.append(
            helper.make_node(op_type, [tensor.name], [name], name=self._choose_name(f"{name}/node"))
        )
        known = self.index.find_shape(tensor) if op_type == "Identity" else None
        return _Lifted(tensor, name, dtype, rank=1 if known is None else len(known))

    def _lead_out(
        self, node: NodeProto, label: str, subgraph: GraphProto, item: _Lifted, scope: str
    ) -> _Lifted | None:
        """Lead an item out of one subgraph of `node`."""
        reason = self._find_obstacle(node, item)
        if reason:
            self.refusals.append(
                Refusal(str(item.tensor), f"{reason} ({scope})", rule="tap", code="R107")
            )
            return None
        for other_label, other in iterate_subgraphs(node):
            if other_label != label:
                self._add_dummy(other, item)
        # Trailing outputs may be left out of a node, but the one to be added is found by its position.
        while len(node.output) < len(subgraph.output) - int(node.op_type == "Loop"):
            node.output.append(self._choose_name(f"{item.name}/unused"))
        subgraph.output.append(helper.make_tensor_value_info(item.name, item.dtype, None))
        for attr in node.attribute:
            # These lists have an entry for every scan output.
            if node.op_type == "Scan" and attr.name in _SCAN_LISTS:
                attr.ints.append(0)
        name = self._choose_name(f"{item.name}/{node.op_type}")
        node.output.append(name)
        branch = node.op_type == "If"
        return _Lifted(
            item.tensor, name, item.dtype, item.conditional or branch, item.rank + int(not branch)
        )

    def _find_obstacle(self, node: NodeProto, item: _Lifted) -> str:
        if node.op_type == "If" and not node.domain:
            if item.rank or not self.index.has_ranked_branches:
                return ""
            return "before opset 11 an If gives one number in both branches"
        if node.op_type in ("Loop", "Scan") and not node.domain and self.probe.loops:
            return "it exists in some iterations only" if item.conditional else ""
        return f"the body of a {node.op_type} cannot be observed from outside"

    def _add_dummy(self, subgraph: GraphProto, item: _Lifted) -> None:
        name = self._choose_name(f"{item.name}/absent")
        absent = self.probe.absent
        # Of the tensor's rank: where the dummy is read as the tensor, sizes are inferred by it.
        value = TensorProto(name=name, data_type=item.dtype, dims=[0] * max(item.rank, 1))
        if absent:
            value = numpy_helper.from_array(
                np.asarray(absent, helper.tensor_dtype_to_np_dtype(item.dtype)), name
            )
        subgraph.node.append(
            helper.make_node(
                "Constant", [], [name], name=self._choose_name(f"{name}/node"), value=value
            )
        )
        subgraph.output.append(helper.make_tensor_value_info(name, item.dtype, None))

    def _choose_name(self, base: str) -> str:
        return choose_name(base, self.taken)


ShapeMap = dict[TensorId, Shape]

# No tensor has the shape [-1]: it says that the branch did not run.
_SHAPE = Probe(op_type="Shape", dtype=TensorProto.INT64, absent=(-1,), loops=False)


def observe_shapes(proto: ModelLike, samples: Iterable[Feeds]) -> ShapeMap:
    """Shapes of all float tensors of the main graph and of the If subgraphs that ran, constants left out.

    Each tensor's shape is of the first sample that made it. A tensor missing from the result lies in a branch no sample
    reached, or in the subgraph of a Loop or Scan.
    """
    probe = Shapes(proto, list_float_tensors(get_index(proto)))
    shapes: ShapeMap = {}
    for sample in samples:
        shapes = probe.of(sample) | shapes
    return shapes


class Shapes:
    """Shapes of some tensors for given feeds; of a light model those seen before of the same graph, for feeds alike.

    Alike: of the same shapes. Where subgraphs may run or not every sample is run.
    """

    def __init__(self, proto: ModelLike, tensors: Iterable[TensorId]) -> None:
        self._proto = proto
        self._tensors = tuple(tensors)
        # With several scopes, values decide which of them run: shapes of one sample say nothing of another.
        self._known: dict[Hashable, ShapeMap] | None = None
        self._graph = ""
        if isinstance(proto, LightModel) and len(get_index(proto).scopes) == 1:
            self._known = proto.weights.observed
            self._graph = hash_graph(proto)

    def of(self, feeds: Feeds) -> ShapeMap:
        """Shapes of the tensors that came to be."""
        key = (self._graph, tuple((name, value.shape) for name, value in sorted(feeds.items())))
        known = None if self._known is None else self._known.setdefault(key, {})
        if known is not None and all(tensor in known for tensor in self._tensors):
            return {tensor: known[tensor] for tensor in self._tensors}
        outputs, session = self._probe
        values = {} if session is None else session.run(feeds, list(outputs.values()))
        shapes = {tensor: tuple(map(int, values[name])) for tensor, name in outputs.items()}
        shapes = {tensor: shape for tensor, shape in shapes.items() if shape != (-1,)}
        if known is not None:
            known.update(shapes)
        return shapes

    @cached_property
    def _probe(self) -> tuple[Mapping[TensorId, str], Session | None]:
        """The outputs that hold shapes, and their session, which is made where a sample has to be run."""
        proto, outputs, _ = tap_tensors(self._proto, self._tensors, only=True, probe=_SHAPE)
        if not outputs:
            return {}, None
        return outputs, Session(proto, optimize=False, arena=False, shapes_first=True)


def list_float_tensors(index: GraphIndex) -> list[TensorId]:
    """Graph inputs and node outputs of a float type that are not constants and not inside a Loop or Scan."""
    ids = [TensorId(value.name) for value in index.inputs]
    for node in index.nodes:
        if not index.is_looped(node.scope):
            ids.extend(node.results)
    return [
        tensor
        for tensor in ids
        if index.find_dtype(tensor) in FLOAT_TENSORS and not index.is_constant(tensor)
    ]
