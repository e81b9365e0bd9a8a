"""Find layers and blocks in a graph: a weight with the activations behind it, and regions around residual sums.

A block, in BRECQ's sense, is the region between a value and the join of all paths that leave it: every value inside is
read inside only. Blocks are the largest such regions with at most `max_layers` weights; a weight outside of all blocks
is a unit of its own. The activations behind a unit's last operator and the quantizers of its inputs belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import networkx
from torch import fx

from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names
from onnxq.sites import Role
from torch_frontend.qmodules import find_entry
from torch_frontend.quantizers import Quantizer, quantizers_of
from torch_frontend.tracing.modules import find_module
from torch_frontend.tracing.names import find_constants, is_plain, read_name, read_op

# Operators that belong to the unit in front of them: engines compute them together with its product.
_FOLLOW = frozenset(
    {
        "relu", "relu6", "clamp", "leaky_relu", "prelu", "elu", "sigmoid", "silu", "gelu", "mish", "hardsigmoid",
        "hardswish", "tanh", "softplus", "batch_norm", "identity",
    }
)  # fmt: skip


# Stands in front of all inputs of a graph.
_ROOT = "root"


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
        self.values = [n for n in model.graph.nodes if n not in fixed and not is_plain(n) and n.op != "output"]
        # The graph of values alone: without parameters, sizes and the output node.
        known = set(self.values)
        self.reads = {n: [s for s in n.all_input_nodes if s in known] for n in self.values}
        self.readers = {n: [u for u in n.users if u in known or u.op == "output"] for n in self.values}
        self.weighted = [n for n in self.values if self._reads_weight(n)]
        # Every value follows from the root, through the inputs.
        self.paths = networkx.DiGraph((s, n) for n in self.values for s in self.reads[n] or [_ROOT])

    def layers(self) -> list[Region]:
        """One region per operator with a quantized weight, with the activations behind it."""
        return [self._make_region(self.path(n), {n}, n) for n in self.weighted]

    def blocks(self, max_layers: int) -> list[Region]:
        """The largest regions with at most `max_layers` weights that end in a join; single layers for the rest."""
        # Each value's immediate dominator: the last value on all paths from the root to it.
        above = networkx.immediate_dominators(self.paths, _ROOT) if self.values else {}
        found = []
        for join in self.values:
            start = above[join]
            if len(set(self.reads[join])) > 1 and start is not _ROOT:
                inside = {join, *(networkx.ancestors(self.paths, join) & networkx.descendants(self.paths, start))}
                layers = [n for n in self.weighted if n in inside]
                if self._leaves_only_by(inside, join) and 0 < len(layers) <= max_layers:
                    found.append((inside, join, layers))
        chosen: list[Region] = []
        taken: set[fx.Node] = set()
        # Largest first: a block holds the smaller blocks inside it.
        for inside, join, layers in sorted(found, key=lambda f: (-len(f[0]), self.order[f[1]])):
            if not taken & inside:
                taken |= inside
                chosen.append(self._make_region(self._find_common_path([*layers, join]), inside, join))
        chosen += [self._make_region(self.path(n), {n}, n) for n in self.weighted if n not in taken]
        return sorted(_make_names_unique(chosen), key=lambda region: self.order[region.exit])

    def find_named(self, names: Sequence[str]) -> list[Region]:
        """Regions of modules by name. Raises ConfigError if a name is unknown or its region has several exits."""
        paths = {node: self.path(node) for node in self.values}
        made = []
        for name in names:
            depth = name.count(".") + 1
            own = {n for n, path in paths.items() if path.split(".")[:depth] == name.split(".") and n in self.reads}
            own = {n for n in own if n.op != "placeholder" and not self._is_quantizer(n)}
            if not own:
                parts = {path.rpartition(".")[0] or path for path in paths.values()} | set(paths.values())
                raise ConfigError(
                    f"block {name!r}", "is no module of the model", suggest_names(name, parts), code="Q309"
                )
            inside = self._add_between(own)
            # Only one value is compared, so a block has one exit.
            exits = [n for n in inside if any(user not in inside for user in self.readers[n])]
            if len(exits) != 1:
                has = ", ".join(self.path(n) for n in exits[:4]) or "none"
                raise ConfigError(
                    f"block {name!r}", f"is left by {len(exits)} values ({has})", "name smaller blocks", code="Q304"
                )
            made.append(self._make_region(name, inside, exits[0]))
        return sorted(made, key=lambda region: self.order[region.exit])

    def path(self, node: fx.Node) -> str:
        """Qualified name of the call."""
        found = read_name(node)
        return found.name if found is not None else str(node.target if node.op == "call_module" else node.name)

    # -- parts -------------------------------------------------------------------------------------------------

    def _is_quantizer(self, node: fx.Node) -> bool:
        return isinstance(find_module(self.model, node), Quantizer)

    def _is_disabled(self, node: fx.Node) -> bool:
        """True for a quantizer that is off for good, which is an identity."""
        found = find_module(self.model, node)
        return isinstance(found, Quantizer) and found.disabled_reason is not None

    def _reads_weight(self, node: fx.Node) -> bool:
        module = find_module(self.model, node)
        inside = [] if module is None or isinstance(module, Quantizer) else quantizers_of(module)
        sources = [find_module(self.model, source) for source in node.all_input_nodes]
        return any(isinstance(found, Quantizer) and found.role is Role.WEIGHT for found in (*inside, *sources))

    def _op_name(self, node: fx.Node) -> str:
        """Name of the node's operator; "" if it is unknown."""
        if read_name(node) is not None:
            return read_op(node)
        # Graphs that were made without QuantModel have no names.
        module = find_module(self.model, node)
        entry = find_entry(node.target if module is None else type(module))
        return "" if entry is None else entry.op.name

    def _make_region(self, name: str, inside: set[fx.Node], exit_: fx.Node) -> Region:
        """Region of these nodes with the activations behind its exit and the quantizers of its inputs."""
        nodes, behind, last = set(inside), set[fx.Node](), exit_
        while len(self.readers[last]) == 1:
            last = self.readers[last][0]
            if last.op == "output" or len(self.reads[last]) != 1:
                break
            # Disabled quantizers join the region only if an activation follows them.
            behind.add(last)
            if self._op_name(last) in _FOLLOW:
                nodes, behind, exit_ = nodes | behind, set(), last
            elif not self._is_disabled(last):
                break
        fronts = {s for n in nodes for s in self.reads[n] if s not in nodes and self._is_quantizer(s)}
        plain = self._find_sizes(nodes | fronts)
        every = nodes | fronts | plain
        return Region(name, tuple(sorted(every, key=lambda n: self.order[n])), exit_)

    def _find_sizes(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """Sizes that the region reads and that follow from values it holds or reads."""
        # Inside the region they are computed from the samples drawn, whose number is not that of the batch.
        reach = set(nodes) | {s for n in nodes for s in self.reads[n]}
        found: set[fx.Node] = set()
        for node in self.model.graph.nodes:
            if is_plain(node) and node.all_input_nodes and all(s in reach or s in found for s in node.all_input_nodes):
                found.add(node)
        wanted = {s for n in nodes for s in n.all_input_nodes if s in found}
        for node in reversed(list(self.model.graph.nodes)):
            if node in wanted:
                wanted.update(s for s in node.all_input_nodes if s in found)
        return wanted

    def _add_between(self, own: set[fx.Node]) -> set[fx.Node]:
        """These values and all on paths between them."""
        after = own.union(*(networkx.descendants(self.paths, node) for node in own))
        before = own.union(*(networkx.ancestors(self.paths, node) for node in own))
        return after & before

    def _leaves_only_by(self, inside: set[fx.Node], exit_: fx.Node) -> bool:
        return all(user in inside for node in inside if node is not exit_ for user in self.readers[node])

    def _find_common_path(self, nodes: list[fx.Node]) -> str:
        """The longest module path that all but the last node share; if empty, the path of the last."""
        parts = [self.path(n).split(".")[:-1] for n in nodes[:-1]]
        shared = parts[0]
        for other in parts[1:]:
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(shared, other, strict=False))
            shared = [one for one, _ in equal]
        return ".".join(shared) or self.path(nodes[-1])


def _make_names_unique(regions: list[Region]) -> list[Region]:
    """The regions with unique names: `:<exit>` is added to names that occur more than once."""
    names = [region.name for region in regions]
    return [
        region
        if names.count(region.name) == 1
        else Region(f"{region.name}:{region.exit.name}", region.nodes, region.exit)
        for region in regions
    ]
