"""Find layers and blocks in a graph: a weight with the activations behind it, and regions around residual sums.

A block, in BRECQ's sense, is the region between a value and the join of all paths that leave it: every value inside is
read inside only. Blocks are the largest such regions with at most `max_layers` weights; a weight outside of all blocks
is a unit of its own. The activations behind a unit's last operator and the quantizers of its inputs belong to it.

A unit is such a part of a model, which runs alone on inputs caught in runs of the whole model.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any

import networkx
from torch import Tensor, fx, nn
from torch.utils import _pytree as tree

from onnxq.errors import ConfigError, ModelError, suggest_names
from torch_frontend.qmodules import find_entry
from torch_frontend.qmodules.registry import GROUPS
from torch_frontend.quant_model import Follower
from torch_frontend.quantizers import AdaRound, Quantizer, quantizers_of
from torch_frontend.tracing.modules import Args, Inputs, Kwargs, find_module
from torch_frontend.tracing.names import find_constants, is_plain, read_name, read_op
from torch_frontend.tracing.values import bind_inputs

# Stands in front of all inputs of a graph.
_ROOT = "root"
Nodes = set[fx.Node]


@dataclass(frozen=True, eq=False)
class Region:
    """Nodes in topological order; `exit` makes the value that is compared."""

    name: str
    nodes: tuple[fx.Node, ...]
    exit: fx.Node


class Regions:
    """The layers and blocks of one graph."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model
        fixed = find_constants(model.graph)
        # Position in topological order.
        self.order = {node: k for k, node in enumerate(model.graph.nodes)}
        self.values = [
            n for n in model.graph.nodes if n not in fixed and not is_plain(n) and n.op != "output"
        ]
        # The graph of values alone: without parameters, sizes and the output node.
        known = set(self.values)
        self.reads = {n: [s for s in n.all_input_nodes if s in known] for n in self.values}
        self.readers = {
            n: [u for u in n.users if u in known or u.op == "output"] for n in self.values
        }
        self.weighted = [n for n in self.values if self._reads_weight(n)]
        # Every value follows from the root, through the inputs.
        self.paths = networkx.DiGraph((s, n) for n in self.values for s in self.reads[n] or [_ROOT])

    def list_layers(self) -> list[Region]:
        """One region per operator with a quantized weight, with the activations behind it."""
        return [self._make_layer(n) for n in self.weighted]

    def list_blocks(self, max_layers: int) -> list[Region]:
        """The largest regions with at most `max_layers` weights that end in a join; single layers for the rest."""
        # Each value's immediate dominator: the last value on all paths from the root to it.
        above = networkx.immediate_dominators(self.paths, _ROOT) if self.values else {}
        blocks = []
        for join in self.values:
            start = above[join]
            if len(set(self.reads[join])) > 1 and start is not _ROOT:
                inside = {
                    join,
                    *(
                        networkx.ancestors(self.paths, join)
                        & networkx.descendants(self.paths, start)
                    ),
                }
                layers = [n for n in self.weighted if n in inside]
                # The values of a block leave it by its join alone.
                readers = {user for node in inside - {join} for user in self.readers[node]}
                if readers <= inside and 0 < len(layers) <= max_layers:
                    blocks.append((inside, join, layers))
        regions: list[Region] = []
        taken: Nodes = set()
        # Largest first: a block holds the smaller blocks inside it.
        for inside, join, layers in sorted(
            blocks, key=lambda block: (-len(block[0]), self.order[block[1]])
        ):
            if not taken & inside:
                taken |= inside
                # The longest module path that all layers share; if empty, the path of the exit.
                paths = [self.find_path(n).split(".")[:-1] for n in layers]
                shared = ".".join(commonprefix(paths))  # noqa: RUF071 (of lists, whose items it compares)
                regions.append(self._make_region(shared or self.find_path(join), inside, join))
        regions += [self._make_layer(n) for n in self.weighted if n not in taken]
        names = Counter(region.name for region in regions)
        unique = [
            replace(region, name=f"{region.name}:{region.exit.name}")
            if names[region.name] > 1
            else region
            for region in regions
        ]
        return self._sort_regions(unique)

    def find_named(self, names: Sequence[str]) -> list[Region]:
        """Regions of modules by name. Raises ConfigError if a name is unknown or its region has several exits."""
        paths = {node: self.find_path(node) for node in self.values}
        regions = []
        for name in names:
            own = {
                node
                for node, path in paths.items()
                if f"{path}.".startswith(f"{name}.")
                and node.op != "placeholder"
                and not self._is_quantizer(node)
            }
            if not own:
                fix = suggest_names(name, [path for path, _ in self.model.named_modules()])
                raise ConfigError(f"block {name!r}", "is no module of the model", fix, code="Q309")
            # These values and all on paths between them.
            after = own.union(*(networkx.descendants(self.paths, node) for node in own))
            before = own.union(*(networkx.ancestors(self.paths, node) for node in own))
            inside = after & before
            # Only one value is compared, so a block has one exit.
            exits = [n for n in inside if any(user not in inside for user in self.readers[n])]
            if len(exits) != 1:
                cause = f"is left by {len(exits)} values ({', '.join(map(self.find_path, exits[:4])) or 'none'})"
                raise ConfigError(f"block {name!r}", cause, "name smaller blocks", code="Q304")
            regions.append(self._make_region(name, inside, exits[0]))
        return self._sort_regions(regions)

    def find_path(self, node: fx.Node) -> str:
        """Qualified name of the call."""
        name = read_name(node)
        return (
            name.name
            if name is not None
            else str(node.target if node.op == "call_module" else node.name)
        )

    def _sort_regions(self, regions: list[Region]) -> list[Region]:
        return sorted(regions, key=lambda region: self.order[region.exit])

    # -- parts -------------------------------------------------------------------------------------------------

    def _is_quantizer(self, node: fx.Node) -> bool:
        return isinstance(find_module(self.model, node), Quantizer)

    def _is_disabled(self, node: fx.Node) -> bool:
        """True for a quantizer that is off for good, which is an identity."""
        module = find_module(self.model, node)
        return isinstance(module, Quantizer) and module.disabled_reason is not None

    def _reads_weight(self, node: fx.Node) -> bool:
        module = find_module(self.model, node)
        inside = [] if module is None or isinstance(module, Quantizer) else quantizers_of(module)
        sources = [find_module(self.model, source) for source in node.all_input_nodes]
        return any(isinstance(q, Quantizer) and q.role.is_weight for q in (*inside, *sources))

    def _op_name(self, node: fx.Node) -> str:
        """Name of the node's operator; "" if it is unknown."""
        if read_name(node) is not None:
            return read_op(node)
        # Graphs that were made without QuantModel have no names.
        module = find_module(self.model, node)
        entry = find_entry(node.target if module is None else type(module))
        return "" if entry is None else entry.op.name

    def _make_layer(self, node: fx.Node) -> Region:
        return self._make_region(self.find_path(node), {node}, node)

    def _make_region(self, name: str, nodes: Nodes, exit_: fx.Node) -> Region:
        """Region of these nodes with the activations behind its exit and the quantizers of its inputs."""
        behind = set[fx.Node]()
        last = exit_
        while len(self.readers[last]) == 1:
            last = self.readers[last][0]
            if last.op == "output" or len(self.reads[last]) != 1:
                break
            # Disabled quantizers join the region only if an activation follows them.
            behind.add(last)
            if self._op_name(last) in GROUPS["following"]:
                nodes = nodes | behind
                behind = set()
                exit_ = last
            elif not self._is_disabled(last):
                break
        every = nodes | {s for n in nodes for s in self.reads[n] if self._is_quantizer(s)}
        every |= self._find_sizes(every)
        return Region(name, tuple(sorted(every, key=self.order.__getitem__)), exit_)

    def _find_sizes(self, nodes: Nodes) -> Nodes:
        """Sizes that the region reads and that follow from values it holds or reads."""
        # Inside the region they are computed from the samples drawn, whose number is not that of the batch.
        reach = nodes.union(*(self.reads[node] for node in nodes))
        sizes = set()
        for node in self.model.graph.nodes:
            if is_plain(node) and node.all_input_nodes and reach.issuperset(node.all_input_nodes):
                sizes.add(node)
                reach.add(node)
        read = {source for node in nodes for source in node.all_input_nodes if source in sizes}
        for node in reversed(self.model.graph.nodes):
            if node in read:
                read |= sizes.intersection(node.all_input_nodes)
        return read


