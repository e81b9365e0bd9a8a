"""The toggled model: a quantized model whose pairs and rounded constants are switched on and off by its inputs.

Every QuantizeLinear/DequantizeLinear pair goes into the branch of an If, with the plain tensor in the other; every
dequantized constant, and every bias that differs from the float model's, becomes an input that is fed the one value or
the other. One session serves any settings; a group of many gets one in which all that it does not switch is constant
(`Switchboard.fix_switches`).
"""

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxq.annotate.bits import read_notes, read_numbers
from onnxq.annotate.find import Chain, find_chains
from onnxq.annotate.read import describe_pair
from onnxq.arrays import Array, ArrayDict, as_float32
from onnxq.evaluation.compare import FloatOutputs, ModelErrors
from onnxq.evaluation.selections import find_selections
from onnxq.evaluation.trials import Switchboard, score_settings
from onnxq.graph import GraphIndex, ModelLike, NodeRef, choose_name, inline_functions, name_nodes
from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.graph.integer_products import dequantize_node, read_integer_products
from onnxq.graph.light import copy_proto, is_large_model, rebuild
from onnxq.graph.precision.widen import read_types, widen_model
from onnxq.graph.scopes import collect_reads, keep_named, replace_items, walk_graphs, walk_nodes
from onnxq.graph.storage import Spool, release_pages
from onnxq.graph.subgraph import assemble_model, remove_unneeded
from onnxq.numerics import dequantize
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew
from onnxq.sites import Edge, Names, Refusal, Refusals, Role, TensorId, drop_repeats

# Operators whose constants passes rewrite: weights, biases, and the Add that holds a MatMul's bias.
_CORRECTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")


@dataclass(frozen=True)
class Switch:
    """A pair or constant that is on (as in the quantized model) or off (as in the float one).

    site: as reports call it. readers: the nodes it serves, by name. ops: their operators. feed: the input that sets it.
    """

    site: str
    role: Role
    readers: Names
    ops: Names
    feed: str


# The switches that are on.
Setting = frozenset[Switch]


@dataclass(frozen=True, eq=False)
class ToggledModel:
    """The model and its switches, in the order it runs. fixed: pairs that cannot be switched and stay on, and why."""

    board: Switchboard
    switches: tuple[Switch, ...]
    fixed: Refusals

    def run(self, feeds: Feeds, on: Collection[Switch]) -> ArrayDict:
        """The outputs with these switches on and all others off."""
        return self.board.run(feeds, {switch.feed for switch in on})


def measure_settings(
    toggled: ToggledModel,
    reference: FloatOutputs,
    settings: Sequence[Setting],
    *,
    progress: Progress,
    title: str = "profiling",
    crew: Crew | None = None,
) -> list[ModelErrors]:
    """The errors of every setting, in order, over the reference's samples. Raises ModelError and DataError.

    crew: measures them; the result does not depend on it.
    """
    different = list(dict.fromkeys(settings))
    feeds = [[switch.feed for switch in setting] for setting in different]
    with progress(title, len(reference.samples) * len(different)) as task:
        errors = score_settings(toggled.board, reference, feeds, crew, task)
    by_setting = dict(zip(different, errors, strict=True))
    return [by_setting[setting] for setting in settings]


def toggle_model(float_model: ModelLike, quantized: ModelLike, *, threads: int = 0) -> ToggledModel:
    """Put every rounding of `quantized`, as it takes the float model's choices, behind a switch.

    float_model: the same network, nodes named alike where constants are to be switched: it has their float values.
    """
    named = inline_functions(name_nodes(quantized))
    named = find_selections(float_model).take_choices(named)
    named = read_integer_products(named)
    # In float32 around the pairs, as all that is compared with them.
    named = widen_model(named) if read_types(named).narrow else named
    work = _ToggleWork(GraphIndex(float_model), named)
    work.toggle_pairs()
    work.toggle_corrections()
    board = work.open_board(work.finish_model(), threads)
    order = {node.name: node.order for node in work.index.nodes}

    def find_place(switch: Switch) -> tuple[int, str]:
        return min((order.get(name, 0) for name in switch.readers), default=len(order)), switch.site

    # Without those of pairs that no output needs, which went with the rest of what none needs.
    switches = sorted(
        (switch for switch in work.switches if switch.feed in board.off), key=find_place
    )
    return ToggledModel(board, tuple(switches), tuple(work.fixed))


