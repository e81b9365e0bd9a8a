"""The proof of a build: its kernels, the nodes and sites they compute, and in which type; frozen values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from onnxq.annotate import WeightSums
from onnxq.engines.builder.process import BuildState
from onnxq.engines.saturation.model import Cost
from onnxq.sites import Caution

INT8, FLOAT8 = "int8", "float8"
UNSEEN = "unseen"
# Types that weights are kept in and no kernel computes in.
STORED = ("int4", "uint4", "float4")
# Types that a node can be required to run in.
TYPES = (INT8, FLOAT8, "float16", "bfloat16", "float32", *STORED)


class SiteState(str, Enum):
    """Which readers of a site take its integers in."""

    FUSED = "fused"  # all
    PARTLY = "partly"  # some
    UNFUSED = "not fused"  # none
    UNSEEN = UNSEEN  # the engine does not show it

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor between kernels. dtype: onnxq's name (int8, float32 …), "" unknown. layout: in the engine's words."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements; dynamic axes count once."""
        size = 1
        for dim in self.shape:
            size *= max(dim, 1)
        return size


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of the engine.

    kind: the engine's own word (correlation, gemm, kgen, QLinearConv …). nodes: names of the ONNX nodes it computes,
    wholly or in part. weights: constants it reads. tactic: the implementation, "" where the engine hides it.
    moves: it lays data out anew, copies it or converts its type, and computes nothing.
    """

    name: str
    kind: str
    nodes: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    tactic: str = ""
    moves: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeProof:
    """One heavy node: the type it computes in ("int8", "float32", "int4 weights, float16" …, "unseen") and where.

    kernel, kind, types: of the kernel that does its work. kernels: all that have a part in it. reason: why not int8.
    computed: the types of the arithmetic, several where kernels share the work, () where the engine shows none.
    stored: dtype of a weight that the kernel reads in fewer bits than it computes in, "" for none.
    """

    node: str
    op: str
    type: str
    kernel: str = ""
    kind: str = ""
    types: str = ""
    kernels: tuple[str, ...] = ()
    reason: str = ""
    computed: tuple[str, ...] = ()
    stored: str = ""

    def runs_in(self, dtype: str) -> bool:
        """True when all of its arithmetic is in a type, or its weight in a type that no kernel computes in."""
        return self.stored == dtype if dtype in STORED else self.computed == (dtype,)


@dataclass(frozen=True, kw_only=True)
class SiteProof:
    """One pair: which kernels read its integers, and the rule that placed it.

    unfused: the readers that do not take its integers in. reason: why, "" for a fused pair.
    """

    site: str
    role: str
    state: SiteState
    rule: str = ""
    readers: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The smallest part found that fails in the same way. path: its file, "" when it was not written."""

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    builds: int
    seconds: float
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Build:
    """How the build went.

    node: the ONNX node that the library blames; needs_plugin: it is no operator of ONNX. capability: e.g. "8.6", "" for
    the GPU of this machine. log: the last lines before the end, when it did not end well. saved: files written for the
    user.
    """

    engine: str
    version: str
    state: BuildState
    capability: str = ""
    seconds: float = 0.0
    engine_bytes: int = 0
    reason: str = ""
    node: str = ""
    needs_plugin: bool = False
    log: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    reduced: Reduced | None = None
    saved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A type that heavy nodes must run in, or, forbidden, that none may compute in.

    pattern: the one that selects `nodes`, "" for all that are heavy. unmet: those of them that do not keep to it.
    """

    dtype: str
    pattern: str = ""
    forbidden: bool = False
    nodes: tuple[str, ...]
    unmet: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One node, site or count that differs from the proof compared with; "" where one of them has none."""

    kind: str
    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.before or 'absent'} -> {self.after or 'absent'}"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The engine that a model became. kernels: in the order they run; nodes, sites: in the model's order.

    chosen: why it is this engine, "" where the caller named it. weights: int8 weights that 8-bit data meets in ONNX
    Runtime, with the sums that can overflow on CPUs without VNNI. cost: of those, on samples; None without samples.
    require_exact: nothing may overflow.
    """

    source: str
    build: Build
    chosen: str = ""
    kernels: tuple[Kernel, ...] = ()
    nodes: tuple[NodeProof, ...] = ()
    sites: tuple[SiteProof, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    weights: tuple[WeightSums, ...] = ()
    cost: Cost | None = None
    require_exact: bool = False
    compared: str = ""
    changes: tuple[Change, ...] = ()
    warnings: tuple[Caution, ...] = ()

    @property
    def built(self) -> bool:
        """True when there is an engine."""
        return self.build.state is BuildState.BUILT

    @property
    def unmet(self) -> tuple[str, ...]:
        """Nodes that do not run in the type required of them, or run in a forbidden one."""
        return tuple(dict.fromkeys(node for requirement in self.requirements for node in requirement.unmet))

    @property
    def saturating(self) -> tuple[WeightSums, ...]:
        """The weights with which CPUs without VNNI can compute something else than others."""
        return tuple(one for one in self.weights if one.saturates)

    @property
    def holds(self) -> bool:
        """Built, and every requirement met."""
        return self.built and not self.unmet and not (self.require_exact and self.saturating)

    def node(self, name: str) -> NodeProof:
        """The heavy node of this name; KeyError without one."""
        return {one.node: one for one in self.nodes}[name]

    def site(self, name: str) -> SiteProof:
        """The site of this name; KeyError without one."""
        return {one.site: one for one in self.sites}[name]

    def by_op(self) -> dict[str, Counter[str]]:
        """How many heavy nodes of each operator run in which type."""
        found: dict[str, Counter[str]] = {}
        for one in self.nodes:
            found.setdefault(one.op, Counter())[one.type] += 1
        return found

    def by_kind(self) -> Counter[str]:
        """How many kernels of each kind the engine has."""
        return Counter(kernel.kind for kernel in self.kernels)

    @property
    def moving(self) -> tuple[Kernel, ...]:
        """The kernels that only lay out, copy or convert data."""
        return tuple(kernel for kernel in self.kernels if kernel.moves)
