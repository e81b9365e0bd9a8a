"""Settings of a toggled model, measured by the workers of a crew: each over all samples, as in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from onnxq.data import Dataset
from onnxq.data.dataset import SharedSamples, share_samples
from onnxq.evaluation.accumulator import Array, ErrorAccumulator
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.slices import AxisSums, SliceSums
from onnxq.graph import ModelLike
from onnxq.progress import Task
from onnxq.runtime import Session
from onnxq.runtime.crew import Crew, SharedFeeds, SharedModel, hash_run, open_model, read_feeds
from onnxq.workers import Piece, register_packed

for _kind in (ModelErrors, ErrorAccumulator, SliceSums, AxisSums):
    register_packed(_kind)

# Pieces of all settings; each runs the float model once more.
_PIECES = 32


@dataclass(frozen=True)
class Switchboard:
    """A toggled model as workers get it. on, off: the inputs of all its switches in both positions."""

    model: SharedModel
    on: SharedFeeds
    off: SharedFeeds
    threads: int


@dataclass(frozen=True)
class SettingsTask:
    """Some settings, each as the inputs that are on, and the samples and float model that they are compared on."""

    board: Switchboard
    reference: SharedModel
    reference_threads: int
    samples: SharedSamples
    settings: tuple[tuple[str, ...], ...]


def measure_in_pieces(
    crew: Crew,
    board: tuple[ModelLike, int, Mapping[str, Array], Mapping[str, Array]],
    reference: FloatOutputs,
    settings: Sequence[Sequence[str]],
    task: Task,
) -> list[ModelErrors]:
    """The errors of every setting, in order. board: the toggled model, its threads, its inputs on and off."""
    model, threads, on, off = board
    shared = Switchboard(crew.share_model(model), crew.share_feeds(on), crew.share_feeds(off), threads)
    plain = crew.share_model(reference.proto)
    samples = share_samples(crew, reference.samples, range(len(reference.samples)))
    size = -(-len(settings) // _PIECES)
    pieces = []
    for first in range(0, len(settings), size):
        part = tuple(tuple(sorted(one)) for one in settings[first : first + size])
        given = SettingsTask(shared, plain, reference.threads, samples, part)
        pieces.append(Piece(f"settings {first + 1} to {first + len(part)}", given, _hash_task(given)))
    found = crew.map(
        measure_piece, pieces, on_done=lambda one: task.advance(len(samples.feeds) * len(one.task.settings))
    )
    return [errors for part in found for errors in part]


def measure_piece(task: SettingsTask) -> list[ModelErrors]:
    """The errors of some settings over all samples."""
    session, on, off = _open_board(task.board)
    reference = open_reference(task.reference, task.samples, task.reference_threads)
    found = [ModelErrors() for _ in task.settings]
    for at, feeds in enumerate(reference.samples.samples()):
        wanted = reference.run(at, feeds)
        given = reference.selections.add_choices(feeds, wanted)
        for errors, setting in zip(found, task.settings, strict=True):
            held = {name: (on if name in setting else off)[name] for name in off}
            errors.update(feeds, wanted, session.run({**given, **held}))
    return found


@lru_cache(maxsize=1)
def _open_board(board: Switchboard) -> tuple[Session, dict[str, Array], dict[str, Array]]:
    session = Session(open_model(board.model), optimize=False, threads=board.threads)
    return session, read_feeds(board.on), read_feeds(board.off)


@lru_cache(maxsize=1)
def open_reference(model: SharedModel, samples: SharedSamples, threads: int) -> FloatOutputs:
    """The float model on the samples, which keeps its outputs from one piece to the next."""
    held: Dataset = samples.open()
    return FloatOutputs(open_model(model), held, threads=threads)


def _hash_task(task: SettingsTask) -> str:
    shared: tuple[SharedModel | SharedFeeds, ...] = (
        task.board.model,
        task.board.on,
        task.board.off,
        task.reference,
        *task.samples.feeds,
    )
    digests = [str(one.digest) for one in shared]
    return hash_run("settings", *digests, repr((task.board.threads, task.reference_threads, task.settings)))
