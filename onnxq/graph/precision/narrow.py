"""Float types written into a float32 model: constants in the type they are read in, as few Casts as types allow.

A node computes in one type; where a tensor is read in another than it is made in, a Cast named `<tensor>/Cast` serves
all readers. QuantizeLinear takes its tensor as it comes, DequantizeLinear gives the type its readers compute in, twice
where they differ: engines fuse a pair with the operator beside it, and a Cast between would part them. Bodies of If,
Loop and Scan read and give float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxq.graph.base import NodeRef
from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.light import M, WeightStore, bare_proto, copy_store, rebuild
from onnxq.graph.names import choose_name, list_names
from onnxq.graph.scopes import iterate_subgraphs, join_scope, rename_reads
from onnxq.graph.shapes import Contrib, find_contrib, infer_shapes
from onnxq.graph.values import decode_tensor, encode_tensor
from onnxq.sites import Edge, TensorId
from onnxq.spec import FLOAT_TYPES

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


FLOAT = int(TensorProto.FLOAT)
# Elements. A larger constant that is read in two types is stored once, behind a Cast.
_COPIED = 1024
# What the scales of a weight may lose.
_LOST = 2.0**-8
# Masks are limited to these: the exponent of a Softmax vanishes far above, and three masks added up still fit.
LOWEST: Mapping[int, float] = {int(TensorProto.FLOAT16): -(2.0**14), int(TensorProto.BFLOAT16): -(2.0**126)}
TYPE_NAMES: Mapping[int, str] = {number: str(kind) for number, kind in FLOAT_TYPES.items()}


def write_types(
    model: M,
    narrow: int,
    wide: Collection[str] | None,
    *,
    limited: Collection[Edge] = (),
    interface: Mapping[str, int] | None = None,
) -> M:
    """A copy of a float32 model whose nodes compute in the type `narrow`, all but those named in `wide`.

    wide: None for all. limited: inputs of narrow nodes whose values are limited to `LOWEST`. interface: types of graph
    inputs and outputs, where they are not float32. Nodes must be named.
    """
    typed = infer_shapes(model)
    out, store = ModelProto(), copy_store(model)
    out.CopyFrom(bare_proto(model))
    apart = None if wide is None else frozenset(wide)
    types = _NodeTypes(get_index(typed), narrow, apart, frozenset(limited), dict(interface or {}))
    writer = _TypeWriter(types, store, list_names(out))
    writer.write_graph(out.graph, "")
    return rebuild(model, out, store)


@dataclass(eq=False)
class _NodeTypes:
    """The type that each node computes in, and in which it reads each input."""

    index: GraphIndex
    narrow: int
    wide: frozenset[str] | None
    limited: frozenset[Edge]
    interface: Mapping[str, int]
    known: dict[str, int] = field(default_factory=dict)

    def of_node(self, node: NodeRef) -> int:
        """The type a node computes in. That of a DequantizeLinear is its readers'."""
        if node.name not in self.known:
            self.known[node.name] = self._find_type(node)
        return self.known[node.name]

    def _find_type(self, node: NodeRef) -> int:
        if self.wide is None or node.name in self.wide:
            return FLOAT
        if node.op_type == QUANTIZE and not node.domain:
            return self.of_tensor(self.index.resolve(node.inputs[0], node.scope)) if self.fits_scale(node) else FLOAT
        if node.op_type == DEQUANTIZE and not node.domain:
            found = self.of_readers(TensorId(node.outputs[0], node.scope))
            return self.narrow if found == {self.narrow} and self.fits_scale(node) else FLOAT
        return self.narrow if bind_types(self.index, node, self.narrow, self.index.opset).able else FLOAT

    def of_tensor(self, tensor: TensorId | None) -> int:
        """The type that an input or a computed tensor is made in."""
        if tensor is None or not is_float32(self.index, tensor):
            return FLOAT
        maker = self.index.producer(tensor)
        given = FLOAT if tensor.scope else self.interface.get(tensor.name, FLOAT)
        return given if maker is None else self.of_node(maker)

    def of_readers(self, tensor: TensorId) -> set[int]:
        """The types that a tensor is read in; float32 where it may have any."""
        found = {kind for edge in self.index.consumers(tensor) if (kind := self.of_input(edge)) is not None}
        if self.index.is_output(tensor):
            found.add(FLOAT if tensor.scope else self.interface.get(tensor.name, FLOAT))
        return found or {FLOAT}

    def of_input(self, edge: Edge) -> int | None:
        """The type that an input must have; None where it takes any."""
        node = self.index.node(edge.node)
        kind = self.of_node(node)
        if not node.domain and node.op_type in (QUANTIZE, DEQUANTIZE):
            return None if node.op_type == DEQUANTIZE and edge.index == 0 else kind
        follows = bind_types(self.index, node, self.narrow, self.index.opset).inputs
        one = follows[edge.index] if edge.index < len(follows) else False
        return None if one is None else kind if one else FLOAT

    def fits_scale(self, node: NodeRef) -> bool:
        """False where the narrow type does not hold a scale: no pair is written with another than was meant."""
        held = self.index.resolve(node.inputs[1], node.scope)
        scale = None if held is None else self.index.constant(held)
        data = self.index.resolve(node.inputs[0], node.scope)
        weight = data is not None and self.index.is_constant(data)
        return scale is not None and holds_scale(scale, self.narrow, weight=weight)


