"""profile_pairs(): who is to blame for the error at the outputs.

Three readings, because each of them misleads somewhere: alone (only these sites quantized), without (all but these) and
the reach (the network quantized from its start up to a node). Sites alone look harmless where several spoil a result
together, as in the spectrogram front end of an audio net (each site ≥ 26 dB, together 9), so nodes are scanned with
their weight and inputs as one, and stretches of neighbouring nodes too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from onnxq.data import Dataset
from onnxq.errors import ConfigError
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.profile import KINDS, GroupCost, OutputCost, Profile, Reach, decibel
from onnxq.evaluation.toggled import Setting, Switch, Switchboard, measure, switchboard
from onnxq.nearest import did_you_mean
from onnxq.progress import Progress
from onnxq.sites import Caution, Role

# The network in so many stretches, coarse to fine, and in so many steps of the reach.
_STRETCHES = (2, 4, 8)
_STEPS = 16
_LEAST = 2
# With everything off the outputs must be the float model's.
_SAME_DB = 60.0


@dataclass(frozen=True)
class Group:
    """Switches that are looked at together."""

    kind: str
    name: str
    switches: tuple[Switch, ...]


def groups_of(switches: Sequence[Switch], kinds: Iterable[str] = KINDS) -> tuple[Group, ...]:
    """Sites, nodes with all they read quantized, stretches of nodes; one of two that hold the same switches.

    switches: in the order the model runs. Raises ConfigError for a kind that does not exist.
    """
    wanted = tuple(dict.fromkeys(kinds))
    for kind in wanted:
        if kind not in KINDS:
            raise ConfigError(f"by: {kind}", "there is no such grouping", did_you_mean(kind, KINDS), code="Q304")
    nodes = by_node(switches)
    found: dict[tuple[str, frozenset[Switch]], Group] = {}
    if "node" in wanted:
        for name, members in nodes.items():
            found.setdefault(("", frozenset(members)), Group("node", name, members))
    if "stretch" in wanted:
        for parts in _STRETCHES:
            for group in stretches(nodes, parts):
                found.setdefault(("stretch", frozenset(group.switches)), group)
    if "site" in wanted:
        for one in switches:
            key = ("", frozenset([one]))
            if key not in found:
                found[key] = Group("site", one.site, (one,))
    return tuple(found.values())


def by_node(switches: Iterable[Switch]) -> dict[str, tuple[Switch, ...]]:
    """Node name -> the switches of what it reads, in order."""
    nodes: dict[str, list[Switch]] = {}
    for one in switches:
        for name in one.readers:
            nodes.setdefault(name, []).append(one)
    return {name: tuple(members) for name, members in nodes.items()}


def stretches(nodes: dict[str, tuple[Switch, ...]], parts: int) -> list[Group]:
    """The nodes in so many stretches with about as many weights each; [] where they would hold fewer than two."""
    heavy = [name for name, members in nodes.items() if any(one.role is Role.WEIGHT for one in members)]
    marks = heavy or list(nodes)
    size = -(-len(marks) // parts)
    if size < _LEAST or len(marks) <= size:
        return []
    starts = frozenset(marks[size::size])
    out: list[list[str]] = [[]]
    for name in nodes:
        if name in starts:
            out.append([])
        out[-1].append(name)
    groups = []
    for names in out:
        members = tuple(dict.fromkeys(one for name in names for one in nodes[name]))
        groups.append(Group("stretch", f"{names[0]} … {names[-1]}", members))
    return groups


def profile_pairs(
    float_model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    samples: Dataset,
    *,
    kinds: Iterable[str] = KINDS,
    threads: int = 0,
    progress: Progress,
) -> Profile:
    """The error of every group of sites at the outputs: alone, and what remains without it.

    float_model: prepared as `quantized` was, nodes named alike. Streaming: one session, only sums are kept.
    Raises ModelError and DataError from the runs, ConfigError for a kind that does not exist.
    """
    with progress("putting every pair behind a switch"):
        board = switchboard(float_model, quantized, threads=threads)
        reference = FloatOutputs(float_model, samples, threads=threads)
    groups = groups_of(board.switches, kinds)
    everything: Setting = frozenset(board.switches)
    steps = _steps(board)
    settings: list[Setting] = [frozenset(), everything]
    for group in groups:
        settings += [frozenset(group.switches), everything.difference(group.switches)]
    settings += [setting for _, setting in steps]
    errors = measure(board, reference, settings, progress=progress)
    off, on, rest = errors[0], errors[1], errors[2:]
    whole = decibel(on.noise())
    costs = []
    for k, group in enumerate(groups):
        alone, without = decibel(rest[2 * k].noise()), decibel(rest[2 * k + 1].noise())
        costs.append(_cost(group, alone, without, whole))
    costs.sort(key=lambda cost: (-cost.gain_db, cost.alone_db, cost.name))
    reach = [
        Reach(node=name, sqnr_db=decibel(e.noise()))
        for (name, _), e in zip(steps, rest[2 * len(groups) :], strict=True)
    ]
    outputs = tuple(
        OutputCost(name=one.name, sqnr_db=one.sqnr_db, float_db=plain.sqnr_db)
        for one, plain in zip(on.results(), off.results(), strict=True)
    )
    return Profile(
        sqnr_db=whole,
        samples=len(samples),
        outputs=outputs,
        groups=tuple(costs),
        reach=tuple(reach),
        fixed=board.fixed,
        warnings=_warnings(outputs, board),
    )


def _cost(group: Group, alone: float, without: float, whole: float) -> GroupCost:
    ops = tuple(dict.fromkeys(op for one in group.switches for op in one.ops))
    sites = tuple(one.site for one in group.switches)
    gain = without - whole if without != whole else 0.0
    return GroupCost(
        kind=group.kind, name=group.name, ops=ops, sites=sites, alone_db=alone, without_db=without, gain_db=gain
    )


def _steps(board: Switchboard) -> list[tuple[str, Setting]]:
    """The network on from its start to one node after another, in at most so many steps."""
    nodes = by_node(board.switches)
    names = list(nodes)
    size = max(1, -(-len(names) // _STEPS))
    ends = [*range(size - 1, len(names) - 1, size), *([len(names) - 1] if names else [])]
    return [(names[k], frozenset(one for name in names[: k + 1] for one in nodes[name])) for k in ends]


def _warnings(outputs: Sequence[OutputCost], board: Switchboard) -> tuple[Caution, ...]:
    found = []
    worst = min(outputs, key=lambda one: one.float_db, default=None)
    if worst is not None and worst.float_db < _SAME_DB and not board.fixed:
        text = (
            f"with everything switched off output {worst.name} is {worst.float_db:.1f} dB from the float model's: the "
            "quantized model differs from it in more than its pairs"
        )
        found.append(Caution("W117", text))
    if board.fixed:
        text = (
            f"{len(board.fixed)} pairs could not be switched off and stay quantized in all figures "
            f"({board.fixed[0].subject}: {board.fixed[0].reason})"
        )
        found.append(Caution("W117", text))
    return tuple(found)
