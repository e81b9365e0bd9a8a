"""Compare a quantized model with its float one, and what engines make of it with each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import onnx

from onnxq.data import Dataset
from onnxq.engines.diff.bisect import Found, bisect
from onnxq.engines.diff.cause import find_cause
from onnxq.engines.diff.isolated import check_kernels
from onnxq.engines.diff.layers import Inner, Inside, Spot, open_inner, read_inside, read_on
from onnxq.engines.diff.levels import level_of
from onnxq.engines.diff.matching import Place
from onnxq.engines.diff.measure import SAME_DB, Array, Tally, parts, unmet
from onnxq.engines.diff.model import FLOAT, OFF, ON, Difference, Error, OutputDiff, Parting, Run, Tolerances, run_label
from onnxq.engines.diff.results import Loaded, Recorder, infer, polygraphy
from onnxq.engines.diff.runs import Engines, engine_text
from onnxq.errors import DataError, ModelError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.progress import Progress, silent
from onnxq.sites import Refusal, TensorId


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to compare. engines: of ENGINES, () takes ORT and, where it can run, TensorRT. keep: samples to record.

    memory_limit: bytes of inner tensors held at a time. threads: of ORT; 0 takes all.
    """

    engines: tuple[str, ...] = ()
    layers: bool = False
    bisect: bool = False
    top_k: int = 1
    keep: int = 0
    threads: int = 0
    memory_limit: int = 2**30
    tolerances: Tolerances = field(default_factory=Tolerances)

    @property
    def inside(self) -> bool:
        """True when inner tensors are read."""
        return self.layers or self.bisect


@dataclass(frozen=True, eq=False)
class Outcome:
    """The account, the recorded samples and the pieces that bisection cut out."""

    difference: Difference
    recorder: Recorder
    pieces: tuple[Found, ...] = ()


def compare(
    float_proto: onnx.ModelProto,
    quantized: onnx.ModelProto,
    dataset: Dataset,
    wish: Wish = Wish(),
    *,
    loaded: Sequence[Loaded] = (),
    progress: Progress = silent,
) -> Outcome:
    """Run float in ORT (optimizations off), quantized in ORT (off, on) and TensorRT, and sum up the differences.

    loaded: results of other runs on the same samples, compared like engines; one called "float" only proves that the
    samples are the same. Raises ModelError for models that do not belong together, DataError for results of other
    samples, MissingDependencyError without Polygraphy or ONNX Runtime.
    """
    polygraphy()
    with progress("indexing both models"):
        float_index, index = GraphIndex(name_nodes(float_proto)), GraphIndex(infer_shapes(name_nodes(quantized)))
        check_pair(float_index, index)
    with ScratchFolder() as folder:
        engines = Engines(float_index, index, dataset, wish.engines, wish.threads, folder, progress)
        work = _Work(engines, wish, recorder=Recorder(wish.keep))
        outputs = work.outputs(loaded)
        inside = work.inside() if wish.inside else Inside()
        spots = _first_spots(work, inside, outputs)
        if wish.bisect:
            spots = (*spots, *work.alone(spots))
        spots = tuple(work.explained(spot) for spot in spots)
        pieces = (*work.bisections(spots), *work.failing_pieces()) if wish.bisect else ()
    difference = Difference(
        data=dataset.describe(),
        samples=len(dataset),
        synthetic=dataset.synthetic,
        top_k=wish.top_k,
        runs=tuple(work.runs),
        outputs=outputs,
        layers=inside.layers if wish.layers else (),
        worst=inside.worst,
        parted=tuple(spot.parting for spot in spots),
        bisections=tuple(piece.bisection for piece in pieces),
        skipped=(*engines.skipped, *inside.skipped),
        notes=(*inside.notes, *work.notes),
        unmet=unmet(outputs, wish.tolerances),
        missing=tuple(engines.missing),
    )
    return Outcome(difference, work.recorder, pieces)


def check_pair(float_index: GraphIndex, index: GraphIndex) -> None:
    """Raise ModelError unless both models take the same inputs and share an output."""
    mine, theirs = ({value.name for value in one.inputs} for one in (float_index, index))
    if mine != theirs:
        only = sorted(mine ^ theirs)
        raise ModelError(
            "inputs",
            f"the models do not have the same ones: {', '.join(only)}",
            "give a model and its own quantized form",
            code="Q114",
        )
    if not {value.name for value in float_index.outputs} & {value.name for value in index.outputs}:
        raise ModelError(
            "outputs", "the models have none in common", "give a model and its own quantized form", code="Q114"
        )


