"""Errors of tensors summed up sample by sample, in real values, and the bounds they must keep.

Integers inside a graph, a file's or the one that ONNX Runtime makes of it, count as (q - zero_point) * scale.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard

import numpy as np

from onnxq.arrays import Array, Arrays, RunValues, as_float64
from onnxq.config import DiffConfig
from onnxq.engines.diff.model import FLOAT, OFF, Error, Errors, OutputDiff, Unmet
from onnxq.evaluation.accumulator import ErrorAccumulator, SliceSums
from onnxq.evaluation.compare import drop_padding
from onnxq.graph import MOVING_OPS, GraphIndex
from onnxq.graph.qoperators import INTEGER_OPERATORS
from onnxq.sites import TensorId

# Where a kernel's inputs hold the scale and zero point of its output.
_OUTPUT_SCALE = {
    **{name: form.result for name, form in INTEGER_OPERATORS.items() if form.result},
    "QuantizeLinear": (1, 2),
    "QLinearReduceMean": (3, 4),
}
# They move integers and leave them as they are.
_MOVERS = MOVING_OPS | {"Upsample"}


@dataclass(frozen=True)
class Level:
    """The affine map of one tensor with a single scale."""

    scale: float
    zero_point: int

    def to_real(self, value: Array) -> Array:
        """float64 values of integers; the value itself when it is float already."""
        if value.dtype.kind == "f":
            return value
        return (as_float64(value) - self.zero_point) * self.scale


def find_level(index: GraphIndex, tensor: str) -> Level | None:
    """The scale of a main-graph tensor that holds integers; None when it has none, or one per channel."""
    node = index.find_producer(index.find_origin(TensorId(tensor), _MOVERS))
    positions = None if node is None else _OUTPUT_SCALE.get(node.op_type)
    if positions is None:
        return None
    scale, zero = (index.input_value(node, k) for k in positions)
    if scale is None or scale.size != 1 or (zero is not None and zero.size != 1):
        return None
    return Level(float(scale.reshape(())), int(zero.reshape(())) if zero is not None else 0)


# Two engines that add the same float32 numbers in another order differ less than this; so does float16 or TF32.
SAME_DB = 40.0
# Rounding can move an integer by one step; float arithmetic adds a little to it.
ONE_LEVEL = 1.01
# Attention masks, not numbers: squared, they would drown everything else. Their positions are left out.
_MASK = 1e30
# Two roundings of one network, each as far from float as the other, are twice that noise apart.
_TWICE_DB = 10.0 * math.log10(2.0)


@dataclass
class Tally:
    """Error sums of one tensor, its largest relative error, worst sample and agreement in the top k."""

    name: str
    # As of ErrorAccumulator.
    top_k: int = 0
    # Of the tensor's quantizer, 0 without one.
    step: float = 0.0
    # Judge slices of other scales too.
    sliced: bool = False
    samples: int = 0
    max_rel: float = 0.0
    worst_sample: int = 0
    # Noise over signal of the worst sample; below any real one at first, so that the first sample counts.
    _worst: float = -1.0
    _sums: ErrorAccumulator = field(init=False)

    def __post_init__(self) -> None:
        self._sums = ErrorAccumulator(
            self.name, slices=SliceSums() if self.sliced else None, top_k=self.top_k
        )

    def update(self, reference: Array, value: Array) -> None:
        """Add one sample."""
        reference = _drop_masks(reference)
        found = self._sums.update(reference, value)
        at = self.samples
        self.samples += 1
        if found is None:
            return
        self.max_rel = max(self.max_rel, _divide(found.max_abs, found.peak))
        share = _divide(found.noise, found.signal)
        if share > self._worst:
            self._worst = share
            self.worst_sample = at

    def error(self, run: str, against: str) -> Error:
        """Return the error over all samples."""
        found = self._sums.result()
        return Error(
            run=run,
            against=against,
            sqnr_db=found.sqnr_db,
            whole_db=found.whole_db,
            part=found.part,
            cosine=found.cosine,
            max_abs=found.max_abs,
            max_rel=self.max_rel,
            top_k=found.top_k,
            rows=found.rows,
            levels=found.max_abs / self.step if self.step else math.nan,
            samples=self.samples,
        )


@dataclass(eq=False)
class Tallies:
    """Error sums by tensor, run and the run that it is compared with. top_k, sliced: as of Tally."""

    top_k: int = 0
    sliced: bool = False
    _known: dict[tuple[str, str, str], Tally] = field(default_factory=dict)

    def add(
        self,
        name: str,
        run: str,
        against: str,
        reference: Array,
        value: Array,
        step: float,
        feeds: Arrays,
    ) -> None:
        """Add one sample of a tensor, without padding. step: of its quantizer, 0 without one. feeds: the sample."""
        fresh = Tally(name, self.top_k, step, sliced=self.sliced)
        self._known.setdefault((name, run, against), fresh).update(
            *drop_padding(feeds, reference, value)
        )

    def list_errors(self, name: str, runs: Iterable[str], against: str) -> Errors:
        """The errors of a tensor in those of the runs that were compared."""
        return tuple(
            self._known[key].error(key[1], against)
            for run in runs
            if (key := (name, run, against)) in self._known
        )

    def find_worst_sample(self, name: str, run: str) -> int:
        """The sample of a run's largest error against ONNX Runtime without optimizations."""
        return self._known[name, run, OFF].worst_sample


