"""Observers of activations, updated by the samples: all at once, in chunks by workers, or in parts that are files.

Observers merge exactly, so neither the chunks nor who does them show in the result. A part names, by hashes, the model
whose tensors were observed, the observers, and the samples. Parts that do not belong together are refused, and so is a
run whose model, configuration or samples are others.
"""

import base64
import json
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import Array, hash_parts
from onnxq.calibrate.taps import Group, Taps
from onnxq.config.schema import JsonText, Loose, Natural, SchemaNumber
from onnxq.data import Batch, Dataset
from onnxq.data.dataset import SharedSamples, share_samples
from onnxq.errors import CalibrationError
from onnxq.files import AnyPath, read_text
from onnxq.graph import ModelLike
from onnxq.observers import Observer, create_observer
from onnxq.progress import Progress, Task, silent
from onnxq.runtime.crew import Crew, SharedModel, hash_feeds, hash_run, open_model
from onnxq.sites import Names, TensorId
from onnxq.spec import ObserverSpec, QuantSpec
from onnxq.wording import abbreviate, join_names, show_html
from onnxq.workers import WorkPiece, count_threads, pack_value, restore_object, unpack_value


@dataclass(frozen=True)
class Want:
    """Request for one observer; sites with equal requests share it."""

    key: str
    observer: ObserverSpec
    quant: QuantSpec

    def create_observer(self) -> Observer:
        """An observer that has seen nothing."""
        return create_observer(self.observer, self.quant)


@dataclass(eq=False)
class Watch:
    """The observers of one run over the data. readers: the requests whose observers each tensor updates."""

    observers: dict[Want, Observer] = field(default_factory=dict)
    readers: dict[TensorId, list[Want]] = field(default_factory=dict)

    def add(self, want: Want, tensor: TensorId) -> None:
        """Update the observer of `want` with the values of `tensor`."""
        self.observers.setdefault(want, want.create_observer())
        wants = self.readers.setdefault(tensor, [])
        if want not in wants:
            wants.append(want)

    def add_constant(self, want: Want, value: Array) -> None:
        """Update the observer of `want` with a constant, once. NaN in it marks what is absent, as -inf does."""
        observer = self.observers.setdefault(want, want.create_observer())
        _update_observer(observer, np.fmax(value, -np.inf))


def _update_observer(observer: Observer, value: Array) -> None:
    try:
        observer.update(value)
    except CalibrationError:
        # -inf is a mask's way to say "not this one"; NaN and an overflow to inf are faults.
        if not (value < np.inf).all() or not np.isneginf(value).any():
            raise
        observer.infinite = True


def observe_samples(
    taps: Taps, watch: Watch, dataset: Dataset, *, batch: int | None, progress: Progress
) -> None:
    """Run all samples and update every observer of `watch` that reads a tensor.

    batch: samples in one run, 1 where an observer takes samples one by one.
    Raises CalibrationError naming tensor and sample for a NaN or +inf; ModelError and DataError from the runs.
    """
    if any(observer.per_sample for observer in watch.observers.values()):
        batch = 1
    groups = taps.form_groups(dataset.batches(batch))
    with progress("calibrating", len(groups) * len(dataset)) as task:
        for group in groups:
            for part, tensor, value in taps.run(
                group, _count_batches(dataset.batches(batch), task), dataset
            ):
                try:
                    for want in watch.readers[tensor]:
                        _update_observer(watch.observers[want], value)
                except CalibrationError as error:
                    raise _name_sample(taps, tensor, part, dataset, error) from error
                # Before the next value is made, so that only one is held.
                del value


def _count_batches(batches: Iterable[Batch], task: Task) -> Iterable[Batch]:
    for batch in batches:
        yield batch
        task.advance(batch.count)


