"""Float types written into a float32 model: constants in the type they are read in, as few Casts as types allow.

A node computes in one type; where a tensor is read in another than it is made in, a Cast named `<tensor>/Cast` serves
all readers. QuantizeLinear takes its tensor as it comes, DequantizeLinear gives the type its readers compute in, twice
where they differ: engines fuse a pair with the operator beside it, and a Cast between would part them. Bodies of If,
Loop and Scan read and give float32.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, defs, helper

from onnxq.arrays import Array, Array64, are_scales, as_float32, as_float64, cast_quietly
from onnxq.graph.base import DEQUANTIZE, LAYOUT_OPS, QUANTIZE, NodeRef
from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.light import M, WeightStore, copy_proto, copy_store, rebuild
from onnxq.graph.names import choose_name, list_names
from onnxq.graph.scopes import iterate_subgraphs, join_scope, rename_tensors, replace_items
from onnxq.graph.shapes import Contrib, find_contrib, infer_shapes
from onnxq.graph.values import decode_tensor, encode_tensor
from onnxq.sites import Edge, MaybeTensor, NameSet, TensorId
from onnxq.spec import FLOAT_TYPES

FLOAT = int(TensorProto.FLOAT)
# Operators on graphs: what goes in and out of bodies stays float32, so that all branches agree.
CONTROL = ("If", "Loop", "Scan")
# ONNX Runtime fails to compute the first in other types than float32; a narrow type merges what the second counts.
_FLOAT32_ONLY = ("AffineGrid", "Unique")
# Their values are those of their inputs: no type rounds them.
MOVES = LAYOUT_OPS.union(
    ("Slice", "Gather", "GatherElements", "GatherND", "Concat", "Split", "Where"),
    ("Expand", "Tile", "Pad", "DepthToSpace", "SpaceToDepth", "ScatterND", "ScatterElements"),
    ("MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "Max", "Min"),
    ("Relu", "Clip", "Abs", "Neg", "Trilu"),
)


@dataclass(frozen=True)
class Binding:
    """How the float32 inputs and outputs of a node follow the type that it computes in.

    inputs: TRUE for those that have the node's type, FALSE for those that are always float32, NONE for those of any
    type. able: the operator may compute in the narrow type at all.
    """

    able: bool
    inputs: tuple[bool | None, ...]


_Takes = tuple[bool, ...]


@lru_cache(maxsize=1024)
def _read_schema(op_type: str, opset: int, narrow: int) -> tuple[_Takes, _Takes] | None:
    """For each formal input, then output: whether its type variable takes `narrow`. The last speaks for all behind."""
    try:
        schema = defs.get_schema(op_type, opset, "")
    except defs.SchemaError:
        return None
    wanted = "tensor(float16)" if narrow == TensorProto.FLOAT16 else "tensor(bfloat16)"
    takes = {
        constraint.type_param_str: wanted in constraint.allowed_type_strs
        for constraint in schema.type_constraints
    }
    variadic = defs.OpSchema.FormalParameterOption.Variadic
    inputs, outputs = (
        tuple(takes.get(formal.type_str, False) for formal in formals)
        for formals in (schema.inputs, schema.outputs)
    )
    repeats = bool(schema.inputs) and schema.inputs[-1].option == variadic
    return (inputs if repeats else (*inputs, False)), outputs


def bind_types(index: GraphIndex, node: NodeRef, narrow: int, opset: int) -> Binding:
    """The binding of a node of a float32 graph. narrow: onnx.TensorProto.FLOAT16 or BFLOAT16."""
    fixed = Binding(False, (False,) * len(node.inputs))
    contrib = find_contrib(node, opset)
    if contrib is not None:
        return _bind_contrib(index, node, contrib)
    if node.domain or node.op_type in CONTROL + _FLOAT32_ONLY:
        return fixed
    if node.op_type == "Cast":
        # It takes any type; its result is in the type of an attribute, which is written anew.
        return Binding(node.attrs.get("to") == FLOAT, (None,))
    if node.op_type == "ConstantOfShape":
        return Binding(is_float32(index, node.result), (None,))
    schema = _read_schema(node.op_type, opset, narrow)
    # The second and third result of a LayerNormalization have the type of an attribute too.
    stashed = node.op_type == "LayerNormalization" and any(node.outputs[1:])
    if schema is None or stashed or "dtype" in node.attrs or "output_dtype" in node.attrs:
        return fixed
    inputs, outputs = schema
    follows = []
    for k, tensor in enumerate(index.list_inputs(node)):
        dtype = index.find_dtype(tensor)
        if dtype == 0 and node.inputs[k]:
            return fixed
        follows.append(inputs[min(k, len(inputs) - 1)] if dtype == FLOAT else None)
    results = [(k, TensorId(name, node.scope)) for k, name in enumerate(node.outputs) if name]
    dtypes = {k: index.find_dtype(tensor) for k, tensor in results}
    if 0 in dtypes.values():
        # Its readers cannot tell what they would get either, and stay float32 with it.
        return fixed
    floats = [k for k, dtype in dtypes.items() if dtype == FLOAT]
    if not floats and follows.count(True) == 1:
        # Shape, ArgMax, IsNaN and their like take a tensor as it comes.
        return Binding(False, (None,) * len(follows))
    # A variadic output (Split) repeats the last formal one.
    able = bool(outputs) and all(outputs[min(k, len(outputs) - 1)] for k in floats)
    # One whose first float input is always float32, such as NonMaxSuppression, computes in that.
    able = able and next((formal for formal in follows if formal is not None), bool(floats))
    if not able:
        follows = [None if formal is None else False for formal in follows]
    return Binding(able, tuple(follows))


def _bind_contrib(index: GraphIndex, node: NodeRef, contrib: Contrib) -> Binding:
    """The binding of an operator of ONNX Runtime, where all types of its tensors are known."""
    dtypes = [index.find_dtype(tensor) for tensor in index.list_inputs(node)]
    wide_inputs, wide_outputs = contrib.wide
    known = all(dtype or not name for dtype, name in zip(dtypes, node.inputs, strict=True))
    able = known and not any(node.outputs[k] for k in wide_outputs if k < len(node.outputs))
    follows = (
        (able and k not in wide_inputs) if dtype == FLOAT else None
        for k, dtype in enumerate(dtypes)
    )
    return Binding(able, tuple(follows))


def is_float32(index: GraphIndex, tensor: MaybeTensor) -> bool:
    """True for a tensor whose type is known to be float32."""
    return index.find_dtype(tensor) == FLOAT


# Elements. A larger constant that is read in two types is stored once, behind a Cast.
_COPIED = 1024
# What the scales of a weight may lose.
_LOST = 2.0**-8
# Masks are limited to these: the exponent of a Softmax vanishes far above, and three masks added up still fit.
LOWEST: Mapping[int, float] = {
    int(TensorProto.FLOAT16): -(2.0**14),
    int(TensorProto.BFLOAT16): -(2.0**126),
}
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
    index = get_index(infer_shapes(model))
    out = copy_proto(model)
    store = copy_store(model)
    apart = None if wide is None else frozenset(wide)
    types = _NodeTypes(index, narrow, apart, frozenset(limited), interface or {})
    _TypeWriter(index, types, store, list_names(out)).write_graph(out.graph, "")
    return rebuild(model, out, store)


@dataclass(eq=False)
class _NodeTypes:
    """The type that each node computes in, and in which it reads each input."""

    index: GraphIndex
    narrow: int
    wide: NameSet | None
    limited: frozenset[Edge]
    interface: Mapping[str, int]
    known: dict[str, int] = field(default_factory=dict)

    def of_node(self, node: NodeRef) -> int:
        """The type a node computes in. That of a DequantizeLinear is its readers'."""
        if node.name not in self.known:
            self.known[node.name] = self._find_type(node)
        return self.known[node.name]

    def _stays_wide(self, node: NodeRef) -> bool:
        """True for a node that was chosen for float32, and for a pair's node whose scale needs it."""
        scaled = node.is_onnx(QUANTIZE, DEQUANTIZE)
        chosen = self.wide is None or node.name in self.wide
        return chosen or (scaled and not self.fits_scale(node))

    def _find_type(self, node: NodeRef) -> int:
        if self._stays_wide(node):
            return FLOAT
        if node.is_onnx(QUANTIZE):
            return self.of_tensor(self.index.find_input(node))
        if node.is_onnx(DEQUANTIZE):
            able = self.of_readers(node.result) == {self.narrow}
        else:
            able = bind_types(self.index, node, self.narrow, self.index.opset).able
        return self.narrow if able else FLOAT

    def of_tensor(self, tensor: MaybeTensor) -> int:
        """The type that an input or a computed tensor is made in."""
        if tensor is None or not is_float32(self.index, tensor):
            return FLOAT
        maker = self.index.find_producer(tensor)
        return self.of_border(tensor) if maker is None else self.of_node(maker)

    def of_border(self, tensor: TensorId) -> int:
        """The type of an input or output of its graph; of bodies always float32."""
        return FLOAT if tensor.scope else self.interface.get(tensor.name, FLOAT)

    def of_readers(self, tensor: TensorId) -> set[int]:
        """The types that a tensor is read in; float32 where it may have any."""
        dtypes = {self.of_input(edge) for edge in self.index.list_consumers(tensor)}
        if self.index.is_output(tensor):
            dtypes.add(self.of_border(tensor))
        return {dtype for dtype in dtypes if dtype is not None} or {FLOAT}

    def of_input(self, edge: Edge) -> int | None:
        """The type that an input must have; None where it takes any."""
        node = self.index.find_node(edge.node)
        # It has the type of the DequantizeLinear, which asks its readers.
        if node.is_onnx(QUANTIZE) and self.index.maker(node, edge.index, DEQUANTIZE):
            return FLOAT if self._stays_wide(node) else None
        dtype = self.of_node(node)
        # Integers, which no float type concerns.
        if node.is_onnx(DEQUANTIZE) and edge.index == 0:
            return None
        if node.is_onnx(QUANTIZE, DEQUANTIZE):
            return dtype
        follows = bind_types(self.index, node, self.narrow, self.index.opset).inputs
        formal = follows[edge.index] if edge.index < len(follows) else False
        if formal is None:
            return None
        return dtype if formal else FLOAT

    def fits_scale(self, node: NodeRef) -> bool:
        """False where the narrow type does not hold a scale: no pair is written with another than was meant."""
        scale = self.index.input_value(node, 1)
        weight = self.index.has_constant(node, 0)
        return scale is not None and holds_scale(scale, self.narrow, weight=weight)


