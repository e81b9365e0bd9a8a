"""The report of one run, as frozen values: the contents of summary and JSON, without the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onnxq.arrays import InputShapes
from onnxq.backends import find_modes, find_target
from onnxq.config import Config
from onnxq.engines.diff.measure import SAME_DB
from onnxq.engines.diff.model import LABELS, OFF, ON, Difference, label_runs
from onnxq.evaluation.agreement import ChoiceAgreement, ChoiceAgreements
from onnxq.passes.journal import LOST_DB, Promotion, StageCost
from onnxq.plan import PrecisionPlan
from onnxq.planner import Forced
from onnxq.planner.cut import MOST_LOSS
from onnxq.report.terminal import format_decibel, format_milliseconds
from onnxq.sites import Caution, Cautions, LeftFloats, Lines, Names, NumberedNames, Refusals
from onnxq.wording import join_names, show_as_summary

# By less two roundings of float sums may differ.
DRIFT_DB = 3.0
# The warning that another placement would serve one kind of CPU better.
OTHER_CPUS = "W103"
# In plans and, as a banner, in summaries.
SYNTHETIC = Caution(
    "W101",
    "SYNTHETIC DATA: no samples were given; ranges that come from random inputs make answers nobody can trust. "
    "Pass real samples as `data=…`.",
)


@dataclass(frozen=True)
class Grade:
    """A grade, and the least that every output has in it.

    sqnr_db: against float. top_1: share of rows whose largest value is where float's is, of scores of classes.
    """

    name: str
    sqnr_db: float
    top_1: float
    style: str


# docs/cli.md has the same table. With 30 dB the error is 3 % of the signal, and classifiers agree with float in 97 of
# 100 cases and more; below 10 dB answers are usually broken (W108).
GRADES = (
    Grade("good", 30.0, 0.97, "bold green"),
    Grade("acceptable", 20.0, 0.90, "bold"),
    Grade("degraded", LOST_DB, 0.50, "bold yellow"),
    Grade("broken", -math.inf, 0.0, "bold red"),
)
# Of a result that computes what the float model did, of one that its engine refuses, and of one that nothing was
# compared with.
UNCHANGED = Grade("unchanged", math.nan, math.nan, "bold")
REFUSED = Grade("refused", math.nan, math.nan, "bold red")
UNCHECKED = Grade("unchecked", math.nan, math.nan, "bold yellow")


@dataclass(frozen=True, kw_only=True)
class RunFigure:
    """One output, or the worst part of it, in one run against float.

    run: as people read it. top_1: share of `rows` whose largest value is where float's is; without rows it does not
    look like scores of classes. classes: it surely holds some, so that top_1 counts.
    """

    output: str
    run: str
    sqnr_db: float
    top_1: float = math.nan
    rows: int = 0
    classes: bool = False

    @property
    def grade(self) -> Grade:
        """The grade of this output alone."""
        # Of few rows one may differ by chance.
        share = min(self.top_1 + 1 / self.rows, 1.0) if self.classes and self.rows else 1.0
        reached = (
            grade for grade in GRADES if self.sqnr_db >= grade.sqnr_db and share >= grade.top_1
        )
        return next(reached, GRADES[-1])

    def describe_agreement(self) -> str:
        """The rows whose largest value is where float's is; "" where it does not look like scores."""
        same = round(self.top_1 * self.rows) if self.rows else 0
        return f"top-1 the same in {same} of {self.rows}" if self.rows else ""


def list_figures(difference: Difference) -> Iterator[RunFigure]:
    """Every output of every run of a comparison against float."""
    labels = label_runs(difference)
    for output in difference.outputs:
        # A verdict counts the agreement in the largest score only, and only where outputs look like scores of classes.
        ranked = output.classes is not None and difference.top_k == 1
        for error in output.accuracy:
            yield RunFigure(
                output=output.name + error.part,
                run=labels.get(error.run, error.run),
                sqnr_db=error.sqnr_db,
                top_1=error.top_k,
                rows=error.rows if ranked else 0,
                classes=bool(output.classes),
            )


