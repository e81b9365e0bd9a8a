"""Is the quantized model still the float one? Both run on held-back samples, as the file says and as users run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.data import attended
from onnxq.errors import VerificationError

Array = NDArray[np.generic]


class Runs(Protocol):
    """A Session, or what stands in for one."""

    def run(self, feeds: Mapping[str, Array], /) -> dict[str, Array]:
        """All outputs by name."""


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """How far one output is from the reference over all samples: SQNR in dB and cosine similarity."""

    name: str
    sqnr_db: float
    cosine: float
    max_abs: float


@dataclass
class Comparison:
    """Streaming sums of one output against its reference; nothing of a sample is kept."""

    name: str
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    power: float = 0.0
    worst: float = 0.0
    finite: bool = True
    shapes: bool = field(default=True)

    def update(self, reference: Array, value: Array) -> None:
        """Add one sample."""
        if reference.shape != value.shape:
            self.shapes = False
            return
        if reference.size == 0:
            return
        ref, got = reference.astype(np.float64), value.astype(np.float64)
        both = np.isfinite(ref)
        if not np.isfinite(got[both]).all():
            self.finite = False
            return
        ref, got = ref[both], got[both]
        error = got - ref
        self.signal += float(ref @ ref)
        self.noise += float(error @ error)
        self.dot += float(ref @ got)
        self.power += float(got @ got)
        self.worst = max(self.worst, float(np.abs(error).max(initial=0.0)))

    def result(self) -> OutputError:
        """What the sums say. An all-zero pair agrees perfectly."""
        if not self.finite or not self.shapes:
            return OutputError(name=self.name, sqnr_db=-np.inf, cosine=0.0, max_abs=np.inf)
        if self.noise == 0.0:
            sqnr = np.inf
        else:
            sqnr = 10.0 * float(np.log10(max(self.signal, np.finfo(np.float64).tiny) / self.noise))
        norm = float(np.sqrt(self.signal) * np.sqrt(self.power))
        cosine = self.dot / norm if norm > 0 else float(self.noise == 0.0)
        return OutputError(name=self.name, sqnr_db=sqnr, cosine=cosine, max_abs=self.worst)


def compare(
    pairs: Mapping[str, tuple[Runs, Runs]],
    samples: Iterable[Mapping[str, Array]],
    *,
    on_sample: Callable[[], None] = lambda: None,
) -> dict[str, tuple[OutputError, ...]]:
    """Run each (reference, other) pair of sessions over the samples; per label, one result an output.

    Sessions that appear in several pairs run once a sample. Only numbers are compared, those in sequences and maps too;
    outputs without any are left out. Of outputs with a
    position for each of the model's mask input only the positions that it does not leave out as padding.
    """
    sums: dict[str, dict[str, Comparison]] = {label: {} for label in pairs}
    for feeds in samples:
        done: dict[int, dict[str, Array]] = {}
        for session in {id(s): s for pair in pairs.values() for s in pair}.values():
            done[id(session)] = session.run(feeds)
        for label, (reference, other) in pairs.items():
            got = done[id(other)]
            for name, beside in paired_outputs(feeds, done[id(reference)], got):
                for one, two in beside:
                    sums[label].setdefault(name, Comparison(name)).update(one, two)
        on_sample()
    return {label: tuple(one.result() for one in by_name.values()) for label, by_name in sums.items()}


def _meant(feeds: Mapping[str, Array], value: Array, other: Array) -> tuple[Array, Array]:
    mask = attended(feeds, value.shape)
    return (value, other) if mask is None or value.shape != other.shape else (value[mask], other[mask])


def paired_outputs(
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
        if array.dtype.kind in "fiub":
            yield place, array


def check_interface(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Same inputs and outputs: names, order, types and shapes. VerificationError names the first that differs."""
    fixed = {tensor.name for tensor in before.graph.initializer}
    wanted = [value for value in before.graph.input if value.name not in fixed]
    for kind, old, new in (("input", wanted, after.graph.input), ("output", before.graph.output, after.graph.output)):
        if [value.name for value in old] != [value.name for value in new]:
            raise VerificationError(
                kind + "s", f"were {[v.name for v in old]}, are {[v.name for v in new]}", code="Q702"
            )
        for a, b in zip(old, new, strict=True):
            if a.type.SerializeToString(deterministic=True) != b.type.SerializeToString(deterministic=True):
                raise VerificationError(f"{kind} {a.name}", "has another type or shape than before", code="Q702")
