"""Editor: the one place where a model is changed. Import once, edit by name, export once.

Every method raises ModelError with the name of a node, tensor or scope that does not exist.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Generic

import numpy as np
from numpy.typing import ArrayLike
from onnx import AttributeProto, NodeProto, TensorProto, helper

from onnxq.arrays import Array
from onnxq.errors import ModelError, suggest_names
from onnxq.graph.base import Attrs, NodeRef
from onnxq.graph.editing import gs
from onnxq.graph.editing.wiring import (
    BODY_TYPES,
    NodeRecord,
    ScopeRecord,
    export_wiring,
    find_nodes_between,
    find_used,
    import_wiring,
    rename_value,
)
from onnxq.graph.index import look_up
from onnxq.graph.light import M, bare_proto, copy_store, rebuild
from onnxq.graph.names import check_names, choose_name, list_names
from onnxq.graph.values import encode_tensor
from onnxq.sites import Edge, Edges, TensorId, is_within

_fault = partial(ModelError, code="Q117")


class Editor(Generic[M]):
    """Edits on a model whose nodes are named (see name_nodes). The proto given is never changed, and must not be."""

    def __init__(self, model: M) -> None:
        proto = bare_proto(model)
        check_names(proto)
        self._source = model
        # A copy: the given model must not come to refer to the arrays of an edit that may be thrown away.
        self._store = copy_store(model)
        self._wiring = wiring = import_wiring(proto)
        self._resolve = wiring.resolve_tensor
        self._nodes = wiring.nodes
        self._tensors = wiring.tensors
        self._scopes = wiring.scopes
        self._names = list_names(proto)
        # New nodes by the node they are anchored to, in the order in which they were inserted.
        self._before: defaultdict[str, list[str]] = defaultdict(list)
        self._after: defaultdict[str, list[str]] = defaultdict(list)
        self._metadata: dict[str, str] = {}

    def export(self) -> M:
        """The edited model, of the kind that was given; untouched parts are as they were, in the same order.

        Raises ModelError for a node that reads, or an output that is, a tensor nothing makes, and for a cycle.
        """
        proto = export_wiring(
            self._wiring, bare_proto(self._source), self._before, self._after, self._metadata
        )
        return rebuild(self._source, proto, self._store)

    def finish(self) -> M:
        """The edited model, without the nodes and initializers that no output depends on any more."""
        self.remove_unused()
        return self.export()

    def fresh(self, base: str) -> str:
        """`base`, or base_1, base_2 …: a name no tensor, node or function of any scope has; it is reserved."""
        return choose_name(base, self._names)

    def is_free(self, name: str, scope: str) -> bool:
        """True when a tensor of this name can be made in `scope`: none there, around it, or inside it.

        Subgraphs side by side may both have one, and inputs of a body may hide one around it.
        """
        same = (t for other in self._scopes if (t := TensorId(name, other)) in self._tensors)
        return not any(
            is_within(scope, t.scope) or (is_within(t.scope, scope) and not self._is_input(t))
            for t in same
        )

    def _is_input(self, t: TensorId) -> bool:
        return t.name in {value.name for value in self._scopes[t.scope].inputs}

    def add_initializer(
        self, scope: str, name: str, array: Array, *, dtype: int | None = None
    ) -> str:
        """A new initializer in `scope`; returns its name.

        dtype: an onnx.TensorProto type, by default the array's; sub-byte values are given as ordinary integers.
        """
        self.add_tensor(
            scope, encode_tensor(name, array, dtype, store=None if scope else self._store)
        )
        return name

    def add_constant(
        self, scope: str, base: str, array: ArrayLike, *, dtype: int | None = None
    ) -> str:
        """A new initializer of about this name, see `fresh`; returns its name."""
        return self.add_initializer(scope, self.fresh(base), np.asarray(array), dtype=dtype)

    def add_tensor(self, scope: str, tensor: TensorProto) -> None:
        """A new initializer in `scope`, as it is and under the name it has."""
        record = self._find_scope(scope)
        self._define_tensor(tensor.name, scope)
        record.initializers[tensor.name] = tensor
        # A type that is declared under this name may be that of another tensor.
        record.value_info.pop(tensor.name, None)

    def is_unread(self, t: TensorId) -> bool:
        """True for a tensor, not an input, that no node reads and no graph or subgraph gives out."""
        if t not in self._tensors or self._is_input(t):
            return False
        outputs = (self._resolve(v.name, s.name) for s in self._scopes.values() for v in s.outputs)
        return not self.list_consumers(t) and t not in outputs

    def remove_initializer(self, t: TensorId) -> None:
        """Take out an initializer that nothing reads."""
        if t.name not in self._tensor_scope(t).initializers or not self.is_unread(t):
            raise _fault(t, "is not an initializer, or is still read", "rewire its readers first")
        del self._tensors[t], self._scopes[t.scope].initializers[t.name]

    def replace_initializer(self, t: TensorId, array: Array) -> None:
        """Other values (and, if need be, another shape or type) for an initializer, for all that read it."""
        scope = self._tensor_scope(t)
        if t.name not in scope.initializers:
            raise _fault(t, "is not an initializer", suggest_names(t.name, scope.initializers))
        # Only initializers of the main graph may be stubs.
        scope.initializers[t.name] = encode_tensor(
            t.name, array, store=None if scope.name else self._store
        )
        scope.value_info.pop(t.name, None)

    def insert_node(
        self,
        scope: str,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        name: str,
        domain: str = "",
        attrs: Attrs | None = None,
        before: str | None = None,
        after: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """A new node. Inputs must be there already; outputs are new tensors ("" leaves an optional one out).

        before, after: the node of the same scope it is to stand next to; without them it stands before its first
        reader. It is moved only as far as its own inputs and readers ask.
        """
        target = self._find_scope(scope)
        if name in self._nodes:
            raise _fault(name, "there is a node of this name already", "take a name from fresh()")
        for anchor in filter(None, (before, after)):
            if self._find_node(anchor).scope != scope:
                raise _fault(
                    anchor, f"is not in scope {scope!r}", "anchor the new node in its own scope"
                )
        attributes = {key: _make_attribute(key, value) for key, value in (attrs or {}).items()}
        read = [self._find_visible(tensor, scope) for tensor in inputs]
        results = [
            self._define_tensor(tensor, scope) if tensor else gs.Variable.empty()
            for tensor in outputs
        ]
        node = gs.Node(op_type, name=name, inputs=read, outputs=results, domain=domain or None)
        source = NodeProto()
        helper.set_metadata_props(source, dict(metadata or {}))
        self._nodes[name] = NodeRecord(node, scope, source, attributes)
        self._names.add(name)
        if before is not None:
            self._before[before].append(name)
        elif after is not None:
            self._after[after].append(name)
        else:
            target.order.append(name)

    def replace_node(
        self,
        node: NodeRef,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        """A new node in the place of another, under its name. outputs: None: those it had. more: of `insert_node`."""
        self.remove_node(node.name)
        results = node.outputs if outputs is None else outputs
        self.insert_node(node.scope, op_type, inputs, results, name=node.name, **more)

    def remove_node(self, name: str) -> None:
        """Take out a node with its subgraphs. Readers of its outputs must be rewired before export."""
        record = self._find_node(name)
        for subgraph in record.subgraphs.values():
            for inner in [key for key, value in self._nodes.items() if value.scope == subgraph]:
                self.remove_node(inner)
            for store in (self._tensors, self._wiring.orphans):
                for t in [key for key in store if key.scope == subgraph]:
                    del store[t]
            del self._scopes[subgraph]
        for tensor in record.node.outputs:
            key = TensorId(tensor.name, record.scope)
            # Its readers keep the object, and read whatever is made under this name next.
            if tensor.name:
                self._wiring.orphans[key] = self._tensors.pop(key)
        # graphsurgeon unlinks the other ends then.
        record.node.inputs.clear()
        record.node.outputs.clear()
        del self._nodes[name]

    def replace_input(self, edge: Edge, tensor: str) -> None:
        """Let one input of one node read another tensor ("" leaves it out; the input after the last one is added)."""
        record = self._find_node(edge.node)
        inputs = record.node.inputs
        if not 0 <= edge.index <= len(inputs):
            raise _fault(edge, f"the node has {len(inputs)} inputs", "use one of these")
        source = self._find_visible(tensor, record.scope)
        if edge.index == len(inputs):
            inputs.append(source)
        else:
            inputs[edge.index] = source

    def replace_output(self, node: str, k: int, new: str) -> None:
        """Let a node make the tensor `new` as its output k. Readers keep the old one, for another node to make."""
        record = self._find_node(node)
        old = TensorId(record.node.outputs[k].name, record.scope)
        self._wiring.orphans[old] = self._tensors.pop(old)
        record.node.outputs[k] = self._define_tensor(new, record.scope)

    def rewire(
        self,
        t: TensorId,
        new: str,
        *,
        consumers: Iterable[Edge] | None = None,
        outputs: bool = False,
    ) -> None:
        """Let the readers of `t` (all, or the given ones) read `new`, captures from inner scopes included.

        Without `consumers`, the nodes that `new` itself is computed by go on reading `t`. outputs: subgraphs that give
        `t` out give out `new` instead; an output of the main graph keeps its name (see rename_tensor).
        """
        self._tensor_scope(t)
        if consumers is None:
            # A node inserted behind `t` would come to read what it makes itself.
            target = self._resolve(new, t.scope)
            makers = find_nodes_between(self._wiring, target, t) if target else set()
            edges = [edge for edge in self.list_consumers(t) if edge.node not in makers]
        else:
            edges = list(consumers)
            strange = next((edge for edge in edges if edge not in self.list_consumers(t)), None)
            if strange is not None:
                raise _fault(strange, f"does not read {t}", "take the edge from the index")
        for edge in edges:
            self.replace_input(edge, new)
        for scope in self._scopes.values() if outputs else ():
            for k, value in enumerate(scope.outputs):
                if self._resolve(value.name, scope.name) == t:
                    self._rewire_output(scope, k, new)

    def _rewire_output(self, scope: ScopeRecord, k: int, new: str) -> None:
        if not scope.name:
            raise _fault(
                scope.outputs[k].name,
                "is an output of the model and keeps its name",
                "rename the tensor, then make it anew",
            )
        self._find_visible(new, scope.name)
        scope.outputs[k] = rename_value(scope.outputs[k], new)

    def list_consumers(self, t: TensorId) -> Edges:
        """The edges that read the tensor now."""
        tensor = self._tensors.get(t)
        edges: dict[Edge, None] = {}
        for node in tensor.outputs if tensor is not None else ():
            scope = self._nodes[node.name].scope
            edges.update(
                (Edge(node.name, k, scope), None)
                for k, read in enumerate(node.inputs)
                if read is tensor
            )
        return tuple(edges)

    def rename_tensor(self, t: TensorId, new: str) -> None:
        """Give a tensor another name where it is made and wherever it is read.

        An output of its graph or subgraph keeps the old name, which something else must then produce. Inputs of the
        model cannot be renamed.
        """
        scope = self._tensor_scope(t)
        tensor = self._tensors[t]
        if not scope.name and self._is_input(t):
            raise _fault(
                t.name, "is an input of the model and keeps its name", "insert a node behind it"
            )
        self._define_tensor(new, t.scope)
        # Subgraphs that give the tensor out by its outer name are readers like any other.
        for inner in self._scopes.values():
            if inner is not scope:
                inner.outputs = [
                    rename_value(v, new) if self._resolve(v.name, inner.name) == t else v
                    for v in inner.outputs
                ]
        self._tensors[TensorId(new, t.scope)] = self._tensors.pop(t)
        tensor.name = new
        # Of a body, whose inputs are known to its parent by position.
        scope.inputs = [rename_value(v, new) if v.name == t.name else v for v in scope.inputs]
        record = scope.initializers.pop(t.name, None)
        if record is not None:
            # A copy: the message may still belong to the model that was given.
            copy = deepcopy(record)
            (copy.values if hasattr(copy, "values") else copy).name = new
            scope.initializers[new] = copy
        known = scope.value_info.pop(t.name, None) or next(
            (v for v in scope.outputs if v.name == t.name), None
        )
        if known is not None and known.type.WhichOneof("value"):
            scope.value_info[new] = rename_value(known, new)
        for old, now in scope.annotated.items():
            if now == t.name:
                scope.annotated[old] = new

    def set_attr(self, node: str, name: str, value: Any) -> None:
        """Set an attribute (None takes it away): int, float, str, bytes, list of these, TensorProto, AttributeProto."""
        record = self._find_node(node)
        if value is None:
            record.attributes.pop(name, None)
        else:
            record.attributes[name] = _make_attribute(name, value)

    def set_op(self, node: str, op_type: str, domain: str = "") -> None:
        """Make the node another operation, with the inputs, outputs and attributes it has."""
        record = self._find_node(node)
        record.node.op = op_type
        record.node.domain = domain or None

    def remove_unused(self) -> None:
        """Take out nodes and initializers, in every scope, that no output of the model depends on."""
        nodes, tensors = find_used(self._wiring)
        for name in [name for name in self._nodes if name not in nodes]:
            # It may have gone with the node whose body it was in.
            if name in self._nodes:
                self.remove_node(name)
        for scope in self._scopes.values():
            for name in [
                name for name in scope.initializers if TensorId(name, scope.name) not in tensors
            ]:
                del scope.initializers[name]
                del self._tensors[TensorId(name, scope.name)]

    def model_metadata(self, metadata: Mapping[str, str]) -> None:
        """Add entries to the model's metadata_props."""
        self._metadata.update(metadata)

    def _find_node(self, name: str) -> NodeRecord:
        return look_up(self._nodes, name, "node of this name")

    def _find_scope(self, name: str) -> ScopeRecord:
        return look_up(self._scopes, name, "such scope")

    def _tensor_scope(self, t: TensorId) -> ScopeRecord:
        if t not in self._tensors:
            known = (key.name for key in self._tensors if key.scope == t.scope)
            raise ModelError(
                t, "the model has no such tensor", suggest_names(t.name, known), code="Q116"
            )
        return self._scopes[t.scope]

    def _find_visible(self, tensor: str, scope: str) -> Any:
        if not tensor:
            return gs.Variable.empty()
        found = self._resolve(tensor, scope)
        if found is None:
            near = suggest_names(tensor, (key.name for key in self._tensors))
            raise ModelError(
                tensor, f"no such tensor is visible in scope {scope!r}", near, code="Q116"
            )
        return self._tensors[found]

    def _define_tensor(self, name: str, scope: str) -> Any:
        if not name:
            raise _fault("a new tensor", "needs a name", "take one from fresh()")
        if not self.is_free(name, scope):
            raise _fault(
                name, f"there is a tensor of this name, seen from scope {scope!r}", "use fresh()"
            )
        self._names.add(name)
        return self._wiring.define_tensor(TensorId(name, scope))


def _make_attribute(name: str, value: Any) -> AttributeProto:
    if isinstance(value, AttributeProto):
        if value.type in BODY_TYPES:
            raise _fault(
                name, "is a body, which cannot be put into a node", "build the model with it"
            )
        return value
    if isinstance(value, (list, tuple)) and not value:
        # An empty list has no type of its own; most lists of ONNX are of integers (axes, pads …).
        return AttributeProto(name=name, type=AttributeProto.INTS)
    return helper.make_attribute(name, value)