def find_worst_figure(figures: Sequence[RunFigure]) -> RunFigure | None:
    """The figure of the worst grade: as an engine runs it before as the file says, and the one of the lowest SQNR.

    None without figures.
    """

    def rank(figure: RunFigure) -> tuple[int, bool, float]:
        return GRADES.index(figure.grade), figure.run != LABELS[OFF], -figure.sqnr_db

    return max(figures, key=rank, default=None)


def describe_figures(figures: Sequence[RunFigure]) -> str:
    """The worst output, and the lowest agreement in the largest value; "" without figures."""
    worst = find_worst_figure(figures)
    if worst is None:
        return ""
    place = worst.run if worst.run.startswith("as ") else f"on {worst.run}"
    verb = "is" if worst.sqnr_db == math.inf else "has"
    text = f"{worst.output} {verb} {format_decibel(worst.sqnr_db)} against float {place}"
    if worst.rows:
        return f"{text}; {worst.describe_agreement()}"
    ranked = [figure for figure in figures if figure.rows]
    least = min(ranked, key=lambda figure: figure.top_1, default=None)
    return text if least is None else f"{text}; {least.output}: {least.describe_agreement()}"


def make_verdict(
    figures: Sequence[RunFigure], choices: Sequence[ChoiceAgreement] = (), facts: Sequence[str] = ()
) -> tuple[Grade, str]:
    """The grade of outputs, and why, in a line. choices: of which outputs may hold nothing else. facts: told behind."""
    worst = find_worst_figure(figures)
    grade = UNCHECKED if worst is None else worst.grade
    parts = [describe_figures(figures)]
    deciding = [choice for choice in choices if choice.decides]
    if deciding:
        least = min(deciding, key=lambda choice: choice.share)
        parts.append(f"{', '.join(least.decides)}: {100 * least.share:.4g} % chosen as in float")
    return grade, "; ".join(filter(None, (*parts, *facts)))


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """One model output compared with the float model's on held-back samples.

    sqnr_db, cosine: [0] with ORT's optimizations off (what the file says), [1] with all on (what users run).
    parts: the slices of other scales that sqnr_db is of, like "[:, 4:, :]", "" where it is of the whole; whole_db: of
    the whole in any case, nan where nobody looked.
    agreement_db: SQNR of the two runs of the quantized model against each other; inf when identical.
    optimized: False when ORT's optimizations cannot take the file; what concerns them is NaN then.
    top_1: shares of `rows` whose largest value is where float's is; NaN for what does not look like scores of classes.
    classes: it surely holds such scores.
    """

    name: str
    sqnr_db: tuple[float, float]
    cosine: tuple[float, float]
    agreement_db: float
    optimized: bool = True
    parts: tuple[str, str] = ("", "")
    whole_db: tuple[float, float] = (math.nan, math.nan)
    top_1: tuple[float, float] = (math.nan, math.nan)
    rows: int = 0
    classes: bool = False

    @property
    def drifts(self) -> bool:
        """True where ORT's optimizations make the answers worse by more than two roundings of float sums differ."""
        off, on = self.sqnr_db
        return on < min(off - DRIFT_DB, SAME_DB)

    @property
    def worst(self) -> tuple[str, float]:
        """The output or part of it that is farthest as the file says, else as ORT runs it; and its whole's dB."""
        k = 0 if self.parts[0] or not self.parts[1] else 1
        return self.name + self.parts[k], self.whole_db[k]


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """SQNR in dB of an output as the target's engine computes it: against float, and against the file's arithmetic.

    float_db: of the float model's output as the engine computes that; inf where it was not asked.
    """

    name: str
    sqnr_db: float
    agreement_db: float
    float_db: float = math.inf


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """The model in the engine of its target, run or emulated.

    target: the backend. reason: why it was not; "" where it was. refusal: what it does with the float model, where
    it refuses the quantized one. partitions: parts that run on its device. left: nodes that the CPU runs. types: how
    many products compute in which. latency: there, where it was timed.
    """

    engine: str
    target: str = ""
    reason: str = ""
    refusal: str = ""
    emulated: bool = False
    samples: int = 0
    outputs: tuple[EngineOutput, ...] = ()
    partitions: int = 0
    left: Names = ()
    types: NumberedNames = ()
    latency: LatencyRatio | None = None

    @property
    def run(self) -> str:
        """The run as people read it."""
        return f"as {self.engine} {'computes' if self.emulated else 'runs it'}"


