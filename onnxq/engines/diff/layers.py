"""Every matching tensor inside, engine by engine: sums over samples, so many tensors at a time as memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.engines.diff.levels import Level, level_of
from onnxq.engines.diff.matching import Place, Row, reached, rows
from onnxq.engines.diff.measure import Tally, parts
from onnxq.engines.diff.model import FLOAT, OFF, ON, Error, LayerDiff, Parting, run_label
from onnxq.engines.diff.results import Feeds, active, infer, ort_runner
from onnxq.errors import OnnxqError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.progress import Task, silent
from onnxq.runtime import Session, ShapeProbe, optimized_graph, tap
from onnxq.sites import Refusal, TensorId

Array = NDArray[np.generic]

# As good as equal: float32 sums in another order.
_EQUAL_DB = 80.0


@dataclass(frozen=True)
class Spot:
    """Where an engine first parts, as bisection needs it."""

    parting: Parting
    place: Place
    step: float
    sample: int


@dataclass(frozen=True)
class Inside:
    """What reading the inside found. layers: in the order of the network; worst: their names by SQNR drop."""

    layers: tuple[LayerDiff, ...] = ()
    worst: tuple[str, ...] = ()
    spots: tuple[Spot, ...] = ()
    skipped: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Inner:
    """The models that are read inside. fused: the graph ORT made of the quantized one; None when it is not read."""

    float_index: GraphIndex
    index: GraphIndex
    fused: GraphIndex | None
    notes: list[str] = field(default_factory=list)
    skipped: list[Refusal] = field(default_factory=list)

    @property
    def survivors(self) -> frozenset[str]:
        """Tensors ORT still computes after all its fusions."""
        if self.fused is None:
            return frozenset()
        return frozenset(name for node in self.fused.nodes if not node.scope for name in node.outputs if name)


def open_inner(float_index: GraphIndex, index: GraphIndex, feeds: Feeds, *, fused: bool, threads: int) -> Inner:
    """Have ORT fuse the quantized model, and see whether what it made still computes what its own run does."""
    inner = Inner(float_index, index, None)
    if not fused:
        return inner
    try:
        # NOTE: the last optimization level only lays tensors out anew, under other names and with other axes.
        made = name_nodes(optimized_graph(index.proto, layout=False))
        inner.fused = GraphIndex(made)
        inner.notes.extend(_layout_notes(index.proto, made, feeds, threads))
    except (OnnxqError, OSError, ValueError) as error:
        inner.fused = None
        fix = "the outputs are compared all the same"
        inner.skipped.append(
            Refusal(f"layers {run_label(ON)}", f"the graph ORT makes cannot be read back ({error})", fix, code="R111")
        )
    return inner


def _layout_notes(quantized: onnx.ModelProto, fused: onnx.ModelProto, feeds: Feeds, threads: int) -> Iterator[str]:
    real: dict[str, Any] = dict(Session(quantized, threads=threads).run(feeds))
    read = Session(fused, optimize=False, threads=threads).run(feeds)
    for name, value in real.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or name not in read:
            continue
        tally = Tally(name)
        tally.update(value, read[name])
        found = tally.error(ON, ON).sqnr_db
        if found < _EQUAL_DB:
            yield (
                f"layers {run_label(ON)} are read after ORT's fusions, before it lays tensors out anew; that last step "
                f"(float kernels that sum in another order) alone moves output {name} by {found:.1f} dB"
            )


@dataclass
class _Sums:
    """Tallies by row and (run, against), and where each run was read."""

    top_k: int
    tallies: dict[tuple[str, str, str], Tally] = field(default_factory=dict)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)

    def add(self, row: Row, run: str, against: str, reference: Array, value: Array) -> None:
        tally = self.tallies.setdefault((row.name, run, against), Tally(row.name, self.top_k, row.step))
        tally.update(reference, value)

    def error(self, row: Row, run: str, against: str) -> Error | None:
        tally = self.tallies.get((row.name, run, against))
        return None if tally is None else tally.error(run, against)


def read_inside(
    inner: Inner,
    samples: Callable[[], Iterable[Feeds]],
    first: Feeds,
    *,
    others: Sequence[Any] = (),
    top_k: int = 0,
    threads: int = 0,
    memory_limit: int = 2**30,
    begin: Callable[[int], AbstractContextManager[Task]] = lambda rounds: silent(""),
) -> Inside:
    """Run float and quantized model (and `others`, active runners that give inner tensors by name) over the samples.

    memory_limit: bytes of tensors held of one sample, all runs together; more samples are read again for more tensors.
    begin: begins a step of so many rounds over the samples.
    """
    made = rows(inner.float_index, inner.index)
    if not made:
        return Inside(skipped=tuple(inner.skipped), notes=tuple(inner.notes))
    sums = _Sums(top_k)
    names = {runner.name for runner in others}
    groups = list(grouped(inner.index.proto, made, first, memory_limit // (3 + len(names))))
    with begin(len(groups)) as task:
        for group in groups:
            _read_group(inner, group, samples, others, sums, threads, task.advance)
    return _summed(inner, made, sums, [*((ON,) if inner.fused is not None else ()), *sorted(names)])


def grouped(proto: onnx.ModelProto, made: Sequence[Row], feeds: Feeds, limit: int) -> Iterator[list[Row]]:
    """The rows in runs whose tensors, of the size they have in this sample, stay within the limit."""
    tensors = [TensorId(place.tensor) for row in made for place in row.places]
    shapes = ShapeProbe(proto, tensors).shapes(feeds)
    group: list[Row] = []
    used = 0
    for row in made:
        size = sum(4 * math.prod(shapes.get(TensorId(place.tensor), ())) for place in row.places)
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(row)
        used += size
    yield group


def _read_group(
    inner: Inner,
    group: Sequence[Row],
    samples: Callable[[], Iterable[Feeds]],
    others: Sequence[Any],
    sums: _Sums,
    threads: int,
    tick: Callable[[], None],
) -> None:
    places = list(dict.fromkeys(place.tensor for row in group for place in row.places))
    references = list(dict.fromkeys(row.reference for row in group if row.reference))
    survivors = inner.survivors
    sources = [(FLOAT, inner.float_index, references), (OFF, inner.index, places)]
    if inner.fused is not None:
        sources.append((ON, inner.fused, [name for name in places if name in survivors]))
    runners = [_runner(name, index.proto, tensors, threads) for name, index, tensors in sources if tensors]
    levels: dict[str, Level | None] = {}
    if inner.fused is not None:
        levels = {name: level_of(inner.fused, name) for name in places if name in survivors}
    with active(runners):
        for feeds in samples():
            values = {runner.name: infer(runner, feeds) for runner in (*runners, *others)}
            for row in group:
                _compare_row(row, values, levels, sums)
            tick()


def read_on(inner: Inner | None, index: GraphIndex, place: Place, feeds: Feeds) -> Array | None:
    """Real values of one tensor of the quantized model as ORT computes it with its optimizations; None if it is gone.

    An output comes from a run, another tensor from the graph that the fusions left.
    """
    if place.tensor in {value.name for value in index.outputs}:
        return place.read(Session(index.proto).run(feeds))
    if inner is None or inner.fused is None or place.tensor not in inner.survivors:
        return None
    tapped = tap(inner.fused.proto, [TensorId(place.tensor)], only=True)
    values = Session(tapped.proto, optimize=False, arena=False).run(feeds)
    return place.read(values, level_of(inner.fused, place.tensor))


def _runner(name: str, proto: onnx.ModelProto, tensors: Sequence[str], threads: int) -> Any:
    tapped = tap(proto, [TensorId(tensor) for tensor in tensors], only=True)
    session = Session(tapped.proto, optimize=False, threads=threads, arena=False)
    return ort_runner(name, session, list(tapped.outputs.values()))


def _compare_row(row: Row, values: dict[str, dict[str, Array]], levels: dict[str, Level | None], sums: _Sums) -> None:
    plain = values.get(OFF, {})
    reference = values.get(FLOAT, {}).get(row.reference) if row.reference else None
    at: Place | None = None
    for run, found in values.items():
        if run in (FLOAT, OFF):
            continue
        for place in row.places:
            value = place.read(found, levels.get(place.tensor) if run == ON else None)
            own = place.read(plain)
            if value is None or own is None:
                continue
            sums.places[row.name, run] = place
            at = place if at is None else at
            sums.add(row, run, OFF, own, value)
            if reference is not None:
                sums.add(row, run, FLOAT, reference, value)
            break
    if at is None:
        at = next((place for place in row.places if place.read(plain) is not None), None)
    if at is not None and reference is not None:
        own = at.read(plain)
        sums.places.setdefault((row.name, OFF), at)
        if own is not None and reference.dtype.kind == "f":
            sums.add(row, OFF, FLOAT, reference, own)


def _summed(inner: Inner, made: Sequence[Row], sums: _Sums, runs: Sequence[str]) -> Inside:
    plain = {row.name: error for row in made if (error := sums.error(row, OFF, FLOAT)) is not None}
    levels = reached(inner.index, made, {name: error.sqnr_db for name, error in plain.items()})
    layers: list[LayerDiff] = []
    spots: dict[str, Spot] = {}
    for row in made:
        accuracy = [error for run in (OFF, *runs) if (error := sums.error(row, run, FLOAT)) is not None]
        engines = [error for run in runs if (error := sums.error(row, run, OFF)) is not None]
        if not accuracy and not engines:
            continue
        before, own = levels[row.name]
        for error in engines:
            if error.run not in spots and parts(error, own):
                spots[error.run] = _spot(row, error, sums)
        place = sums.places.get((row.name, ON), sums.places.get((row.name, OFF)))
        name = row.reference or row.name
        layers.append(
            LayerDiff(
                name=name,
                node=row.node.name,
                op=row.node.op_type,
                at="" if place is None or place.tensor == name else place.tensor,
                accuracy=tuple(accuracy),
                engines=tuple(engines),
                drop_db=before - own if row.name in plain else math.nan,
            )
        )
    fallen = sorted((layer for layer in layers if layer.drop_db > 0), key=lambda layer: -layer.drop_db)
    return Inside(
        tuple(layers),
        tuple(layer.name for layer in fallen),
        tuple(spots.values()),
        tuple(inner.skipped),
        tuple(inner.notes),
    )


def _spot(row: Row, error: Error, sums: _Sums) -> Spot:
    parting = Parting(
        run=error.run,
        against=error.against,
        tensor=row.reference or row.name,
        node=row.node.name,
        op=row.node.op_type,
        sqnr_db=error.sqnr_db,
        levels=error.levels,
    )
    tally = sums.tallies[row.name, error.run, error.against]
    return Spot(parting, sums.places[row.name, error.run], row.step, tally.worst_sample)
