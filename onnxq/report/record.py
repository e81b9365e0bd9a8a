"""The record of a quantized model: all that its page shows, as frozen values, which the page holds as JSON.

Figures in dB are SQNRs at the outputs against the float model, within 200 of 0; None where there is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxq.config.rows import Written, read_fields, write_fields
from onnxq.config.schema import JsonText
from onnxq.errors import DataError
from onnxq.files import read_text
from onnxq.passes.journal import LOST_DB
from onnxq.sites import LeftFloat, Names, Refusals
from onnxq.wording import abbreviate

# The version of the JSON; raised when a key changes its meaning or goes.
SCHEMA = 1
# The element of the page that holds it.
ELEMENT = "onnxq-record"
_EMBEDDED = re.compile(rf'<script type="application/json" id="{ELEMENT}">(.*?)</script>', re.DOTALL)
_FIX = "give a page or JSON that `onnxq report` wrote"
_MOST_DB = 200.0
# Share of the noise at the outputs from which an operator is marked, and dB that it must bring back.
RED_SHARE, RED_GAIN_DB = 0.1, 0.5
# Below: values cut off; levels that half of the channels have; share of the range that 99 % of the values lie in.
_CLIPPED, _LEVELS, _CORE = 0.01, 16.0, 0.05
# The share of the values at either end that is not their core.
_TAIL = 0.005


def bound_db(value: float) -> float | None:
    """A figure in dB for the record."""
    return None if math.isnan(value) else round(min(max(value, -_MOST_DB), _MOST_DB), 2)


@dataclass(frozen=True, kw_only=True)
class ValueBars:
    """How many values lie in each of the intervals of equal width between low and high."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def core(self) -> float:
        """The share of the intervals that hold all values but half a percent at either end."""
        total, below = sum(self.counts), 0
        inside = 0
        for count in self.counts:
            inside += below + count > _TAIL * total and below < (1 - _TAIL) * total
            below += count
        return inside / max(len(self.counts), 1)


@dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """One quantized tensor.

    scales: the smallest and the largest; () where they are computed at each run. range: the values that its integers
    can hold, per tensor only. clipped: the share of values outside. isolated_db: only this is quantized; left_out_db:
    all but this. channels: largest magnitudes of channels or groups of them; of a weight, of its input channels,
    against those of their outputs. levels: that the channel in the middle has, of a scale that channels share.
    """

    name: str
    role: str
    readers: Names = ()
    bits: int
    type: str
    scheme: str
    granularity: str
    scales: tuple[float, ...] = ()
    range: tuple[float, ...] = ()
    clipped: float | None = None
    isolated_db: float | None = None
    left_out_db: float | None = None
    values: ValueBars | None = None
    channels: tuple[float, ...] = ()
    levels: float | None = None

    def list_causes(self) -> Iterator[str]:
        """Name what is wrong with its range, in sentences."""
        if self.clipped is not None and self.clipped > _CLIPPED:
            yield f"{100 * self.clipped:.1f} % of the values are cut off"
        if self.levels is not None and self.levels < _LEVELS:
            whose = "input channels" if self.role == "weight" else "channels"
            few = f"half of the {whose} have {max(self.levels, 1):.0f} of {2**self.bits} levels or fewer"
            yield f"{few}: equalization or smoothing (`skip` without them) evens channels out"
        if self.values is not None and self.role == "activation" and self.values.core < _CORE:
            yield f"99 % of the values lie in {100 * self.values.core:.0f} % of the range"


@dataclass(frozen=True, kw_only=True)
class OperatorRecord:
    """One operator, in the order they run.

    type: of its kernel's results; "" where the engine shows none. moves: conversions and copies directly in front of
    it. share: of the noise at the outputs, of the sum of all operators alone. own_db: of its first result, against
    float. reason, code: why it stayed float. sites: the quantized tensors that it reads.
    """

    name: str
    op: str
    inputs: Names = ()
    outputs: Names = ()
    type: str = ""
    kernel: str = ""
    moves: int = 0
    share: float = 0.0
    isolated_db: float | None = None
    left_out_db: float | None = None
    gain_db: float | None = None
    cumulative_db: float | None = None
    own_db: float | None = None
    reason: str = ""
    code: str = ""
    sites: Names = ()

    @property
    def red(self) -> bool:
        """True for an operator whose noise counts."""
        return self.share >= RED_SHARE


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A rule to paste for operators. gain_db: what it brings back at the outputs. size: bytes that the file grows by.

    cost: change of the predicted time of the model, as a share of it; None where nothing predicts it.
    """

    nodes: Names
    rule: str
    gain_db: float
    size: int
    cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutputRecord:
    """A model output. runs: SQNR in dB by run. float_values, values: some of its numbers, of both models."""

    name: str
    runs: Mapping[str, float] = field(default_factory=dict)
    float_values: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportRecord:
    """A quantized model beside its float one.

    grade, verdict: of the outputs, and why. speed: times as fast as float. types: operators by the type of their
    results. engine: whose kernels they are. passes: what each did or took back. provenance: versions, CPU, hashes,
    seeds.
    """

    __repr__ = abbreviate

    version: Written[int] = SCHEMA
    title: str
    quantized: str = ""
    grade: str = ""
    verdict: str = ""
    speed: float | None = None
    data: str = ""
    samples: int = 0
    synthetic: bool = False
    source_bytes: int = 0
    quantized_bytes: int = 0
    sqnr_db: float | None = None
    engine: str = ""
    types: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[OutputRecord, ...] = ()
    nodes: tuple[OperatorRecord, ...] = ()
    sites: tuple[SiteRecord, ...] = ()
    advice: tuple[Advice, ...] = ()
    passes: Names = ()
    refusals: Refusals = ()
    left_float: tuple[LeftFloat, ...] = ()
    warnings: Names = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The record as one line of JSON, which no browser takes for tags."""
        return json.dumps(write_fields(self), separators=(",", ":")).replace("<", "\\u003c")


def read_record(path: str | Path) -> ReportRecord:
    """The record in a page or in JSON. Raises DataError for other files, and for a schema that is newer than ours."""
    text = read_text(path, DataError, _FIX, code="Q226")
    found = _EMBEDDED.search(text)
    source = JsonText(str(path), found.group(1) if found else text)
    document = source.parse(DataError, _FIX, code="Q226")
    if not isinstance(document, dict) or document.get("version") != SCHEMA:
        raise DataError(path, f"holds no record of version {SCHEMA} of a report", _FIX, code="Q226")
    return read_fields(source, ReportRecord, DataError, _FIX, code="Q226")


# The rule of the verdict, printed on the page.
RULE = (
    "good: every output has 30 dB or more against float, and scores of classes agree in 97 of 100 cases; acceptable: "
    f"20 dB and 90; degraded: {LOST_DB:g} dB and 50; broken: less"
)
