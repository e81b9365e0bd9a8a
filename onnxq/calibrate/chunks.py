"""Calibration in chunks of samples: done by the workers of a crew, merged in order.

Observers merge exactly, so neither the chunks nor who does them show in the result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any

from onnxq.calibrate.activations import Want, Watch, observe_samples, order_tensors
from onnxq.calibrate.taps import Taps
from onnxq.data import Dataset
from onnxq.data.dataset import SharedSamples, share_samples
from onnxq.graph import ModelLike
from onnxq.observers import Observer, create_observer
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import Crew, SharedModel, hash_run, open_model
from onnxq.sites import TensorId
from onnxq.workers import Piece, restore_object

# Of all samples: few enough that their histograms fit on a disk, and one sample each of the usual 32 to 64.
_CHUNKS = 64

Readers = tuple[tuple[TensorId, tuple[Want, ...]], ...]


@dataclass(frozen=True)
class ObserveTask:
    """Some samples, and the observers that look at each tensor of a model. modules: those that define the observers."""

    model: SharedModel
    readers: Readers
    modules: tuple[str, ...]
    samples: SharedSamples
    batch: int | None
    memory_limit: int


def observe_in_chunks(
    crew: Crew,
    proto: ModelLike,
    watch: Watch,
    dataset: Dataset,
    *,
    batch: int | None,
    memory_limit: int,
    progress: Progress,
) -> None:
    """Update every observer of `watch` that reads a tensor, as `observe_samples` does."""
    readers = freeze_readers(watch, proto)
    modules = tuple(sorted({type(watch.observers[want]).__module__ for _, wants in readers for want in wants}))
    with progress("calibrating", len(dataset)) as task:
        model = crew.share_model(proto)
        pieces = []
        for positions in split_evenly(range(len(dataset)), _CHUNKS):
            samples = share_samples(crew, dataset, positions)
            title = f"calibration on {samples.names[0]}"
            key = _hash_chunk(model, readers, samples)
            pieces.append(Piece(title, ObserveTask(model, readers, modules, samples, batch, memory_limit), key))
        found = crew.map(observe_chunk, pieces, on_done=lambda piece: task.advance(len(piece.task.samples.feeds)))
        for observers in found:
            merge_observers(watch, list_wants(readers), observers)


def observe_chunk(task: ObserveTask) -> list[Observer]:
    """The observers of one chunk, in the order of `list_wants`."""
    for module in task.modules:
        # Observers of the caller's own are registered by their module; that of a script has been run already.
        if module not in sys.modules and module != "__main__":
            import_module(module)
    watch = Watch()
    for tensor, wants in task.readers:
        for want in wants:
            watch.add(want, tensor)
    taps = _open_taps(task.model, tuple(tensor for tensor, _ in task.readers), task.memory_limit)
    if taps.tensors:
        observe_samples(taps, watch, task.samples.open(), batch=task.batch, progress=silent)
    return [watch.observers[want] for want in list_wants(task.readers)]


def merge_observers(watch: Watch, wants: Sequence[Want], found: Sequence[Observer | Mapping[str, Any]]) -> None:
    """Merge observers into those of `watch`. found: as `observe_chunk` returns them, or as a file has them.

    Raises ValueError for numbers that are not those of such observers.
    """
    for want, other in zip(wants, found, strict=True):
        if isinstance(other, Mapping):
            fresh = create_observer(want.observer, want.quant)
            restore_object(fresh, other)
            other = fresh
        watch.observers[want].merge(other)
        watch.observers[want].infinite |= other.infinite


def freeze_readers(watch: Watch, proto: ModelLike) -> Readers:
    """The tensors that observers read, in the order in which the graph computes them."""
    ordered = sorted(watch.readers, key=order_tensors(proto))
    return tuple((tensor, tuple(watch.readers[tensor])) for tensor in ordered)


def list_wants(readers: Readers) -> list[Want]:
    """Every request once, in order."""
    return list(dict.fromkeys(want for _, wants in readers for want in wants))


def split_evenly(items: Sequence[int], most: int) -> list[Sequence[int]]:
    """At most so many runs of neighbours, none empty, whose sizes differ by no more than one."""
    count = min(len(items), most)
    ends = [len(items) * k // count for k in range(count + 1)]
    return [items[first:last] for first, last in pairwise(ends)]


def _hash_chunk(model: SharedModel, readers: Readers, samples: SharedSamples) -> str:
    return hash_run("observe", model.digest, repr(readers), *(one.digest for one in samples.feeds))


# Sessions are kept from one chunk to the next.
@lru_cache(maxsize=1)
def _open_taps(model: SharedModel, tensors: tuple[TensorId, ...], memory_limit: int) -> Taps:
    return Taps(open_model(model), tensors, memory_limit)