@dataclass(eq=False)
class _Work:
    engines: Engines
    wish: Wish
    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    recorder: Recorder = field(default_factory=lambda: Recorder(0))
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sums: _OutputSums | None = None
    inner: Inner | None = None

    @property
    def index(self) -> GraphIndex:
        """The quantized model's."""
        return self.engines.index

    @property
    def dataset(self) -> Dataset:
        """The samples."""
        return self.engines.dataset

    def outputs(self, loaded: Sequence[Loaded]) -> tuple[OutputDiff, ...]:
        """Every common output over all samples."""
        theirs = {value.name for value in self.index.outputs}
        names = [value.name for value in self.engines.float_index.outputs if value.name in theirs]
        self.sums = sums = _OutputSums(names, self.wish.top_k, {name: _output_step(self.index, name) for name in names})
        with self.engines.running(alone=not loaded) as runners:
            self.loaded = _labelled(loaded, self.engines.names)
            with self.engines.progress("comparing outputs", len(self.dataset)) as task:
                for at, feeds in enumerate(self.dataset.samples()):
                    values = {runner.name: infer(runner, feeds) for runner in runners}
                    if self.recorder.wants(at):
                        times = {runner.name: runner.last_inference_time() for runner in runners}
                        self.recorder.add(feeds, values, times)
                    values |= {run: one.samples[at] for run, one in self.loaded.items() if at < len(one.samples)}
                    sums.add(values)
                    task.advance()
        self._tell_runs(sums.seen)
        self._same_samples(sums)
        return sums.results([run for run in self.runs_shown() if run != FLOAT])

    def runs_shown(self) -> list[str]:
        """All runs but float runs from files: those only prove that the samples are the same."""
        return [run.name for run in self.runs if not self._proves(run.name)]

    def _proves(self, run: str) -> bool:
        return run in self.loaded and self.loaded[run].name == FLOAT

    def _tell_runs(self, seen: Mapping[str, int]) -> None:
        for run in [*self.engines.names, *self.loaded]:
            count, where = seen.get(run, 0), self.loaded[run].path if run in self.loaded else ""
            self.runs.append(Run(name=run, engine=f"from {where}" if where else engine_text(run), samples=count))
            if where and count < len(self.dataset):
                self.notes.append(
                    f"{run_label(run)}: only the first {count} of {len(self.dataset)} samples are in {where}"
                )

    def _same_samples(self, sums: _OutputSums) -> None:
        """The float run in a results file must answer as float does here."""
        for run in filter(self._proves, self.loaded):
            for name in sums.names:
                error = sums.error(name, run, FLOAT)
                if error is not None and error.sqnr_db < SAME_DB:
                    path = self.loaded[run].path
                    raise DataError(
                        path,
                        f"its float run gives another {name} than the float model does here ({error.sqnr_db:.1f} dB): "
                        "it was made with other samples or another model",
                        "give the samples it was made with: as `data=…` the inputs.json saved beside it",
                        code="Q218",
                    )

    def inside(self) -> Inside:
        """Every matching tensor inside."""
        first, threads = self.dataset[0], self.wish.threads
        if OFF not in self.engines.names:
            return Inside(
                skipped=(
                    Refusal(
                        "layers", f"they are compared with the model run {run_label(OFF)}, which failed", code="R111"
                    ),
                )
            )
        with self.engines.progress("having ONNX Runtime optimize the model"):
            self.inner = inner = open_inner(
                self.engines.float_index, self.index, first, fused=ON in self.engines.names, threads=threads
            )  # fmt: skip
        with ExitStack() as stack:
            others = self.engines.inner(stack)
            return read_inside(
                inner, self.dataset.samples, first, others=others, threads=threads,
                memory_limit=self.wish.memory_limit,
                begin=lambda rounds: self.engines.progress("comparing layers", rounds * len(self.dataset)),
            )  # fmt: skip

    def alone(self, spots: Sequence[Spot]) -> Iterator[Spot]:
        """Where nothing parts on the way through: a kernel that parts when it is fed the same as without fusions."""
        if self.inner is None or self.inner.fused is None or any(spot.parting.run == ON for spot in spots):
            return
        with self.engines.progress("checking each kernel alone") as task:
            found = check_kernels(self.inner, self.dataset[0], threads=self.wish.threads, tick=task.advance)
        if found.spot is not None:
            yield found.spot
        elif found.kernels:
            self.notes.append(found.text())

    def explained(self, spot: Spot) -> Spot:
        """The spot with the weights that saturate, where a run with optimizations parts because of them."""
        if spot.parting.run != ON:
            return spot
        feeds = self.dataset[spot.sample]
        with self.engines.progress("looking for the cause"):
            found = find_cause(
                self.index, spot.place, feeds, lambda: read_on(self.inner, self.index, spot.place, feeds),
                threads=self.wish.threads,
            )  # fmt: skip
        return replace(spot, parting=replace(spot.parting, saturating=found))

    def bisections(self, spots: Iterable[Spot]) -> Iterator[Found]:
        """The smallest piece for every engine that parts."""
        for spot in spots:
            run, rival = spot.parting.run, self.engines.rivals.get(spot.parting.run)
            if rival is None or run not in self.engines.names:
                continue
            with self.engines.progress(f"bisecting ({run_label(run)})") as task:
                found = bisect(
                    self.index, spot.place.tensor, self.dataset[spot.sample], rival, run=run,
                    level=spot.place.level, step=spot.step, threads=self.wish.threads, tick=task.advance,
                )  # fmt: skip
            if found is not None:
                yield found
            else:
                self.notes.append(
                    f"{run_label(run)}: no piece of the network up to {spot.parting.tensor} parts when it is given "
                    "the same inputs; the difference adds up from roundings"
                )

    def failing_pieces(self) -> Iterator[Found]:
        """The smallest piece that an engine which failed cannot run, where its message names a node of the model."""
        for run, error in self.engines.failed.items():
            rival = self.engines.rivals.get(run)
            if rival is None or OFF not in self.engines.names:
                continue
            with self.engines.progress(f"bisecting the failure ({run_label(run)})") as task:
                for tensor in named_tensors(self.index, str(error)):
                    found = bisect(
                        self.index, tensor, self.dataset[0], rival, run=run, failing=True,
                        threads=self.wish.threads, tick=task.advance,
                    )  # fmt: skip
                    if found is not None:
                        yield found
                        break


