"""Models and settings of switches scored against the float model: here, or in pieces by the workers of a crew.

Workers run `FloatOutputs.score_runs` as this process does. Errors of single samples are added up in the order of the
samples, so that the result does not depend on the crew.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any

from onnxq.arrays import ArrayDict, Arrays
from onnxq.calibrate.parts import split_evenly
from onnxq.data.dataset import SharedSamples, share_samples
from onnxq.errors import ModelError
from onnxq.evaluation.accumulator import AxisSums, ErrorAccumulator, SliceSums
from onnxq.evaluation.compare import FloatOutputs, ModelErrors, SampleErrors
from onnxq.evaluation.selections import Selections
from onnxq.graph import ModelLike, drop_named, release_pages
from onnxq.graph.light import copy_proto, copy_store, rebuild
from onnxq.graph.values import encode_tensor
from onnxq.progress import Task
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew, SharedFeeds, SharedModel, hash_run, open_model, read_feeds
from onnxq.sites import Indices, Names, NameSet
from onnxq.workers import WorkPiece, register_packed

for _kind in (ModelErrors, ErrorAccumulator, SliceSums, AxisSums):
    register_packed(_kind)

# Pieces of one model's trial: enough for some workers, each of which opens the models.
TRIAL_PIECES = 8
# Pieces of all settings, each with a session of its own; workers run the float model once more for each.
_SETTING_PIECES = 16
# Runs of a piece, below which its session takes longer to make than it saves.
_LEAST_RUNS = 96
# Settings, below which sharing models with workers takes longer than they save.
_WORTH_SHARING = 8


@dataclass(frozen=True)
class SharedReference:
    """The float model and the samples that others are scored on, as workers get them."""

    model: SharedModel
    threads: int
    samples: SharedSamples


# It keeps its outputs from one piece to the next. One is enough: pieces of one model come behind each other, and each
# model may hold gigabytes.
@lru_cache(maxsize=1)
def _open_reference(shared: SharedReference) -> FloatOutputs:
    return FloatOutputs(open_model(shared.model), shared.samples.open(), threads=shared.threads)


def _share_reference(crew: Crew, reference: FloatOutputs) -> SharedReference:
    samples = share_samples(crew, reference.samples, range(len(reference.samples)))
    return SharedReference(crew.share_model(reference.proto), reference.threads, samples)


@dataclass(frozen=True, eq=False)
class TrialModel:
    """A model to be tried. fuse_pairs: as users run it, and not as the file says."""

    model: ModelLike
    fuse_pairs: bool = False

    def open(self, selections: Selections, threads: int) -> Session:
        """The session that runs it, on the choices of a float model."""
        model = selections.take_choices(self.model)
        return Session(model, fuse_pairs=self.fuse_pairs, threads=threads)


@dataclass(frozen=True)
class TrialTask:
    """A model as of `TrialModel`, and the samples it is tried on. positions: of samples to run."""

    model: SharedModel
    fuse_pairs: bool
    reference: SharedReference
    positions: Indices


def measure_models(
    models: Iterable[TrialModel],
    reference: FloatOutputs,
    crew: Crew,
    task: Task,
    *,
    pieces: int = TRIAL_PIECES,
) -> list[ModelErrors]:
    """The errors of each model over all samples. task: gets a step for each run. pieces: of each, at most.

    crew: runs them; the result does not depend on it.
    """
    return [sum_samples(each) for each in _try_models(models, reference, crew, task, pieces)]


def sum_samples(samples: Iterable[SampleErrors]) -> ModelErrors:
    """The errors of one model over some samples."""
    errors = ModelErrors()
    for sample in samples:
        errors.add(sample)
    return errors


def measure_each(
    model: TrialModel, reference: FloatOutputs, crew: Crew, task: Task
) -> list[ModelErrors]:
    """The errors of a model on each sample alone; see `measure_models`."""
    (samples,) = _try_models([model], reference, crew, task, TRIAL_PIECES)
    return [sum_samples([sample]) for sample in samples]


def _try_models(
    models: Iterable[TrialModel], reference: FloatOutputs, crew: Crew, task: Task, count: int
) -> Iterable[list[SampleErrors]]:
    """The errors of each model on each sample."""
    # One model after the other: each may hold gigabytes.
    if crew.plain:
        for model in models:
            session = model.open(reference.selections, reference.threads)
            samples = []
            for _, errors in reference.score_runs([session.run], range(len(reference.samples))):
                samples.append(errors)
                task.advance()
            yield samples
        return
    shared = _share_reference(crew, reference)
    shares = split_evenly(range(len(reference.samples)), count)
    pieces = []
    for number, model in enumerate(models, start=1):
        form = crew.share_model(model.model), model.fuse_pairs
        for share in shares:
            trial = TrialTask(*form, shared, tuple(share))
            pieces.append(
                WorkPiece(
                    f"trial {number} on {shared.samples.names[share[0]]}",
                    trial,
                    hash_run("trial", repr(trial)),
                )
            )
    done = crew.map(
        try_model, pieces, on_done=lambda piece: task.advance(len(piece.task.positions))
    )
    # Results come in the order of the pieces, those of one model behind each other.
    for _ in range(len(pieces) // len(shares)):
        yield [errors for part in islice(done, len(shares)) for errors in part]


def try_model(task: TrialTask) -> list[SampleErrors]:
    """The errors of a model on some samples."""
    reference = _open_reference(task.reference)
    session = _open_trial(task.model, task.fuse_pairs, reference.selections, reference.threads)
    # The workers share the cores between them.
    return [errors for _, errors in reference.score_runs([session.run], task.positions, threads=1)]


@lru_cache(maxsize=1)
def _open_trial(
    model: SharedModel, fuse_pairs: bool, selections: Selections, threads: int
) -> Session:
    return TrialModel(open_model(model), fuse_pairs).open(selections, threads)


@dataclass(eq=False)
class Switchboard:
    """A model whose inputs switch parts of it, in a session. on, off: their values in both positions, by input.

    threads: of the session. large: the values lie in files, and are let go of after each run.
    """

    model: ModelLike
    on: Arrays
    off: Arrays
    threads: int
    large: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @cached_property
    def _session(self) -> Session:
        return Session(self.model, fuse_pairs=False, threads=self.threads)

    def open_session(self) -> Session:
        """The session, opened when it is first needed: large parts of a trial have boards of their own, and use none
        of the whole. Raises ModelError where ORT refuses the model.
        """
        # Threads share a board, and each would open one.
        with self._lock:
            return self._session

    def run(self, feeds: Feeds, on: Collection[str]) -> ArrayDict:
        """The outputs with these inputs on and all others off. Raises ModelError where ORT refuses the model."""
        values = self._choose_values(on, self.off)
        outputs = self.open_session().run({**feeds, **values})
        if self.large:
            release_pages(*values.values())
        return outputs

    def fix_switches(self, settings: Sequence[NameSet]) -> Switchboard:
        """The board for these settings alone: inputs that are alike in all of them are constants.

        ORT takes out roundings that are off, computes on the constants once, and fuses what is left. Those that only
        bodies of If, Loop and Scan read stay inputs: ORT refuses some bodies with constants, or fails as they run.
        Raises ModelError where ORT refuses it.
        """
        varied = frozenset.union(*settings) - frozenset.intersection(*settings)
        proto = copy_proto(self.model)
        store = copy_store(self.model)
        graph = proto.graph
        read = {name for node in graph.node for name in node.input}
        # In one order: sets have none, and the same part is the same model in every process.
        names = sorted(read.intersection(self.off) - varied)
        fixed = self._choose_values(settings[0], names)
        graph.initializer.extend(
            encode_tensor(name, value, store=store) for name, value in fixed.items()
        )
        drop_named(graph.input, fixed)
        rest = self.off.keys() - fixed
        on, off = (self._choose_values(chosen, rest) for chosen in (rest, ()))
        board = Switchboard(rebuild(self.model, proto, store), on, off, self.threads)
        board.open_session()
        return board

    def _choose_values(self, on: Collection[str], names: Iterable[str]) -> ArrayDict:
        return {name: (self.on if name in on else self.off)[name] for name in names}


@dataclass(frozen=True)
class SharedBoard:
    """A switchboard as workers get it."""

    model: SharedModel
    on: SharedFeeds
    off: SharedFeeds
    threads: int
    large: bool


@dataclass(frozen=True)
class SettingsTask:
    """Some settings, each as the inputs that are on, and what they are scored on."""

    board: SharedBoard
    reference: SharedReference
    settings: tuple[Names, ...]


def score_settings(
    board: Switchboard,
    reference: FloatOutputs,
    settings: Sequence[Collection[str]],
    crew: Crew | None,
    task: Task,
) -> list[ModelErrors]:
    """The errors of every setting, in order, over all samples.

    Settings behind each other are best of the same switches; the parts do not depend on the crew.
    """
    count = len(reference.samples)
    size = max(-(-len(settings) // _SETTING_PIECES), -(-_LEAST_RUNS // max(count, 1)))
    # A piece is known by its text, and sets have no order.
    parts = [
        tuple(tuple(sorted(setting)) for setting in settings[first : first + size])
        for first in range(0, len(settings), size)
    ]
    if crew is None or crew.plain or len(settings) < _WORTH_SHARING:
        return [
            errors
            for part in parts
            for errors in _score_part(board, reference, part, tick=task.advance)
        ]
    shared = SharedBoard(
        crew.share_model(board.model),
        crew.share_feeds(board.on),
        crew.share_feeds(board.off),
        board.threads,
        board.large,
    )
    shared_reference = _share_reference(crew, reference)
    works = [SettingsTask(shared, shared_reference, part) for part in parts]
    pieces = [
        WorkPiece(f"settings, part {number}", work, hash_run("settings", repr(work)))
        for number, work in enumerate(works, start=1)
    ]
    done = crew.map(
        measure_piece, pieces, on_done=lambda piece: task.advance(count * len(piece.task.settings))
    )
    return [errors for part in done for errors in part]


def measure_piece(task: SettingsTask) -> list[ModelErrors]:
    """The errors of some settings over all samples."""
    board = _open_board(task.board)
    return _score_part(board, _open_reference(task.reference), task.settings, threads=1)


def _score_part(
    board: Switchboard, reference: FloatOutputs, settings: Sequence[Collection[str]], **how: Any
) -> list[ModelErrors]:
    """The errors of some settings over all samples. how: as of `sum_runs`."""
    switched = [frozenset(setting) for setting in settings]
    # Of a large model no session holds all weights.
    if not board.large and len(settings) * len(reference.samples) >= _LEAST_RUNS:
        # ORT refuses some loops whose weights are constants of the graph around them.
        with suppress(ModelError):
            board = board.fix_switches(switched)
    runs = [partial(board.run, on=setting) for setting in switched]
    return reference.sum_runs(runs, **how)


@lru_cache(maxsize=1)
def _open_board(shared: SharedBoard) -> Switchboard:
    on, off = map(read_feeds, (shared.on, shared.off))
    return Switchboard(open_model(shared.model), on, off, shared.threads, shared.large)
