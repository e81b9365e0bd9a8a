"""The journal of a run: actions of passes and costs of stages, as frozen values. `report` alone makes text of them."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np

from onnxq.plan import Plan
from onnxq.sites import Lines, Names, Refusals, Role
from onnxq.spec import ObserverSpec
from onnxq.wording import join_names

# Below this the answers are usually broken, dB; every model that kept its metric in development stayed above it.
LOST_DB = 10.0


class Outcome(Enum):
    """The end that an attempt of a pass came to."""

    KEPT = "kept"
    NO_GAIN = "nothing to gain"
    NOT_EQUIVALENT = "rolled back: it changed the float outputs"
    WORSE = "rolled back: the quantized outputs became worse"


# SQNR in dB before a pass and behind it.
TrialFigures = tuple[float, float]


@dataclass(frozen=True)
class PassReport:
    """One attempt of a pass.

    changed: one "node: change" line for each. skipped: changes left out, each with its reason. trial_db: SQNR of
    the quantized outputs before and after. difference: largest change of a float output.
    """

    name: str
    changed: Lines = ()
    skipped: Refusals = ()
    outcome: Outcome = Outcome.KEPT
    trial_db: TrialFigures | None = None
    difference: float | None = None


def report_changes(name: str, changed: Lines = ()) -> PassReport:
    """The report of a pass that made these changes, or without any found nothing to gain."""
    return PassReport(name, changed, outcome=Outcome.KEPT if changed else Outcome.NO_GAIN)


class Shortage(Enum):
    """How a budget of time shortened something."""

    LEFT_OUT = "left out"
    GIVEN_UP = "given up"
    FEWER_SAMPLES = "fewer samples"
    EXCEEDED = "exceeded"


@dataclass(frozen=True)
class Shortened:
    """Something that a budget of `budget` seconds cut short.

    seconds: its share, where it was given up; the time of the whole run, where that exceeded the budget.
    samples: those done and all there were.
    """

    name: str
    how: Shortage
    budget: float
    seconds: float = np.nan
    samples: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Wall seconds of one stage and the process's peak memory after it, in bytes (0: not measured)."""

    name: str
    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PromotionStep:
    """One promotion. nodes: operators that compute in float from then on. before, after: the figure it was made for."""

    name: str
    to: str
    nodes: Names
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Outcome of mixed-precision promotion.

    asked: the request in words. unit: "dB", or the metric's name; float_value: the float model's metric.
    least: the figure asked for. met: by `value`, measured on the finished model. spread: dB that other samples may have
    less, all but surely; NaN where nothing tells. operators: how many were promoted, left: how many stayed. samples:
    those that `value` is of and that the steps were judged on. note: why it stopped, where the request is not met.
    part: the slices of an output that `value` is of, like "output0[:, 4:, :]", "" where it is of a whole output.
    headroom: ranges of activations reach so many times as far as the samples. required: somebody asked for it.
    """

    asked: str
    unit: str
    met: bool
    value: float
    least: float
    steps: tuple[PromotionStep, ...] = ()
    operators: int = 0
    left: int = 0
    spread: float = np.nan
    float_value: float = np.nan
    samples: int = 0
    note: str = ""
    part: str = ""
    headroom: float = 1.0
    required: bool = False


# Roles of sites whose scales are measured.
MEASURED = (Role.ACTIVATION, Role.OUTPUT)
# Sites that a line names for each observer; a network has hundreds.
_SHOWN = 4


def list_replaced(before: Plan, after: Plan, roles: Collection[Role], why: str) -> str:
    """The sites of these roles whose scale changed, by the observer that gave the one before; "" where none did.

    why: the reason, and how to keep the observer's scales.
    """
    scales = {site.site: site.qparams.scale for site in before.sites if site.qparams is not None}
    replaced = defaultdict(list)
    for site in after.sites:
        if site.role not in roles or site.site not in scales or site.qparams is None:
            continue
        if not np.array_equal(scales[site.site], site.qparams.scale):
            replaced[name_observer(site.observer)].append(site.name)
    parts = [f"{observer} at {join_names(names, _SHOWN)}" for observer, names in replaced.items()]
    return f"in place of the observer {', of '.join(parts)}: {why}" if parts else ""


def name_observer(observer: ObserverSpec) -> str:
    """percentile (percentile 99.9)."""
    options = ", ".join(f"{key} {value}" for key, value in observer.options)
    return f"{observer.name} ({options})" if options else observer.name