@dataclass(frozen=True, kw_only=True)
class LatencyRatio:
    """Median times of one run, float and quantized interleaved."""

    # Milliseconds.
    float_ms: float
    int8_ms: float
    # 0: all.
    threads: int = 1
    # Of the inputs timed, by name.
    shapes: InputShapes = field(default_factory=dict)
    # 0 where the model does not say which axis it is.
    batch: int = 1
    # The kind of CPU, of runtime.CPU_KINDS; "" if not determined.
    cpu: str = ""
    # Why int8 is slower, if it is.
    reason: str = ""
    engine: str = ""
    # Of a model made for this engine alone, where others share the file; nan where it is placed alike.
    own_ms: float = math.nan

    @property
    def ratio(self) -> float:
        """float / int8: above 1 the quantized model is faster; nan without a measurement."""
        return self.float_ms / self.int8_ms if self.int8_ms > 0 else math.nan

    def describe(self) -> str:
        """Both times, and how they compare."""
        times = f"{format_milliseconds(self.float_ms)} -> {format_milliseconds(self.int8_ms)}, {self.ratio:.2f}x"
        return f"{times} faster" if self.ratio >= 1 else f"{times}: SLOWER than float"


@dataclass(frozen=True, kw_only=True)
class OpCount:
    """Number of nodes of one operator that compute on quantized inputs."""

    op: str
    quantized: int
    total: int