def holds_scale(scale: Array, narrow: int, *, weight: bool) -> bool:
    """True when the type holds a pair's scales.

    For an activation all of them are normal numbers of the type, since kernels may multiply by their reciprocals. Those
    of a weight multiply sums in float32: they lose digits below, and may lose as much as rounding to 8 bits does.
    """
    kind = FLOAT_TYPES[narrow]
    values, written = _round_scale(scale, narrow)
    if not are_scales(written):
        return False
    if not weight:
        return bool((values >= kind.smallest).all())
    return bool(np.sqrt(((written - values) ** 2).sum()) <= _LOST * np.sqrt((values**2).sum()))


def is_exact(scale: Array, narrow: int) -> bool:
    """True when a pair has the same scales in the type, as one has that was written in it."""
    values, written = _round_scale(scale, narrow)
    return bool((values >= FLOAT_TYPES[narrow].smallest).all() and np.array_equal(written, values))


def _round_scale(scale: Array, narrow: int) -> tuple[Array64, Array64]:
    """The scale before and after rounding to the type."""
    values = as_float64(scale)
    dtype = helper.tensor_dtype_to_np_dtype(narrow)
    return values, as_float64(cast_quietly(values, dtype))


@dataclass(eq=False)
class _TypeWriter:
    """Writes types graph by graph, from the outside in.

    dtypes: the type of every float tensor so far. casts: the name under which a tensor is read in a type. nodes: those
    written so far, by scope.
    """

    index: GraphIndex
    types: _NodeTypes
    store: WeightStore | None
    taken: set[str]
    dtypes: dict[TensorId, int] = field(default_factory=dict)
    casts: dict[tuple[TensorId, int, bool], str] = field(default_factory=dict)
    nodes: dict[str, list[NodeProto]] = field(default_factory=dict)
    graphs: dict[str, GraphProto] = field(default_factory=dict)

    def write_graph(self, graph: GraphProto, scope: str) -> None:
        """Give every node of the graph, and of the bodies in it, the types it reads."""
        self.graphs[scope] = graph
        self.nodes[scope] = []
        for value in graph.input:
            tensor = TensorId(value.name, scope)
            if is_float32(self.index, tensor):
                self.dtypes[tensor] = self.types.of_tensor(tensor)
                _set_type(value, self.dtypes[tensor])
        for stored in list(graph.initializer):
            self._write_constant(stored, scope)
        for node in graph.node:
            self._write_node(node, scope)
        self._write_outputs(graph, scope)
        replace_items(graph.node, self.nodes.pop(scope))
        for value in graph.value_info:
            _set_type(value, self.dtypes.get(TensorId(value.name, scope), FLOAT))
        # What a body captures has its type from the graph around it, which may still change.
        own = (
            value
            for value in graph.value_info
            if self.index.resolve_tensor(value.name, scope) == TensorId(value.name, scope)
        )
        replace_items(graph.value_info, own)

    def _write_constant(self, stored: TensorProto, scope: str) -> None:
        if stored.data_type != FLOAT:
            return
        tensor = TensorId(stored.name, scope)
        # Stubs stand in the main graph alone.
        store = None if scope else self.store
        narrow = self.types.narrow
        read_in = self.types.of_readers(tensor) if self.index.is_constant(tensor) else {FLOAT}
        dtype = self.dtypes[tensor] = narrow if read_in == {narrow} else FLOAT
        # Both halves of a pair have one scale, also where they have two types.
        if dtype != FLOAT or self._is_shared_scale(tensor, read_in):
            value = self._narrow_value(decode_tensor(stored, store), self._is_limited(tensor))
            value = value if dtype != FLOAT else as_float32(value)
            stored.CopyFrom(encode_tensor(stored.name, value, dtype, store=store))

    def _is_shared_scale(self, tensor: TensorId, read_in: set[int]) -> bool:
        """True for the scale of a pair that is read in both types, or written in both."""
        edges = [edge for edge in self.index.list_consumers(tensor) if edge.index == 1]
        readers = [self.index.find_node(edge.node) for edge in edges]
        paired = [node for node in readers if node.is_onnx(QUANTIZE, DEQUANTIZE)]
        if paired and self.types.narrow in read_in:
            return True
        return any(node.op_type == DEQUANTIZE and self._read_in_both(node) for node in paired)

    def _is_limited(self, tensor: TensorId) -> bool:
        return any(edge in self.types.limited for edge in self.index.list_consumers(tensor))

    def _narrow_value(self, value: Array, limited: bool) -> Array:
        if limited:
            value = np.maximum(value, np.float32(LOWEST[self.types.narrow]))
        return cast_quietly(value, helper.tensor_dtype_to_np_dtype(self.types.narrow))

    def _write_node(self, node: NodeProto, scope: str) -> None:
        ref = self.index.find_node(node.name)
        dtype = self.types.of_node(ref)
        if ref.is_onnx("Constant"):
            dtype = self._write_constant_node(node, ref.result)
        for label, body in iterate_subgraphs(node):
            self.write_graph(body, join_scope(scope, node.name, label))
        both = ref.is_onnx(DEQUANTIZE) and self._read_in_both(ref)
        self._write_inputs(node, ref)
        if dtype != FLOAT:
            _set_attributes(node, dtype)
        self.nodes[scope].append(node)
        for tensor in ref.results:
            if is_float32(self.index, tensor):
                self.dtypes[tensor] = dtype
        if both:
            self._repeat_dequantize(node, ref)

    def _read_in_both(self, ref: NodeRef) -> bool:
        types = self.types
        # One that stays in float32 gives that alone, and a Cast follows.
        if types.wide is None or ref.name in types.wide or not types.fits_scale(ref):
            return False
        read_in = types.of_readers(ref.result)
        return types.of_node(ref) == FLOAT and types.narrow in read_in

    def _repeat_dequantize(self, node: NodeProto, ref: NodeRef) -> None:
        """A second DequantizeLinear for the readers in the narrow type."""
        scale = self.index.find_input(ref, 1)
        assert scale is not None
        copy = NodeProto()
        copy.CopyFrom(node)
        suffix = TYPE_NAMES[self.types.narrow]
        copy.name = choose_name(f"{node.name}/{suffix}", self.taken)
        copy.output[0] = choose_name(f"{node.output[0]}/{suffix}", self.taken)
        copy.input[1] = self._copy_constant(scale, limited=False)
        self.nodes[ref.scope].append(copy)
        self.casts[ref.result, self.types.narrow, False] = copy.output[0]

    def _write_inputs(self, node: NodeProto, ref: NodeRef) -> None:
        for k, tensor in enumerate(self.index.list_inputs(ref)):
            if tensor is None or tensor not in self.dtypes:
                continue
            edge = ref.make_edge(k)
            dtype = self.types.of_input(edge)
            if dtype is not None and dtype != self.dtypes[tensor]:
                node.input[k] = self._read_as(tensor, dtype, limited=edge in self.types.limited)

    def _write_constant_node(self, node: NodeProto, tensor: TensorId) -> int:
        value = self.index.find_constant(tensor)
        narrow = self.types.narrow
        if value is None or not is_float32(self.index, tensor):
            return FLOAT
        if self.types.of_readers(tensor) != {narrow}:
            return FLOAT
        del node.attribute[:]
        value = self._narrow_value(value, self._is_limited(tensor))
        stored = encode_tensor(tensor.name, value, narrow)
        node.attribute.append(helper.make_attribute("value", stored))
        return narrow

    def _read_as(self, tensor: TensorId, dtype: int, *, limited: bool = False) -> str:
        """The name under which a tensor is read in another type than it is made in."""
        limited = limited and dtype == self.types.narrow
        key = tensor, dtype, limited
        if key not in self.casts:
            value = self.index.find_constant(tensor)
            if value is not None and value.size < _COPIED and dtype == self.types.narrow:
                self.casts[key] = self._copy_constant(tensor, limited)
            else:
                self.casts[key] = self._add_cast(tensor, dtype, limited)
        return self.casts[key]

    def _copy_constant(self, tensor: TensorId, limited: bool) -> str:
        """A copy of a constant in the narrow type."""
        name = self._name_part(tensor, TYPE_NAMES[self.types.narrow])
        value = self._narrow_value(np.asarray(self.index.find_constant(tensor)), limited)
        self.graphs[tensor.scope].initializer.append(encode_tensor(name, value, self.types.narrow))
        return name

    def _add_cast(self, tensor: TensorId, dtype: int, limited: bool) -> str:
        source = tensor.name
        nodes = self.nodes[tensor.scope]
        if limited:
            lowest = self._name_part(tensor, "lowest")
            bound = np.asarray(np.float32(LOWEST[dtype]))
            self.graphs[tensor.scope].initializer.append(encode_tensor(lowest, bound))
            source = self._name_part(tensor, "limited")
            clip = self._name_part(tensor, "Clip")
            nodes.append(helper.make_node("Clip", [tensor.name, lowest], [source], name=clip))
        target = self._name_part(tensor, TYPE_NAMES[dtype])
        nodes.append(make_cast(source, target, dtype, self._name_part(tensor, "Cast")))
        return target

    def _name_part(self, tensor: TensorId, part: str) -> str:
        return choose_name(f"{tensor.name}/{part}", self.taken)

    def _write_outputs(self, graph: GraphProto, scope: str) -> None:
        """Outputs in the types of the interface; those of bodies in float32."""
        for value in graph.output:
            tensor = self.index.resolve_tensor(value.name, scope)
            dtype = self.types.of_border(TensorId(value.name, scope))
            if tensor is None or tensor not in self.dtypes:
                continue
            # Outputs of a body are known by their place, so that their names may change; a model's
            # may not.
            if self.dtypes[tensor] != dtype and scope:
                value.name = self._read_as(tensor, dtype)
            elif self.dtypes[tensor] != dtype:
                self._cast_output(graph, tensor, dtype)
            if is_float32(self.index, tensor):
                _set_type(value, dtype)

    def _cast_output(self, graph: GraphProto, tensor: TensorId, dtype: int) -> None:
        """A Cast in front of a model output, which keeps its name; all other readers read the tensor before it."""
        inner = self._name_part(tensor, TYPE_NAMES[self.dtypes[tensor]])
        names = {tensor.name: inner}
        written = GraphProto(node=self.nodes[""])
        rename_tensors(written, names)
        self.nodes[""] = [*written.node]
        # An output may be an initializer, which no node makes.
        for stored in graph.initializer:
            stored.name = names.get(stored.name, stored.name)
        self.nodes[""].append(make_cast(inner, tensor.name, dtype, self._name_part(tensor, "Cast")))
        self.dtypes[TensorId(inner)] = self.dtypes[tensor]
        self.dtypes[tensor] = dtype


def make_cast(source: str, target: str, to: int, name: str) -> NodeProto:
    """A Cast node."""
    return helper.make_node("Cast", [source], [target], name=name, to=to)


def _set_attributes(node: NodeProto, kind: int) -> None:
    """The attributes that say the type of a result."""
    if node.domain or node.op_type not in ("Cast", "ConstantOfShape"):
        return
    if node.op_type == "Cast":
        for attr in node.attribute:
            attr.i = kind if attr.name == "to" else attr.i
        return
    values = [decode_tensor(attr.t) for attr in node.attribute if attr.name == "value"]
    narrow = (values or [np.zeros(1, np.float32)])[0].astype(helper.tensor_dtype_to_np_dtype(kind))
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("value", encode_tensor("", narrow, kind)))


def _set_type(value: ValueInfoProto, kind: int) -> None:
    if value.type.tensor_type.elem_type == FLOAT:
        value.type.tensor_type.elem_type = kind
