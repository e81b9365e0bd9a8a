"""The proof of a build: its kernels, the nodes and sites they compute, and in which type; frozen values.

Two proofs are compared by the names of nodes and sites, which stay when kernels are fused and named otherwise.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onnxq.annotate import WeightSums
from onnxq.annotate.operators import SaturatingWeights
from onnxq.backends.engine import BuildState, DevicePlacement, Kernels, Profile
from onnxq.config.schema import JsonText, Loose, Natural
from onnxq.engines.saturation import SaturationCost
from onnxq.errors import DataError
from onnxq.files import AnyPath, read_text
from onnxq.sites import Cautions, EngineOptions, JsonObject, Lines, Names, drop_repeats
from onnxq.wording import Word, show_as_summary

INT8 = "int8"
FLOAT8 = "float8"
INT16 = "int16"
# Types of kernels that read the integers, or the float8 values, of pairs.
LOW = (INT8, FLOAT8, INT16)
UNSEEN = "unseen"
# In the place of a type, of nodes that an engine leaves to the CPU.
HOST = "CPU"
# Types that weights are kept in and no kernel computes in.
STORED = ("int4", "uint4", "int2", "uint2", "float4")
# Types that a node can be required to run in.
TYPES = (INT8, FLOAT8, INT16, "float16", "bfloat16", "float32", *STORED)
# In the place of a type: the one that a node's pairs ask for.
QUANTIZED = "quantized"
# In the place of a type, of every node that kernels compute: all of them take and give integers.
INTEGERS = "integers"


class SiteState(Word):
    """Which readers of a site take its integers in."""

    FUSED = "fused"  # all
    PARTLY = "partly"  # some
    UNFUSED = "not fused"  # none
    UNSEEN = UNSEEN  # the engine does not show it


@dataclass(frozen=True, kw_only=True)
class NodeProof:
    """One heavy node, the type it computes in, and the kernel that does its work."""

    node: str
    op: str
    # "int8", "float32", "int4 weights, float16" …, or UNSEEN.
    type: str
    kernel: str = ""
    kind: str = ""
    types: str = ""
    # All kernels that have a part in it.
    kernels: Names = ()
    # Why it does not compute in int8, "" where it does.
    reason: str = ""
    # Types of the arithmetic: several where kernels share the work, () where the engine shows none.
    computed: Names = ()
    # dtype of a weight that the kernel reads in fewer bits than it computes in, "" for none.
    stored: str = ""

    def runs_in(self, dtype: str) -> bool:
        """True when all of its arithmetic is in a type, or its weight in a type that no kernel computes in.

        int4 and int2 are those without a sign too, as int8 is: an engine may move the zero point and read the same.
        """
        if dtype == QUANTIZED:
            return not self.reason
        return self.stored in (dtype, f"u{dtype}") if dtype in STORED else self.computed == (dtype,)


@dataclass(frozen=True, kw_only=True)
class SiteProof:
    """One pair: which kernels read its integers, and the rule that placed it."""

    site: str
    role: str
    state: SiteState
    # "" for pairs of other tools.
    rule: str = ""
    readers: Names = ()
    # The readers that do not take its integers in, and why; () and "" for a fused pair.
    unfused: Names = ()
    kernels: Names = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The smallest part found that fails in the same way."""

    nodes: Names
    ops: Names
    # How many parts were built to find it, and for how long.
    builds: int
    seconds: float
    # "" when it was not written.
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Build:
    """How the build went."""

    engine: str
    version: str
    state: BuildState
    # E.g. "8.6", "" for the GPU of this machine.
    capability: str = ""
    seconds: float = 0.0
    engine_bytes: int = 0
    # Why there is no engine, the ONNX node that the library blames, and a remedy; whether that is no operator of ONNX.
    reason: str = ""
    node: str = ""
    fix: str = ""
    needs_plugin: bool = False
    # The last lines before the end, when it did not end well.
    log: Lines = ()
    # (min, opt, max) of the inputs whose shape is not fixed.
    shapes: Profile
    # Settings of the library, e.g. the chip.
    options: EngineOptions = field(default_factory=dict)
    reduced: Reduced | None = None
    # Files written for the user.
    saved: Names = ()


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A type that heavy nodes must run in, or, forbidden, that no product may compute in."""

    dtype: str
    # The one that selects the nodes, "" for all products.
    pattern: str = ""
    forbidden: bool = False
    nodes: Names
    # Those of them that do not keep to it.
    unmet: Lines


@dataclass(frozen=True, kw_only=True)
class Change:
    """One node, site or count that differs from the proof compared with; "" where one of them has none."""

    kind: str
    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.before or 'absent'} -> {self.after or 'absent'}"


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Proof:
    """The engine that a model became. kernels: in the order they run; nodes, sites: in the model's order.

    chosen: why it is this engine, "" where the caller named it. weights: int8 weights that 8-bit data meets in ONNX
    Runtime, with the sums that can overflow on CPUs without VNNI. cost: of those, on samples; None without samples.
    require_exact: nothing may overflow. placement: None where the engine runs all on one device. max_partitions: the
    largest number of parts that may run there, of which there must be one; None: any.
    """

    source: str
    build: Build
    chosen: str = ""
    kernels: Kernels = ()
    placement: DevicePlacement | None = None
    max_partitions: int | None = None
    nodes: tuple[NodeProof, ...] = ()
    sites: tuple[SiteProof, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    weights: SaturatingWeights = ()
    cost: SaturationCost | None = None
    require_exact: bool = False
    compared: str = ""
    changes: tuple[Change, ...] = ()
    warnings: Cautions = ()

    @property
    def built(self) -> bool:
        """True when there is an engine."""
        return self.build.state is BuildState.BUILT

    @property
    def unmet(self) -> Lines:
        """Nodes that do not run in the type required of them, or run in a forbidden one."""
        return drop_repeats(node for requirement in self.requirements for node in requirement.unmet)

    @property
    def saturating(self) -> SaturatingWeights:
        """The weights with which CPUs without VNNI can compute something else than others."""
        return tuple(one for one in self.weights if one.saturates)

    @property
    def scattered(self) -> bool:
        """True where more parts than asked for run on the device, or none does."""
        placement = self.placement
        most = self.max_partitions
        return placement is not None and most is not None and not 0 < placement.partitions <= most

    @property
    def holds(self) -> bool:
        """Built, and every requirement met."""
        exact = not (self.require_exact and self.saturating)
        return self.built and not self.unmet and exact and not self.scattered

    def node(self, name: str) -> NodeProof:
        """The heavy node of this name; KeyError without one."""
        return {one.node: one for one in self.nodes}[name]

    def site(self, name: str) -> SiteProof:
        """The site of this name; KeyError without one."""
        return {one.site: one for one in self.sites}[name]

    def by_op(self) -> dict[str, Counter[str]]:
        """How many heavy nodes of each operator run in which type."""
        types = defaultdict[str, Counter[str]](Counter)
        for node in self.nodes:
            types[node.op][node.type] += 1
        return types

    def by_kind(self) -> Counter[str]:
        """How many kernels of each kind the engine has."""
        return Counter(kernel.kind for kernel in self.kernels)

    @property
    def moving(self) -> Kernels:
        """The kernels that only lay out, copy or convert data."""
        return tuple(kernel for kernel in self.kernels if kernel.moves)


# The JSON of a proof has some 1000 bytes for a node.
_MOST_BYTES = 2**29


class _BuildRow(Loose):
    engine: str = ""
    version: str = ""
    capability: str = ""
    state: str = ""


class _NodeRow(Loose):
    type: str


class _SiteRow(Loose):
    state: str


class _WeightRow(Loose):
    weight: str
    exact: str = ""
    rows: Natural = 0
    all_rows: Natural = 0


class ProofFile(Loose):
    """The parts of a proof's JSON that a later proof is compared with."""

    build: _BuildRow
    nodes: dict[str, _NodeRow]
    sites: dict[str, _SiteRow]
    kernels: tuple[JsonObject, ...] = ()
    weights: tuple[_WeightRow, ...] | None = None


