"""The observers of all activation sites, updated by one pass over the samples for each group of tapped tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from onnxq.calibrate.taps import Array, Taps
from onnxq.data import Batch, Dataset
from onnxq.errors import CalibrationError
from onnxq.graph import ModelLike
from onnxq.observers import Observer, create_observer
from onnxq.progress import Progress, Task
from onnxq.runtime import Feeds
from onnxq.sites import TensorId
from onnxq.spec import ObserverSpec, QuantSpec

# Batches among which the largest is found, to size the groups of taps by.
_LOOK_AHEAD = 16


@dataclass(frozen=True)
class Want:
    """Request for one observer; sites with equal requests share it."""

    key: str
    observer: ObserverSpec
    quant: QuantSpec


@dataclass(eq=False)
class Watch:
    """The observers of one run over the data. readers: the requests whose observers each tensor updates."""

    observers: dict[Want, Observer] = field(default_factory=dict)
    readers: dict[TensorId, list[Want]] = field(default_factory=dict)

    def add(self, want: Want, tensor: TensorId) -> None:
        """Update the observer of `want` with the values of `tensor`."""
        if want not in self.observers:
            self.observers[want] = create_observer(want.observer, want.quant)
        wants = self.readers.setdefault(tensor, [])
        if want not in wants:
            wants.append(want)

    def add_constant(self, want: Want, value: Array) -> None:
        """Update the observer of `want` with a constant, once."""
        self._update(self.observers.setdefault(want, create_observer(want.observer, want.quant)), value)

    def see(self, tensor: TensorId, value: Array) -> None:
        """Update the observers of `tensor` with one batch. Raises CalibrationError on NaN and +inf."""
        for want in self.readers[tensor]:
            self._update(self.observers[want], value)

    def _update(self, observer: Observer, value: Array) -> None:
        try:
            observer.update(value)
        except CalibrationError:
            # -inf is a mask's way to say "not this one"; NaN and an overflow to inf are faults.
            if not (value < np.inf).all() or not np.isneginf(value).any():
                raise
            observer.infinite = True


def observe_samples(taps: Taps, watch: Watch, dataset: Dataset, *, batch: int | None, progress: Progress) -> None:
    """Run all samples and update every observer of `watch` that reads a tensor.

    batch: samples in one run, 1 where an observer takes samples one by one.
    Raises CalibrationError naming tensor and sample for a NaN or +inf; ModelError and DataError from the runs.
    """
    if any(observer.per_sample for observer in watch.observers.values()):
        batch = 1
    widest = max(islice(dataset.batches(batch), _LOOK_AHEAD), key=_count_elements)
    groups = taps.groups(widest)
    # Not to be held during the run: with large inputs it would count beside the limit.
    del widest
    with progress("calibrating", len(groups) * len(dataset)) as task:
        for group in groups:
            for part, tensor, value in taps.run(
                group, _count_batches(dataset.batches(batch), task), _list_samples(dataset)
            ):
                try:
                    watch.see(tensor, value)
                except CalibrationError as error:
                    raise _name_sample(taps, tensor, part, dataset, error) from error
                # Before the next value is made, so that only one is held.
                del value


def order_tensors(proto: ModelLike) -> Callable[[TensorId], tuple[str, int, str]]:
    """Sort key: the order in which the main graph computes tensors.

    Groups of neighbours need the least of the graph to be run.
    """
    place = {name: k for k, node in enumerate(proto.graph.node) for name in node.output}
    return lambda tensor: (tensor.scope, place.get(tensor.name, -1) if tensor.scope == "" else 0, tensor.name)


def _count_elements(batch: Batch) -> int:
    return sum(value.size for value in batch.feeds.values())


def _count_batches(batches: Iterable[Batch], task: Task) -> Iterable[Batch]:
    for one in batches:
        yield one
        task.advance(one.count)


def _list_samples(dataset: Dataset) -> Callable[[Batch], Iterable[Feeds]]:
    return lambda batch: (dataset[k] for k in range(batch.first_index, batch.first_index + batch.count))


def _name_sample(
    taps: Taps, tensor: TensorId, batch: Batch, dataset: Dataset, error: CalibrationError
) -> CalibrationError:
    """The error with the names of the tensor and the sample, found by running the samples of the batch one by one."""
    positions: Sequence[int] = range(batch.first_index, batch.first_index + batch.count)
    # Stays the first where no sample fails alone.
    guilty = positions[0]
    if batch.count > 1:
        for position in positions:
            alone = Batch(dataset[position], position, 1)
            probe = create_observer(ObserverSpec(), QuantSpec())
            try:
                for _, _, value in taps.run((tensor,), [alone], lambda _: ()):
                    probe.update(value)
            except CalibrationError:
                guilty = position
                break
    return CalibrationError(
        str(tensor),
        f"{error.cause}, in {dataset.name(guilty)}",
        "mend or leave out that sample, or the node that made it",
        code="Q501",
    )
