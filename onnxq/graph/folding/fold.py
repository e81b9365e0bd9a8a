"""Constants computed once: Constant nodes, nodes that read only constants or static shapes, wrapped weights."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto

from onnxq.arrays import Array
from onnxq.graph.base import RANDOM_OPS, NodeRef
from onnxq.graph.editing.editor import Editor
from onnxq.graph.folding.values import evaluate_nodes, infer_shape_values, move_constant
from onnxq.graph.index import GraphIndex
from onnxq.graph.light import LightModel, M, ModelLike, bare_proto, strip_weights
from onnxq.graph.names import name_nodes
from onnxq.graph.scopes import walk_from, walk_graphs, walk_nodes
from onnxq.graph.shapes import infer_shapes
from onnxq.graph.storage import SMALL_BYTES, count_tensor_bytes, omit_weights
from onnxq.graph.values import encode_tensor, find_constant_attribute
from onnxq.sites import MaybeTensor, TensorId, is_within

# Random, stateful, without a tensor as result, or meant to stay: quantized weights live behind DequantizeLinear.
_NEVER = (
    *RANDOM_OPS,
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "Optional",
    "OptionalGetElement",
    "OptionalHasElement",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceLength",
    "SequenceMap",
    "ConcatFromSequence",
    "SplitToSequence",
)
# A folded tensor may be this much larger than the constants it comes from, or this large: a scalar blown up by Expand
# or ConstantOfShape is cheaper to compute than to store.
_GROWTH = 8
_ALWAYS_BYTES = 2**20
# Inputs that have no axis in ONNX: ORT refuses constants with an axis of size 1 there, and takes computed tensors.
_SCALARS = {"Range": (0, 1, 2), "Loop": (1,), "DFT": (2,)}
# Each round can make more shapes static; real models need two or three.
_ROUNDS = 10
# By their names.
Nodes = dict[str, NodeRef]
# The values of tensors that depend on constants alone.
Folded = dict[TensorId, TensorProto]


def fold_constants(model: M) -> M:
    """A copy in which all that does not depend on the inputs is an initializer under its own tensor's name.

    All scopes; subgraphs that unpack one weight share the result, in the scope around them. Constant nodes become
    initializers; readers of Identity(constant) read the constant itself; chains of shape arithmetic fold as far as
    dims are static, by inference from the inputs (value_info in the file may be stale and is not believed). Nodes that
    make a graph or subgraph output stay, as do Q/DQ, random operators, functions, and nodes that would grow the model.
    ORT folds more of the result than of the model, and refuses constants with an axis where it takes such tensors for
    scalars: those are reshaped.
    Raises MissingDependencyError without onnxruntime.
    """
    model = name_nodes(model)
    for _ in range(_ROUNDS):
        folding = _Folding(model)
        plan = folding.make_plan()
        before = model
        model = (
            _apply_plan(folding.index, plan, model)
            if plan.nodes
            else _insert_scalars(folding.index, model)
        )
        if model is before:
            break
    return strip_weights(model) if isinstance(model, LightModel) else model  # type: ignore[return-value]


@dataclass(eq=False)
class _Plan:
    """The changes of one round."""

    # To remove.
    nodes: Nodes
    # Initializers that are still read.
    tensors: Folded
    # Identity outputs and their sources.
    same: dict[TensorId, TensorId]


def _infer_types(proto: ModelProto) -> ModelProto:
    # Without weights: inference looks at small tensors only, and would copy the large ones.
    light, _ = omit_weights(proto)
    for _, graph in walk_graphs(light.graph):
        del graph.value_info[:]
    return infer_shapes(light)


class _Folding:
    """One round over one model."""

    def __init__(self, model: ModelLike) -> None:
        self.proto = proto = bare_proto(model)
        # The first knows types and shapes, without the weights; the second holds those, without a copy.
        self.index = GraphIndex(_infer_types(proto))
        self.weights = GraphIndex(model)
        self.shapes = infer_shape_values(self.index)
        self.protos = {node.name: node for node in walk_nodes(proto.graph)}
        # Tensors that a graph or body gives out.
        self.protected = {
            self.index.resolve_tensor(name, scope)
            for scope in self.index.scopes
            for name in self.index.scope_outputs(scope)
        }
        # Of the constants that a tensor is computed from, which its own size is weighed against.
        self.bytes: dict[TensorId, int] = {}

    def make_plan(self) -> _Plan:
        """Find what can be folded now; nodes that fail or grow too much are left out with all that depends on them."""
        refused: set[str] = set()
        computed = {}
        # Again without those that were refused: what depends on them cannot be folded either.
        while True:
            nodes = self._find_foldable(refused)
            same, wanted = self._find_wanted(nodes)
            missing = [t for t in wanted if not self._is_literal(t) and t not in computed]
            computed.update(self._compute_values(nodes, missing))
            failed = [
                t
                for t in missing
                if t not in computed or self._too_large(t, count_tensor_bytes(computed[t]))
            ]
            if not failed:
                tensors = {
                    t: self._read_literal(t) if self._is_literal(t) else computed[t] for t in wanted
                }
                return _Plan(nodes, tensors, same)
            refused.update(self._find_maker(t).name for t in failed)

    def _find_foldable(self, refused: set[str]) -> Nodes:
        nodes = {}
        for node in self.index.nodes:
            outputs = node.results
            if node.name in refused or not outputs or any(t in self.protected for t in outputs):
                continue
            if all(map(self._is_literal, outputs)):
                nodes[node.name] = node
                continue
            if (
                node.domain
                or node.op_type in _NEVER
                or self.index.subgraphs(node.name)
                or not any(node.inputs)
            ):
                continue
            read = [self.index.resolve_tensor(name, node.scope) for name in node.inputs if name]
            if self._unpacks_weight(node, read[0]):
                continue
            if all(t is not None and self._is_fixed(t, nodes) for t in read):
                size = sum(
                    self.bytes[t] if t in self.bytes else self._inferred_bytes(t)
                    for t in self.index.list_reads(node)
                )
                self.bytes.update(dict.fromkeys(outputs, size))
                if not any(self._too_large(t, self._inferred_bytes(t)) for t in outputs):
                    nodes[node.name] = node
        return nodes

    def _unpacks_weight(self, node: NodeRef, read: MaybeTensor) -> bool:
        """A Cast that makes bytes of a quantized weight's 4 bits: they are packed to keep the file small."""
        packed = self.index.find_dtype(read) in (TensorProto.INT4, TensorProto.UINT4)
        readers = self.index.readers(node.result) if node.op_type == "Cast" and packed else ()
        return any(reader.op_type == "DequantizeLinear" for reader in readers)

    def _is_fixed(self, t: TensorId, nodes: Nodes) -> bool:
        maker = self.index.find_producer(t)
        return self.index.is_constant(t) or (maker is not None and maker.name in nodes)

    def _is_literal(self, t: TensorId) -> bool:
        """A Constant node's output, or a tensor whose value follows from static dims: known without computing."""
        attribute = self._find_attribute(t)
        return t in self.shapes or (attribute is not None and attribute.name != "sparse_value")

    def _find_attribute(self, t: TensorId) -> AttributeProto | None:
        """The attribute that a Constant node has the tensor in."""
        maker = self.index.find_onnx_producer(t, "Constant")
        return None if maker is None else find_constant_attribute(self.protos[maker.name])

    def _read_literal(self, t: TensorId) -> TensorProto:
        attribute = None if t in self.shapes else self._find_attribute(t)
        if attribute is not None and attribute.name == "value":
            tensor = deepcopy(attribute.t)
            tensor.name = t.name
            return tensor
        return self._encode_value(t, t.name)

    def _find_wanted(self, nodes: Nodes) -> tuple[dict[TensorId, TensorId], list[TensorId]]:
        """Identities to bypass, and the folded tensors that must exist because something else reads them."""
        same = {}
        wanted: dict[TensorId, None] = {}
        for node in nodes.values():
            for t in node.results:
                # Read by folded nodes alone it need not exist.
                if any(edge.node not in nodes for edge in self.index.list_consumers(t)):
                    source = self._unwrap_identity(t, nodes)
                    if source != t:
                        same[t] = source
                    maker = self.index.find_producer(source)
                    if maker is not None and maker.name in nodes:
                        wanted[source] = None
        return same, list(wanted)

    def _unwrap_identity(self, t: TensorId, nodes: Nodes) -> TensorId:
        """Return the source of an Identity, or of a chain of them: tied weights must stay one tensor."""
        while (
            (maker := self.index.find_producer(t)) is not None
            and maker.name in nodes
            and maker.op_type == "Identity"
        ):
            source = self.index.find_input(maker)
            if source is None or t in self.shapes:
                break
            t = source
        return t

    def _compute_values(self, nodes: Nodes, wanted: list[TensorId]) -> Folded:
        """The values of the tensors asked for, as far as there are any."""
        # Without ORT, which would copy a weight in and out.
        moved = {t: array for t in wanted if (array := self._move_weight(t)) is not None}
        done = {t: encode_tensor(t.name, array) for t, array in moved.items()}
        rest = [t for t in wanted if t not in moved]
        return {**done, **self._evaluate_nodes(nodes, rest)} if rest else done

    def _move_weight(self, t: TensorId) -> Array | None:
        """The value of a weight that is only transposed, reshaped or widened, perhaps several times."""
        chain = []
        at: MaybeTensor = t
        while at is not None and not self.weights.is_constant(at):
            maker = self.index.find_producer(at)
            if maker is None or not maker.inputs:
                return None
            chain.append(maker)
            at = self.index.find_input(maker)
        if at is None or not chain:
            return None
        array = self.weights.find_constant(at)
        dtype = self.weights.find_dtype(at)
        for node in reversed(chain):
            shape = self.index.find_sizes(node.result)
            array = None if array is None else move_constant(node, array, dtype, shape)
            dtype = node.attrs.get("to", dtype) if node.op_type == "Cast" else dtype
        return array

    def _evaluate_nodes(self, nodes: Nodes, wanted: list[TensorId]) -> Folded:
        """The part of the model that makes `wanted`, in names that fit one scope, computed."""
        names: dict[TensorId, str] = {}
        constants = {}
        part = []
        for ref in self._list_makers(nodes, wanted):
            node = deepcopy(self.protos[ref.name])
            for k, name in enumerate(ref.inputs):
                t = self.index.resolve_tensor(name, ref.scope)
                if t is not None and t not in names:
                    names[t] = f"t{len(names)}"
                    constants[names[t]] = self._encode_value(t, names[t])
                node.input[k] = names[t] if t is not None else ""
            for k, name in enumerate(ref.outputs):
                names[TensorId(name, ref.scope)] = node.output[k] = f"t{len(names)}" if name else ""
            part.append(node)
        run = partial(evaluate_nodes, self.proto, part, constants)
        values = run([names[t] for t in wanted])
        if values is None:
            # One node that cannot run keeps the others from running; alone, each of the rest has its chance.
            alone = [run([names[t]]) for t in wanted] if len(wanted) > 1 else []
            values = {name: value for each in alone if each for name, value in each.items()}
        return {t: encode_tensor(t.name, values[names[t]]) for t in wanted if names[t] in values}

    def _list_makers(self, nodes: Nodes, wanted: list[TensorId]) -> list[NodeRef]:
        def find_makers(tensors: Iterable[TensorId]) -> list[NodeRef]:
            makers = (self.index.find_producer(t) for t in tensors if not self._is_literal(t))
            return [maker for maker in makers if maker is not None and maker.name in nodes]

        needed = walk_from(
            find_makers(wanted), lambda node: find_makers(self.index.list_reads(node))
        )
        return sorted(needed, key=lambda node: node.order)

    def _encode_value(self, t: TensorId, name: str) -> TensorProto:
        array = self.shapes[t] if t in self.shapes else self.weights.find_constant(t)
        # Only constants and tensors of known shapes are foldable.
        assert array is not None, t
        return encode_tensor(name, array, self.index.find_dtype(t) or None)

    def _find_maker(self, t: TensorId) -> NodeRef:
        maker = self.index.find_producer(t)
        assert maker is not None, t
        return maker

    def _inferred_bytes(self, t: TensorId) -> int:
        """Return the tensor's size in bytes if its shape is static, else 0."""
        shape = self.index.find_sizes(t)
        dtype = self.index.find_dtype(t)
        if shape is None or not dtype or dtype == TensorProto.STRING:
            return 0
        return count_tensor_bytes(TensorProto(data_type=dtype, dims=shape))

    def _too_large(self, t: TensorId, size: int) -> bool:
        return size > max(_ALWAYS_BYTES, _GROWTH * self.bytes.get(t, 0))


