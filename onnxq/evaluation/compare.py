"""Outputs of two models side by side: the one place where a float model and others run on the same samples."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from onnx import TypeProto, ValueInfoProto

from onnxq.arrays import Array, ArrayDict, Arrays, Shape
from onnxq.data import Dataset, read_mask
from onnxq.errors import VerificationError
from onnxq.evaluation.accumulator import (
    ErrorAccumulator,
    OutputAccuracy,
    SliceSums,
    compute_sqnr,
    db_to_noise,
)
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.selections import find_selections
from onnxq.graph import ModelLike, is_large_model
from onnxq.numerics.machine import map_in_threads, share_cores
from onnxq.progress import Tick
from onnxq.runtime import Feeds, Session
from onnxq.spec import FLOAT_TYPES, FloatType
from onnxq.workers import count_threads


class ModelRunner(Protocol):
    """A Session, or a stand-in for one."""

    def run(self, feeds: Arrays, /) -> ArrayDict:
        """Return all outputs by name."""


# The reference, and what is compared with it.
RunnerPair = tuple[ModelRunner, ModelRunner]
# Quantile of the normal distribution: 19 in 20 other sets of as many samples have no fewer dB than an estimate less its
# spread.
_QUANTILE = 1.645

# By output: the sums of each of its arrays, of which a sequence has several.
SampleErrors = dict[str, list[ErrorAccumulator]]
# Of a run, by name.
Outputs = Mapping[str, object]


@dataclass(eq=False)
class ModelErrors:
    """All outputs of one model against another's, summed over samples, whole and by slices of other scales."""

    outputs: dict[str, ErrorAccumulator] = field(default_factory=dict)
    # As of ErrorAccumulator: how many of the largest of each row are compared.
    top_k: int = 0
    # Noise and signal of each sample, by output.
    _samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def update(self, feeds: Arrays, reference: Outputs, got: Outputs) -> None:
        """Add one run. Strings do not count, nor do values that the model's own mask input leaves out."""
        self.add(measure_sample(feeds, reference, got, self.top_k))

    def add(self, sample: SampleErrors) -> None:
        """Add one run that `measure_sample` looked at."""
        for name, parts in sample.items():
            sums = self._find_sums(name)
            noise = sums.noise
            signal = sums.signal
            for part in parts:
                sums.add(part)
            own = (sums.noise - noise, sums.signal - signal)
            self._samples.setdefault(name, []).append(own)

    def merge(self, other: ModelErrors) -> None:
        """Add the runs of another."""
        for name, sums in other.outputs.items():
            self._find_sums(name).add(sums)
            self._samples.setdefault(name, []).extend(other._samples[name])

    @property
    def count(self) -> int:
        """Number of samples."""
        return max(map(len, self._samples.values()), default=0)

    def _find_sums(self, name: str) -> ErrorAccumulator:
        return self.outputs.setdefault(name, _make_sums(name, self.top_k))

    def results(self) -> tuple[OutputAccuracy, ...]:
        """The error of each output."""
        return tuple(sums.result() for sums in self.outputs.values())

    def noise(self, outputs: Collection[str] | None = None) -> float:
        """Noise power over signal power, the mean of all outputs, or of these; inf when an output is not finite."""
        # By name: the choices of a network are outputs, too.
        results = (
            sums.result()
            for name, sums in self.outputs.items()
            if outputs is None or name in outputs
        )
        ratios = [db_to_noise(result.sqnr_db) for result in results]
        return math.fsum(ratios) / len(ratios) if ratios else 0.0

    def worst_db(self) -> float:
        """SQNR in dB of the worst output, or part of one; inf when nothing differs."""
        return min((result.sqnr_db for result in self.results()), default=math.inf)

    def likely_db(self) -> float:
        """SQNR in dB that the worst output, or part of one, is likely to have on as many other samples.

        That is with one standard error more noise; with twice the noise of a single sample, which says nothing of
        others.
        """
        return self._estimate(1.0).least_db

    def estimate(self, optimism: float = 0.0) -> Estimate:
        """The SQNR that new samples will have, of the output, or the part of one, that may have least.

        optimism: dB by which these samples may have more than others, beyond chance.
        """
        estimate = self._estimate(count_errors(self.count))
        return replace(estimate, spread_db=estimate.spread_db + optimism)

    def _estimate(self, errors: float) -> Estimate:
        """`estimate` with a spread of so many standard errors."""
        estimates = [Estimate(math.inf, 0.0)]
        for name, sums in self.outputs.items():
            result = sums.result()
            estimates.append(
                Estimate(result.whole_db, _to_spread(errors * self._measure_error(name)), name)
            )
            for part in sums.parts() if sums.comparable else ():
                # Of their ratio to the mean, as of the whole.
                error = part.spread / part.noise if part.noise > 0 else 0.0
                db = compute_sqnr(part.signal, part.noise)
                estimates.append(Estimate(db, _to_spread(errors * error), name + part.text))
        return min(estimates, key=lambda estimate: estimate.least_db)

    def _measure_error(self, name: str) -> float:
        """Standard error of an output's noise-to-signal ratio, as a share of it; 1 where one sample tells nothing."""
        # Copied, so that each is added up along its memory.
        noises, signals = np.asarray(self._samples[name]).T.copy()
        if len(noises) < 2:
            return 1.0
        noise = float(noises.sum())
        signal = float(signals.sum())
        if not (noise > 0 and signal > 0 and math.isfinite(noise)):
            return 0.0
        # Of a ratio of sums: Cochran, "Sampling Techniques", 3rd ed., 1977, section 6.3.
        rest = noises / noise - signals / signal
        return math.sqrt(float(rest @ rest) * len(rest) / (len(rest) - 1))