def named_tensors(index: GraphIndex, message: str) -> list[str]:
    """Tensors to search from: what the nodes named in a message compute, and what quantizers make of it."""
    found: list[str] = []
    for name in re.findall(r"[^\s'\"(),;]+", message):
        made = [tensor for node in index.nodes if node.name == name and not node.scope for tensor in node.outputs]
        readers = [edge.node for tensor in made for edge in index.consumers(TensorId(tensor)) if not edge.scope]
        found += made
        found += [node.outputs[0] for reader in readers if (node := index.node(reader)).op_type == "QuantizeLinear"]
    return list(dict.fromkeys(found))


@dataclass(eq=False)
class _OutputSums:
    """Tallies of the outputs by (output, run, against)."""

    names: Sequence[str]
    top_k: int
    steps: Mapping[str, float]
    seen: dict[str, int] = field(default_factory=dict)
    _tallies: dict[tuple[str, str, str], Tally] = field(default_factory=dict)

    def add(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """One sample of all runs."""
        for run, found in values.items():
            self.seen[run] = self.seen.get(run, 0) + 1
            for name, against in product(self.names, (FLOAT, OFF)):
                mine, other = found.get(name), values.get(against, {}).get(name)
                if run not in (FLOAT, against) and _numeric(mine) and _numeric(other):
                    tally = self._tallies.get((name, run, against)) or Tally(name, self.top_k, self.steps[name])
                    self._tallies[name, run, against] = tally
                    tally.update(other, mine)

    def error(self, name: str, run: str, against: str) -> Error | None:
        """What is known of one output of one run."""
        tally = self._tallies.get((name, run, against))
        return None if tally is None else tally.error(run, against)

    def worst_sample(self, name: str, run: str) -> int:
        """Where a run is farthest from ORT without optimizations."""
        return self._tallies[name, run, OFF].worst_sample

    def results(self, runs: Sequence[str]) -> tuple[OutputDiff, ...]:
        """Output by output."""
        return tuple(
            OutputDiff(
                name=name,
                accuracy=tuple(error for run in runs if (error := self.error(name, run, FLOAT)) is not None),
                engines=tuple(error for run in runs if (error := self.error(name, run, OFF)) is not None),
            )
            for name in self.names
        )


def _first_spots(work: _Work, inside: Inside, outputs: Sequence[OutputDiff]) -> tuple[Spot, ...]:
    """By run, the first inner tensor that parts; else the first output that does."""
    found = {spot.parting.run: spot for spot in inside.spots}
    for output in outputs:
        plain = next((error.sqnr_db for error in output.accuracy if error.run == OFF), np.inf)
        for error in output.engines:
            if error.run in found or not parts(error, plain):
                continue
            node = work.index.producer(TensorId(output.name))
            parting = Parting(
                run=error.run, against=error.against, tensor=output.name, node=node.name if node else "",
                op=node.op_type if node else "", sqnr_db=error.sqnr_db, levels=error.levels,
            )  # fmt: skip
            worst = work.sums.worst_sample(output.name, error.run) if work.sums is not None else 0
            found[error.run] = Spot(parting, Place(output.name, None), _output_step(work.index, output.name), worst)
            if work.wish.inside and inside.layers:
                work.notes.append(
                    f"{run_label(error.run)}: output {output.name} parts though no tensor read inside does"
                )
    return tuple(found.values())


def _output_step(index: GraphIndex, name: str) -> float:
    """One level of what an output was quantized to last; 0 when a float node makes it."""
    node = index.producer(TensorId(name))
    level = level_of(index, node.inputs[0]) if node is not None and node.op_type == "DequantizeLinear" else None
    return level.scale if level is not None else 0.0


def _labelled(loaded: Sequence[Loaded], local: Iterable[str]) -> dict[str, Loaded]:
    """Loaded runs by a name no other run has."""
    found: dict[str, Loaded] = {}
    taken = set(local)
    for one in loaded:
        label, number = one.name, 1
        if label in taken or label in found:
            label = f"{one.name} ({Path(one.path).stem})"
        while label in taken or label in found:
            number += 1
            label = f"{one.name} ({Path(one.path).stem}, {number})"
        found[label] = replace(one)
    return found


def _numeric(value: object) -> TypeGuard[Array]:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
