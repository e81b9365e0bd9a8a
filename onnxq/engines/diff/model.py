"""The result of a comparison of engines, as frozen values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxq.annotate.operators import SaturatingWeights
from onnxq.errors import VerificationError
from onnxq.evaluation.agreement import ChoiceAgreements
from onnxq.sites import Lines, Names, Refusal, Refusals
from onnxq.wording import show_as_summary

# The float model, and the quantized one in ONNX Runtime without and with its optimizations. The run of any other engine
# has the name of its backend.
FLOAT = "float"
OFF = "ort-off"
ON = "ort-on"
# The last two as people read them.
LABELS = {OFF: "as the file says", ON: "as ORT runs it"}


def label_run(base: str, origin: str = "") -> str:
    """A run as people read it: without ORT's optimizations "as the file says", with them "as ORT runs it".

    base, origin: as of Run.
    """
    label = LABELS.get(base, base)
    return f"{label} ({origin})" if origin else label


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model in one engine."""

    # Its column in reports, and its runner's name in saved results.
    name: str
    engine: str
    samples: int = 0
    # The name without its origin; the origin tells a run from a file from others of the same name, "" for any other.
    base: str = ""
    origin: str = ""

    @property
    def label(self) -> str:
        """Its name as people read it."""
        return label_run(self.base or self.name, self.origin)


@dataclass(frozen=True, kw_only=True)
class Error:
    """The distance of one run's tensor from another's, over all samples."""

    run: str
    against: str
    # inf when identical; of an output's worst part, where slices of another scale are farther than the whole.
    sqnr_db: float
    cosine: float
    max_abs: float
    # Largest error over the largest reference value of its sample.
    max_rel: float
    # Share of the K largest along the last axis that both name, the mean of so many rows; nan where there is none.
    top_k: float = math.nan
    rows: int = 0
    # Largest error in steps of the tensor's quantizer; nan where it has none.
    levels: float = math.nan
    samples: int = 0
    # The slices that sqnr_db is of, like "[:, 4:, :]", and the SQNR of the whole, nan where nobody looked.
    part: str = ""
    whole_db: float = math.nan


Errors = tuple[Error, ...]


@dataclass(frozen=True, kw_only=True)
class OutputDiff:
    """One model output: every quantized run against float, and every engine against ORT without optimizations.

    classes: it holds scores of classes, by its name or Softmax; False: it may; None: it does not look so.
    """

    name: str
    accuracy: Errors
    engines: Errors
    classes: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LayerDiff:
    """One tensor inside, by its name in the float model, with the node of the quantized model that makes it."""

    name: str
    node: str
    op: str
    # The quantized model's tensor that was read for it, "" when it has the same name.
    at: str
    accuracy: Errors
    engines: Errors
    # The SQNR it lost against the worst tensor it is computed from.
    drop_db: float


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first tensor, in the order of the network, in which an engine differs from another beyond rounding."""

    run: str
    against: str
    tensor: str
    node: str
    op: str
    sqnr_db: float
    levels: float
    # The weights whose 16-bit sums overflow on CPUs without VNNI, where that explains the difference.
    saturating: SaturatingWeights = ()


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The smallest subgraph found whose output diverges when both engines get the same inputs."""

    run: str
    against: str
    output: str
    # In the order they run, like ops.
    nodes: Names
    ops: Names
    inputs: Names
    sqnr_db: float
    max_abs: float
    levels: float
    # How many subgraphs were tried.
    trials: int
    # Of an engine that cannot run it at all, in the engine's words.
    failure: str
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Unmet:
    """A tolerance that an output, or part of it, does not meet in a run."""

    output: str
    run: str
    measure: str
    value: float
    wanted: float
    # True for errors, which have an upper bound.
    at_most: bool = False
    part: str = ""


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Difference:
    """The result of one `onnxq diff`.

    float_model, quantized_model: paths as given ("" when only in memory). top_k: K of the agreement.
    worst: layers by SQNR drop, the largest first. skipped: engines and tensors that were not compared, and why.
    saved: files written. unmet: tolerances not met, in the order of the outputs. missing: engines asked for by name
    that could not run. divergences: at most one for every run. choices: by run, how far its own choices are those of
    the float model, on which outputs and layers are compared.
    """

    float_model: str = ""
    quantized_model: str = ""
    data: str = ""
    samples: int = 0
    synthetic: bool = False
    top_k: int = 1
    runs: tuple[Run, ...] = ()
    outputs: tuple[OutputDiff, ...] = ()
    choices: Mapping[str, ChoiceAgreements] = field(default_factory=dict)
    layers: tuple[LayerDiff, ...] = ()
    worst: Names = ()
    divergences: tuple[Divergence, ...] = ()
    bisections: tuple[Bisection, ...] = ()
    skipped: Refusals = ()
    notes: Lines = ()
    saved: Names = ()
    unmet: tuple[Unmet, ...] = ()
    missing: Names = ()

    @property
    def holds(self) -> bool:
        """True when every tolerance is met and every engine asked for by name has run."""
        return not self.unmet and not self.missing


def label_runs(difference: Difference) -> dict[str, str]:
    """The labels of the runs by their names."""
    return {run.name: run.label for run in difference.runs}


def explain_absence(refusal: Refusal) -> VerificationError:
    """Make the error of an engine that must run and did not. refusal: why it is skipped."""
    cause = f"must run, and did not: {refusal.reason}"
    return VerificationError(f"engine {refusal.subject}", cause, refusal.fix, code="Q704")
