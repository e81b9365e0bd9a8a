"""Outputs of two models side by side over samples, and their interfaces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from onnx import TypeProto, ValueInfoProto

from onnxq.data import read_mask
from onnxq.errors import VerificationError
from onnxq.evaluation.accumulator import Array, ErrorAccumulator, OutputAccuracy, compute_sqnr
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.selections import NO_SELECTIONS
from onnxq.evaluation.slices import SliceSums
from onnxq.graph import ModelLike
from onnxq.spec import FLOAT_TYPES, FloatType


class Runner(Protocol):
    """A Session, or a stand-in for one."""

    def run(self, feeds: Mapping[str, Array], /) -> dict[str, Array]:
        """Return all outputs by name."""


# By output: the sums of each of its arrays, of which a sequence has several.
SampleErrors = dict[str, list[ErrorAccumulator]]


@dataclass(eq=False)
class ModelErrors:
    """All outputs of one model against another's, summed over samples, whole and by slices of other scales."""

    outputs: dict[str, ErrorAccumulator] = field(default_factory=dict)
    # As of ErrorAccumulator.
    top_k: int = 0
    _each: dict[str, list[float]] = field(default_factory=dict)

    def update(self, feeds: Mapping[str, Array], reference: Mapping[str, object], got: Mapping[str, object]) -> None:
        """Add one run. Strings do not count, nor do values that the model's own mask input leaves out."""
        for name, pairs in pair_outputs(feeds, reference, got):
            sums = self.outputs.setdefault(name, ErrorAccumulator(name, slices=SliceSums(), top_k=self.top_k))
            before = sums.noise
            for one, two in pairs:
                sums.update(one, two)
            self._each.setdefault(name, []).append(sums.noise - before)

    def add(self, sample: SampleErrors) -> None:
        """Add one run that `measure_sample` looked at: to the bit as `update` would."""
        for name, found in sample.items():
            sums = self.outputs.setdefault(name, ErrorAccumulator(name, slices=SliceSums()))
            before = sums.noise
            for one in found:
                sums.add(one)
            self._each.setdefault(name, []).append(sums.noise - before)

    def results(self) -> tuple[OutputAccuracy, ...]:
        """The error of each output."""
        return tuple(sums.result() for sums in self.outputs.values())

    def noise(self) -> float:
        """Noise power over signal power, the mean of all outputs; inf when an output is not finite."""
        ratios = [10.0 ** (-one.sqnr_db / 10.0) for one in self.results()]
        return math.fsum(ratios) / len(ratios) if ratios else 0.0

    def worst_db(self) -> float:
        """SQNR in dB of the worst output, or part of one; inf when nothing differs."""
        return min((one.sqnr_db for one in self.results()), default=math.inf)

    def likely_db(self) -> float:
        """SQNR in dB that the worst output, or part of one, is likely to have on as many other samples.

        That is with the mean noise and one standard error of it more; with twice the noise of a single sample, which
        says nothing of others.
        """
        found = [math.inf]
        for name, sums in self.outputs.items():
            each = self._each[name]
            mean = math.fsum(each) / len(each)
            # One sample says nothing of the spread between samples; its noise stands for its own error.
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else mean
            worse = 10.0 * math.log10(1.0 + error / mean) if mean > 0 else 0.0
            found.append(sums.result().whole_db - worse)
            if sums.comparable:
                found += [compute_sqnr(part.signal, part.noise + part.spread) for part in sums.parts()]
        return min(found)


def measure_sample(
    feeds: Mapping[str, Array], reference: Mapping[str, object], got: Mapping[str, object]
) -> SampleErrors:
    """The errors of one run by themselves, for `ModelErrors.add`, which may be that of another process."""
    found: SampleErrors = {}
    for name, pairs in pair_outputs(feeds, reference, got):
        found[name] = [ErrorAccumulator(name, slices=SliceSums()) for _ in pairs]
        for sums, (one, two) in zip(found[name], pairs, strict=True):
            sums.update(one, two)
    return found


