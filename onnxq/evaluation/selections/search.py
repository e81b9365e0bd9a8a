"""The search for choices along the graphs of a float model, from inputs to outputs and through bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper, parser

from onnxq.graph import FLOAT_TENSORS, MICROSOFT, ModelLike, get_index, infer_shapes, name_nodes
from onnxq.graph.base import LAYOUT_OPS, counts_in_floats
from onnxq.graph.index import GraphIndex, find_opset
from onnxq.graph.light import bare_proto, rebuild
from onnxq.graph.scopes import (
    OWN_DOMAINS,
    iterate_subgraphs,
    join_scope,
    list_captures,
    list_defined,
    list_reads,
    replace_items,
    sort_nodes,
    walk_from,
    walk_graphs,
    walk_nodes,
)
from onnxq.graph.storage import omit_weights, restore_weights
from onnxq.graph.subgraph import find_needed
from onnxq.sites import Indices, Names, NameSet, NumberedNames, TensorId

# Routers of fused mixtures of experts, written out: the experts that such an operator picks become a tensor.
# The operator picks the best experts of each row by itself, so that nobody sees which. In front of it the same choice
# is written as a TopK, and the scores it reads put those first that the TopK names, whoever names them: those of
# another model, too. Of the other experts, scores that are not lower than theirs go just below; all else stays as it
# is.

_ROUTED = ("MoE", "QMoE")
# The input that holds a score of each expert.
_SCORES = 1
# The opset that has these operators in this form.
_OPSET = 11
_CHOICE = parser.parse_graph(
    """router (float[N, E] scores) => (float[N, E] forced) {
        values, experts = TopK <axis = -1> (scores, k)
        best = GatherElements <axis = -1> (scores, experts)
        least, place = TopK <axis = -1, largest = 0> (best, one)
        below = Sub(least, step)
        low = Min(scores, below)
        forced = ScatterElements <axis = -1> (low, experts, best)
    }"""
)
# What scores of this type tell apart; those of narrower types differ by more.
_STEPS: Mapping[int, float] = {TensorProto.FLOAT: 1e-4}
_COARSE_STEP = 1 / 16


def write_out_routers(model: ModelLike) -> ModelLike:
    """A copy of the model, nodes named, with the experts of each fused mixture as a tensor.

    The very object where it has none, or is older than the operators that this takes.
    """
    routed = any(map(_is_routed, walk_nodes(bare_proto(model).graph)))
    if find_opset(model) < _OPSET or not routed:
        return model
    named = name_nodes(model)
    index = GraphIndex(infer_shapes(named))
    proto, weights = omit_weights(bare_proto(named))
    for scope, graph in walk_graphs(proto.graph):
        nodes = []
        for node in graph.node:
            if _is_routed(node):
                scores = index.resolve_tensor(node.input[_SCORES], scope)
                nodes += _write_out(graph, node, index.find_dtype(scores) or TensorProto.FLOAT)
            nodes.append(node)
        replace_items(graph.node, nodes)
    return rebuild(model, restore_weights(proto, weights))


def _is_routed(node: NodeProto) -> bool:
    # The sparse mixer draws its second expert by other scores than it shows.
    sparse = _read_int(node, "use_sparse_mixer", 0)
    return node.domain == MICROSOFT and node.op_type in _ROUTED and not sparse


def _read_int(node: NodeProto, name: str, default: int) -> int:
    return next((attr.i for attr in node.attribute if attr.name == name), default)


def _write_out(graph: GraphProto, node: NodeProto, dtype: int) -> list[NodeProto]:
    """The nodes in front of a mixture, which then reads their result. dtype: the ONNX type of its scores."""
    base = f"{node.name}/router"
    count = _read_int(node, "k", 1)
    step = np.asarray(_STEPS.get(dtype, _COARSE_STEP), helper.tensor_dtype_to_np_dtype(dtype))
    constants = {"k": np.array([count], np.int64), "one": np.array([1], np.int64), "step": step}
    graph.initializer.extend(
        numpy_helper.from_array(value, f"{base}/{key}") for key, value in constants.items()
    )
    nodes = []
    for part in _CHOICE.node:
        copy = NodeProto()
        copy.CopyFrom(part)
        copy.input[:] = [
            node.input[_SCORES] if name == "scores" else f"{base}/{name}" for name in part.input
        ]
        copy.output[:] = [f"{base}/{name}" for name in part.output]
        copy.name = base if part.output[0] == "values" else f"{base}/{part.output[0]}"
        nodes.append(copy)
    node.input[_SCORES] = f"{base}/forced"
    return nodes


# Operators that choose by values, and the outputs that hold the choice.
_CHOOSERS = {
    "TopK": (1,),
    "ArgMax": (0,),
    "ArgMin": (0,),
    "Hardmax": (0,),
    "NonMaxSuppression": (0,),
    "NonZero": (0,),
    "Unique": (0, 1, 2, 3),
    "MaxPool": (1,),
}
# Those that make integers or truth of numbers. They choose where the result becomes a position or a size.
_CASTS = frozenset({"Cast", "CastLike"})
_TESTS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"})
# Inputs that are the sizes, or the ends, of all that the operator makes.
_SHAPING = {
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "ConstantOfShape": (0,),
    "Split": (1,),
}
# Inputs that are positions, sizes or conditions of what runs.
_PLACES = {
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "Scatter": (1,),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "OneHot": (0,),
    "Compress": (1,),
    "NonZero": (0,),
    "Slice": (1, 2),
    **_SHAPING,
    "If": (0,),
    "Loop": (0, 1),
}
_HOLDERS = ("If", "Loop", "Scan")
# Operators whose result has as many items as the values make.
_COUNTING = ("NonMaxSuppression", "NonZero", "Unique", "Compress")
# Inputs that are sizes of the result.
_SIZES = {
    "Slice": (1, 2, 4),
    **_SHAPING,
    "TopK": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "Resize": (2, 3),
    "Upsample": (1,),
}
# They hand values on as they are.
_MOVES = LAYOUT_OPS | {
    "Slice",
    "Concat",
    "Split",
    "Expand",
    "Tile",
    "Gather",
    "GatherElements",
    "GatherND",
    "Cast",
    "CastLike",
}


@dataclass(frozen=True)
class Selection:
    """One node that chooses.

    choices: the tensors of the choice, with their ONNX types; of one in a body, as the text of their identity. values:
    by the names that they are judged under, the inputs that were computed, as positions. axis: that it chooses along,
    in the tensor of all iterations. outputs: of the model, behind it. scope: that it lies in. obstacle: the reason why
    it is not followed; "" where it is.
    """

    node: str
    op_type: str
    choices: NumberedNames
    values: NumberedNames
    axis: int = -1
    outputs: Names = ()
    scope: str = ""
    obstacle: str = ""

    @property
    def name(self) -> str:
        """The tensor of the choice."""
        return self.choices[-1 if self.op_type == "TopK" else 0][0]

    def name_inside(self, choice: str) -> str:
        """The name that one of the choices has in the graph that makes it."""
        return choice.removeprefix(f"{self.scope}::")


# In the order they run.
SelectedNodes = tuple[Selection, ...]


def explain_missing(selection: Selection) -> str:
    """The reason why a choice is not taken from the float model, for a message."""
    maker = f"{selection.node} ({selection.op_type})"
    behind = ", ".join(selection.outputs) or "nothing"
    cause = f"the quantized model has no tensor {selection.name!r}, which {maker} of the float model makes"
    if selection.obstacle:
        cause = f"the choice of {maker} is not taken from the float model, {selection.obstacle}"
    return f"{cause}: behind it ({behind}) it is compared on its own choices, whose rows need not be the float model's"


def name_own(choice: str) -> str:
    """The output that holds a model's own choice, where the float model's is given."""
    return f"{choice}/own"


def find_axis(node: NodeProto) -> int:
    """The axis that a node chooses along, as it is written."""
    return _read_int(node, "axis", -1)


def search_choices(model: ModelLike) -> tuple[SelectedNodes, NameSet]:
    """The selections, in the order they run, and the outputs that they alone decide."""
    # Nothing chooses in most models, and looking for types takes longer than looking for operators.
    wanted = _CHOOSERS.keys() | _TESTS | _CASTS
    if wanted.isdisjoint(node.op_type for node in walk_nodes(bare_proto(model).graph)):
        return (), frozenset()
    typed = infer_shapes(name_nodes(model))
    outputs = [value.name for value in model.graph.output]
    index = get_index(typed)
    walk = _ChoiceWalk(index, typed.graph, live=index.input_names, judged=set(outputs))
    walk.walk_graph()
    nodes = (
        replace(
            selection, outputs=tuple(name for name in outputs if k in walk.behind.get(name, ()))
        )
        for k, selection in enumerate(walk.found)
    )
    return tuple(nodes), frozenset(
        name for name in outputs if walk.behind.get(name) and name not in walk.changed
    )


@dataclass(eq=False)
class _ChoiceWalk:
    """One walk along a graph. changed: tensors that quantizing may change, though the choices so far are the same.

    live: tensors that inputs of the model decide on. behind: by tensor, the selections that it depends on. judged:
    tensors that are compared anyway. scope: of a body; around: the nodes whose bodies it lies in, from outside in.
    unsteady: tensors whose size may be another one in each iteration.
    """

    index: GraphIndex
    graph: GraphProto
    live: set[str]
    judged: set[str]
    found: list[Selection] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    behind: dict[str, frozenset[int]] = field(default_factory=dict)
    scope: str = ""
    around: tuple[NodeProto, ...] = ()
    unsteady: set[str] = field(default_factory=set)

    def walk_graph(self) -> None:
        """Fill the fields in."""
        graph = self.graph
        self.makers = {name: node for node in graph.node for name in node.output if name}
        order = sort_nodes(graph)
        self.needed = find_needed(graph, order)
        plain = filter(_is_plain, graph.node)
        starts = [name for node in plain for name in _select_inputs(node, _PLACES)]
        # Integers that go into bodies and come out of them are positions or sizes there.
        starts += [
            name
            for node in graph.node
            for _, body in iterate_subgraphs(node)
            for name in list_captures(body)
        ]
        results = [value.name for value in graph.output]
        self.places = self._trace(starts + (results if self.scope else []))
        self.truths = self._trace(results)
        for node in order:
            self._visit(node)

    def _trace(self, start: Iterable[str]) -> set[str]:
        """Of these tensors those of integers or truth, and the ones of such that they are computed from."""

        def list_read(name: str) -> Iterable[str]:
            node = self.makers.get(name)
            # A shape hangs on no values, whatever it is taken of.
            if node is None or node.op_type in ("Shape", "Size"):
                return ()
            return filter(self._is_whole, node.input)

        return walk_from(filter(self._is_whole, start), list_read)

    def _is_whole(self, name: str) -> bool:
        """True for a tensor of integers or truth."""
        return (self._find_type(name) or TensorProto.FLOAT) not in FLOAT_TENSORS

    def _find_type(self, name: str) -> int:
        """The ONNX type of a tensor that this graph reads or makes; 0 where it is not known."""
        return self.index.find_dtype(self.index.resolve_tensor(name, self.scope))

    def _visit(self, node: NodeProto) -> None:
        reads = list_reads(node)
        outputs = [name for name in node.output if name]
        earlier = frozenset[int]().union(*(self.behind.get(name, ()) for name in reads))
        if self.around and self._is_unsteady(node):
            self.unsteady.update(name for name in outputs if not self.has_size(name))
        choices = self._list_choices(node) if self.changed.intersection(reads) else ()
        if choices:
            earlier |= {len(self.found)}
            self.found.append(self._describe(node, choices))
            # What is not followed is another one in another model.
            choices = () if self.found[-1].obstacle else choices
        live = bool(self.live.intersection(reads))
        inside = (
            self._search_bodies(node, earlier)
            if live and node.op_type in _HOLDERS and _is_plain(node)
            else None
        )
        if inside is not None:
            results = ((body, value.name) for body in inside for value in body.graph.output)
            earlier = earlier.union(*(body.behind.get(name, ()) for body, name in results))
        self.behind.update((name, earlier) for name in outputs if earlier)
        # Sizes are the same, whatever the values are: choices alone change them.
        if (node.op_type in ("Shape", "Size") and _is_plain(node)) or not live:
            return
        self.live.update(outputs)
        if inside is not None:
            for body in inside:
                pairs = zip(node.output, body.graph.output[_count_fronts(node) :], strict=False)
                self.changed.update(name for name, value in pairs if value.name in body.changed)
        elif self.changed.intersection(reads):
            self.changed.update(name for name in outputs if name not in choices)
        elif not self._is_exact(node):
            self.changed.update(name for name in outputs if not self._is_whole(name))

    def _search_bodies(self, node: NodeProto, earlier: frozenset[int]) -> list[_ChoiceWalk]:
        """The walks along the bodies of a node. earlier: the selections that its inputs depend on."""
        walks = []
        for label, body in iterate_subgraphs(node):
            own = list_defined(body)
            inputs = [value.name for value in body.input]
            # A body has an input for each of the node's; the first two of a Loop are counted inside, and let it go on.
            fed = dict(zip(inputs, node.input, strict=False))
            changed = self.changed - own
            changed |= {name for name, outer in fed.items() if outer in self.changed}
            # State of an iteration is an input of the next.
            results = [value.name for value in body.output]
            carried = dict(zip(results, inputs[_count_fronts(node) :], strict=False))
            while True:
                walk = _ChoiceWalk(
                    self.index,
                    body,
                    (self.live - own).union(inputs),
                    set(self.judged),
                    list(self.found),
                    set(changed),
                    {**self.behind, **dict.fromkeys(inputs, earlier)},
                    join_scope(self.scope, node.name, label),
                    (*self.around, node),
                    self.unsteady - own,
                )
                if node.op_type == "Loop":
                    walk.unsteady.update(name for name in inputs[2:] if not walk.has_size(name))
                walk.walk_graph()
                more = {
                    name for output, name in carried.items() if output in walk.changed
                } - changed
                if node.op_type == "If" or not more:
                    break
                changed |= more
            self.found[:] = walk.found
            self.judged = walk.judged
            walks.append(walk)
        return walks

    def _is_exact(self, node: NodeProto) -> bool:
        """True where quantizing cannot change a result of the node alone."""
        gathers = node.op_type == "Gather"
        table = self.index.resolve_tensor(node.input[0], self.scope) if gathers else None
        moves = node.op_type in _MOVES and not self.index.is_constant(table)
        # No placement quantizes what counts.
        return _is_plain(node) and (
            moves or counts_in_floats(self.index, self.index.find_node(node.name))
        )

    def _list_choices(self, node: NodeProto) -> Names:
        """The outputs that hold a choice; () for a node that makes none, or that no output depends on."""
        if not _is_plain(node) or not self.needed.intersection(node.output):
            return ()
        if node.op_type in _CHOOSERS:
            outputs = [node.output[k] for k in _CHOOSERS[node.op_type] if k < len(node.output)]
            return tuple(name for name in outputs if name in self.needed)
        positions = self.places | self.truths if node.op_type in _TESTS else self.places
        computed = any(name in self.changed and not self._is_whole(name) for name in node.input)
        picks = node.op_type in _TESTS | _CASTS and computed and node.output[0] in positions
        return tuple(node.output) if picks else ()

    def _describe(self, node: NodeProto, choices: Names) -> Selection:
        values = []
        for k, name in enumerate(node.input):
            # A tensor that two selections go by, or that is an output anyway, is judged once.
            if name in self.changed and name not in self.judged:
                self.judged.add(name)
                values.append((f"{name} in front of {node.name}", k))
        kinds = tuple(
            (str(TensorId(name, self.scope)), self._find_type(name) or TensorProto.INT64)
            for name in choices
        )
        axis = find_axis(node)
        if axis >= 0:
            # All iterations of a body are one tensor, along a new first axis.
            axis += sum(parent.op_type != "If" for parent in self.around)
        about = node.name, node.op_type, kinds, tuple(values), axis
        obstacle = self._find_obstacle(choices)
        return Selection(*about, scope=self.scope, obstacle=obstacle)

    def has_size(self, name: str) -> bool:
        """True for a tensor of this graph whose size is written down, or inferred, as numbers."""
        return self.index.find_sizes(TensorId(name, self.scope)) is not None

    def _is_unsteady(self, node: NodeProto) -> bool:
        """True where results of a node of a body may have another size in another iteration."""
        own = list_defined(self.graph).intersection(_select_inputs(node, _SIZES))
        computed = any(not self.index.is_constant(TensorId(name, self.scope)) for name in own)
        unsteady = not self.unsteady.isdisjoint(list_reads(node))
        return node.op_type in _COUNTING or computed or unsteady

    def _find_obstacle(self, choices: Names) -> str:
        """Why the choices of all iterations are not one tensor; "" where they are."""
        ops = [parent.op_type for parent in self.around]
        iterated = next((k for k, op_type in enumerate(ops) if op_type != "If"), len(ops))
        if "If" in ops[iterated:]:
            return f"since it is made in some iterations of a {ops[iterated]} only"
        if iterated < len(ops) and self.unsteady.intersection(choices):
            return f"since its size may be another one in each iteration of a {ops[iterated]}"
        shapes = (self.index.find_shape(TensorId(name, self.scope)) for name in choices)
        if "If" in ops and self.index.has_ranked_branches and () in shapes:
            return "since an If before opset 11 gives one number in both branches"
        return ""


def _count_fronts(node: NodeProto) -> int:
    """The results of a body in front of those of its node: the condition on which a Loop goes on."""
    return int(node.op_type == "Loop")


def _is_plain(node: NodeProto) -> bool:
    return node.domain in OWN_DOMAINS


def _select_inputs(node: NodeProto, numbers: Mapping[str, Indices]) -> list[str]:
    """Those of a node's inputs whose numbers a table has by operator."""
    return [node.input[k] for k in numbers.get(node.op_type, ()) if k < len(node.input)]