@dataclass(frozen=True)
class Estimate:
    """An SQNR in dB, and how many dB less other samples may have. name: the output, and the part of it."""

    sqnr_db: float
    spread_db: float
    name: str = ""

    @property
    def least_db(self) -> float:
        """The SQNR that other samples have at least, all but surely."""
        return self.sqnr_db - self.spread_db


def count_errors(samples: int) -> float:
    """Standard errors below a mean of so many samples, above which another such mean lies 19 times in 20.

    Student's quantile by its Cornish-Fisher expansion, within 2 % from 4 samples on.
    """
    z = _QUANTILE
    freedom = max(samples - 1, 1)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _to_spread(share: float) -> float:
    """Decibels that so large a share more noise costs."""
    return 10.0 * math.log10(1.0 + share)


def _make_sums(name: str, top_k: int) -> ErrorAccumulator:
    return ErrorAccumulator(name, slices=SliceSums(), top_k=top_k)


def measure_sample(feeds: Arrays, reference: Outputs, got: Outputs, top_k: int = 0) -> SampleErrors:
    """The errors of one run by themselves, for `ModelErrors.add`, which may be that of another process."""
    errors: SampleErrors = {}
    for name, pairs in pair_outputs(feeds, reference, got):
        errors[name] = []
        for exact, value in pairs:
            sums = _make_sums(name, top_k)
            sums.update(exact, value)
            errors[name].append(sums)
    return errors


def compare_models(
    pairs: Mapping[str, RunnerPair],
    samples: Iterable[Arrays],
    *,
    on_sample: Tick = lambda: None,
) -> dict[str, ModelErrors]:
    """Run each (reference, other) pair of sessions over the samples; per label, their errors.

    Sessions that appear in several pairs run once a sample. Only numbers are compared, those in sequences and maps too;
    outputs without any are left out. Of outputs with a position for each of the model's mask input only the positions
    count that it does not leave out as padding.
    """
    sums = {label: ModelErrors(top_k=1) for label in pairs}
    for feeds in samples:
        # By identity: sessions compare by nothing else, and the float model's is in most pairs.
        sessions = {id(session): session for pair in pairs.values() for session in pair}
        outputs = {key: session.run(feeds) for key, session in sessions.items()}
        for label, (reference, other) in pairs.items():
            sums[label].update(feeds, outputs[id(reference)], outputs[id(other)])
        on_sample()
    return sums


def drop_padding(feeds: Arrays, value: Array, other: Array) -> tuple[Array, Array]:
    """The values of both at the positions that the model's mask input does not leave out; all without such an input."""
    mask = read_mask(feeds, value.shape)
    if value.shape != other.shape:
        return value, other
    if mask is None:
        written = _find_written(feeds, value.shape)
        return value[written], other[written]
    return value[mask][np.newaxis], other[mask][np.newaxis]


def _find_written(feeds: Arrays, shape: Shape) -> Any:
    """The part of an output that a run writes: of a ring of keys or values no more than there are tokens.

    Such a ring [..., tokens, size] is as long going in as coming out, and holds a window of the last tokens.
    """
    if not any("past" in name and feed.shape == shape for name, feed in feeds.items()):
        return ...
    tokens = [feed.shape[-1] for name, feed in feeds.items() if "mask" in name]
    return ..., slice(max(tokens, default=None)), slice(None)