def holds_scale(scale: NDArray[Any], narrow: int, *, weight: bool) -> bool:
    """True when the type holds a pair's scales.

    For an activation all of them are normal numbers of the type, since kernels may multiply by their reciprocals. Those
    of a weight multiply sums in float32: they lose digits below, and may lose as much as rounding to 8 bits does.
    """
    kind = FLOAT_TYPES[narrow]
    values, written = _round_scale(scale, narrow)
    if not (np.isfinite(written).all() and (written > 0).all()):
        return False
    if not weight:
        return bool((values >= kind.smallest).all())
    return bool(np.sqrt(np.sum((written - values) ** 2)) <= _LOST * np.sqrt(np.sum(values**2)))


def is_exact(scale: NDArray[Any], narrow: int) -> bool:
    """True when a pair has the same scales in the type, as one has that was written in it."""
    values, written = _round_scale(scale, narrow)
    return bool((values >= FLOAT_TYPES[narrow].smallest).all() and np.array_equal(written, values))


def _round_scale(scale: NDArray[Any], narrow: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scale before and after rounding to the type."""
    values = np.asarray(scale, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        return values, values.astype(helper.tensor_dtype_to_np_dtype(narrow)).astype(np.float64)


@dataclass(eq=False)
class _TypeWriter:
    """Writes types graph by graph, from the outside in.

    made: the type of every float tensor so far. casts: the name under which a tensor is read in a type. nodes: those
    written so far, by scope.
    """

    types: _NodeTypes
    store: WeightStore | None
    taken: set[str]
    made: dict[TensorId, int] = field(default_factory=dict)
    casts: dict[tuple[TensorId, int, bool], str] = field(default_factory=dict)
    nodes: dict[str, list[NodeProto]] = field(default_factory=dict)
    graphs: dict[str, GraphProto] = field(default_factory=dict)

    def write_graph(self, graph: GraphProto, scope: str) -> None:
        """Give every node of the graph, and of the bodies in it, the types it reads."""
        self.graphs[scope], self.nodes[scope] = graph, []
        for value in graph.input:
            held = TensorId(value.name, scope)
            if is_float32(self.types.index, held):
                self.made[held] = self.types.of_tensor(held)
                _set_type(value, self.made[held])
        for tensor in list(graph.initializer):
            self._write_constant(tensor, TensorId(tensor.name, scope), self.store if not scope else None)
        for node in graph.node:
            self._write_node(node, scope)
        self._write_outputs(graph, scope)
        written = [NodeProto.FromString(node.SerializeToString()) for node in self.nodes.pop(scope)]
        del graph.node[:]
        graph.node.extend(written)
        for value in graph.value_info:
            _set_type(value, self.made.get(TensorId(value.name, scope), FLOAT))

    def _write_constant(self, tensor: TensorProto, held: TensorId, store: WeightStore | None) -> None:
        index = self.types.index
        if tensor.data_type != FLOAT:
            return
        wanted = self.types.of_readers(held) if index.is_constant(held) else {FLOAT}
        kind = self.made[held] = self.types.narrow if wanted == {self.types.narrow} else FLOAT
        # Both halves of a pair have one scale, also where they have two types.
        if kind != FLOAT or self._is_shared_scale(held, wanted):
            value = self._narrow(decode_tensor(tensor, store), self._is_limited(held))
            value = value if kind != FLOAT else value.astype(np.float32)
            tensor.CopyFrom(encode_tensor(tensor.name, value, kind, store=store))

    def _is_shared_scale(self, held: TensorId, wanted: set[int]) -> bool:
        """True for the scale of a pair that is read in both types, or written in both."""
        index, pairs = self.types.index, (QUANTIZE, DEQUANTIZE)
        readers = [index.node(edge.node) for edge in index.consumers(held) if edge.index == 1]
        paired = [node for node in readers if node.op_type in pairs and not node.domain]
        both = any(node.op_type == DEQUANTIZE and self._read_in_both(node) for node in paired)
        return both or (bool(paired) and self.types.narrow in wanted)

    def _is_limited(self, held: TensorId) -> bool:
        return any(edge in self.types.limited for edge in self.types.index.consumers(held))

    def _narrow(self, value: NDArray[Any], limited: bool) -> NDArray[Any]:
        kind = self.types.narrow
        if limited:
            value = np.maximum(value, np.float32(LOWEST[kind]))
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(value.astype(helper.tensor_dtype_to_np_dtype(kind)))

    def _write_node(self, node: NodeProto, scope: str) -> None:
        ref = self.types.index.node(node.name)
        kind = self.types.of_node(ref)
        if node.op_type == "Constant" and not node.domain:
            kind = self._write_constant_node(node, scope)
        for label, body in iterate_subgraphs(node):
            self.write_graph(body, join_scope(scope, node.name, label))
        both = node.op_type == DEQUANTIZE and not node.domain and self._read_in_both(ref)
        self._write_inputs(node, ref)
        if kind != FLOAT:
            _set_attributes(node, kind)
        self.nodes[scope].append(node)
        for name in filter(None, node.output):
            if is_float32(self.types.index, TensorId(name, scope)):
                self.made[TensorId(name, scope)] = kind
        if both:
            self._repeat_dequantize(node, ref, scope)

    def _read_in_both(self, ref: NodeRef) -> bool:
        made = TensorId(ref.outputs[0], ref.scope)
        # One that stays in float32 gives that alone, and a Cast follows.
        fixed = self.types.wide is None or ref.name in self.types.wide or not self.types.fits_scale(ref)
        return not fixed and self.types.of_node(ref) == FLOAT and self.types.narrow in self.types.of_readers(made)

    def _repeat_dequantize(self, node: NodeProto, ref: NodeRef, scope: str) -> None:
        """A second DequantizeLinear for the readers in the narrow type."""
        held = self.types.index.resolve(ref.inputs[1], scope)
        assert held is not None
        copy = NodeProto()
        copy.CopyFrom(node)
        suffix = TYPE_NAMES[self.types.narrow]
        copy.name = choose_name(f"{node.name}/{suffix}", self.taken)
        copy.output[0] = choose_name(f"{node.output[0]}/{suffix}", self.taken)
        copy.input[1] = self._copy_constant(held, limited=False)
        self.nodes[scope].append(copy)
        self.casts[TensorId(node.output[0], scope), self.types.narrow, False] = copy.output[0]

    def _write_inputs(self, node: NodeProto, ref: NodeRef) -> None:
        for k, name in enumerate(ref.inputs):
            held = self.types.index.resolve(name, ref.scope) if name else None
            if held is None or held not in self.made:
                continue
            edge = Edge(ref.name, k, ref.scope)
            wanted = self.types.of_input(edge)
            if wanted is not None and wanted != self.made[held]:
                node.input[k] = self._read_as(held, wanted, limited=edge in self.types.limited)

    def _write_constant_node(self, node: NodeProto, scope: str) -> int:
        held = TensorId(node.output[0], scope)
        value = self.types.index.constant(held)
        if value is None or not is_float32(self.types.index, held):
            return FLOAT
        if self.types.of_readers(held) != {self.types.narrow}:
            return FLOAT
        del node.attribute[:]
        narrow = self._narrow(value, self._is_limited(held))
        node.attribute.append(helper.make_attribute("value", encode_tensor(held.name, narrow, self.types.narrow)))
        return self.types.narrow

    def _read_as(self, held: TensorId, kind: int, *, limited: bool = False) -> str:
        """The name under which a tensor is read in another type than it is made in."""
        limited = limited and kind == self.types.narrow
        key = held, kind, limited
        if key not in self.casts:
            value = self.types.index.constant(held)
            small = value is not None and value.size < _COPIED and kind == self.types.narrow
            self.casts[key] = self._copy_constant(held, limited) if small else self._add_cast(held, kind, limited)
        return self.casts[key]

    def _copy_constant(self, held: TensorId, limited: bool) -> str:
        """A copy of a constant in the narrow type."""
        name = choose_name(f"{held.name}/{TYPE_NAMES[self.types.narrow]}", self.taken)
        value = self._narrow(np.asarray(self.types.index.constant(held)), limited)
        self.graphs[held.scope].initializer.append(encode_tensor(name, value, self.types.narrow))
        return name

    def _add_cast(self, held: TensorId, kind: int, limited: bool) -> str:
        source = held.name
        nodes = self.nodes[held.scope]
        if limited:
            lowest = choose_name(f"{held.name}/lowest", self.taken)
            bound = np.float32(LOWEST[kind])
            self.graphs[held.scope].initializer.append(encode_tensor(lowest, np.asarray(bound)))
            source = choose_name(f"{held.name}/limited", self.taken)
            name = choose_name(f"{held.name}/Clip", self.taken)
            nodes.append(helper.make_node("Clip", [held.name, lowest], [source], name=name))
        made = choose_name(f"{held.name}/{TYPE_NAMES[kind]}", self.taken)
        nodes.append(make_cast(source, made, kind, choose_name(f"{held.name}/Cast", self.taken)))
        return made

    def _write_outputs(self, graph: GraphProto, scope: str) -> None:
        """Outputs in the types of the interface; those of bodies in float32."""
        for value in graph.output:
            held = self.types.index.resolve(value.name, scope)
            kind = FLOAT if scope else self.types.interface.get(value.name, FLOAT)
            if held is None or held not in self.made:
                continue
            if self.made[held] != kind:
                if scope:
                    value.name = self._read_as(held, kind)
                else:
                    self._cast_output(graph, held, kind)
            if is_float32(self.types.index, held):
                _set_type(value, kind)

    def _cast_output(self, graph: GraphProto, held: TensorId, kind: int) -> None:
        """A Cast in front of a model output, which keeps its name; all other readers read the tensor before it."""
        inner = choose_name(f"{held.name}/{TYPE_NAMES[self.made[held]]}", self.taken)
        written = GraphProto(node=self.nodes[""])
        rename_reads(written, {held.name: inner})
        for node in written.node:
            node.output[:] = [inner if name == held.name else name for name in node.output]
        self.nodes[""] = [*written.node]
        for tensor in graph.initializer:
            tensor.name = inner if tensor.name == held.name else tensor.name
        name = choose_name(f"{held.name}/Cast", self.taken)
        self.nodes[""].append(make_cast(inner, held.name, kind, name))
        self.made[TensorId(inner)] = self.made[held]
        self.made[held] = kind


def make_cast(source: str, target: str, to: int, name: str) -> NodeProto:
    """A Cast node."""
    return onnx.helper.make_node("Cast", [source], [target], name=name, to=to)


def _set_attributes(node: NodeProto, kind: int) -> None:
    """The attributes that say the type of a result."""
    if node.domain:
        return
    attr: AttributeProto
    if node.op_type == "Cast":
        for attr in node.attribute:
            if attr.name == "to":
                attr.i = kind
    if node.op_type == "ConstantOfShape":
        value = next(
            (decode_tensor(attr.t) for attr in node.attribute if attr.name == "value"), np.zeros(1, np.float32)
        )
        del node.attribute[:]
        narrow = value.astype(helper.tensor_dtype_to_np_dtype(kind))
        node.attribute.append(helper.make_attribute("value", encode_tensor("", narrow, kind)))


def _set_type(value: ValueInfoProto, kind: int) -> None:
    if value.type.tensor_type.elem_type == FLOAT:
        value.type.tensor_type.elem_type = kind
