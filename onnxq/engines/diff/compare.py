"""Compare a quantized model with its float one, and the engines' answers with each other."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.annotate import find_operators
from onnxq.annotate.find import find_chains
from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.engines.diff.bisect import FedParts, Piece, PieceSearch, check_kernels
from onnxq.engines.diff.cause import find_saturating_weights
from onnxq.engines.diff.layers import (
    Counterpart,
    DivergencePoint,
    Inner,
    LayerResults,
    compare_layers,
    make_point,
    open_inner,
    read_optimized_tensor,
)
from onnxq.engines.diff.measure import SAME_DB, OutputSums, diverges, find_output_step, find_unmet
from onnxq.engines.diff.model import FLOAT, OFF, ON, Difference, OutputDiff, Run, label_run
from onnxq.engines.diff.results import LoadedRun, Recorder
from onnxq.engines.diff.runs import Engines, Reference, describe_engine
from onnxq.errors import DataError, ModelError, OnnxqError
from onnxq.evaluation.agreement import AgreementSums, find_class_scores
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.selections import Selections, explain_missing, name_own
from onnxq.files import ScratchFolder
from onnxq.graph import QUANTIZE, GraphIndex, ModelLike, infer_shapes, name_nodes
from onnxq.progress import Progress, silent
from onnxq.sites import Names, Refusal, TensorId, drop_repeats

# Bytes of inner tensors held at a time, where the configuration names no limit: a GiB, which every machine has that
# can hold two models.
_MEMORY_LIMIT = 2**30


@dataclass(frozen=True, eq=False)
class DiffResult:
    """The difference, the recorded samples and the pieces that bisection cut out."""

    difference: Difference
    recorder: Recorder
    pieces: tuple[Piece, ...]


def compare_models(
    float_model: ModelLike,
    quantized: ModelLike,
    dataset: Dataset,
    config: Config,
    *,
    keep: int = 0,
    loaded: Sequence[LoadedRun] = (),
    prepared: ModelLike | None = None,
    progress: Progress = silent,
) -> DiffResult:
    """Run float in ORT (optimizations off), quantized in ORT (off, on) and other engines, and sum up the differences.

    config: of which the sections `diff`, `data`, `verify` and `runtime` are used. keep: samples to record.
    loaded: results of other runs on the same samples, compared like engines; one called "float" only proves that the
    samples are the same. prepared: the float model with the channels of the quantized one, for layers; None: as it is.
    What the float model chooses by computed values is given to all other runs. Raises ModelError for models that do not
    belong together, DataError for results of other samples, MissingDependencyError without ONNX Runtime.
    """
    options = config.diff
    with progress("indexing both models"):
        named, other = name_nodes(float_model), name_nodes(quantized)
        check_pair(GraphIndex(named), GraphIndex(other))
        reference = FloatOutputs(named, dataset, threads=config.verify.threads)
        selections = reference.selections
        float_index = GraphIndex(selections.expose_choices(named))
        index = GraphIndex(infer_shapes(selections.take_choices(other)))
    if selections.nodes:
        # They travel with the samples, since every run takes them as inputs.
        dataset = dataset.extended(reference.add_choices)
    with ScratchFolder() as folder:
        engines = Engines(float_index, index, dataset, config, folder, progress)
        work = _Comparison(engines, config, Recorder(keep), selections, prepared)
        work.notes += map(explain_missing, selections.list_missing(other))
        outputs = work.compare_outputs(loaded)
        layers = work.compare_layers() if options.layers or options.bisect else LayerResults()
        points = work.find_first_points(layers, outputs)
        # Kernels alone are looked at first: bisection needs a tensor to start from, and they may give one.
        if options.bisect:
            points = (*points, *work.check_kernels(points))
        points = tuple(map(work.explain, points))
        pieces = (*work.bisect(points), *work.bisect_failures()) if options.bisect else ()
    difference = Difference(
        data=dataset.describe(),
        samples=len(dataset),
        synthetic=dataset.synthetic,
        top_k=options.top_k,
        runs=tuple(work.runs),
        outputs=outputs,
        choices={run: sums.results() for run, sums in work.agreement.items() if sums.results()},
        layers=layers.layers if options.layers else (),
        worst=layers.worst,
        divergences=tuple(point.divergence for point in points),
        bisections=tuple(piece.bisection for piece in pieces),
        skipped=(*engines.skipped, *work.skipped, *layers.skipped),
        notes=(*layers.notes, *work.notes),
        unmet=find_unmet(outputs, options),
        missing=tuple(engines.missing),
    )
    return DiffResult(difference, work.recorder, pieces)


def check_pair(float_index: GraphIndex, index: GraphIndex) -> None:
    """Raise ModelError unless both models take the same inputs and share an output."""
    inputs = float_index.input_names
    others = index.input_names
    fix = "give a model and its own quantized form"
    if inputs != others:
        cause = f"the models do not have the same ones: {', '.join(sorted(inputs ^ others))}"
        raise ModelError("inputs", cause, fix, code="Q114")
    if not float_index.output_names & index.output_names:
        raise ModelError("outputs", "the models have none in common", fix, code="Q114")


def _is_quantized(index: GraphIndex) -> bool:
    return any(find_chains(index)) or bool(find_operators(index))


@dataclass(eq=False)
class _Comparison:
    """The steps of one comparison, and their results so far."""

    engines: Engines
    config: Config
    recorder: Recorder
    selections: Selections
    # The float model in the channels of the quantized one, with which tensors inside are compared.
    prepared: ModelLike | None
    agreement: dict[str, AgreementSums] = field(default_factory=dict)
    loaded: Mapping[str, LoadedRun] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    skipped: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inner: Inner | None = None

    def __post_init__(self) -> None:
        common = self.index.output_names
        names = [value.name for value in self.engines.float_index.outputs if value.name in common]
        steps = {name: find_output_step(self.index, name) for name in names}
        self.sums = OutputSums(names, steps, self.config.diff.top_k)
        if _is_quantized(self.engines.float_index) and not _is_quantized(self.index):
            text = "the first model is quantized and the second is not: float comes first"
            self.notes.append(text)

    @property
    def index(self) -> GraphIndex:
        """The quantized model's."""
        return self.engines.index

    @property
    def dataset(self) -> Dataset:
        """The samples."""
        return self.engines.dataset

    def compare_outputs(self, loaded: Sequence[LoadedRun]) -> tuple[OutputDiff, ...]:
        """Every common output over all samples."""
        sums = self.sums
        with self.engines.open_runners(alone=not loaded) as runners:
            # Only now is it known which engines run, and so which names are taken.
            self.loaded = _label_loaded(
                [self._leave_out_rows(one) for one in loaded], self.engines.names
            )
            own = [value.name for value in self.dataset.inputs]
            with self.engines.progress("comparing outputs", len(self.dataset)) as task:
                for at, feeds in enumerate(self.dataset.samples()):
                    values = {runner.name: runner.infer(feeds) for runner in runners}
                    # Without the float model's choices, which are no inputs of the model that the
                    # sample is for.
                    given = {name: feeds[name] for name in own}
                    seconds = {runner.name: runner.seconds for runner in runners}
                    self.recorder.add(given, values, seconds)
                    # A file may hold fewer samples than were run here.
                    values |= {
                        run: one.samples[at]
                        for run, one in self.loaded.items()
                        if at < len(one.samples)
                    }
                    self._compare_choices(values)
                    sums.add(values, feeds)
                    task.advance()
        self.skipped += [
            Refusal(
                f"output {name}",
                f"is {kind}: only tensors of numbers are compared and saved",
                code="R111",
            )
            for name, kind in sums.not_numeric.items()
        ]
        self.notes += (
            f"output {name}: {count} values of the float model are NaN, and are left out"
            for name, count in sums.nans.items()
        )
        self._describe_runs()
        self._check_same_samples()
        runs = [run.name for run in self.runs if run.name != FLOAT and not self._proves(run.name)]
        return sums.make_results(runs, find_class_scores(self.engines.float_index))

    def _compare_choices(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """How far the choices of each run are those of float, on one sample."""
        for run, outputs in values.items():
            if run != FLOAT and not self._proves(run):
                sums = self.agreement.setdefault(run, AgreementSums(self.selections))
                sums.update(values[FLOAT], dict(outputs))

    def _leave_out_rows(self, loaded: LoadedRun) -> LoadedRun:
        """The run without the outputs that hold rows as it chose itself, which nothing can be compared with."""
        outputs = frozenset(next(iter(loaded.samples), ()))
        unmatched = {
            name: one
            for one in self.selections.nodes
            if loaded.name != FLOAT and name_own(one.name) not in outputs
            for name in one.outputs
            if name in outputs
        }
        for name, one in unmatched.items():
            cause = f"{loaded.path} holds the rows that its run chose in {one.node}, and they need not be float's"
            fix = "save that run with `onnxq diff` and `out=…`, which gives every run the same choices"
            self.skipped.append(Refusal(f"output {name} of {loaded.name}", cause, fix, code="R111"))
        kept = (
            {name: value for name, value in row.items() if name not in unmatched}
            for row in loaded.samples
        )
        return replace(loaded, samples=tuple(kept)) if unmatched else loaded

    def _proves(self, run: str) -> bool:
        """True for a float run from a file: it only proves that the samples are the same."""
        return run in self.loaded and self.loaded[run].name == FLOAT

    def _describe_runs(self) -> None:
        seen = self.sums.seen
        for name in self.engines.names:
            engine = describe_engine(name, self.config.runtime.provider)
            self.runs.append(Run(name=name, engine=engine, samples=seen[name], base=name))
        for name, one in self.loaded.items():
            count = seen[name]
            run = Run(
                name=name,
                engine=f"from {one.path}",
                samples=count,
                base=one.name,
                origin=one.origin,
            )
            self.runs.append(run)
            total = len(self.dataset)
            if count < total:
                self.notes.append(
                    f"{run.label}: only the first {count} of {total} samples are in {one.path}"
                )

    def _check_same_samples(self) -> None:
        """The float run in a results file must answer as float does here."""
        runs = list(filter(self._proves, self.loaded))
        for name in self.sums.names:
            for error in self.sums.tallies.list_errors(name, runs, FLOAT):
                if error.whole_db < SAME_DB:
                    cause = (
                        f"its float run gives another {name} than the float model does here ({error.sqnr_db:.1f} dB): "
                        "it was made with other samples or another model"
                    )
                    fix = "give the samples it was made with: as `data=…` the inputs.json saved beside it"
                    raise DataError(self.loaded[error.run].path, cause, fix, code="Q218")

    def compare_layers(self) -> LayerResults:
        """Every matching tensor inside."""
        engines = self.engines
        first = self.dataset[0]
        threads = self.config.verify.threads
        if OFF not in engines.names:
            cause = f"they are compared with the model run {label_run(OFF)}, which failed"
            return LayerResults(skipped=(Refusal("layers", cause, code="R111"),))
        with engines.progress("having ONNX Runtime optimize the model"):
            # The graph of fusions can be read for the CPU alone.
            fused = ON in engines.names and not self.config.runtime.provider
            # Equalization scales and shifts channels: beside the model as it came, innocent layers
            # have 0 dB.
            inside = engines.float_index if self.prepared is None else GraphIndex(self.prepared)
            self.inner = inner = open_inner(inside, self.index, first, fused=fused, threads=threads)
        with ExitStack() as stack:
            return compare_layers(
                inner,
                self.dataset,
                engines.open_inner(stack),
                threads=threads,
                memory_limit=self.config.data.memory_limit or _MEMORY_LIMIT,
                progress=engines.progress,
            )

    def find_first_points(
        self, layers: LayerResults, outputs: Sequence[OutputDiff]
    ) -> tuple[DivergencePoint, ...]:
        """By run, the first inner tensor that diverges; else the first output that does."""
        points = {point.divergence.run: point for point in layers.points}
        for output in outputs:
            name = output.name
            plain = next((error.sqnr_db for error in output.accuracy if error.run == OFF), np.inf)
            for error in output.engines:
                if error.run in points or not diverges(error, plain):
                    continue
                node = self.index.find_producer(TensorId(name))
                worst = self.sums.tallies.find_worst_sample(name, error.run)
                points[error.run] = make_point(
                    error, name, node, Counterpart(name), self.sums.steps[name], worst
                )
                if layers.layers:
                    label = next(run.label for run in self.runs if run.name == error.run)
                    self.notes.append(
                        f"{label}: output {name} diverges though no tensor read inside does"
                    )
        return tuple(points.values())

    def check_kernels(self, points: Sequence[DivergencePoint]) -> Iterator[DivergencePoint]:
        """Where no tensor on the way diverges: a kernel that diverges when it is fed the same as without fusions."""
        if (
            self.inner is None
            or self.inner.fused is None
            or any(point.divergence.run == ON for point in points)
        ):
            return
        with self.engines.progress("checking each kernel alone") as task:
            found = check_kernels(
                self.inner, self.dataset[0], threads=self.config.verify.threads, tick=task.advance
            )
        if found.point is not None:
            yield found.point
        elif found.kernels:
            self.notes.append(found.describe())

    def explain(self, point: DivergencePoint) -> DivergencePoint:
        """The point with the weights that saturate, where these make a run with optimizations diverge."""
        # ORT's fusions bring in the integer kernels whose sums saturate; TensorRT's sums are exact.
        if point.divergence.run != ON or self.config.runtime.provider:
            return point
        feeds = self.dataset[point.sample]
        with self.engines.progress("looking for the cause"):
            found = find_saturating_weights(
                self.index,
                point.counterpart,
                feeds,
                lambda: read_optimized_tensor(self.inner, self.index, point.counterpart, feeds),
                threads=self.config.verify.threads,
            )
        return replace(point, divergence=replace(point.divergence, saturating=found))

    def bisect(self, points: Iterable[DivergencePoint]) -> Iterator[Piece]:
        """The smallest piece for every engine that diverges."""
        for point in points:
            run = point.divergence.run
            engine = self.engines.find_under_test(run)
            # A run from a file cannot run a piece.
            if engine is None or run not in self.engines.names:
                continue
            with self.engines.progress(f"bisecting ({label_run(run)})") as task:
                parts = self._cut_parts(point.sample)
                found = PieceSearch(
                    parts,
                    point.counterpart,
                    run,
                    engine,
                    task.advance,
                    step=point.step,
                ).find_piece()
            if found is not None:
                yield found
            else:
                none = (
                    f"no piece of the network up to {point.divergence.tensor} "
                    "diverges when it is given the same inputs"
                )
                self.notes.append(
                    f"{label_run(run)}: {none}; the difference adds up from roundings"
                )

    def _cut_parts(self, sample: int) -> FedParts:
        """The model's parts, fed with its tensors on the sample of this number."""
        reference = Reference(self.index, self.dataset[sample], threads=self.config.verify.threads)
        return FedParts(self.index, reference)

    def bisect_failures(self) -> Iterator[Piece]:
        """The smallest piece that an engine which failed cannot run, where its message names a node of the model."""
        for run, error in self.engines.failed.items():
            engine = self.engines.find_under_test(run)
            if engine is None or OFF not in self.engines.names:
                continue
            with self.engines.progress(f"bisecting the failure ({label_run(run)})") as task:
                parts = self._cut_parts(0)
                for tensor in find_named_tensors(self.index, error):
                    end = Counterpart(tensor)
                    found = PieceSearch(
                        parts, end, run, engine, task.advance, failing=True
                    ).find_piece()
                    if found is not None:
                        yield found
                        break


def find_named_tensors(index: GraphIndex, error: OnnxqError) -> Names:
    """Tensors to search from: the outputs of the nodes that an engine's error names, and those of their quantizers."""
    found = []
    # Names of nodes have no common form: every word of the message may be one.
    for name in [error.node, *re.findall(r"[^\s'\"(),;]+", error.cause)]:
        node = index.named.get(name)
        if node is None or node.scope:
            continue
        readers = [reader for made in node.results for reader in index.readers(made)]
        quantizers = [one for one in readers if one.op_type == QUANTIZE and not one.scope]
        found += [*node.outputs, *(one.outputs[0] for one in quantizers)]
    return drop_repeats(found)


def _label_loaded(loaded: Sequence[LoadedRun], local: Iterable[str]) -> dict[str, LoadedRun]:
    """Loaded runs by a name no other run has: with the file's name, and a number where that is not enough."""
    found = {}
    taken = set(local)
    for one in loaded:
        label, origin, number = one.name, "", 1
        while label in taken or label in found:
            stem = Path(one.path).stem
            origin = stem if number == 1 else f"{stem}, {number}"
            label, number = f"{one.name} ({origin})", number + 1
        found[label] = replace(one, origin=origin)
    return found