def pair_outputs(
    feeds: Arrays, reference: Outputs, got: Outputs
) -> Iterator[tuple[str, list[tuple[Array, Array]]]]:
    """The arrays of each output beside those of another run, without padding; strings are left out.

    Where the runs gave different numbers of them, or other keys, the pair is one of different shapes.
    """
    for name, value in reference.items():
        if name not in got:
            continue
        mine = dict(_list_arrays(value, ""))
        other = dict(_list_arrays(got[name], ""))
        if list(mine) != list(other):
            # Two shapes that never agree make the output incomparable.
            yield name, [(np.zeros(1), np.zeros(0))]
        elif mine:
            yield name, [drop_padding(feeds, array, other[place]) for place, array in mine.items()]


def _list_arrays(value: object, place: str) -> Iterator[tuple[str, Array]]:
    """The arrays of numbers in a value of ONNX Runtime's, with their places: in sequences, maps and optionals."""
    if isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from _list_arrays(item, f"{place}[{k}]")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _list_arrays(value[key], f"{place}[{key!r}]")
    elif isinstance(value, (np.ndarray, np.generic, int, float)):
        array = np.asarray(value)
        # Strings and objects have no distance.
        if array.dtype.kind in "fiub":
            yield place, array


def check_interface(
    before: ModelLike,
    after: ModelLike,
    floats: FloatType | None = None,
    *,
    fixed: Collection[str] = (),
) -> None:
    """Same inputs and outputs: names, order, types and shapes. VerificationError names the first that differs.

    floats: the type of all float inputs and outputs of `after` but those named in `fixed`; None: those of `before`.
    """
    # Up to IR version 3 initializers are listed among the inputs; nobody feeds them.
    stored = {tensor.name for tensor in before.graph.initializer}
    wanted = [value for value in before.graph.input if value.name not in stored]
    for kind, old, new in (
        ("input", wanted, after.graph.input),
        ("output", before.graph.output, after.graph.output),
    ):
        if [value.name for value in old] != [value.name for value in new]:
            raise VerificationError(
                kind + "s",
                f"were {[v.name for v in old]}, are {[v.name for v in new]}",
                code="Q702",
            )
        for a, b in zip(old, new, strict=True):
            if _describe_type(a, None if a.name in fixed else floats) != _describe_type(b, None):
                raise VerificationError(
                    f"{kind} {a.name}", "has another type or shape than before", code="Q702"
                )


def _describe_type(value: ValueInfoProto, floats: FloatType | None) -> bytes:
    kind = TypeProto.FromString(value.type.SerializeToString())
    if floats is not None and kind.tensor_type.elem_type in FLOAT_TYPES:
        kind.tensor_type.elem_type = floats.onnx_type
    return bytes(kind.SerializeToString(deterministic=True))


# Bytes of outputs that are kept, 64 MiB; those of further samples are computed again.
_MOST_BYTES = 2**26

Run = Callable[[Feeds], Outputs]
# A run, a sample, the float outputs for it, and what the run is fed.
_FedRun = tuple[Run, Feeds, Arrays, Feeds]


