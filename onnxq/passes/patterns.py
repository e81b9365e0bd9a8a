"""Patterns in a graph: the questions that they ask, and the edits that passes share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from onnx import TensorProto

from onnxq.arrays import Array, Array64, Arrays, as_float32, as_int64
from onnxq.errors import OnnxqError, PlanError
from onnxq.graph import Editor, GraphIndex, ModelLike, NodeRef, find_opset, get_index, infer_shapes
from onnxq.graph.base import MOVING_OPS, Attrs
from onnxq.graph.convert import ensure_opset
from onnxq.graph.scopes import drop_absent_inputs, walk_from, walk_nodes
from onnxq.numerics.rounding import round_to_type
from onnxq.passes.journal import PassReport
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import Edge, NameSet, Refusal, TensorId

# ORT's CPU provider has most kernels for these only; a chain of double may run where its single node does not.
SINGLE = (TensorProto.FLOAT, TensorProto.FLOAT16)

# The rewrite of loops, which only integers gain by.
INVARIANTS = "invariants"
# Operators whose results hold the values that they read.
_PARTS = (*MOVING_OPS, "Concat")
# The error of a plan that does not fit what it is carried out on.
unfit_plan = partial(PlanError, fix="plan the model again", code="Q404")


def find_pad_value(index: GraphIndex, node: NodeRef) -> float:
    """A Pad's constant value: given, left out or an attribute of old opsets; NaN for a computed one."""
    if index.find_input(node, 2) is None:
        return node.read_float("value", 0.0)
    value = index.input_value(node, 2)
    return np.nan if value is None or value.size != 1 else float(value.flat[0])


def find_logits(index: GraphIndex, *scores: str) -> set[TensorId]:
    """The tensors whose scores are results of the network, merely moved otherwise. scores: operators that make them.

    Most lie far below zero, and the few above are the answers. A range that clips these hardly shows in the error of
    the tensor (a YOLOv8: no score of one head above .5, where float's reach .8).
    """

    def walk_outputs(*op_types: str) -> set[TensorId]:
        def list_sources(tensor: TensorId) -> list[TensorId]:
            maker = index.find_onnx_producer(tensor, *op_types)
            return [] if maker is None else index.list_reads(maker)

        return walk_from((TensorId(value.name) for value in index.outputs), list_sources)

    return walk_outputs(*_PARTS, *scores) - walk_outputs(*_PARTS)


# The edits that passes share, on top of the Editor. Nodes and tensors that survive keep names and values.
# `Edit` is one import, some edits and one export; `apply_replacements` replaces patterns that end in one node.

# Above opset 20 ORT refuses some int8 graphs that are fine below, and no pattern here needs more.
NEWEST = 20
_FIX = "export the model with a newer opset"
# From this opset on the axes of a ReduceMax are an input.
_AXES_INPUT = 18

StateT = TypeVar("StateT", bound=FloatState)
# A node to be written: its operator, its inputs but the first, its attributes.
Step = tuple[str, Sequence[str], Attrs]
_NO_ATTRS: Attrs = MappingProxyType({})


