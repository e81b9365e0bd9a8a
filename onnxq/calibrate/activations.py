"""Observers of all activation sites, fed by one pass over the samples for each group of taps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from onnxq.calibrate.taps import Array, Taps
from onnxq.data import Batch, Dataset
from onnxq.errors import CalibrationError
from onnxq.graph import ModelLike
from onnxq.observers import Observer, create
from onnxq.progress import Progress, Task
from onnxq.runtime import Feeds
from onnxq.sites import Refusal, TensorId
from onnxq.spec import ObserverSpec, QuantSpec

# How many batches are looked at to find out how large the taps get.
_LOOK_AHEAD = 16


@dataclass(frozen=True)
class Want:
    """What one observer is for: sites with the same key share it."""

    key: str
    observer: ObserverSpec
    quant: QuantSpec


@dataclass(eq=False)
class Watch:
    """The observers of one run over the data. readers: which observers each tensor feeds."""

    observers: dict[Want, Observer] = field(default_factory=dict)
    readers: dict[TensorId, list[Want]] = field(default_factory=dict)

    def add(self, want: Want, tensor: TensorId) -> None:
        """Let the observer of `want` see `tensor`."""
        if want not in self.observers:
            self.observers[want] = create(want.observer, want.quant)
        wants = self.readers.setdefault(tensor, [])
        if want not in wants:
            wants.append(want)

    def add_constant(self, want: Want, value: Array) -> None:
        """Show the observer of `want` a value that never changes."""
        self.observers.setdefault(want, create(want.observer, want.quant)).update(value)

    def see(self, tensor: TensorId, value: Array) -> None:
        """Update the tensor's observers. Raises CalibrationError on NaN and inf."""
        for want in self.readers[tensor]:
            self.observers[want].update(value)


def observe(
    proto: ModelLike,
    watch: Watch,
    dataset: Dataset,
    *,
    batch: int | None,
    memory_limit: int,
    progress: Progress,
) -> tuple[Refusal, ...]:
    """Run all samples and feed every observer of `watch`; the tensors that could not be observed come back.

    Observers that must see samples one by one make the batch 1. Raises CalibrationError naming tensor and sample for
    a NaN or inf; ModelError and DataError from the runs.
    """
    if not watch.readers:
        return ()
    if any(observer.per_sample for observer in watch.observers.values()):
        batch = 1
    taps = Taps(proto, sorted(watch.readers, key=_order(proto)), memory_limit)
    if not taps.tensors:
        return taps.refusals
    widest = max(islice(dataset.batches(batch), _LOOK_AHEAD), key=_volume)
    groups = taps.groups(widest)
    del widest
    with progress("calibrating", len(groups) * len(dataset)) as task:
        for group in groups:
            for part, tensor, value in taps.run(group, _told(dataset.batches(batch), task), _singles(dataset)):
                try:
                    watch.see(tensor, value)
                except CalibrationError as error:
                    raise _blame(taps, tensor, part, dataset, error) from error
                del value
    return taps.refusals


def _order(proto: ModelLike) -> Callable[[TensorId], tuple[str, int, str]]:
    """As the main graph makes them: groups of neighbours need the least of the graph."""
    place = {name: k for k, node in enumerate(proto.graph.node) for name in node.output}
    return lambda tensor: (tensor.scope, place.get(tensor.name, -1) if tensor.scope == "" else 0, tensor.name)


def _volume(batch: Batch) -> int:
    return sum(value.size for value in batch.feeds.values())


def _told(batches: Iterable[Batch], task: Task) -> Iterable[Batch]:
    for one in batches:
        yield one
        task.advance(one.count)


def _singles(dataset: Dataset) -> Callable[[Batch], Iterable[Feeds]]:
    return lambda batch: (dataset[k] for k in range(batch.first_index, batch.first_index + batch.count))


def _blame(taps: Taps, tensor: TensorId, batch: Batch, dataset: Dataset, error: CalibrationError) -> CalibrationError:
    """The error with the tensor's name and that of the sample, found by running the batch's samples alone."""
    positions: Sequence[int] = range(batch.first_index, batch.first_index + batch.count)
    guilty = positions[0]
    if batch.count > 1:
        for position in positions:
            alone = Batch(dataset[position], position, 1)
            probe = create(ObserverSpec(), QuantSpec())
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