def _apply_plan(index: GraphIndex, plan: _Plan, model: M) -> M:
    editor = Editor(model)
    for t, source in plan.same.items():
        outside = [edge for edge in index.list_consumers(t) if edge.node not in plan.nodes]
        editor.rewire(t, source.name, consumers=outside)
    for name in plan.nodes:
        editor.remove_node(name)
    for t, tensor in plan.tensors.items():
        editor.add_tensor(t.scope, tensor)
    _remove_sources(index, plan, editor)
    _share_equal(index, plan, editor)
    return editor.export()


def _insert_scalars(index: GraphIndex, model: M) -> M:
    """The model with a Reshape in front of each input of _SCALARS that has axes, which may become a constant."""
    edges = [
        (node.make_edge(k), t)
        for node in index.nodes
        if not node.domain
        for k in _SCALARS.get(node.op_type, ())
        if (t := index.find_input(node, k)) is not None and index.find_shape(t)
    ]
    if not edges:
        return model
    editor = Editor(model)
    for edge, t in edges:
        node = editor.fresh(f"{edge}/scalar")
        # A Reshape to the empty shape makes a scalar.
        shape = editor.add_constant(edge.scope, f"{node}/shape", np.zeros(0, np.int64))
        scalar = editor.fresh(node)
        editor.insert_node(
            edge.scope, "Reshape", [t.name, shape], [scalar], name=node, before=edge.node
        )
        editor.replace_input(edge, scalar)
    return editor.export()