class FloatOutputs:
    """A float model on the samples of a data set, as ONNX Runtime optimizes it, which changes outputs by 120 dB.

    Models are compared with it in the form that `selections.take_choices` gives them. threads: of each session; None:
    so many that the samples fill the cores, side by side.
    """

    def __init__(self, proto: ModelLike, samples: Dataset, *, threads: int | None = 0) -> None:
        self.proto = proto
        self.samples = samples
        self.selections = find_selections(proto)
        if threads is None:
            # Operators of most networks are too small to be shared out among cores. Of a large model one run at a time
            # is in memory.
            threads = 0 if is_large_model(proto) else count_threads() or share_cores(len(samples))
        self.threads = threads
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._outputs: dict[int, ArrayDict] = {}
        self._bytes = 0

    def run(self, at: int, feeds: Feeds) -> ArrayDict:
        """Return the outputs, choices among them, for the sample at this position, whose inputs are `feeds`."""
        # Models may be scored in several threads.
        with self._lock:
            if at in self._outputs:
                return self._outputs[at]
            if self._session is None:
                exposed = self.selections.expose_choices(self.proto)
                self._session = Session(exposed, fuse_pairs=False, threads=self.threads)
            outputs = self._session.run(feeds)
            # Sequences and maps have no size; they are rare, and small.
            self._bytes += sum(getattr(value, "nbytes", 0) for value in outputs.values())
            if self._bytes <= _MOST_BYTES:
                self._outputs[at] = outputs
                if len(self._outputs) == len(self.samples):
                    self._session = None  # and the weights with it: nothing is left to run
            return outputs

    def add_choices(self, at: int, feeds: Feeds) -> Feeds:
        """The inputs at this position with all that the float model chooses by computed values."""
        return self.selections.add_choices(feeds, self.run(at, feeds))

    def score_runs(
        self, runs: Sequence[Run], positions: Iterable[int], *, threads: int = 0
    ) -> Iterator[tuple[int, SampleErrors]]:
        """Yield (number of the run, its errors) for each sample and, within it, each run, which takes the choices.

        threads: that run at a time; 0: as many as leave each session its own on all cores.
        """

        def score(item: _FedRun) -> SampleErrors:
            run, feeds, exact, matched = item
            return measure_sample(feeds, exact, run(matched))

        large = is_large_model(self.proto)
        # Of a large model one run at a time is in memory; a session of all cores leaves none for another.
        threads = threads or (1 if large or not self.threads else share_cores(self.threads))
        for number, errors in enumerate(
            map_in_threads(score, self._list_runs(runs, positions), threads=threads)
        ):
            yield number % len(runs), errors
        # Until the next model comes: its session, and what calibrates it, have maps of the same weights. Sessions that
        # further samples need hold what their largest run took: 1 GB each of four, of a network of 1024 x 1024 pixels.
        if large or self._bytes > _MOST_BYTES:
            self._session = None

    def _list_runs(self, runs: Sequence[Run], positions: Iterable[int]) -> Iterator[_FedRun]:
        """Each run on each sample, with the sample, the float outputs and what the run is fed."""
        for at in positions:
            feeds = self.samples[at]
            exact = self.run(at, feeds)
            matched = self.selections.add_choices(feeds, exact)
            for run in runs:
                yield run, feeds, exact, matched

    def sum_runs(
        self,
        runs: Sequence[Run],
        *,
        limit: int | None = None,
        threads: int = 0,
        tick: Tick = lambda: None,
    ) -> list[ModelErrors]:
        """Return the errors of each run over all samples. limit: the most samples to run. tick: called after each.

        threads: as of `score_runs`.
        """
        errors = [ModelErrors() for _ in runs]
        for k, sample in self.score_runs(runs, range(len(self.samples))[:limit], threads=threads):
            errors[k].add(sample)
            tick()
        return errors


def add_own_choices(model: ModelLike, samples: Iterable[Feeds]) -> Iterator[Feeds]:
    """Each sample with what a float model chooses on it, as other forms of the model take it."""
    # Without choices there is nothing to run it for.
    reference = ReferenceRunner(model, optimize=False) if find_selections(model).nodes else None
    for feeds in samples:
        yield dict(feeds) if reference is None else reference.add_choices(feeds)


class ReferenceRunner:
    """A float model with its choices among its outputs. Asked again for the same inputs, by identity, it runs no more.

    optimize, threads, arena: of the session.
    """

    def __init__(
        self, model: ModelLike, *, optimize: bool = True, threads: int = 0, arena: bool = True
    ) -> None:
        self.selections = find_selections(model)
        exposed = self.selections.expose_choices(model)
        self.session = Session(exposed, optimize=optimize, threads=threads, arena=arena)
        self._last: tuple[Feeds, ArrayDict] | None = None

    def run(self, feeds: Feeds, /) -> ArrayDict:
        """Return all outputs by name."""
        if self._last is None or self._last[0] is not feeds:
            self._last = feeds, self.session.run(feeds)
        return self._last[1]

    def add_choices(self, feeds: Feeds) -> Feeds:
        """The inputs with all that the model chooses by computed values."""
        return self.selections.add_choices(feeds, self.run(feeds))


class MatchedRunner:
    """Another model, as `take_choices` makes it of one, on the choices of the reference.

    agreement: of its own choices, over all runs.
    """

    def __init__(self, reference: ReferenceRunner, runner: ModelRunner) -> None:
        self.agreement = AgreementSums(reference.selections)
        self._reference = reference
        self._runner = runner

    def run(self, feeds: Feeds, /) -> ArrayDict:
        """Return all outputs by name, without its own choices."""
        outputs = self._runner.run(self._reference.add_choices(feeds))
        self.agreement.update(self._reference.run(feeds), outputs)
        return outputs