class Edit:
    """One import, edits in the vocabulary of passes, one export."""

    def __init__(self, proto: ModelLike) -> None:
        self._proto = proto
        self._rewritten = set[str]()

    @cached_property
    def index(self) -> GraphIndex:
        """The model as it was."""
        return get_index(self._proto)

    @cached_property
    def _editor(self) -> Editor[ModelLike]:
        """Made at the first edit: most passes find nothing to do in most models."""
        return Editor(self._proto)

    def export(self) -> ModelLike:
        """The edited model, without the nodes and initializers that nothing depends on any more."""
        proto = self._editor.finish()
        # An operator may take fewer inputs than the one whose place it takes.
        for node in walk_nodes(proto.graph):
            if node.name in self._rewritten:
                drop_absent_inputs(node)
        return proto

    def finish_pass(
        self, state: StateT, name: str, changed: Sequence[str], skipped: Sequence[Refusal] = ()
    ) -> tuple[StateT, PassReport]:
        """The state with the edited model, or as it was where nothing changed, and the report of the pass.

        state: of the model that was edited, or of the one that it was made from.
        """
        model = self.export() if changed else self._proto
        return replace(state, model=model), PassReport(name, tuple(changed), tuple(skipped))

    def replace_node(
        self,
        node: NodeRef,
        op_type: str,
        inputs: Sequence[str],
        attrs: Attrs = _NO_ATTRS,
        domain: str = "",
    ) -> None:
        """Make a node another operation with these inputs and attributes only; name and outputs stay."""
        self._editor.set_op(node.name, op_type, domain)
        for name in node.attrs:
            self._editor.set_attr(node.name, name, None)
        self.set_attrs(node, attrs)
        # Inputs beyond the new ones become absent, and are dropped on export.
        for k, (name, _) in enumerate(zip_longest(inputs, node.inputs, fillvalue="")):
            self._editor.replace_input(node.make_edge(k), name)
        self._rewritten.add(node.name)

    def set_attrs(self, node: NodeRef, attrs: Attrs) -> None:
        """Set attributes; None takes one away."""
        for name, value in attrs.items():
            self._editor.set_attr(node.name, name, value)

    def read(self, edge: Edge, tensor: str) -> None:
        """Let one input read another tensor."""
        self._editor.replace_input(edge, tensor)

    def absorb_chain(self, node: NodeRef, chain: Sequence[NodeRef]) -> None:
        """Take out a chain of nodes behind `node`, which from now on writes the output of the last of them.

        The tensor keeps the name that had this value before: the last one's.
        """
        final = chain[-1].result
        # Before the nodes go, while the tensor has readers.
        readers = self._editor.list_consumers(final)
        for follower in chain:
            self._editor.remove_node(follower.name)
        self._editor.rename_tensor(node.result, final.name)
        for edge in readers:
            self._editor.replace_input(edge, final.name)

    def redirect_readers(self, tensor: TensorId, source: str) -> None:
        """Let all readers of a tensor read another."""
        self._editor.rewire(tensor, source)

    def remove_node(self, node: NodeRef) -> None:
        """Take out a node nobody reads any more."""
        self._editor.remove_node(node.name)

    def insert_before(
        self,
        node: NodeRef,
        op_type: str,
        inputs: Sequence[str],
        tensor: str,
        attrs: Attrs = _NO_ATTRS,
    ) -> str:
        """A new node in front of another, writing a tensor of about this name, which is also the node's; returns it."""
        made = self._editor.fresh(tensor)
        self._write_before(node, op_type, inputs, made, attrs)
        return made

    def insert_reshape(self, node: NodeRef, source: str, sizes: ArrayLike, tensor: str) -> str:
        """A Reshape to these sizes in front of a node; see `insert_before`."""
        inputs = [source, self.add_integers(node.scope, f"{tensor}/shape", sizes)]
        return self.insert_before(node, "Reshape", inputs, tensor)

    def insert_slice(
        self, node: NodeRef, source: str, span: tuple[int, int], axis: str, tensor: str
    ) -> str:
        """The places of a span along an axis, in front of a node; see `insert_before`. axis: names a constant."""
        bounds = [
            self.add_integers(node.scope, f"{tensor}/{part}", [place])
            for part, place in zip(("start", "end"), span, strict=True)
        ]
        return self.insert_before(node, "Slice", [source, *bounds, axis], f"{tensor}/part")

    def insert_largest(self, node: NodeRef, source: str, axis: int, tensor: str) -> str:
        """The largest values along an axis, which is kept, in front of a node; see `insert_before`."""
        inputs = [source]
        attrs: dict[str, Any] = {"keepdims": 1, "axes": [axis]}
        if find_opset(self._proto) >= _AXES_INPUT:
            inputs.append(self.add_integers(node.scope, f"{tensor}/axes", attrs.pop("axes")))
        return self.insert_before(node, "ReduceMax", inputs, tensor, attrs=attrs)

    def rename_output(self, node: NodeRef, tensor: str, k: int = 0) -> str:
        """Let a node write a new tensor of about this name in place of its output k; returns it."""
        made = self._editor.fresh(tensor)
        self._editor.replace_output(node.name, k, made)
        return made

    def take_over(
        self, node: NodeRef, k: int, op_type: str, inputs: Sequence[str], attrs: Attrs
    ) -> None:
        """A new node in front of another, which writes output k of it in its place."""
        name = node.outputs[k]
        self.rename_output(node, f"{name}/{node.op_type}", k)
        self._write_before(node, op_type, inputs, name, attrs)

    def _write_before(
        self, node: NodeRef, op_type: str, inputs: Sequence[str], tensor: str, attrs: Attrs
    ) -> None:
        name = self._editor.fresh(f"{tensor}/{op_type}")
        self._editor.insert_node(
            node.scope, op_type, inputs, [tensor], name=name, attrs=attrs, before=node.name
        )

    def append(
        self, node: NodeRef, steps: Sequence[Step], activation: NodeRef | None = None
    ) -> None:
        """New nodes behind another, each of the result in front of it. The last writes the tensor under its name.

        activation: what reads the node, and stays in front of the new ones. What the node writes has other sizes than
        are declared for that name, with which ONNX Runtime may refuse the model.
        """
        if activation is not None:
            between = self.rename_output(node, f"{node.outputs[0]}/{node.op_type}")
            self.read(activation.make_edge(0), between)
            node = activation
        name = node.outputs[0]
        last = node.name
        made = self.rename_output(node, f"{name}/{node.op_type}") if steps else name
        for k, (op_type, operands, attrs) in enumerate(steps, 1):
            result = name if k == len(steps) else self._editor.fresh(f"{name}/{op_type}")
            called = self._editor.fresh(f"{name}/{op_type}")
            self._editor.insert_node(
                node.scope,
                op_type,
                [made, *operands],
                [result],
                name=called,
                attrs=attrs,
                after=last,
            )
            made = result
            last = called

    def make_reshape(self, node: NodeRef, sizes: ArrayLike) -> Step:
        """A Reshape to these sizes, for `append` behind this node."""
        return "Reshape", [self.add_part(node, "shape", as_int64(sizes))], _NO_ATTRS

    def replace_constant(self, tensor: TensorId, value: Array) -> None:
        """Give an initializer another value, for all that read it."""
        self._editor.replace_initializer(tensor, value)

    def add_constant(self, scope: str, base: str, value: Array) -> str:
        """A new initializer of about this name."""
        return self._editor.add_constant(scope, base, value)

    def add_integers(self, scope: str, base: str, values: ArrayLike) -> str:
        """A new initializer of int64 of about this name."""
        return self.add_constant(scope, base, as_int64(values))

    def add_part(self, node: NodeRef, part: str, value: Array) -> str:
        """A new initializer, named after a node and its part in it."""
        return self.add_constant(node.scope, f"{node.name}/{part}", value)

    def add_float(self, node: NodeRef, part: str, value: float) -> str:
        """`add_part` of one float32."""
        return self.add_part(node, part, as_float32(value))

    def set_constant(self, edge: Edge, value: Array) -> None:
        """Give one reader of a constant another value: in place where nobody else reads it, else a copy of its own."""
        constant = self.index.find_at(edge)
        if constant is not None and self.index.is_owned(constant):
            # The tensor keeps its name, by which plans and reports know it.
            self._editor.replace_initializer(constant, value)
            return
        base = (
            f"{edge.node}/{'weight' if edge.index == 1 else 'bias'}"
            if constant is None
            else f"{constant.name}/{edge.node}"
        )
        self._editor.replace_input(edge, self.add_constant(edge.scope, base, value))

    def set_rounded(self, edge: Edge, value: Array64, dtype: np.dtype[Any]) -> None:
        """`set_constant` with the value rounded to a float type. Raises PlanError where that overflows."""
        narrow = round_to_type(value, dtype)
        if narrow is None:
            cause = f"the factors or shifts that the plan gives it overflow {dtype}"
            raise unfit_plan(edge, cause)
        self.set_constant(edge, narrow)


