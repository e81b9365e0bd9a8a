"""Polygraphy: imported at first use, kept quiet, its runners given our sessions and its files read and written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError, MissingDependencyError, ModelError
from onnxq.files import check_regular, first_line_of, write_text
from onnxq.runtime import Session

Array = NDArray[Any]
Feeds = Mapping[str, Array]

INSTALL = "pip install 'onnxq[polygraphy]'"
RESULTS, INPUTS = "results.json", "inputs.json"
# Polygraphy's own runner names end in a counter and the time.
_STAMP = re.compile(r"-N\d+-\d\d/\d\d/\d\d-\d\d:\d\d:\d\d$")
_LOADABLE = frozenset("fiub")
_TOLD = 500


def polygraphy(module: str = "") -> Any:
    """Polygraphy, or one of its modules. Raises MissingDependencyError with the install line."""
    try:
        return import_module(f"polygraphy.{module}" if module else "polygraphy")
    except ImportError as error:
        raise MissingDependencyError("polygraphy", f"cannot be imported ({error})", INSTALL, code="Q804") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what Polygraphy logs is shown; what it raises becomes a ModelError with its words."""
    logger = polygraphy("logger").G_LOGGER
    trouble = polygraphy("exception").PolygraphyException
    with logger.verbosity(logger.CRITICAL + 1):
        try:
            yield
        except (trouble, OSError) as error:  # OSError: a CUDA library that cannot be loaded
            # Its messages go on for lines; the later ones say what to install.
            told = " ".join(str(error).split())
            raise ModelError("Polygraphy", told[:_TOLD] or "failed", code="Q115") from error


class _OurSession:
    """What OnnxrtRunner asks of an InferenceSession, answered by a Session: quiet, and with errors that name nodes."""

    def __init__(self, session: Session, outputs: Sequence[str] | None) -> None:
        self._session = session
        self._names = [value.name for value in session.outputs] if outputs is None else list(outputs)

    def get_inputs(self) -> Any:
        return self._session.native.get_inputs()

    def get_outputs(self) -> Any:
        by_name = {value.name: value for value in self._session.native.get_outputs()}
        return [by_name[name] for name in self._names]

    def run(self, _names: object, feeds: Feeds) -> list[Array]:
        found = self._session.run(feeds, self._names)
        return [found[name] for name in self._names]


def ort_runner(name: str, session: Session, outputs: Sequence[str] | None = None) -> Any:
    """Polygraphy's OnnxrtRunner over one of our sessions; `outputs` in this order, by default all."""
    return polygraphy("backend.onnxrt").OnnxrtRunner(_OurSession(session, outputs), name=name)


@contextmanager
def active(runners: Sequence[Any]) -> Iterator[None]:
    """All runners activated, and deactivated at the end."""
    with ExitStack() as stack:
        for runner in runners:
            with quiet():
                runner.activate()
            stack.callback(_stop, runner)
        yield


def _stop(runner: Any) -> None:
    with quiet():
        runner.deactivate()


def infer(runner: Any, feeds: Feeds) -> dict[str, Any]:
    """One sample through an active runner: arrays by name, lists for sequences.

    The arrays may be the runner's own buffers: they last until its next run.
    """
    with quiet():
        # Dataset and Session check the feeds, and say what is wrong with them.
        return dict(runner.infer(dict(feeds), check_inputs=False))


@dataclass
class Recorder:
    """Keeps the inputs and outputs of the first `limit` samples, to be written as plain Polygraphy files."""

    limit: int
    inputs: list[dict[str, Array]] = field(default_factory=list)
    outputs: dict[str, list[Any]] = field(default_factory=dict)

    def wants(self, sample: int) -> bool:
        """True for the samples that are kept."""
        return sample < self.limit

    def add(self, feeds: Feeds, by_run: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> None:
        """Keep copies of one sample: runners use their buffers again."""
        kind = polygraphy("comparator.struct").IterationResult
        self.inputs.append({name: _storable(value) for name, value in feeds.items()})
        for run, values in by_run.items():
            kept = {name: _storable(value) for name, value in values.items() if isinstance(value, np.ndarray)}
            self.outputs.setdefault(run, []).append(kind(kept, seconds.get(run), run))

    def write(self, folder: Path, *, overwrite: bool) -> tuple[str, ...]:
        """results.json (RunResults) and inputs.json (a list of feeds); both readable by `polygraphy run`."""
        with quiet():
            results = polygraphy("comparator").RunResults()
            for run, iterations in self.outputs.items():
                results.append((run, iterations))
            texts = {RESULTS: results.to_json(), INPUTS: polygraphy("json").to_json(self.inputs)}
        for name, text in texts.items():
            write_text(folder / name, text, overwrite=overwrite)
        return tuple(str(folder / name) for name in texts)


def save_feeds(path: Path, feeds: Sequence[Feeds], *, overwrite: bool) -> None:
    """Feeds as Polygraphy's JSON of inputs."""
    with quiet():
        text = polygraphy("json").to_json([{name: _storable(value) for name, value in one.items()} for one in feeds])
    write_text(path, text, overwrite=overwrite)


def _storable(value: Array) -> Array:
    """A copy numpy can write and read back without pickling: bfloat16 and float8 as float32."""
    return np.array(value if value.dtype.kind in _LOADABLE else value.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Loaded:
    """One runner's outputs from a file, sample by sample."""

    name: str
    path: str
    samples: tuple[dict[str, Array], ...]


def load_results(path: str | Path) -> tuple[Loaded, ...]:
    """The runs in a Polygraphy results file, a folder of per-iteration files, or a folder that a comparison saved.

    Raises DataError for anything else.
    """
    place = Path(path)
    file = place / RESULTS if (place / RESULTS).is_file() else place
    if not file.exists():
        raise DataError(path, "there is no such file or folder", "save one with `onnxq diff` and `save=…`", code="Q217")
    for one in sorted(file.glob("*.json")) if file.is_dir() else [file]:
        check_regular(one, DataError)
    kind = polygraphy("comparator").RunResults
    found: dict[str, list[dict[str, Array]]] = {}
    try:
        with quiet():
            files = sorted(file.glob("*.json")) if file.is_dir() else [file]
            for one in files:
                for name, iterations in kind.load(str(one)).items():
                    found.setdefault(name, []).extend(_arrays(iteration) for iteration in iterations)
    except Exception as error:  # the file may hold anything; numpy, json and Polygraphy each complain in their own way
        fix = "save one with `onnxq diff` and `save=…`, or `polygraphy run --save-outputs`"
        raise DataError(path, f"holds no Polygraphy RunResults ({first_line_of(error)})", fix, code="Q217") from error
    if not any(found.values()):
        raise DataError(path, "holds no results", "save some with `onnxq diff` and `save=…`", code="Q217")
    return tuple(Loaded(_STAMP.sub("", str(name)), str(path), tuple(samples)) for name, samples in found.items())


def inputs_beside(path: str | Path) -> Path | None:
    """The inputs that were saved with some results; None when there are none."""
    place = Path(path)
    file = (place if place.is_dir() else place.parent) / INPUTS
    return file if file.is_file() else None


def _arrays(iteration: Any) -> dict[str, Array]:
    return {name: np.asarray(value) for name, value in iteration.items()}