Caught = list[tuple[Args, Tensor]]


@dataclass(eq=False)
class Unit:
    """A layer or block. run: its output for caught inputs. catch: a batch -> inputs and output of every call.

    owned: quantizers whose results nothing outside reads, so that their scales may be learned here.
    """

    name: str
    run: Callable[..., Tensor]
    catch: Callable[[Inputs], Caught]
    module: nn.Module
    owned: list[Quantizer] = field(default_factory=list)

    @property
    def weights(self) -> list[AdaRound]:
        """Quantizers of weights that learn to round and are not disabled."""
        return [
            q
            for q in quantizers_of(self.module)
            if isinstance(q, AdaRound) and q.disabled_reason is None
        ]


class _AllCaught(Exception):
    """Raised to stop a forward pass once all values are caught."""


def module_unit(model: nn.Module, name: str) -> Unit:
    """A submodule as a unit; hooks catch the inputs of every call. Raises ModelError for an unknown name."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(
            name, "is no module of the model", "name one that named_modules() lists", code="Q124"
        ) from error
    layouts: list[Any] = []  # structure of the arguments, which `run` restores from the flat values

    def catch(inputs: Inputs) -> Caught:
        caught: Caught = []
        pending: list[Args] = []

        def note_inputs(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
            flat, layout = tree.tree_flatten((args, kwargs))
            if not layouts:
                layouts.append(layout)
            if layout != layouts[0]:
                cause = "is called with different arguments at different times"
                raise ModelError(name, cause, "name another block", code="Q124")
            # A stack: the module may call itself, and then inner calls end first.
            # Copies: the model may write into them.
            pending.append(tuple(map(_copy_value, flat)))

        def note_output(_: nn.Module, __: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                cause = f"gives a {type(output).__name__}, not a tensor"
                raise ModelError(name, cause, "name another block", code="Q124")
            caught.append((pending.pop(), output.detach().clone()))

        before = module.register_forward_pre_hook(note_inputs, with_kwargs=True)
        with before, module.register_forward_hook(note_output):
            inputs.run_model(model)
        return caught

    def run(*flat: Any) -> Tensor:
        args, kwargs = tree.tree_unflatten(list(flat), layouts[0])
        return module(*args, **kwargs)

    return Unit(name, run, catch, module, owned=quantizers_of(module))


def graph_unit(model: fx.GraphModule, region: Region) -> Unit:
    """A region of a graph as a unit; values read from outside are inputs."""
    name = region.name
    exit_ = region.exit
    inside = set(region.nodes)
    part, entries = _extract_part(model, inside, exit_)
    wanted = {*entries, exit_}
    caught: dict[fx.Node, Any] = {}

    class Tap(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n in wanted:
                caught[n] = _copy_value(result)
                # The rest of the model is not needed.
                if len(caught) == len(wanted):
                    raise _AllCaught
            return result

    def catch(inputs: Inputs) -> Caught:
        caught.clear()
        with suppress(_AllCaught):
            Tap(model).run(*bind_inputs(model.graph, inputs))
        if not isinstance(caught.get(exit_), Tensor):
            raise ModelError(name, "gives no tensor", "name another block", code="Q124")
        values = [(tuple(caught[node] for node in entries), caught[exit_])]
        caught.clear()
        return values

    # Quantizers inside are its own whose readers are all inside, and that nothing outside calls or follows: a leader's
    # qparams are also its followers'; learning them here would change other units.
    shared = {q.leader for q in quantizers_of(model) if isinstance(q, Follower)}
    for node in model.graph.nodes:
        module = find_module(model, node)
        if module is not None and not (node in inside and inside.issuperset(node.users)):
            shared.update(quantizers_of(module))
    own = [q for q in quantizers_of(part) if q not in shared and not isinstance(q, Follower)]
    return Unit(name, part, catch, part, own)


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _extract_part(
    model: fx.GraphModule, region: Nodes, exit_: fx.Node
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """(the region as a module that shares the model's modules, the nodes outside that it reads)."""
    fixed = find_constants(model.graph)
    inside = [node for node in model.graph.nodes if node in region]
    sources = dict.fromkeys(source for node in inside for source in node.all_input_nodes)
    entries = [source for source in sources if source not in region and source not in fixed]
    part = fx.Graph()
    copies = {entry: part.placeholder(f"value_{k}") for k, entry in enumerate(entries)}

    # Constants are copied along with their readers, although they are not in the region.
    def copy_node(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copy_node(source)
            copies[node] = part.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in inside:
        copy_node(node)
    part.output(copies[exit_])
    return fx.GraphModule(model, part), entries
