"""Selections: nodes where a float model chooses by values that it computes, and models judged on the same choices.

TopK, ArgMax, NonMaxSuppression, or a comparison in front of NonZero give positions. Two candidates that differ by less
than rounding does may change places, and from there on the rows of two outputs have nothing to do with each other: a
detector that lost nothing has 5 dB. So models are compared in a judged form. The float model gives its choices as
outputs; any other model takes them as inputs, and gives its own as outputs. Both give the values chosen by as outputs.
All rows then match, those of decoders and experts behind a choice too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxq.graph import GraphIndex, ModelLike, get_index, infer_shapes, inline_functions, name_nodes
from onnxq.graph.light import LightModel, bare_proto, rebuild
from onnxq.graph.scopes import collect_reads, list_reads, replace_items, sort_nodes
from onnxq.graph.weights import omit_weights, restore_weights
from onnxq.sites import TensorId
from onnxq.spec import FLOAT_TYPES

Array = NDArray[Any]

# Operators that choose by values, and the outputs that hold the choice.
_CHOOSERS = {
    "TopK": (1,), "ArgMax": (0,), "ArgMin": (0,), "Hardmax": (0,), "NonMaxSuppression": (0,), "NonZero": (0,),
    "Unique": (0, 1, 2, 3), "MaxPool": (1,),
}  # fmt: skip
# Those that make integers or truth of numbers. They choose where the result becomes a position or a size.
_CASTS = frozenset({"Cast", "CastLike"})
_TESTS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"})
# Inputs that are positions, sizes or conditions of what runs.
_PLACES = {
    "Gather": (1,), "GatherElements": (1,), "GatherND": (1,), "Scatter": (1,), "ScatterElements": (1,),
    "ScatterND": (1,), "OneHot": (0,), "Compress": (1,), "NonZero": (0,), "Slice": (1, 2), "Range": (0, 1, 2),
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "ConstantOfShape": (0,), "Split": (1,), "If": (0,), "Loop": (0, 1),
}  # fmt: skip
# They hand values on as they are.
_MOVES = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Split", "Expand",
     "Tile", "Gather", "GatherElements", "GatherND", "Cast", "CastLike"}
)  # fmt: skip
# The opset that has GatherElements. Older models keep values of a TopK in their own order.
_GATHER_ELEMENTS = 11
_FLOATS = frozenset({*FLOAT_TYPES, TensorProto.DOUBLE})


@dataclass(frozen=True)
class Selection:
    """One node that chooses.

    choices: the tensors of the choice, with their ONNX types. values: by the names that they are judged under, the
    inputs that were computed, as positions. axis: that it chooses along. outputs: of the model, behind it.
    """

    node: str
    op_type: str
    choices: tuple[tuple[str, int], ...]
    values: tuple[tuple[str, int], ...]
    axis: int = -1
    outputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The tensor of the choice."""
        return self.choices[-1 if self.op_type == "TopK" else 0][0]