class ConstantSwitches:
    """A copy of a model, `proto`, some of whose constants are inputs. on, off: the values of both positions, by input.

    source: the model, its nodes named. large: the constants of both positions together do not fit into memory.
    """

    def __init__(self, source: ModelLike, *, large: bool) -> None:
        self.source = source
        self.proto = copy_proto(source)
        self.on = ArrayDict()
        self.off = ArrayDict()
        self.by_name = {node.name: node for node in walk_nodes(self.proto.graph)}
        self.spool = Spool() if large else None
        self.taken = {*self.by_name}
        for node in self.by_name.values():
            self.taken.update(node.input, node.output)

    def feed_constant(self, base: str, edges: Sequence[Edge], on: Array, off: Array) -> str:
        """Have these inputs of nodes read a new input of the model, which gets a name like `base`."""
        # Not copied: those of a large model lie in its file.
        feed = self.add_input(base, on, off.astype(on.dtype, copy=False))
        for edge in edges:
            inputs = self.by_name[edge.node].input
            # A bias that the node did not have may lie behind others that are left out.
            inputs.extend([""] * (edge.index + 1 - len(inputs)))
            inputs[edge.index] = feed
        if self.spool is not None:
            self.on[feed] = self.spool.keep_array(on)
            release_pages(self.off[feed])
        return feed

    def add_input(self, base: str, on: Array, off: Array) -> str:
        """A new input of the model, which gets a name like `base`, with its values in both positions."""
        feed = self.make_unique(base)
        dtype = helper.np_dtype_to_tensor_dtype(on.dtype)
        self.proto.graph.input.append(helper.make_tensor_value_info(feed, dtype, on.shape))
        self.on[feed], self.off[feed] = (np.asarray(value, order="C") for value in (on, off))
        return feed

    def make_unique(self, base: str) -> str:
        """A name like this that nothing in the model has."""
        return choose_name(base, self.taken)

    def open_board(self, model: ModelLike, threads: int = 0) -> Switchboard:
        """The board of a model made of `proto`, which may have lost some of the inputs."""
        present = {value.name for value in model.graph.input}
        on, off = (
            {name: value for name, value in values.items() if name in present}
            for values in (self.on, self.off)
        )
        return Switchboard(model, on, off, threads, large=self.spool is not None)