def _name_sample(
    taps: Taps, tensor: TensorId, batch: Batch, dataset: Dataset, error: CalibrationError
) -> CalibrationError:
    """The error with the names of the tensor and the sample, found by running the samples of the batch one by one."""
    # Stays the first where no sample fails alone.
    guilty = batch.first_index
    if batch.count > 1:
        for alone in dataset.split_batch(batch):
            # Of any kind: all observers refuse the same values.
            probe = create_observer(ObserverSpec(), QuantSpec())
            try:
                for _, _, value in taps.run((tensor,), [alone]):
                    _update_observer(probe, value)
            except CalibrationError:
                guilty = alone.first_index
                break
    return CalibrationError(
        tensor,
        f"{error.cause}, in {dataset.name(guilty)}",
        "mend or leave out that sample, or the node that made it",
        code="Q501",
    )


# Of all samples: few enough that their histograms fit on a disk, and one sample each of the usual 32 to 64.
_CHUNKS = 64

Readers = tuple[tuple[TensorId, tuple[Want, ...]], ...]
# Hashes that all parts of one calibration share, by the name of what they are of.
PartKeys = dict[str, str]


@dataclass(frozen=True)
class ObserveTask:
    """Some samples, and the observers that look at each tensor of a model.

    modules: those that define the observers. runs: batches side by side, 0 where the samples are not many.
    """

    model: SharedModel
    readers: Readers
    modules: Names
    samples: SharedSamples
    runs: int
    batch: int | None
    memory_limit: int | None


def observe_in_chunks(
    crew: Crew,
    proto: ModelLike,
    watch: Watch,
    dataset: Dataset,
    *,
    runs: int,
    batch: int | None,
    memory_limit: int | None,
    progress: Progress,
) -> None:
    """Update every observer of `watch` that reads a tensor, as `observe_samples` does. runs: as of `ObserveTask`."""
    readers = freeze_readers(watch, proto)
    modules = tuple(
        sorted({type(watch.observers[want]).__module__ for _, wants in readers for want in wants})
    )
    with progress("calibrating", len(dataset)) as task:
        model = crew.share_model(proto)
        pieces = []
        for positions in split_evenly(range(len(dataset)), _CHUNKS):
            samples = share_samples(crew, dataset, positions)
            title = f"calibration on {samples.names[0]}"
            feeds = (feed.digest for feed in samples.feeds)
            key = hash_run("observe", model.digest, repr(readers), str(runs), *feeds)
            observe = ObserveTask(model, readers, modules, samples, runs, batch, memory_limit)
            pieces.append(WorkPiece(title, observe, key))
        chunks = crew.map(
            observe_chunk, pieces, on_done=lambda piece: task.advance(len(piece.task.samples.feeds))
        )
        for observers in chunks:
            merge_observers(watch, list_wants(readers), observers)


def observe_chunk(task: ObserveTask) -> list[Observer]:
    """The observers of one chunk, in the order of `list_wants`."""
    for module in task.modules:
        # Observers of the caller's own are registered by their module; that of a script has been run already.
        if module not in sys.modules and module != "__main__":
            import_module(module)
    watch = make_watch(task.readers)
    tensors = tuple(tensor for tensor, _ in task.readers)
    taps = _open_taps(task.model, tensors, task.memory_limit, task.runs)
    if taps.tensors:
        observe_samples(taps, watch, task.samples.open(), batch=task.batch, progress=silent)
    return [watch.observers[want] for want in list_wants(task.readers)]


def merge_observers(
    watch: Watch, wants: Sequence[Want], others: Sequence[Observer | Mapping[str, Any]]
) -> None:
    """Merge observers into those of `watch`. others: as `observe_chunk` returns them, or as a file has them.

    Raises ValueError for numbers that are not those of such observers.
    """
    for want, other in zip(wants, others, strict=True):
        if isinstance(other, Mapping):
            fresh = want.create_observer()
            restore_object(fresh, other)
            other = fresh
        watch.observers[want].merge(other)
        watch.observers[want].infinite |= other.infinite


