"""Sensitivity: how much of the error at the outputs comes from each quantized site, node and segment of the network.

Three readings, because each of them misleads somewhere: isolated (only these sites quantized), leave-one-out (all but
these) and prefix (the network quantized from its start up to a node). Isolated sites look harmless where several spoil
a result together, as in the spectrogram front end of an audio net (each site ≥ 26 dB, together 9), so nodes are scanned
with their weight and inputs as one, and segments of neighbouring nodes too.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from onnxq.data import Dataset
from onnxq.errors import escape_json
from onnxq.evaluation.accumulator import noise_to_db
from onnxq.evaluation.agreement import AgreementSums, ChoiceAgreements
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.selections import Selection, explain_missing
from onnxq.evaluation.toggled import Setting, Switch, ToggledModel, measure_settings, toggle_model
from onnxq.graph import ModelLike
from onnxq.progress import Progress
from onnxq.runtime.crew import Crew
from onnxq.sites import Caution, Cautions, Names, Refusals, drop_repeats
from onnxq.wording import show_as_summary

KINDS = ("node", "segment", "site")


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """The cost of some sites together at the outputs, in dB of SQNR against the float model.

    kind: "site"; "node": all that one node reads quantized; "segment": neighbouring nodes. ops: their readers.
    isolated_db: only these are quantized. leave_one_out_db: everything but these is. inf: no difference at all.
    """

    kind: str
    name: str
    ops: Names
    sites: Names
    isolated_db: float
    leave_one_out_db: float
    gain_db: float


@dataclass(frozen=True, kw_only=True)
class PrefixError:
    """SQNR with the network quantized from its start up to and including `node`."""

    node: str
    sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class JointCost:
    """SQNR with the loudest nodes in float together, and all others quantized."""

    nodes: Names
    sqnr_db: float

    @property
    def rule(self) -> str:
        """The rule of a configuration that leaves them in float, as a line of YAML."""
        # A list of names in JSON is one in YAML, but for letters escaped as two surrogates.
        names = escape_json(json.dumps(self.nodes, ensure_ascii=False))
        return f"- {{node: {names}, set: {{float: true}}}}"


@dataclass(frozen=True, kw_only=True)
class OutputProfile:
    """One output: with everything quantized, and with everything switched off, which should be exact.

    part: the slices of another scale that sqnr_db is of, like "[:, 4:, :]", "" where it is of the whole.
    """

    name: str
    sqnr_db: float
    float_db: float
    part: str = ""


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Profile:
    """Errors at the outputs by their causes.

    sqnr_db: of everything quantized, all outputs taken together (mean of their relative noise). groups: worst first.
    joint: the loudest nodes together, more and more of them.
    fixed: pairs that could not be switched and stayed quantized throughout. choices: of the float model, which all
    figures are measured on, and how far those made with everything quantized are the same. data, source, quantized:
    in words.
    """

    sqnr_db: float
    samples: int
    outputs: tuple[OutputProfile, ...]
    groups: tuple[GroupCost, ...]
    prefixes: tuple[PrefixError, ...] = ()
    joint: tuple[JointCost, ...] = ()
    fixed: Refusals = ()
    choices: ChoiceAgreements = ()
    warnings: Cautions = ()
    source: str = ""
    quantized: str = ""
    data: str = ""
    synthetic: bool = False

    def of(self, kind: str) -> tuple[GroupCost, ...]:
        """The groups of one kind, worst first."""
        return tuple(group for group in self.groups if group.kind == kind)


# The network in so many segments, coarse to fine, and in at most so many prefixes.
_SEGMENTS = (2, 4, 8)
_PREFIXES = 16
# Loudest nodes that are left float together; sites that overlap, or spoil a result together, need it.
_JOINT = (1, 2, 4, 8)
# Nodes with a weight in a segment; a single one is a node of its own.
_LEAST = 2
# With everything off the outputs must be the float model's, but for the order of sums: ORT packs constant weights, and
# not those that are fed.
_SAME_DB = 60.0


@dataclass(frozen=True)
class SwitchGroup:
    """Switches that are measured together."""

    kind: str
    name: str
    switches: Sequence[Switch]

    @property
    def setting(self) -> Setting:
        """These alone are on."""
        return frozenset(self.switches)


def list_groups(
    switches: Sequence[Switch], kinds: Collection[str] = KINDS
) -> tuple[SwitchGroup, ...]:
    """Sites, nodes with all they read quantized, segments of nodes; one of two that hold the same switches.

    switches: in the order the model runs. kinds: of KINDS.
    """
    nodes = group_by_node(switches)
    groups: dict[tuple[str, Setting], SwitchGroup] = {}
    if "node" in kinds:
        for name, members in nodes.items():
            groups.setdefault(("", frozenset(members)), SwitchGroup("node", name, members))
    if "segment" in kinds:
        for parts in _SEGMENTS:
            for segment in split_segments(nodes, parts):
                groups.setdefault(("segment", segment.setting), segment)
    if "site" in kinds:
        for switch in switches:
            # A node that reads only this site has the figures already.
            groups.setdefault(
                ("", frozenset([switch])), SwitchGroup("site", switch.site, (switch,))
            )
    return tuple(groups.values())


def group_by_node(switches: Iterable[Switch]) -> dict[str, Sequence[Switch]]:
    """Node name -> the switches of the tensors it reads, in order."""
    nodes = defaultdict(list)
    for switch in switches:
        for name in switch.readers:
            nodes[name].append(switch)
    return {name: tuple(members) for name, members in nodes.items()}


def split_segments(nodes: dict[str, Sequence[Switch]], parts: int) -> list[SwitchGroup]:
    """The nodes in so many segments with about as many weights each; [] where they would hold fewer than two."""
    heavy = [
        name for name, members in nodes.items() if any(switch.role.is_weight for switch in members)
    ]
    # A plan of activations alone has no weights to go by.
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
    return [
        SwitchGroup(
            "segment",
            f"{names[0]} … {names[-1]}",
            drop_repeats(switch for name in names for switch in nodes[name]),
        )
        for names in out
    ]


def measure_sensitivity(
    float_model: ModelLike,
    quantized: ModelLike,
    samples: Dataset,
    *,
    kinds: Collection[str],
    threads: int,
    crew: Crew | None,
    progress: Progress,
) -> Profile:
    """The error of every group of sites at the outputs: isolated, and left out.

    float_model: prepared as `quantized` was, nodes named alike. Streaming: only sums are kept. crew:
    measures them; the result does not depend on it. Raises ModelError and DataError from the runs.
    """
    with progress("putting every pair behind a switch"):
        toggled = toggle_model(float_model, quantized, threads=threads)
        reference = FloatOutputs(float_model, samples, threads=threads)
    groups = list_groups(toggled.switches, kinds)
    measure = partial(measure_settings, toggled, reference, progress=progress, crew=crew)
    nothing: Setting = frozenset()
    everything = frozenset(toggled.switches)
    isolated = [group.setting for group in groups]
    steps = _list_prefixes(toggled)
    # All in one go: the samples are run through once.
    left_out = [everything - setting for setting in isolated]
    settings = [nothing, everything, *isolated, *left_out, *steps.values()]
    errors = dict(zip(settings, measure(settings), strict=True))
    figures = {setting: noise_to_db(sums.noise()) for setting, sums in errors.items()}
    costs = [_make_cost(group, figures, everything) for group in groups]
    # By name at last, so that equal figures have one order.
    costs.sort(key=lambda cost: (-cost.gain_db, cost.isolated_db, cost.name))
    # A second go, since the loudest are known only now.
    loudest = _list_joint(groups, figures)
    rest = measure([everything - setting for setting in loudest.values()]) if loudest else []
    joint = (
        JointCost(nodes=names, sqnr_db=noise_to_db(without.noise()))
        for names, without in zip(loudest, rest, strict=True)
    )
    pairs = (errors[setting].results() for setting in (everything, nothing))
    outputs = tuple(
        OutputProfile(name=own.name, sqnr_db=own.sqnr_db, part=own.part, float_db=exact.whole_db)
        for own, exact in zip(*pairs, strict=True)
    )
    return Profile(
        sqnr_db=figures[everything],
        samples=len(samples),
        outputs=outputs,
        groups=tuple(costs),
        prefixes=tuple(
            PrefixError(node=name, sqnr_db=figures[setting]) for name, setting in steps.items()
        ),
        joint=tuple(joint),
        fixed=toggled.fixed,
        choices=_compare_choices(toggled, reference, everything),
        warnings=_gather_warnings(outputs, toggled, reference.selections.list_missing(quantized)),
    )


def _compare_choices(
    toggled: ToggledModel, reference: FloatOutputs, setting: Setting
) -> ChoiceAgreements:
    """How far the model's own choices, with these switches on, are the float model's."""
    selections = reference.selections
    sums = AgreementSums(selections)
    for at, feeds in enumerate(reference.samples.samples() if selections.nodes else ()):
        exact = reference.run(at, feeds)
        sums.update(exact, toggled.run(selections.add_choices(feeds, exact), setting))
    return sums.results()


def _make_cost(
    group: SwitchGroup, figures: Mapping[Setting, float], everything: Setting
) -> GroupCost:
    whole = figures[everything]
    left_out = figures[everything - group.setting]
    return GroupCost(
        kind=group.kind,
        name=group.name,
        ops=drop_repeats(op for switch in group.switches for op in switch.ops),
        sites=tuple(switch.site for switch in group.switches),
        isolated_db=figures[group.setting],
        leave_one_out_db=left_out,
        # Both may be infinite, and inf - inf is no number.
        gain_db=left_out - whole if left_out != whole else 0.0,
    )


def _list_joint(
    groups: Sequence[SwitchGroup], figures: Mapping[Setting, float]
) -> dict[Names, Setting]:
    """Settings of the loudest nodes, by their names. figures: SQNR by setting."""
    # By name among equals: groups have no order of their own.
    ranked = sorted(
        (group for group in groups if group.kind == "node"),
        key=lambda group: (figures[group.setting], group.name),
    )
    return {
        tuple(group.name for group in ranked[:count]): frozenset(
            switch for group in ranked[:count] for switch in group.switches
        )
        for count in _JOINT
        if len(ranked) >= count
    }


def _list_prefixes(toggled: ToggledModel) -> dict[str, Setting]:
    """Settings that quantize from the start up to one node after another, by that node."""
    nodes = group_by_node(toggled.switches)
    names = list(nodes)
    size = max(1, -(-len(names) // _PREFIXES))
    prefixes = (names[:end] for end in range(size, len(names) + size, size))
    return {
        prefix[-1]: frozenset(switch for name in prefix for switch in nodes[name])
        for prefix in prefixes
    }


def _gather_warnings(
    outputs: Sequence[OutputProfile], toggled: ToggledModel, missing: Sequence[Selection]
) -> Cautions:
    worst = min(outputs, key=lambda output: output.float_db, default=None)
    if toggled.fixed:
        text = (
            f"{len(toggled.fixed)} pairs could not be switched off and stay quantized in all figures "
            f"({toggled.fixed[0].subject}: {toggled.fixed[0].reason})"
        )
    elif worst is not None and worst.float_db < _SAME_DB:
        text = (
            f"with everything switched off output {worst.name} is {worst.float_db:.1f} dB from the float model's: the "
            "quantized model differs from it in more than its pairs"
        )
    elif missing:
        text = explain_missing(missing[0])
    else:
        return ()
    return (Caution("W117", text),)