def _remove_sources(index: GraphIndex, plan: _Plan, editor: Editor[Any]) -> None:
    """Take out sources that only the folded nodes read: weights, and Shape nodes that nobody needs."""
    waiting = list(plan.nodes.values())
    removed = set(plan.nodes)
    while waiting:
        node = waiting.pop()
        for name in filter(None, node.inputs):
            read = index.resolve_tensor(name, node.scope)
            maker = index.find_producer(read)
            if read is None or not editor.is_unread(read):
                continue
            if maker is None:
                editor.remove_initializer(read)
            elif (
                maker.name not in removed
                and not index.subgraphs(maker.name)
                and all(map(editor.is_unread, maker.results))
            ):
                editor.remove_node(maker.name)
                removed.add(maker.name)
                waiting.append(maker)


def _share_equal(index: GraphIndex, plan: _Plan, editor: Editor[Any]) -> None:
    """Make large results that are equal one initializer: branches that unpack one weight must not double it."""
    alike = defaultdict(list)
    for t, tensor in plan.tensors.items():
        maker = index.find_producer(t)
        if (
            count_tensor_bytes(tensor) > SMALL_BYTES
            and maker is not None
            and maker.op_type != "Constant"
        ):
            alike[tensor.data_type, tuple(tensor.dims)].append(t)
    equal = defaultdict(list)
    for kind, same in alike.items():
        # Only of several is it worth looking at the values.
        for t in same if len(same) > 1 else ():
            equal[kind, hashlib.sha256(plan.tensors[t].raw_data).digest()].append(t)
    for group in equal.values():
        if len(group) == 1:
            continue
        # Only what nothing reads can be taken out, and its name is needed for the shared one.
        edges = [edge for t in group for edge in editor.list_consumers(t)]
        for edge in edges:
            editor.replace_input(edge, "")
        for t in group:
            editor.remove_initializer(t)
        first = group[0]
        shared = deepcopy(plan.tensors[first])
        # The innermost that is, or lies around, those of all.
        scope = next(
            scope
            for scope in index.list_outwards(first.scope)
            if all(is_within(t.scope, scope) for t in group)
        )
        # A copy has the name of the first.
        if not editor.is_free(shared.name, scope):
            shared.name = editor.fresh(shared.name)
        editor.add_tensor(scope, shared)
        for edge in edges:
            editor.replace_input(edge, shared.name)