def compare_models(
    pairs: Mapping[str, tuple[Runner, Runner]],
    samples: Iterable[Mapping[str, Array]],
    *,
    agreement: AgreementSums | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> dict[str, tuple[OutputAccuracy, ...]]:
    """Run each (reference, other) pair of sessions over the samples; per label, one result an output.

    Sessions that appear in several pairs run once a sample. Only numbers are compared, those in sequences and maps too;
    outputs without any are left out. Of outputs with a position for each of the model's mask input only the positions
    count that it does not leave out as padding.
    agreement: of the choices of the first pair. Its selections are those of the first reference, which exposes its
    choices; all other sessions take them.
    """
    agreement = AgreementSums(NO_SELECTIONS) if agreement is None else agreement
    sums = {label: ModelErrors(top_k=1) for label in pairs}
    # By identity: sessions compare by nothing else, and the float model's is in most pairs.
    first, *others = {id(session): session for pair in pairs.values() for session in pair}.values()
    for feeds in samples:
        exact = first.run(feeds)
        given = agreement.selections.add_choices(feeds, exact)
        done = {id(first): exact, **{id(session): session.run(given) for session in others}}
        agreement.update(exact, done[id(next(iter(pairs.values()))[1])])
        for label, (reference, other) in pairs.items():
            sums[label].update(feeds, done[id(reference)], done[id(other)])
        on_sample()
    return {label: errors.results() for label, errors in sums.items()}


def _meant(feeds: Mapping[str, Array], value: Array, other: Array) -> tuple[Array, Array]:
    mask = read_mask(feeds, value.shape)
    if mask is None or value.shape != other.shape:
        return value, other
    return value[mask][np.newaxis], other[mask][np.newaxis]


def pair_outputs(
    feeds: Mapping[str, Array], reference: Mapping[str, object], got: Mapping[str, object]
) -> Iterator[tuple[str, list[tuple[Array, Array]]]]:
    """The arrays of each output beside those of another run, without padding; strings are left out.

    Where the runs gave different numbers of them, or other keys, the pair is one of different shapes.
    """
    for name, value in reference.items():
        if name not in got:
            continue
        mine, other = dict(_arrays(value, "")), dict(_arrays(got[name], ""))
        if list(mine) != list(other):
            # Two shapes that never agree make the output incomparable.
            yield name, [(np.zeros(1), np.zeros(0))]
        elif mine:
            yield name, [_meant(feeds, array, other[place]) for place, array in mine.items()]


def _arrays(value: object, place: str) -> Iterator[tuple[str, Array]]:
    """The arrays of numbers in a value of ONNX Runtime's, with their places: in sequences, maps and optionals."""
    if isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from _arrays(item, f"{place}[{k}]")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _arrays(value[key], f"{place}[{key!r}]")
    elif isinstance(value, (np.ndarray, np.generic, int, float)):
        array = np.asarray(value)
        # Strings and objects have no distance.
        if array.dtype.kind in "fiub":
            yield place, array


def check_interface(
    before: ModelLike, after: ModelLike, floats: FloatType | None = None, *, fixed: Collection[str] = ()
) -> None:
    """Same inputs and outputs: names, order, types and shapes. VerificationError names the first that differs.

    floats: the type of all float inputs and outputs of `after` but those named in `fixed`; None: those of `before`.
    """
    # Up to IR version 3 initializers are listed among the inputs; nobody feeds them.
    stored = {tensor.name for tensor in before.graph.initializer}
    wanted = [value for value in before.graph.input if value.name not in stored]
    for kind, old, new in (("input", wanted, after.graph.input), ("output", before.graph.output, after.graph.output)):
        if [value.name for value in old] != [value.name for value in new]:
            raise VerificationError(
                kind + "s", f"were {[v.name for v in old]}, are {[v.name for v in new]}", code="Q702"
            )
        for a, b in zip(old, new, strict=True):
            if _describe_type(a, None if a.name in fixed else floats) != _describe_type(b, None):
                raise VerificationError(f"{kind} {a.name}", "has another type or shape than before", code="Q702")


def _describe_type(value: ValueInfoProto, floats: FloatType | None) -> bytes:
    wanted = TypeProto.FromString(value.type.SerializeToString())
    if floats is not None and wanted.tensor_type.elem_type in FLOAT_TYPES:
        wanted.tensor_type.elem_type = floats.onnx_type
    return bytes(wanted.SerializeToString(deterministic=True))