@dataclass(frozen=True)
class Selections:
    """The selections of a float model, in the order they run. settled: outputs that the choices alone decide."""

    nodes: tuple[Selection, ...] = ()
    settled: frozenset[str] = frozenset()

    def expose_choices(self, model: ModelLike) -> ModelLike:
        """The float model with its choices, and the values they were made by, as further outputs."""
        return _rewrite(model, self, given=False) if self.nodes else model

    def take_choices(self, model: ModelLike) -> ModelLike:
        """Another form of the model, with the float model's choices as inputs.

        Its own become outputs, as do the values they were made by; `settled` outputs go. A choice that it has no tensor
        for is an input that nothing reads: what is behind it is its own then.
        """
        return _rewrite(model, self, given=True) if self.nodes else model

    def add_choices(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The inputs of another model. outputs: of the float model, on the same sample."""
        if not self.nodes:
            return feeds
        return {**feeds, **{name: outputs[name] for one in self.nodes for name, _ in one.choices}}

    def list_missing(self, model: ModelLike) -> tuple[Selection, ...]:
        """Those whose tensors another model does not make."""
        made = {name for node in bare_proto(_inline(model)).graph.node for name in node.output} if self.nodes else set()
        return tuple(one for one in self.nodes if not made.issuperset(name for name, _ in one.choices))


NO_SELECTIONS = Selections()


def explain_missing(selection: Selection) -> str:
    """The reason why a choice is not taken from the float model, for a message."""
    maker, behind = f"{selection.node} ({selection.op_type})", ", ".join(selection.outputs) or "nothing"
    return (
        f"the quantized model has no tensor {selection.name!r}, which {maker} of the float model makes: behind it "
        f"({behind}) it is compared on its own choices, whose rows need not be the float model's"
    )


def name_own(choice: str) -> str:
    """The output that holds a model's own choice, where the float model's is given."""
    return f"{choice}/own"


def find_selections(model: ModelLike) -> Selections:
    """The selections in the main graph of a float model; of a light model looked for once."""
    facts = model.facts if isinstance(model, LightModel) else {}
    if "selections" not in facts:
        facts["selections"] = _find(model)
    found: Selections = facts["selections"]
    return found


def _inline(model: ModelLike) -> ModelLike:
    return inline_functions(model) if model.functions else model


def _find(model: ModelLike) -> Selections:
    plain = _inline(model)
    # Nothing chooses in most models, and looking for types takes longer than looking for operators.
    if not any(node.op_type in _CHOOSERS.keys() | _TESTS | _CASTS for node in plain.graph.node):
        return NO_SELECTIONS
    typed = infer_shapes(name_nodes(plain))
    search = _Search(get_index(typed), typed.graph)
    search.run()
    outputs = [value.name for value in plain.graph.output]
    nodes = tuple(
        Selection(
            one.node, one.op_type, one.choices, one.values, one.axis,
            tuple(name for name in outputs if k in search.behind.get(name, ())),
        )
        for k, one in enumerate(search.found)
    )  # fmt: skip
    return Selections(nodes, frozenset(n for n in outputs if search.behind.get(n) and n not in search.changed))


@dataclass(eq=False)
class _Search:
    """One walk along the graph. changed: tensors that quantizing may change, though the choices so far are the same.

    live: tensors that inputs of the model decide on. behind: by tensor, the selections that it depends on.
    """

    index: GraphIndex
    graph: GraphProto
    found: list[Selection] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    behind: dict[str, frozenset[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Fill the fields in."""
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.reads = collect_reads(self.graph)
        starts = (
            node.input[k]
            for node in self.graph.node if _is_plain(node)
            for k in _PLACES.get(node.op_type, ()) if k < len(node.input)
        )  # fmt: skip
        self.places = self._trace(list(starts))
        self.given = {value.name for value in self.graph.output}
        self.truths = self._trace([name for name in self.given if not self._is_float(name)])
        self.judged = set(self.given)
        self.live = {value.name for value in self.index.inputs}
        for node in sort_nodes(self.graph):
            self._visit(node)

    def _trace(self, waiting: list[str]) -> set[str]:
        """These tensors of integers or truth, and those of such that they are computed from."""
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in found or self._is_float(name):
                continue
            found.add(name)
            node = self.makers.get(name)
            if node is not None and node.op_type not in ("Shape", "Size"):
                waiting.extend(node.input)
        return found

    def _is_float(self, name: str) -> bool:
        return (self.index.dtype(TensorId(name)) or TensorProto.FLOAT) in _FLOATS

    def _visit(self, node: NodeProto) -> None:
        reads, made = list_reads(node), [name for name in node.output if name]
        earlier = frozenset[int]().union(*(self.behind.get(name, frozenset()) for name in reads))
        choices = self._list_choices(node) if self.changed.intersection(reads) else ()
        if choices:
            earlier |= {len(self.found)}
            self.found.append(self._describe(node, choices))
        self.behind.update((name, earlier) for name in made if earlier)
        # Sizes are the same, whatever the values are: choices alone change them.
        if (node.op_type in ("Shape", "Size") and _is_plain(node)) or not self.live.intersection(reads):
            return
        self.live.update(made)
        if self.changed.intersection(reads):
            self.changed.update(name for name in made if name not in choices)
        elif not self._is_exact(node):
            self.changed.update(name for name in made if self._is_float(name))

    def _is_exact(self, node: NodeProto) -> bool:
        """True where quantizing cannot change a result of the node alone."""
        looks_up = node.op_type == "Gather" and self.index.is_constant(TensorId(node.input[0]))
        return _is_plain(node) and node.op_type in _MOVES and not looks_up

    def _list_choices(self, node: NodeProto) -> tuple[str, ...]:
        """The outputs that hold a choice; () for a node that makes none, or that nothing depends on."""
        if not _is_plain(node):
            return ()
        if node.op_type in _CHOOSERS:
            made = [node.output[k] for k in _CHOOSERS[node.op_type] if k < len(node.output)]
            return tuple(name for name in made if name and name in self.reads)
        asked = self.places | self.truths if node.op_type in _TESTS else self.places
        computed = any(name in self.changed and self._is_float(name) for name in node.input)
        picks = node.op_type in _TESTS | _CASTS and computed and node.output[0] in asked
        return tuple(node.output) if picks else ()

    def _describe(self, node: NodeProto, choices: tuple[str, ...]) -> Selection:
        values = []
        for k, name in enumerate(node.input):
            # A tensor that two selections go by, or that is an output anyway, is judged once.
            if name in self.changed and name not in self.judged:
                self.judged.add(name)
                values.append((f"{name} in front of {node.name}", k))
        kinds = tuple((name, self.index.dtype(TensorId(name)) or TensorProto.INT64) for name in choices)
        axis = next((attr.i for attr in node.attribute if attr.name == "axis"), -1)
        return Selection(node.name, node.op_type, kinds, tuple(values), axis)


def _is_plain(node: NodeProto) -> bool:
    return node.domain in ("", "ai.onnx")


def _rewrite(model: ModelLike, selections: Selections, *, given: bool) -> ModelLike:
    """The judged form of a model. given: the choices are inputs."""
    plain = name_nodes(_inline(model))
    index = get_index(infer_shapes(plain))
    proto, weights = omit_weights(bare_proto(plain))
    graph = proto.graph
    makers = {name: node for node in graph.node for name in node.output if name}
    choices = {name: kind for one in selections.nodes for name, kind in one.choices}
    present = {name: name_own(name) if given else name for name in choices if name in makers}
    for one in selections.nodes:
        maker = makers.get(one.name)
        if maker is not None and maker.op_type == one.op_type:
            _add_values(graph, maker, one, index)
            if given and one.op_type == "TopK" and maker.output[0] and index.opset >= _GATHER_ELEMENTS:
                _match_rows(graph, maker, one)
    if given:
        settled = selections.settled if len(present) == len(choices) else frozenset()
        kept = [value for value in graph.output if value.name not in settled and value.name not in choices]
        replace_items(graph.output, kept)
        replace_items(graph.value_info, [value for value in graph.value_info if value.name not in choices])
        graph.input.extend(_declare(index, name, name, kind) for name, kind in choices.items())
        for name, own in present.items():
            makers[name].output[:] = [own if made == name else made for made in makers[name].output]
    outputs = {value.name for value in graph.output}
    graph.output.extend(_declare(index, own, name) for name, own in present.items() if own not in outputs)
    # What was added is read by nodes in front of it.
    replace_items(graph.node, sort_nodes(graph))
    return rebuild(plain, restore_weights(proto, weights))


def _add_values(graph: GraphProto, maker: NodeProto, selection: Selection, index: GraphIndex) -> None:
    """Give the values that are chosen by as outputs: those that the node reads, behind a pair where it has one."""
    for name, k in selection.values:
        graph.node.append(helper.make_node("Identity", [maker.input[k]], [name], name=name))
        graph.output.append(_declare(index, name, maker.input[k]))


def _match_rows(graph: GraphProto, maker: NodeProto, selection: Selection) -> None:
    """Let the values of a TopK be those at the given positions."""
    values = maker.output[0]
    maker.output[0] = name_own(values)
    inputs = [maker.input[0], selection.name]
    name = name_own(maker.name)
    graph.node.append(helper.make_node("GatherElements", inputs, [values], name=name, axis=selection.axis))


def _declare(index: GraphIndex, name: str, like: str, kind: int = 0) -> ValueInfoProto:
    """An input or output of the type and rank of a tensor, as far as they are known. kind: where its type is not."""
    tensor = TensorId(like)
    dtype, shape = index.dtype(tensor) or kind, index.shape(tensor)
    # Other sizes than were written down run all the same inside, and must from outside.
    return (
        helper.make_tensor_value_info(name, dtype, shape and [None] * len(shape))
        if dtype
        else ValueInfoProto(name=name)
    )
