"""What one run did, as frozen values: everything the summary and the JSON show, and nothing of the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnxq.passes.journal import LOST_DB, Promotion, StageCost
from onnxq.sites import Caution, LeftFloat, Refusal, Unquantized

DRIFT_DB = 3.0
_OTHERS = {
    "ort": "try the presets ort-int8-mse and ort-int8-percentile",
    "trt": "try another observer (mse, minmax), or trt-fp8",
}


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """One model output compared with the float model's on held-back samples.

    sqnr_db, cosine: [0] with ORT's optimizations off (what the file says), [1] with all on (what users run).
    parts: the slices of other scales that sqnr_db is of, like "[:, 4:, :]", "" where it is of the whole; whole_db: of
    the whole in any case, nan where nobody looked.
    agreement_db: SQNR of the two runs of the quantized model against each other; inf when identical.
    optimized: False when ORT's optimizations cannot take the file; what concerns them is NaN then.
    """

    name: str
    sqnr_db: tuple[float, float]
    cosine: tuple[float, float]
    agreement_db: float
    optimized: bool = True
    parts: tuple[str, str] = ("", "")
    whole_db: tuple[float, float] = (math.nan, math.nan)

    @property
    def worst(self) -> tuple[str, float]:
        """The output or part of it that is farthest as the file says, else as ORT runs it; and its whole's dB."""
        k = 0 if self.parts[0] or not self.parts[1] else 1
        return self.name + self.parts[k], self.whole_db[k]


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Median milliseconds of one run, float and quantized interleaved.

    cpu: the kind of CPU that ran it, of runtime.CPU_KINDS; "" when nobody looked. reason: why, when int8 is slower.
    """

    float_ms: float
    int8_ms: float
    threads: int = 1
    batch: int = 1
    cpu: str = ""
    reason: str = ""

    @property
    def ratio(self) -> float:
        """float / int8: above 1 the quantized model is faster; nan when nothing was measured."""
        return self.float_ms / self.int8_ms if self.int8_ms > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class OpCount:
    """How many nodes of one operator compute on quantized inputs."""

    op: str
    quantized: int
    total: int


@dataclass(frozen=True, kw_only=True)
class SiteLine:
    """One quantized site for people: `spec` like "uint8 asymmetric", `scale` like "0.0235" or "2.1e-4 … 9.8e-3"."""

    site: str
    role: str
    spec: str
    scale: str = ""
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The account of one `quantize` or `apply`.

    cpu: the kind of CPU the placement was made for, "any" for all that were measured; "" where it goes by none.
    source, output: paths as given ("" when only in memory). data: what calibration ran on, in words.
    synthetic: ranges come from made-up inputs; shown as a banner. pairs: Q/DQ pairs written.
    rewrites: what preparation changed, a line each. accounts: what each accuracy pass did, or why it was rolled back or
    left out. promotion: what was promoted for a wish. already: how much of the model was quantized before, in words,
    "" for a float one; kept: the nodes of its pairs.
    saturating: which weights can overflow 16-bit sums, where runs without and with optimizations drifted apart.
    unchecked: why there are no `checks`, "" where there are.
    checked: number of samples behind `checks`; seen: what else they were used for, "" where nothing was chosen on them.
    """

    source: str = ""
    output: str = ""
    target: str = ""
    config: str = ""
    placement: str = "rules"
    cpu: str = ""
    data: str = ""
    synthetic: bool = False
    source_bytes: int = 0
    output_bytes: int = 0
    checks: tuple[OutputCheck, ...] = ()
    checked: int = 0
    unchecked: str = ""
    seen: str = ""
    latency: Latency | None = None
    pairs: int = 0
    roles: tuple[tuple[str, int], ...] = ()
    ops: tuple[OpCount, ...] = ()
    sites: tuple[SiteLine, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    left_float: tuple[LeftFloat, ...] = ()
    rewrites: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    promotion: Promotion | None = None
    already: str = ""
    kept: tuple[str, ...] = ()
    saturating: str = ""
    warnings: tuple[Caution, ...] = ()
    stages: tuple[StageCost, ...] = ()

    @property
    def slower(self) -> bool:
        """True when the quantized model was measured to be slower than the float one."""
        return self.latency is not None and self.latency.ratio < 1.0

    @property
    def calibrated(self) -> bool:
        """True when ranges of activations came from the data; False for weights alone."""
        return not self.roles or any(count for role, count in self.roles if role in ("activation", "output"))

    def alarms(self) -> tuple[Caution, ...]:
        """What the numbers themselves warn of: nothing done, accuracy lost, answers changed by fusions, speed lost."""
        found = []
        if self.source_bytes and not self.pairs:
            why = "what was refused or left float says why"
            found.append(Caution("W111", f"nothing was quantized: the result computes what the model did; {why}"))
        for check in self.checks:
            off, on = check.sqnr_db
            # For another engine the file is what counts, not what ORT's optimizations make of it.
            counts = check.optimized and self.target in ("", "ort")
            worst = min(on, off) if counts and not math.isnan(off) else off
            if math.isnan(worst) or worst < LOST_DB:
                text = (
                    f"output {check.worst[0]} is far from the float model's ({worst:.1f} dB); "
                    "check the task's own metric, "
                    f"{_OTHERS.get(self.target, _OTHERS['ort'])}, or keep sensitive nodes float with a rule"
                )
                found.append(Caution("W108", text))
            elif on < off - DRIFT_DB:
                text = (
                    f"output {check.worst[0]} is {off - on:.1f} dB worse with ONNX Runtime's optimizations on: "
                    f"{self.saturating or 'its fusions compute something else than the file says'}"
                )
                found.append(Caution("W109", text))
        if self.slower and self.latency is not None:
            reason = self.latency.reason or "the cause is not known; try `placement='measured'`"
            found.append(Caution("W110", f"the quantized model is slower than the float one: {reason}"))
        return tuple(found)


def group_reasons(found: Sequence[Unquantized]) -> tuple[tuple[str, tuple[Unquantized, ...]], ...]:
    """What is not quantized, grouped by reason, the most frequent reason first."""
    groups: dict[str, list[Unquantized]] = {}
    for one in found:
        groups.setdefault(one.reason, []).append(one)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return tuple((reason, tuple(members)) for reason, members in ordered)
