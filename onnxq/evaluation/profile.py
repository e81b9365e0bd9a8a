"""Sensitivity as frozen values: the cost of sites, nodes and segments at the outputs."""

import json
import math
from dataclasses import dataclass

from onnxq.evaluation.agreement import ChoiceAgreements
from onnxq.sites import Cautions, Names, Refusals
from onnxq.wording import abbreviate, show_html

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
        # A list of names in JSON is one in YAML, whatever letters they have.
        return f"- {{node: {json.dumps(self.nodes)}, set: {{float: true}}}}"


@dataclass(frozen=True, kw_only=True)
class OutputProfile:
    """One output: with everything quantized, and with everything switched off, which should be exact.

    part: the slices of another scale that sqnr_db is of, like "[:, 4:, :]", "" where it is of the whole.
    """

    name: str
    sqnr_db: float
    float_db: float
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Errors at the outputs by their causes.

    sqnr_db: of everything quantized, all outputs taken together (mean of their relative noise). groups: worst first.
    joint: the loudest nodes together, more and more of them.
    fixed: pairs that could not be switched and stayed quantized throughout. choices: of the float model, which all
    figures are measured on, and how far those made with everything quantized are the same. data, source, quantized:
    in words.
    """

    __repr__ = abbreviate
    _repr_html_ = show_html

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


def noise_to_db(noise: float) -> float:
    """Relative noise power as SQNR."""
    if noise <= 0.0:
        return math.inf
    # Answers that are no numbers have no noise power; the worst figure stands for it.
    return -math.inf if not math.isfinite(noise) else -10.0 * math.log10(noise)