# Says what it changed at a node; each line begins with a node's name.
NodeRewriter = Callable[[Edit, NodeRef], Iterator[str]]
FloatPass = Callable[[object, FloatState], FloatStep]


def rewrite_nodes(
    name: str,
) -> Callable[[NodeRewriter], FloatPass]:
    """Make a pass of this name of a function that rewrites one node: all of them, in the order the model runs in."""

    def make_pass(rewrite: NodeRewriter) -> FloatPass:
        @wraps(rewrite)
        def run(_ctx: object, state: FloatState) -> FloatStep:
            edit = Edit(state.model)
            changed = [line for node in edit.index.nodes for line in rewrite(edit, node)]
            return edit.finish_pass(state, name, changed)

        return run

    return make_pass


@dataclass(frozen=True, eq=False)
class Replacement:
    """`last` becomes `op_type` reading `inputs` and, behind them, new constants; the other `nodes` go.

    opset: the version of the standard domain (or of `domain`) that brought the operation.
    """

    last: NodeRef
    nodes: NameSet
    op_type: str
    inputs: tuple[TensorId, ...]
    attrs: Attrs
    domain: str
    opset: int
    constants: Arrays = field(default_factory=dict)


Finder = Callable[[GraphIndex], list[Replacement]]


def apply_replacements(state: StateT, name: str, find: Finder) -> tuple[StateT, PassReport]:
    """Apply all that a finder finds. Those that need a newer opset than the model can have are left and reported."""
    matches = find(state.index)
    # Once for all matches: a conversion of the opset may rewrite any node, so they are looked for again behind it.
    proto, failure = _raise_opset(state.model, matches)
    version = find_opset(proto)
    skipped = tuple(
        Refusal(
            match.last.name,
            f"{match.op_type} needs opset {match.opset}: {failure}",
            _FIX,
            name,
            "R112",
        )
        for match in matches
        if not match.domain and match.opset > version
    )
    if matches:
        matches = [
            match for match in find(get_index(proto)) if match.domain or match.opset <= version
        ]
    edit = Edit(proto)
    changed = []
    for match in matches:
        last = match.last
        made = (edit.add_part(last, key, value) for key, value in match.constants.items())
        inputs = [*(tensor.name for tensor in match.inputs), *made]
        edit.replace_node(last, match.op_type, inputs, match.attrs, match.domain)
        changed.append(f"{last.name}: {match.op_type} instead of {len(match.nodes)} nodes")
    return edit.finish_pass(state, name, changed, skipped)


def _raise_opset(proto: ModelLike, matches: list[Replacement]) -> tuple[ModelLike, str]:
    """The model at the highest opset its matches need and it can be converted to, and why not higher."""
    failure = ""
    needed = {
        match.opset
        for match in matches
        if not match.domain and find_opset(proto) < match.opset <= NEWEST
    }
    for version in sorted(needed, reverse=True):
        try:
            return infer_shapes(ensure_opset(proto, version)), failure
        except OnnxqError as error:
            # The first is that of the newest version, which would have served all matches.
            failure = failure or error.cause
    return proto, failure
