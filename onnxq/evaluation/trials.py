"""Models tried beside the float model, sample by sample: here, or in pieces by the workers of a crew.

Workers give the sums of each sample alone. They are added up in the order of the samples, as one process does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from onnxq.calibrate.chunks import split_evenly
from onnxq.data.dataset import SharedSamples, share_samples
from onnxq.evaluation.compare import ModelErrors, SampleErrors, measure_sample
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.selections import NO_SELECTIONS, Selections
from onnxq.evaluation.settings import open_reference
from onnxq.graph import ModelLike
from onnxq.graph.dequantized import dequantize_weights
from onnxq.progress import Task
from onnxq.runtime import Session
from onnxq.runtime.crew import Crew, SharedModel, hash_run, open_model
from onnxq.workers import Piece

# Pieces of one model's trial: enough for some workers, each of which opens the models.
TRIAL_PIECES = 8


@dataclass(frozen=True, eq=False)
class TrialModel:
    """A model to be tried. optimize: as users run it. dequantize: its weights, once and not in every run."""

    model: ModelLike
    optimize: bool = False
    dequantize: bool = False
    threads: int = 0

    def open(self, selections: Selections = NO_SELECTIONS) -> Session:
        """The session that runs it, on the choices of a float model."""
        model = dequantize_weights(self.model) if self.dequantize else self.model
        return Session(selections.take_choices(model), optimize=self.optimize, threads=self.threads)


@dataclass(frozen=True)
class TrialTask:
    """A model as of `TrialModel`, and the float model and samples it is tried on. positions: of samples to run."""

    model: SharedModel
    optimize: bool
    dequantize: bool
    threads: int
    reference: SharedModel
    reference_threads: int
    samples: SharedSamples
    positions: tuple[int, ...]


def measure_models(
    models: Iterable[TrialModel], reference: FloatOutputs, crew: Crew, task: Task, *, pieces: int = TRIAL_PIECES
) -> list[ModelErrors]:
    """The errors of each model over all samples. task: gets a step for each run. pieces: of each, at most.

    crew: runs them; the result does not depend on it.
    """
    if crew.plain:
        return [reference.measure(one.open(reference.selections), tick=task.advance) for one in models]
    found = []
    for samples in _try_in_pieces(models, reference, crew, task, pieces):
        found.append(ModelErrors())
        for one in samples:
            found[-1].add(one)
    return found


def measure_each(model: TrialModel, reference: FloatOutputs, crew: Crew, task: Task) -> list[ModelErrors]:
    """The errors of a model on each sample alone; see `measure_models`."""
    if crew.plain:
        return reference.measure_each(model.open(reference.selections), tick=task.advance)
    (samples,) = _try_in_pieces([model], reference, crew, task, TRIAL_PIECES)
    found = [ModelErrors() for _ in samples]
    for errors, one in zip(found, samples, strict=True):
        errors.add(one)
    return found


def _try_in_pieces(
    models: Iterable[TrialModel], reference: FloatOutputs, crew: Crew, task: Task, count: int
) -> list[list[SampleErrors]]:
    """The errors of each model on each sample."""
    plain = crew.share_model(reference.proto)
    samples = share_samples(crew, reference.samples, range(len(reference.samples)))
    todo, shares = [], split_evenly(range(len(reference.samples)), count)
    for number, one in enumerate(models):
        shared = crew.share_model(one.model)
        for share in shares:
            given = TrialTask(
                shared, one.optimize, one.dequantize, one.threads, plain, reference.threads, samples, tuple(share)
            )
            todo.append(Piece(f"trial {number + 1} on {samples.names[share[0]]}", given, _hash_task(given)))
    done = crew.map(try_model, todo, on_done=lambda one: task.advance(len(one.task.positions)))
    return [[errors for part in islice(done, len(shares)) for errors in part] for _ in range(len(todo) // len(shares))]


def try_model(task: TrialTask) -> list[SampleErrors]:
    """The errors of a model on some samples."""
    reference = open_reference(task.reference, task.samples, task.reference_threads)
    session = _open_trial(task.model, task.optimize, task.dequantize, task.threads, reference.selections)
    found = []
    for at in task.positions:
        feeds = reference.samples[at]
        exact = reference.run(at, feeds)
        outputs = session.run(reference.selections.add_choices(feeds, exact))
        found.append(measure_sample(feeds, exact, outputs))
    return found


@lru_cache(maxsize=1)
def _open_trial(model: SharedModel, optimize: bool, dequantize: bool, threads: int, selections: Selections) -> Session:
    return TrialModel(open_model(model), optimize, dequantize, threads).open(selections)


def _hash_task(task: TrialTask) -> str:
    feeds = [task.samples.feeds[at].digest for at in task.positions]
    numbers = (task.optimize, task.dequantize, task.threads, task.reference_threads)
    return hash_run("trial", task.model.digest, task.reference.digest, repr(numbers), *feeds)