def _divide(error: float, by: float) -> float:
    return error / by if by else math.inf if error else 0.0


def _drop_masks(reference: Array) -> Array:
    if reference.dtype.kind != "f" or reference.dtype.itemsize < 4:
        return reference
    masks = abs(reference) > _MASK
    return np.where(masks, np.nan, reference) if masks.any() else reference


def diverges(error: Error, accuracy_db: float = math.inf) -> bool:
    """True when two engines differ by more than rounding.

    Rounding is: at least 40 dB, or at most one step of the quantizer, or no more than two equally good roundings
    of the network differ (`accuracy_db`, SQNR against float, less 3 dB): a value rounded the other way early on moves
    all those after it.
    """
    if math.isnan(error.sqnr_db):
        return True
    return error.sqnr_db < min(SAME_DB, accuracy_db - _TWICE_DB) and not error.levels <= ONE_LEVEL


# (measure for people, field of Error, field of DiffConfig).
_AGAINST_FLOAT = (
    ("SQNR in dB", "sqnr_db", "min_sqnr"),
    ("cosine", "cosine", "min_cosine"),
    ("max abs error", "max_abs", "max_abs"),
    ("top-k agreement", "top_k", "min_agreement"),
)
_AGAINST_FILE = ("SQNR in dB against what the file says", "sqnr_db", "min_engines")


def find_unmet(outputs: Iterable[OutputDiff], tolerances: DiffConfig) -> tuple[Unmet, ...]:
    """Every tolerance that an output of a run does not meet; one that cannot be measured is not met."""
    found = []
    for output in outputs:
        checks = [(error, check) for error in output.accuracy for check in _AGAINST_FLOAT]
        checks += [(error, _AGAINST_FILE) for error in output.engines]
        for error, (measure, attribute, tolerance) in checks:
            wanted = getattr(tolerances, tolerance)
            value = float(getattr(error, attribute))
            if wanted is None or (attribute == "top_k" and math.isnan(value)):
                continue  # An output without rows to rank has no agreement to ask for.
            at_most = tolerance == "max_abs"
            if not (value <= wanted if at_most else value >= wanted):
                found.append(
                    Unmet(
                        output=output.name,
                        run=error.run,
                        measure=measure,
                        value=value,
                        wanted=wanted,
                        at_most=at_most,
                        part=error.part if attribute == "sqnr_db" else "",
                    )
                )
    return tuple(found)


@dataclass(eq=False)
class OutputSums:
    """Errors of the outputs."""

    names: Sequence[str]
    steps: Mapping[str, float]
    top_k: int
    # Samples of each run: a file may hold fewer than were run here.
    seen: Counter[str] = field(default_factory=Counter)
    # By output: the values of the float model with which nothing can be compared.
    nans: Counter[str] = field(default_factory=Counter)
    # By output that cannot be compared: its kind.
    not_numeric: dict[str, str] = field(default_factory=dict)

    @cached_property
    def tallies(self) -> Tallies:
        """The errors; outputs are judged by slices of other scales, too."""
        return Tallies(self.top_k, sliced=True)

    def add(self, values: Mapping[str, RunValues], feeds: Arrays) -> None:
        """One sample of all runs."""
        for name in self.names:
            if not _is_numeric(value := values[FLOAT][name]):
                self.not_numeric[name] = (
                    "a tensor of text" if isinstance(value, np.ndarray) else "a sequence or a map"
                )
            elif nans := int(np.isnan(value).sum()):
                self.nans[name] += nans
        for run, found in values.items():
            self.seen[run] += 1
            for name in self.names:
                mine = found.get(name)
                for against in (FLOAT, OFF):
                    other = values.get(against, {}).get(name)
                    # Float is nobody's quantized run, and no run is compared with itself.
                    if run not in (FLOAT, against) and _is_numeric(mine) and _is_numeric(other):
                        self.tallies.add(name, run, against, other, mine, self.steps[name], feeds)

    def make_results(
        self, runs: Sequence[str], classes: Mapping[str, bool]
    ) -> tuple[OutputDiff, ...]:
        """Output by output. classes: as of `find_class_scores`."""
        errors = self.tallies.list_errors
        return tuple(
            OutputDiff(
                name=name,
                accuracy=errors(name, runs, FLOAT),
                engines=errors(name, runs, OFF),
                classes=classes.get(name),
            )
            for name in self.names
        )


def find_output_step(index: GraphIndex, name: str) -> float:
    """One quantization step of an output's last quantizer; 0 when a float node makes it."""
    node = index.find_producer(TensorId(name))
    level = (
        find_level(index, node.inputs[0])
        if node is not None and node.op_type == "DequantizeLinear"
        else None
    )
    return level.scale if level is not None else 0.0


def _is_numeric(value: object) -> TypeGuard[Array]:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
