"""The record of a quantized model: all that its page shows, as frozen values, which the page holds as JSON.

Figures in dB are SQNRs at the outputs against the float model, within 200 of 0; None where there is none.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxq.config.rows import Written, read_fields, write_fields
from onnxq.config.schema import JsonText
from onnxq.errors import DataError, MissingDependencyError
from onnxq.files import read_text
from onnxq.passes.journal import LOST_DB
from onnxq.sites import LeftFloats, Names, Refusals
from onnxq.wording import format_counts, show_as_summary

# The version of the JSON; raised when a key changes its meaning or goes.
SCHEMA = 1
# The element of the page that holds it.
ELEMENT = "onnxq-record"
_EMBEDDED = re.compile(rf'<script type="application/json" id="{ELEMENT}">(.*?)</script>', re.DOTALL)
_FIX = "give a page or JSON that `onnxq report` wrote"
# In place of infinity, which JSON does not have.
MOST_DB = 200.0
# Operators that a plot names.
_LABELLED = 5
# None where there is no figure.
Measured = float | None
Figures = tuple[float, ...]
# Share of the noise at the outputs from which an operator is marked.
RED_SHARE = 0.1
# Below: values cut off; levels that half of the channels have; share of the range that 99 % of the values lie in.
_CLIPPED = 0.01
_LEVELS = 16.0
_CORE = 0.05
# The share of the values at either end that is not their core.
_TAIL = 0.005


def make_axes(width: float, height: float) -> Any:
    """Make axes of matplotlib, sizes in inches. Raises MissingDependencyError without it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        fix = "pip install onnxq[plots]"
        raise MissingDependencyError(
            "plot", "matplotlib is not installed", fix, code="Q800"
        ) from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def bound_db(value: float) -> Measured:
    """A figure in dB for the record."""
    return None if math.isnan(value) else round(min(max(value, -MOST_DB), MOST_DB), 2)


@dataclass(frozen=True, kw_only=True)
class ValueBars:
    """A histogram of intervals of equal width between low and high."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def core(self) -> float:
        """The share of the intervals that hold all values but half a percent at either end."""
        total = sum(self.counts)
        below = 0
        inside = 0
        for count in self.counts:
            inside += below + count > _TAIL * total and below < (1 - _TAIL) * total
            below += count
        return inside / max(len(self.counts), 1)


@dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """One quantized tensor."""

    name: str
    role: str
    # Operators.
    readers: Names = ()
    bits: int
    type: str
    scheme: str
    granularity: str
    # The smallest and the largest; () where they are computed at each run.
    scales: Figures = ()
    # The smallest and the largest value that the integers can hold; () of several scales.
    range: Figures = ()
    # Share of the values outside.
    clipped: Measured = None
    # Only this is quantized; all but this.
    isolated_db: Measured = None
    left_out_db: Measured = None
    values: ValueBars | None = None
    # Largest magnitudes of channels or groups of them; of a weight, of its input channels, against their outputs.
    channels: Figures = ()
    # Of the channel in the middle, with a scale that channels share.
    levels: Measured = None

    def list_causes(self) -> Iterator[str]:
        """Name what is wrong with its range, in sentences."""
        if self.clipped is not None and self.clipped > _CLIPPED:
            yield f"{100 * self.clipped:.1f} % of the values are cut off"
        if self.levels is not None and self.levels < _LEVELS:
            whose = "input channels" if self.role == "weight" else "channels"
            few = f"half of the {whose} have {max(self.levels, 1):.0f} of {2**self.bits} levels or fewer"
            yield f"{few}: `onnxq quantize` can equalize or smooth them"
        if self.values is not None and self.role == "activation" and self.values.core < _CORE:
            yield f"99 % of the values lie in {100 * self.values.core:.0f} % of the range"


@dataclass(frozen=True, kw_only=True)
class OperatorRecord:
    """One operator, in the order they run."""

    name: str
    op: str
    # Tensors that depend on the model's inputs.
    inputs: Names = ()
    outputs: Names = ()
    # Of its kernel's results; "" where the engine shows none.
    type: str = ""
    kernel: str = ""
    # Conversions and copies directly in front of it.
    moves: int = 0
    # Of the noise at the outputs, in the sum of all operators alone.
    share: float = 0.0
    isolated_db: Measured = None
    left_out_db: Measured = None
    # dB that leaving it float brings back.
    gain_db: Measured = None
    # Quantized from the start up to here.
    cumulative_db: Measured = None
    # Of its first result, against float.
    own_db: Measured = None
    # Why it stayed float, and the code of that.
    reason: str = ""
    code: str = ""
    # The quantized tensors that it reads.
    sites: Names = ()

    @property
    def red(self) -> bool:
        """True for an operator whose noise counts."""
        return self.share >= RED_SHARE


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A rule to paste for operators."""

    nodes: Names
    # YAML.
    rule: str
    # dB that it brings back at the outputs.
    gain_db: float
    # Bytes that the file grows by.
    size: int
    # Change of the model's predicted time, as a share of it; None where nothing predicts it.
    cost: Measured = None