@dataclass(frozen=True, kw_only=True)
class SiteLine:
    """One quantized site for people."""

    site: str
    role: str
    # E.g. "uint8 asymmetric".
    spec: str
    # E.g. "0.0235" or "2.1e-4..9.8e-3".
    scale: str = ""
    # The placement rule and why it applied.
    rule: str = ""
    reason: str = ""


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of one `quantize` or `apply`."""

    # Paths as given; "" for models in memory.
    source: str = ""
    output: str = ""
    target: str = Config.model_fields["target"].default
    config: str = ""
    mode: str = Config.model_fields["mode"].default
    effort: str = Config.model_fields["effort"].default
    placement: str = "rules"
    # The kind of CPU of the placement, "any" for all that were measured; "" if it depends on none.
    cpu: str = ""
    # Description of the calibration data.
    data: str = ""
    # The code of others that was run: libraries, a metric, a scheduler. A function that gave the data stands in `data`.
    code: Lines = ()
    # Ranges come from made-up inputs; shown as a banner.
    synthetic: bool = False
    source_bytes: int = 0
    output_bytes: int = 0
    # Of the notes, where they are why the file is not smaller.
    note_bytes: int = 0
    checks: tuple[OutputCheck, ...] = ()
    # Choices of the float model, on which `checks` compares, and how far those of the quantized one are the same.
    choices: ChoiceAgreements = ()
    # Number of samples of `checks`.
    checked: int = 0
    # Segments that the models were compared in, of which `checks` has the worst; 0 where they ran whole.
    segments: int = 0
    # Name of these samples, if they were made up: "8 made-up inputs, seed 0".
    made_up: str = ""
    # Why there are no `checks`; "" if there are.
    unchecked: str = ""
    # Other uses of these samples; "" if nothing was chosen on them.
    seen: str = ""
    # The model on its target's engines, but for ONNX Runtime alone, and those that cannot be run or emulated.
    engines: tuple[EngineCheck, ...] = ()
    # On the engine that gains least, where there are several.
    latency: LatencyRatio | None = None
    # Number of Q/DQ pairs written.
    pairs: int = 0
    roles: NumberedNames = ()
    # Sites whose scale is computed at each run.
    dynamic: int = 0
    ops: tuple[OpCount, ...] = ()
    sites: tuple[SiteLine, ...] = ()
    refusals: Refusals = ()
    left_float: LeftFloats = ()
    # The float types around the pairs; None: float32.
    float_types: PrecisionPlan | None = None
    # Changes by preparation, a line each.
    rewrites: Names = ()
    # The journal of accuracy passes: what each did, or why it was rolled back or left out.
    accounts: Lines = ()
    # Promotions for a requested accuracy.
    promotion: Promotion | None = None
    # Description of the parts that were quantized before; "" for a float model.
    already: str = ""
    # Operators that only rules of the configuration put into integers.
    forced: Forced | None = None
    # Nodes of the pairs that the model came with.
    kept: Names = ()
    # The weights that can overflow 16-bit sums, if runs without and with optimizations drifted apart.
    saturating: str = ""
    warnings: Cautions = ()
    stages: tuple[StageCost, ...] = ()

    @property
    def unchanged(self) -> bool:
        """True if nothing was quantized, and no float type changed."""
        types = self.float_types
        typed = types is not None and (types.nodes or types.io is not None)
        return bool(self.source_bytes) and not self.pairs and not typed

    @property
    def grade(self) -> Grade | None:
        """The grade in the place of that of the figures; None where they decide."""
        if self.unchanged:
            return UNCHANGED
        return REFUSED if self.refusers else None

    @property
    def refusers(self) -> str:
        """Names of the engines that refuse the file; "" for none."""
        return join_names([engine.engine for engine in self.engines if engine.refusal])

    @property
    def figures(self) -> tuple[RunFigure, ...]:
        """All outputs in the runs that count, by which the verdict is."""
        figures = [figure for check in self.checks for figure in self.list_figures(check)]
        for engine in self.engines:
            # The few samples that an emulator answers count where it computes something else than the file says.
            drifts = self._find_drifts(engine)
            for output in engine.outputs:
                if not engine.emulated or output.name in drifts:
                    name = output.name
                    figures.append(RunFigure(output=name, run=engine.run, sqnr_db=output.sqnr_db))
        return tuple(figures)

    def _find_drifts(self, engine: EngineCheck) -> dict[str, float]:
        """Outputs that an engine gives farther from float than the file says, and by how many dB."""
        said = {check.name: min(check.sqnr_db[0], SAME_DB) for check in self.checks}
        changes = {out.name: said.get(out.name, 0.0) - out.sqnr_db for out in engine.outputs}
        return {name: change for name, change in changes.items() if change > DRIFT_DB}

    def list_figures(self, check: OutputCheck) -> list[RunFigure]:
        """An output as the file says and, where ONNX Runtime is to run it, as it does."""
        # Other engines run the file as it is, without ORT's optimizations.
        here = check.optimized and find_target(self.target).times_itself
        return [
            RunFigure(
                output=check.name + check.parts[k],
                run=LABELS[run],
                sqnr_db=check.sqnr_db[k],
                top_1=check.top_1[k],
                rows=check.rows,
                classes=check.classes,
            )
            for k, run in enumerate((OFF, ON) if here else (OFF,))
        ]

    @property
    def slower(self) -> bool:
        """True if the quantized model was measured to be slower than the float one."""
        return self.latency is not None and self.latency.ratio < 1.0

    @property
    def has_smaller_mode(self) -> bool:
        """True where weights alone may be stored in integers instead, which takes no int8 kernels that pay."""
        return self.mode != "weight-only" and "weight-only" in find_modes(self.target)

    @property
    def calibrated(self) -> bool:
        """True if ranges of activations come from the data; False for weights alone."""
        data = (count for role, count in self.roles if role in ("activation", "output"))
        return not self.roles or any(data)

    def alarms(self) -> Cautions:
        """List the warnings that follow from the numbers: nothing quantized, accuracy lost, answers changed, slower."""
        return tuple(self._list_alarms())

    def _list_alarms(self) -> Iterator[Caution]:
        if self.unchanged:
            text = "nothing was quantized, and the result computes what the model did"
            slow = any(left.code != "F101" for left in self.left_float)
            if self.refusals:
                text = f"everything was refused{' or would not pay' if slow else ''}: {text}"
            elif slow:
                text = f"int8 would not pay: {text}"
                if self.has_smaller_mode:
                    text += "; `mode: weight-only` makes the file smaller, and no faster"
            else:
                text = f"the model has no operator for it, or rules leave them float: {text}"
            # Placed for one kind of CPU alone, there may be something.
            others = (warning for warning in self.warnings if warning.code == OTHER_CPUS)
            yield Caution("W111", "; ".join((text, *others)))
        lost = []
        for check in self.checks:
            figure = find_worst_figure(self.list_figures(check))
            off, on = map(format_decibel, check.sqnr_db)
            if figure and figure.grade is GRADES[-1]:
                facts = format_decibel(figure.sqnr_db), figure.describe_agreement()
                lost.append(f"{figure.output} ({', '.join(filter(None, facts))})")
            elif check.drifts:
                yield Caution(
                    "W109",
                    f"output {check.worst[0]}: {off} as the file says, {on} with ONNX Runtime's optimizations on: "
                    f"{self.saturating or 'its fusions compute something else than the file says'}",
                )
        if lost:
            effort = "take `effort: balanced`, " if self.effort == "fast" else ""
            text = (
                f"far from the float model's: output {join_names(lost)}; check the task's own metric, "
                f"{effort}{find_target(self.target, self.mode).advice}, or leave float what costs most: `min_sqnr=20`"
            )
            yield Caution("W108", text)
        for engine in self.engines:
            yield from self._list_cautions(engine)
        if self.slower and self.latency and not self.unchanged:
            cause = self.latency.reason or "the cause is not known; try `placement='measured'`"
            at = f" with {self.latency.engine}" if self.latency.engine else ""
            yield Caution("W110", f"the quantized model is slower than the float one{at}: {cause}")

    def _list_cautions(self, engine: EngineCheck) -> Iterator[Caution]:
        """Warnings of an engine that refuses the file, takes longer with it, or gives other answers than it says."""
        if engine.refusal:
            text = f"{engine.engine} refuses the file: {engine.reason}; {engine.refusal}"
            yield Caution("W148", text)
        time = engine.latency
        if time and time.int8_ms > MOST_LOSS * time.own_ms:
            yield Caution(
                "W138",
                f"with {engine.engine} the file for several engines takes {time.int8_ms / time.own_ms - 1:.0%} longer "
                f"than one made for it alone ({time.int8_ms:.3g} ms instead of {time.own_ms:.3g}): make a file of its "
                f"own there, `target={engine.target!r}`",
            )
        drifts = self._find_drifts(engine)
        for output in engine.outputs:
            if output.name not in drifts:
                continue
            cause = f"output {output.name} is {drifts[output.name]:.1f} dB worse {engine.run} than as the file says"
            advice = "`onnxq diff` finds the operator"
            if output.float_db < output.sqnr_db + DRIFT_DB:
                advice = f"the float model has {output.float_db:.1f} dB there, so an operator is computed otherwise"
            yield Caution("W109", f"{cause}: {advice}")


def warn_synthetic(done: str) -> Caution:
    """Make the warning for figures from made-up inputs. done: "costs were measured"."""
    return Caution(
        "W101",
        f"no samples were given: {done} on made-up inputs, so give `data=…` for numbers that count",
    )