class _ToggleWork(ConstantSwitches):
    def __init__(self, real: GraphIndex, source: ModelLike) -> None:
        super().__init__(source, large=is_large_model(real.proto))
        self.real = real
        self.index = GraphIndex(source)
        self.switches: list[Switch] = []
        self.fixed: list[Refusal] = []
        self.branches: dict[str, NodeProto] = {}
        gone = [
            node
            for node in self.real.nodes
            if node.op_type in ("Relu", "Clip") and node.name not in self.by_name
        ]
        # Their inputs may have kept their names, or their outputs.
        self.activations = {
            name: node for node in gone for name in (node.inputs[0], node.outputs[0])
        }

    def toggle_pairs(self) -> None:
        """Every chain of nodes that rounds something."""
        notes = read_notes(self.source)
        for chain in find_chains(self.index):
            if self._is_in_both(chain):
                continue
            info = describe_pair(self.index, chain, notes)
            if chain.dequantize is None:
                reason = "what it quantizes is computed on in integers"
                self.fixed.append(Refusal(info.name, reason, rule="profile", code="R113"))
                continue
            tensor = chain.dequantize.result
            edges = self.index.list_consumers(tensor)
            nodes = drop_repeats(self._list_readers(tensor))
            maker = self.index.find_producer(chain.source)
            if not nodes and maker is not None:
                # A graph output that nobody reads: its error is its maker's.
                nodes = (maker.name,)
            if chain.lookup is not None:
                nodes = (chain.lookup.name,)
                feed = self._toggle_table(chain, chain.lookup)
            elif chain.quantize is not None:
                # A Clip between the two halves belongs to the pair; the network's own Clip in front does not.
                inner = [] if chain.inner is None else [chain.inner.name]
                feed = self._insert_branch(chain, {*info.nodes, *inner})
            else:
                feed = self._toggle_constant(chain, tensor, edges)
            if feed:
                ops = drop_repeats(self.index.find_node(name).op_type for name in nodes)
                self.switches.append(Switch(info.name, info.role, nodes, ops, feed))
            else:
                reason = "the float model has no constant in this place to compare with"
                fix = "name its nodes as the quantized ones"
                self.fixed.append(Refusal(info.name, reason, fix, "profile", "R113"))

    def _list_readers(self, tensor: TensorId) -> Iterator[str]:
        """The nodes that compute on a tensor: behind a pair of other bits, those behind that."""
        for node in self.index.readers(tensor):
            if node.op_type in (QUANTIZE, DEQUANTIZE):
                yield from self._list_readers(node.result)
            else:
                yield node.name

    def _is_in_both(self, chain: Chain) -> bool:
        """True for a pair, or a dequantized constant, that the float model came with too: it is on in both."""
        if chain.dequantize is None or not all(map(self._is_known, chain.nodes)):
            return False
        return chain.quantize is not None or self.index.is_constant(chain.source)

    def _is_known(self, node: NodeRef) -> bool:
        """True when the float model has this node too; a Gather that became another operator keeps its name."""
        real = self.real.named.get(node.name)
        return real is not None and real.op_type == node.op_type

    def _insert_branch(self, chain: Chain, members: set[str]) -> str:
        """An If in the place of the pair."""
        last = chain.last
        inside = [deepcopy(self.by_name[n.name]) for n in chain.nodes if n.name in members]
        plain = inside[0].input[0]
        result = inside[-1].output[0]
        source = self.index.resolve_tensor(plain, last.scope)
        if source is None:
            return ""
        # Names are unique over all scopes in ONNX, those inside a branch among them.
        rename = {name: self.make_unique(f"{name}/in") for node in inside for name in node.output}
        for node in inside:
            node.name = self.make_unique(f"{node.name}/in")
            node.input[:] = [rename.get(name, name) for name in node.input]
            node.output[:] = [rename[name] for name in node.output]
        dtype = self.index.find_dtype(source) or TensorProto.FLOAT
        feed = self.add_input(f"onnxq/{last.name}/on", np.asarray(True), np.asarray(False))
        skip = self.make_unique(f"{result}/plain")
        outside = self._make_bypass(plain, skip, f"{last.name}/plain")
        branches = [
            helper.make_graph(
                nodes, "branch", [], [helper.make_tensor_value_info(out, dtype, None)]
            )
            for nodes, out in ((inside, rename[result]), (outside, skip))
        ]
        # In the place of the last node, so that the order of the nodes stays one that runs.
        self.branches[last.name] = helper.make_node(
            "If", [feed], [result], name=last.name, then_branch=branches[0], else_branch=branches[1]
        )
        return feed

    def _make_bypass(self, plain: str, result: str, base: str) -> list[NodeProto]:
        """Nodes that compute `result` without the pair: the tensor, through the Relu or Clip the pair stands for.

        onnxruntime.quantization leaves out activations whose bounds the integers keep anyway.
        """
        node = self.activations.get(plain)
        name = self.make_unique(base)
        if node is None:
            return [helper.make_node("Identity", [plain], [result], name=name)]
        again = helper.make_node(node.op_type, [plain], [result], name=name, **node.attrs)
        nodes = []
        for k in range(1, len(node.inputs)):
            value = self.real.input_value(node, k)
            again.input.append(self.make_unique(f"{result}/bound{k}") if value is not None else "")
            if value is not None:
                tensor = numpy_helper.from_array(np.asarray(value))
                nodes.append(
                    helper.make_node(
                        "Constant", [], [again.input[-1]], name=again.input[-1], value=tensor
                    )
                )
        return [*nodes, again]

    def _toggle_constant(self, chain: Chain, tensor: TensorId, edges: Sequence[Edge]) -> str:
        """An input in the place of a dequantized constant; "" where the float model lacks its value."""
        plain = self._find_float_constant(edges)
        value = _dequantize_constant(self.index, chain)
        if (
            plain is None
            or value is None
            or value.size != plain.size
            or self.index.is_output(tensor)
        ):
            return ""
        return self.feed_constant(
            f"onnxq/{chain.last.name}", edges, value, plain.reshape(value.shape)
        )

    def _toggle_table(self, chain: Chain, lookup: NodeRef) -> str:
        """A Gather of rows of an input, in the place of the nodes that look rows up; "" without a float table."""
        stored_qparams = read_numbers(self.index, chain)
        qparams = stored_qparams.qparams
        stored = self.index.find_constant(chain.source)
        plain = self._find_float_constant([lookup.make_edge(0)])
        if plain is None or stored is None or qparams is None or plain.shape != stored.shape:
            return ""
        spec = stored_qparams.spec
        rounded = dequantize(stored.astype(spec.numpy_storage), qparams, spec)
        feed = self.add_input(f"onnxq/{lookup.name}", rounded, as_float32(plain))
        ids = self.by_name[lookup.name].input[1]
        self.branches[chain.last.name] = helper.make_node(
            "Gather", [feed, ids], chain.last.outputs[:1], name=chain.last.name
        )
        return feed

    def _find_float_constant(self, edges: Sequence[Edge]) -> Array | None:
        """The float model's constant in the place of these inputs; None where it lacks one of them.

        As it is read here: a Gemm may store the weight of its MatMul transposed.
        """
        value = None
        for edge in edges:
            real = self.real.named.get(edge.node)
            value = self.real.input_value(real, edge.index)
            if real is None or value is None:
                return None
            if edge.index == 1 and real.is_transposed != self.index.named[edge.node].is_transposed:
                value = value.T
        return value

    def toggle_corrections(self) -> None:
        """Float constants that differ from the float model's: corrected biases."""
        for node in self.index.nodes:
            real = self.real.named.get(node.name)
            if node.op_type not in _CORRECTED or real is None:
                continue
            for k in range(len(node.inputs)):
                value = self.index.input_value(node, k)
                # Input 0 is data; an Add has the bias at either.
                if value is None or value.dtype.kind != "f" or (k == 0 and node.op_type != "Add"):
                    continue
                plain = self.real.input_value(real, k)
                # A bias that the float model has not is one of zeros.
                if plain is None and not real.name_input(k):
                    plain = np.zeros_like(value)
                if (
                    plain is None
                    or plain.size != value.size
                    or np.array_equal(plain.ravel(), value.ravel())
                ):
                    continue
                edge = node.make_edge(k)
                feed = self.feed_constant(
                    f"onnxq/{edge}", [edge], value, plain.reshape(value.shape)
                )
                # The operator whose bias this is: the MatMul in front of an Add.
                maker = self.index.maker(node, 1 - k, "MatMul") if node.op_type == "Add" else None
                owner = node if maker is None else maker
                self.switches.append(
                    Switch(str(edge), Role.BIAS, (owner.name,), (owner.op_type,), feed)
                )

    def finish_model(self) -> ModelLike:
        """The model with the branches in place, and nothing in it that no output needs."""
        whole = self.proto.graph
        for _, graph in walk_graphs(whole):
            replace_items(graph.node, [self.branches.get(n.name, n) for n in graph.node])
        # From the inside out: a tensor that no subgraph reads any more, its parent need not compute.
        for _, graph in reversed(list(walk_graphs(whole))):
            remove_unneeded(graph)
        used = self.index.input_names | collect_reads(whole)
        keep_named(whole.input, used)
        return rebuild(self.source, self.proto)


def _dequantize_constant(index: GraphIndex, chain: Chain) -> Array | None:
    """The constant of a chain without a quantize node, dequantized as ONNX Runtime does, by itself in rare forms."""
    value = dequantize_node(index, chain.last)
    if value is not None:
        # The usual one: a session for each takes longer than all of them here.
        return value
    nodes: list[NodeProto] = []
    tensors = {}
    for node in chain.nodes:
        for k, name in enumerate(node.inputs):
            value = index.input_value(node, k)
            if value is not None:
                tensors[name] = numpy_helper.from_array(value, name)
            elif name and not any(name in before.output for before in nodes):
                return None
        ends = node.inputs, node.outputs
        nodes.append(
            helper.make_node(node.op_type, *ends, node.name, domain=node.domain, **node.attrs)
        )
    out = chain.last.outputs[0]
    proto = assemble_model(index.proto, nodes, (), [ValueInfoProto(name=out)], tensors)
    return np.asarray(Session(proto, optimize=False).run({})[out])
