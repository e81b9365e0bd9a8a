"""Runs of a model with inner tensors as outputs, as many at a time as the memory limit allows."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import onnx

from onnxq.arrays import Array, ArrayDict, Shape, part_by_size
from onnxq.data import Batch, Dataset
from onnxq.errors import DataError, ModelError
from onnxq.graph import ModelLike, get_index, is_large_model
from onnxq.numerics.machine import map_in_threads, share_cores
from onnxq.runtime import Feeds, Session, Shapes, Tapped, tap_tensors, trim_memory
from onnxq.runtime.tap import lay_out_convolutions
from onnxq.sites import TensorId
from onnxq.workers import count_threads

Group = tuple[TensorId, ...]
Signature = tuple[tuple[str, Shape], ...]
# In bytes.
TensorSizes = dict[TensorId, int]

_MEMORY_LIMIT = 2**30
# Batches among which the largest is found, to size the groups by.
_LOOK_AHEAD = 16
# Exponent: tensors grow with the input at most as those of attention, by the square.
_GROWTH = 2.0
# Bytes; the share is of the memory limit. Memory is given back to the system after a run that tapped more than the
# first two, and after runs that tapped more than the last together: after every run of a small network it would take
# longer than the run, since the same pages are asked for again.
_WORTH_TRIMMING = 2**25
_SHARE = 32
_IN_ALL = 2**28
# Samples from which on laying convolutions out pays: that takes as long as a dozen runs, and each takes half the time.
MANY = 24


class _Runner:
    """One tapped session. worth: bytes of a run after which memory is given back. threads: of the session."""

    def __init__(self, tapped: Tapped, worth: int, threads: int) -> None:
        self._outputs = tapped.outputs
        self._worth = worth
        self._untrimmed = 0
        # NOTE: without optimizations a tensor's bits do not depend on what else is tapped; on the batch the last bits
        # of Softplus, Mish, Log and Elu do.
        self._session = Session(tapped.proto, optimize=False, arena=False, threads=threads)

    def release_values(self, results: Iterable[ArrayDict]) -> Iterator[tuple[TensorId, Array]]:
        """The values of the tensors in the results of `run_batch`, each released as it is yielded."""
        for outputs in results:
            size = sum(value.nbytes for value in outputs.values())
            self._untrimmed += size
            for tensor, name in self._outputs.items():
                # So that a value is freed as soon as the observers have looked at it, before the
                # next one.
                value = outputs.pop(name)
                if value.size:
                    yield tensor, value
                del value
            if size > self._worth or self._untrimmed > _IN_ALL:
                self._untrimmed = 0
                trim_memory()

    def run_batch(self, batch: Batch, dataset: Dataset | None) -> Iterable[ArrayDict]:
        """The outputs of the batch, or of its samples one by one, which run as they are read."""
        try:
            return [self._session.run(batch.feeds, list(self._outputs.values()))]
        except (DataError, ModelError) as error:
            if dataset is None:
                raise
            if batch.count == 1:
                cause = f"{error.cause}, in {dataset.name(batch.first_index)}"
                raise error.replace_text(cause=cause) from error
            # A Reshape inside may have the size of one sample, whatever the inputs declare.
            singles = dataset.split_batch(batch)
            return chain.from_iterable(self.run_batch(single, dataset) for single in singles)


class Taps:
    """The tapped runs of one model. refusals: the tensors that cannot be made outputs, with the reason.

    memory_limit: bytes of the tapped values at a time, 1 GiB by default; the memory of the model itself comes on top.
    many: run the model of `lay_out_convolutions`, and several batches side by side where the limit lets them. runs: so
    many batches, where `count_runs` of other samples says so.
    """

    def __init__(
        self,
        proto: ModelLike,
        tensors: Sequence[TensorId],
        memory_limit: int | None = None,
        *,
        many: bool = False,
        runs: int = 0,
    ) -> None:
        self._proto = proto
        self._index = get_index(proto)
        self._limit = _MEMORY_LIMIT if memory_limit is None else memory_limit
        whole = tap_tensors(proto, tensors, only=True)
        self.refusals = whole.refusals
        self.tensors = tuple(whole.outputs)
        # Used by the first runner of all tensors, then released: it is of a model that is not laid out.
        self._whole = None if many else whole
        # The model that is run; made when first needed.
        self._run_model = None if many else proto
        # Batches at a time, each on its share of the cores: operators of most networks are too small for all of them.
        self._most_runs = (
            share_cores(count_threads() or 1) if many and not is_large_model(proto) else 1
        )
        self.runs = runs
        # Bytes of each tensor, by the shapes of the inputs.
        self._sizes: dict[Signature, TensorSizes] = {}
        self._shapes: Shapes | None = None
        # The session of the last group, which the next run may be of too.
        self._open: tuple[Group, _Runner] | None = None

    def form_groups(self, batches: Iterable[Batch]) -> list[Group]:
        """The tensors, in order, in groups whose values stay below the limit; no tensor is split.

        batches: the largest of the first ones decides.
        """
        largest = _find_largest(batches)
        self.runs = self.runs or self.count_runs([largest])
        return self._pack_tensors(self.tensors, largest)

    def count_runs(self, batches: Iterable[Batch]) -> int:
        """How many batches go on side by side; the largest of the first ones decides."""
        size = max(sum(self._find_sizes(_find_largest(batches)).values()), 1)
        # Results wait for the observers: of as many runs as go on, and of one more.
        return max(min(self._most_runs, self._limit // size - 1), 1)

    def run(
        self, group: Group, batches: Iterable[Batch], dataset: Dataset | None = None
    ) -> Iterator[tuple[Batch, TensorId, Array]]:
        """Every non-empty value of the group's tensors, batch by batch; the caller owns the arrays.

        dataset: of the batches; one that the model cannot run whole (a Reshape to batch 1) runs sample by sample. A
        batch whose values would exceed the limit is run in smaller groups. Raises ModelError or DataError with the name
        of the sample that fails.
        """
        if self._open is None or self._open[0] != group:
            # Let go of the old one first.
            self._open = None
            self._open = group, self._open_runner(group)
        main = self._open[1]

        def list_runs() -> Iterator[tuple[Batch, _Runner]]:
            for batch in batches:
                parts = self._pack_tensors(group, batch)
                for part in parts:
                    yield batch, main if len(parts) == 1 else self._open_runner(part)

        def run_batch(item: tuple[Batch, _Runner]) -> tuple[Batch, _Runner, Iterable[ArrayDict]]:
            batch, runner = item
            return batch, runner, runner.run_batch(batch, dataset)

        for batch, runner, results in map_in_threads(
            run_batch, list_runs(), threads=max(self.runs, 1)
        ):
            for tensor, value in runner.release_values(results):
                yield batch, tensor, value

    def _open_runner(self, group: Group) -> _Runner:
        tapped = self._whole
        self._whole = None
        if tapped is None or group != self.tensors:
            if self._run_model is None:
                self._run_model = lay_out_convolutions(self._proto)
            tapped = tap_tensors(self._run_model, group, only=True)
        worth = min(_WORTH_TRIMMING, self._limit // _SHARE)
        return _Runner(tapped, worth, count_threads() or share_cores(self.runs))

    def _pack_tensors(self, group: Group, batch: Batch) -> list[Group]:
        sizes = self._find_sizes(batch)
        at_a_time = self.runs + 1 if self.runs > 1 else 1
        parts = part_by_size([sizes[tensor] for tensor in group], self._limit // at_a_time)
        return [group[part] for part in parts]

    def _find_sizes(self, batch: Batch) -> Mapping[TensorId, int]:
        """Bytes of each tensor in this batch: as declared, else bounded by an earlier batch, else observed."""
        signature = tuple((name, value.shape) for name, value in sorted(batch.feeds.items()))
        if signature not in self._sizes:
            self._sizes[signature] = (
                self._read_sizes(batch.feeds)
                or self._bound_sizes(signature)
                or self._observe_sizes(batch)
            )
        return self._sizes[signature]

    def _read_sizes(self, feeds: Feeds) -> TensorSizes | None:
        """Bytes by the declared shapes; None where one is not known."""
        known = {}
        for value in self._index.inputs:
            # An input of unknown rank has no symbols.
            for symbol, size in zip(value.dims, feeds[value.name].shape, strict=False):
                if isinstance(symbol, str):
                    known[symbol] = size
        sizes_of_tensors = {}
        for tensor in self.tensors:
            shape = self._index.find_shape(tensor)
            dims = (
                [None]
                if shape is None
                else [known.get(dim) if isinstance(dim, str) else dim for dim in shape]
            )
            sizes = [dim for dim in dims if dim is not None]
            if len(sizes) < len(dims):
                return None
            sizes_of_tensors[tensor] = math.prod(sizes) * self._find_itemsize(tensor)
        return sizes_of_tensors

    def _bound_sizes(self, signature: Signature) -> TensorSizes | None:
        """Upper bounds from an observed batch; None where they exceed the limit."""
        for earlier, sizes in self._sizes.items():
            ratio = (
                max(1.0, _count_elements(signature) / max(_count_elements(earlier), 1)) ** _GROWTH
            )
            if ratio * sum(sizes.values()) <= self._limit:
                return {tensor: int(ratio * size) for tensor, size in sizes.items()}
        return None

    def _observe_sizes(self, batch: Batch) -> TensorSizes:
        if self._shapes is None:
            self._shapes = Shapes(self._proto, self.tensors)
        try:
            shapes = self._shapes.of(batch.feeds)
        except ModelError:
            if batch.count == 1:
                raise
            # The batch cannot run whole; its singles will, and are smaller.
            return dict.fromkeys(self.tensors, 0)
        return {t: math.prod(shapes.get(t, (0,))) * self._find_itemsize(t) for t in self.tensors}

    def _find_itemsize(self, tensor: TensorId) -> int:
        dtype = self._index.find_dtype(tensor) or onnx.TensorProto.FLOAT
        return int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def _find_largest(batches: Iterable[Batch]) -> Batch:
    return max(
        islice(batches, _LOOK_AHEAD),
        key=lambda batch: sum(value.size for value in batch.feeds.values()),
    )


def _count_elements(signature: Signature) -> int:
    return sum(math.prod(shape) for _, shape in signature)