@dataclass(frozen=True, kw_only=True)
class OutputRecord:
    """A model output."""

    name: str
    # SQNR in dB by run.
    runs: Mapping[str, float] = field(default_factory=dict)
    # Some of its numbers, of both models.
    float_values: Figures = ()
    values: Figures = ()


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A mixture of precisions that a search made and measured; dB of the worst output, ms of one run."""

    # How many operators have each.
    precisions: Mapping[str, int]
    # None of the first, by which others are predicted.
    predicted_db: Measured = None
    sqnr_db: float
    predicted_bytes: int | None = None
    bytes: int
    predicted_ms: Measured = None
    # These two where they were asked for.
    latency_ms: Measured = None
    metric: Measured = None
    # It keeps all limits.
    holds: bool = True
    taken: bool = False

    def describe(self) -> str:
        """The mixture in words."""
        return format_counts(self.precisions)


FrontPoints = tuple[FrontPoint, ...]


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class ReportRecord:
    """A quantized model beside its float one."""

    version: Written[int] = SCHEMA
    # Name of the float model.
    title: str
    quantized: str = ""
    # Of the outputs, and why.
    grade: str = ""
    verdict: str = ""
    # Times as fast as float.
    speed: Measured = None
    data: str = ""
    samples: int = 0
    synthetic: bool = False
    source_bytes: int = 0
    quantized_bytes: int = 0
    # Of the worst output in any run.
    sqnr_db: Measured = None
    # Whose kernels the operators have, and how many of those are of each type.
    engine: str = ""
    types: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[OutputRecord, ...] = ()
    nodes: tuple[OperatorRecord, ...] = ()
    sites: tuple[SiteRecord, ...] = ()
    advice: tuple[Advice, ...] = ()
    # Of a search, from small to large, and what was asked of it.
    front: FrontPoints = ()
    asked: str = ""
    # What each pass did or took back.
    passes: Names = ()
    refusals: Refusals = ()
    left_float: LeftFloats = ()
    warnings: Names = ()
    # Versions, CPU, hashes, seeds.
    provenance: Mapping[str, str] = field(default_factory=dict)

    def plot(self, axes: Any = None) -> Any:
        """Draw the share of the noise of each operator, in the order they run; needs matplotlib.

        axes: of matplotlib, to draw on; None makes a figure. Returns the axes.
        """
        axes = axes or make_axes(12, 3)
        shares = [100 * node.share for node in self.nodes]
        axes.bar(
            range(len(shares)), shares, color=["C3" if node.red else "C0" for node in self.nodes]
        )
        axes.set_ylabel("noise at the outputs, %")
        axes.set_title(f"{self.title}: {self.verdict}")
        loudest = sorted(range(len(shares)), key=lambda k: -shares[k])[:_LABELLED]
        axes.set_xticks(loudest, [self.nodes[k].name for k in loudest], rotation=20, ha="right")
        return axes

    def to_json(self) -> str:
        """The record as one line of JSON, which no browser takes for tags."""
        return json.dumps(write_fields(self), separators=(",", ":")).replace("<", "\\u003c")


def read_record(path: str | Path) -> ReportRecord:
    """The record in a page or in JSON. Raises DataError for other files, and for a schema that is newer than ours."""
    text = read_text(path, DataError, _FIX, code="Q226")
    found = _EMBEDDED.search(text)
    source = JsonText(str(path), found[1] if found else text)
    document = source.parse(DataError, _FIX, code="Q226")
    if not isinstance(document, dict) or document.get("version") != SCHEMA:
        raise DataError(path, f"holds no record of version {SCHEMA} of a report", _FIX, code="Q226")
    return read_fields(source, ReportRecord, DataError, _FIX, code="Q226")


# The rule of the verdict, printed on the page.
RULE = (
    "good: every output has 30 dB or more against float, and scores of classes agree in 97 of 100 cases; acceptable: "
    f"20 dB and 90; degraded: {LOST_DB:g} dB and 50; broken: less"
)