def freeze_readers(watch: Watch, proto: ModelLike) -> Readers:
    """The tensors that observers read, in the order in which the graph computes them."""
    # The order in which the main graph computes tensors: groups of neighbours need the least of it to be run.
    place = {name: k for k, node in enumerate(proto.graph.node) for name in node.output}
    ordered = sorted(
        watch.readers,
        key=lambda tensor: (
            tensor.scope,
            # Inputs of the graph come before all nodes.
            place.get(tensor.name, -1) if tensor.scope == "" else 0,
            tensor.name,
        ),
    )
    return tuple((tensor, tuple(watch.readers[tensor])) for tensor in ordered)


def make_watch(readers: Readers) -> Watch:
    """Observers of these tensors, which have seen nothing."""
    watch = Watch()
    for tensor, wants in readers:
        for want in wants:
            watch.add(want, tensor)
    return watch


def list_wants(readers: Readers) -> list[Want]:
    """Every request once, in order."""
    return list(dict.fromkeys(want for _, wants in readers for want in wants))


def split_evenly(items: Sequence[int], most: int) -> list[Sequence[int]]:
    """At most so many runs of neighbours, none empty, whose sizes differ by no more than one."""
    count = min(len(items), most)
    ends = [len(items) * k // count for k in range(count + 1)]
    return [items[first:last] for first, last in pairwise(ends)]


# Sessions are kept from one chunk to the next.
@lru_cache(maxsize=1)
def _open_taps(model: SharedModel, tensors: Group, memory_limit: int | None, runs: int) -> Taps:
    return Taps(open_model(model), tensors, memory_limit, many=runs > 0, runs=runs)


# Of the file; raised when its form changes.
_SCHEMA = 1
_AGAIN = "make it with `onnxq calibrate`"
# Bytes of a file: histograms of ten thousand tensors.
_MOST_BYTES = 2**32
# Samples that a message lists.
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Part:
    """Observers of some samples.

    keys: hashes of what parts must have in common, by its name in messages. total: samples of the whole. samples: the
    hash of each observed one, by its position. wants: the requests, in order; observers: what they saw, one each, as
    attributes by name.
    """

    __repr__ = abbreviate
    _repr_html_ = show_html

    source: str
    keys: PartKeys
    total: int
    samples: dict[int, str]
    wants: tuple[Want, ...]
    observers: tuple[Any, ...]

    @property
    def missing(self) -> list[int]:
        """Positions of the samples that were not observed."""
        return [k for k in range(self.total) if k not in self.samples]


class _PartFile(Loose):
    schema_number: SchemaNumber
    keys: PartKeys
    total: Natural
    samples: dict[str, str]
    value: str
    arrays: Names


def make_keys(model: str, readers: Readers, dataset: Dataset) -> PartKeys:
    """The hashes that parts of one calibration share. model: digest of the prepared model."""
    # Most data sets differ in one or the other; the rest shows when contents are compared, sample by sample.
    data = f"{len(dataset)} {hash_feeds(dataset[0])}"
    return {
        "version of onnxq": version("onnxq"),
        "model": model,
        # Sums of floats depend, in their last bits, on how many threads share them.
        "configuration": hash_parts(f"{readers!r} {count_threads()}"),
        "data": hash_parts(data),
    }


def make_part(
    keys: PartKeys, readers: Readers, watch: Watch, dataset: Dataset, positions: Sequence[int]
) -> Part:
    """The part of the samples at these positions, which `watch` has observed."""
    samples = {k: hash_feeds(dataset[k]) for k in positions}
    wants = tuple(list_wants(readers))
    return Part("", keys, len(dataset), samples, wants, _pack_observers(watch, wants))


def _pack_observers(watch: Watch, wants: Iterable[Want]) -> tuple[Any, ...]:
    """The observers as they come out of a file."""
    return tuple(unpack_value(*pack_value([watch.observers[want] for want in wants])))


_QUANT_FIELDS = ("bits", "signed", "symmetric", "narrow_range", "storage", "footroom")


def write_part(part: Part) -> str:
    """The part as JSON."""
    rows = [
        [
            want.key,
            want.observer.name,
            dict(want.observer.options),
            # Those of an activation, whose spec is for the whole tensor.
            {name: getattr(want.quant, name) for name in _QUANT_FIELDS},
        ]
        for want in part.wants
    ]
    value, arrays = pack_value({"wants": rows, "observers": list(part.observers)})
    texts = [base64.b64encode(zlib.compress(array.tobytes(), 1)).decode() for array in arrays]
    samples = {str(k): digest for k, digest in sorted(part.samples.items())}
    whole = {
        "schema": _SCHEMA,
        "kind": "onnxq.ranges",
        "keys": part.keys,
        "total": part.total,
        "samples": samples,
        "value": value,
        "arrays": texts,
    }
    return json.dumps(whole, indent=1) + "\n"


def read_part(path: AnyPath) -> Part:
    """Read what `write_part` wrote. Raises CalibrationError for another file."""
    text = read_text(path, CalibrationError, _AGAIN, limit=_MOST_BYTES, code="Q513")
    file = JsonText(str(path), text)
    row = file.parse(CalibrationError, _AGAIN, code="Q513")
    if not isinstance(row, dict) or (row.get("kind"), row.get("schema")) != (
        "onnxq.ranges",
        _SCHEMA,
    ):
        raise CalibrationError(
            Path(path), "is no part of a calibration of this version", _AGAIN, code="Q513"
        )
    contents = file.read(_PartFile, CalibrationError, _AGAIN, code="Q513")
    try:
        arrays = [
            np.frombuffer(zlib.decompress(base64.b64decode(array_text)), np.uint8)
            for array_text in contents.arrays
        ]
        value = unpack_value(contents.value, arrays)
        wants = tuple(
            Want(key, ObserverSpec(name, tuple(options.items())), QuantSpec(**quant))
            for key, name, options, quant in value["wants"]
        )
        samples = {int(k): digest for k, digest in contents.samples.items()}
        part = Part(
            str(path), contents.keys, contents.total, samples, wants, tuple(value["observers"])
        )
        # Its observers must take the numbers.
        join_parts([part])
    except CalibrationError:
        raise
    except Exception as error:  # of whatever kind a damaged value leads to
        raise CalibrationError(
            Path(path), f"is damaged ({type(error).__name__})", _AGAIN, code="Q513"
        ) from error
    return part


def join_parts(parts: Sequence[Part]) -> Part:
    """One part of all their samples.

    Raises CalibrationError for parts of another model, configuration, data set or version than the first, and for
    samples that two of them hold.
    """
    first = parts[0]
    watch = Watch({want: want.create_observer() for want in first.wants})
    samples: dict[int, str] = {}
    for part in parts:
        check_keys(part, first.keys, first.source)
        twice = sorted(samples.keys() & part.samples.keys())
        if twice:
            cause = f"holds sample {twice[0]}, which another part holds too"
            raise CalibrationError(part.source, cause, "give each part once", code="Q512")
        samples |= part.samples
        merge_observers(watch, first.wants, part.observers)
    return replace(first, samples=samples, observers=_pack_observers(watch, first.wants))


def check_keys(part: Part, keys: PartKeys, other: str) -> None:
    """Raise CalibrationError, with the name of the difference, for a part with other keys than those of `other`."""
    for name, value in keys.items():
        if part.keys.get(name) != value:
            cause = f"was made with another {name} than {other}"
            fix = "make all parts, and quantize, with the same model, samples, options, version and kind of machine"
            raise CalibrationError(part.source, cause, fix, code="Q511")


def check_samples(part: Part, dataset: Dataset) -> None:
    """Raise CalibrationError where samples are missing from a part, or are not those of the data set."""
    if part.missing:
        listed = join_names(map(dataset.name, part.missing), _SHOWN)
        cause = f"lacks {len(part.missing)} of {part.total} samples: {listed}"
        raise CalibrationError(part.source, cause, "merge the parts of all shards", code="Q512")
    for k in range(len(dataset)):
        if hash_feeds(dataset[k]) != part.samples[k]:
            cause = f"was made with other values of {dataset.name(k)}"
            raise CalibrationError(
                part.source, cause, "make its part again with this data", code="Q511"
            )