_FIX = "write it with `onnxq prove`, as JSON"


def read_proof(path: AnyPath) -> ProofFile:
    """The proof in a JSON file that `onnxq prove` wrote. Raises DataError with line and path for any other file."""
    text = JsonText(str(path), read_text(path, DataError, _FIX, limit=_MOST_BYTES, code="Q217"))
    raw = text.parse(DataError, _FIX, code="Q217")
    if not isinstance(raw, dict) or not all(
        isinstance(raw.get(key), dict) for key in ("build", "nodes", "sites")
    ):
        raise DataError(path, "is not the JSON of a proof", _FIX, code="Q217")
    return text.read(ProofFile, DataError, _FIX, code="Q217")


def find_changes(before: ProofFile, after: Proof) -> Iterator[Change]:
    """The differences: engine and state, numbers of kernels, then nodes, weights and sites in the model's order."""
    facts = dict(before.build)
    yield from _compare_named(
        "build", facts, {key: str(getattr(after.build, key)) for key in facts}
    )
    counts = ({"kernels": str(len(proof.kernels))} for proof in (before, after))
    yield from _compare_named("count", *counts)
    types = {name: one.type for name, one in before.nodes.items()}
    yield from _compare_named("node", types, {one.node: one.type for one in after.nodes})
    if before.weights is not None:
        rows = {one.weight: _describe_rows(one) for one in before.weights}
        yield from _compare_named(
            "weight", rows, {one.weight: _describe_rows(one) for one in after.weights}
        )
    states = {name: one.state for name, one in before.sites.items()}
    yield from _compare_named("site", states, {one.site: str(one.state) for one in after.sites})


def _describe_rows(weight: _WeightRow | WeightSums) -> str:
    return f"{0 if weight.exact else weight.rows} of {weight.all_rows} rows can overflow"


def _compare_named(
    kind: str, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[Change]:
    for name in drop_repeats((*after, *before)):
        was = before.get(name, "")
        now = after.get(name, "")
        if was != now:
            yield Change(kind=kind, name=name, before=was, after=now)
