"""Files of results in Polygraphy's JSON, written and read without Polygraphy, and without pickling."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import ArrayDict, RunValues
from onnxq.data.scripts import decode_array, encode_array
from onnxq.errors import DataError
from onnxq.files import AnyPath, check_input_kind, shorten_error, write_text
from onnxq.runtime import Feeds
from onnxq.sites import JsonObject, Names

RESULTS = "results.json"
INPUTS = "inputs.json"
# Polygraphy's own runner names end in a counter and the time.
_STAMP = re.compile(r"-N\d+-\d\d/\d\d/\d\d-\d\d:\d\d:\d\d$")
# Kinds of types that numpy writes by pickling alone: bfloat16, float8 and narrow integers; texts.
_STORED = {"V": np.float32, "O": np.str_}
# The key by which Polygraphy's JSON names the class of an object.
_CLASS = "polygraphy_class"


@dataclass
class Recorder:
    """Keeps the inputs and outputs of the first `limit` samples, to be written as Polygraphy's files."""

    limit: int
    inputs: list[Feeds] = field(default_factory=list)
    outputs: dict[str, list[JsonObject]] = field(default_factory=dict)

    def add(
        self, feeds: Feeds, by_run: Mapping[str, RunValues], seconds: Mapping[str, float]
    ) -> None:
        """Keep copies of one sample, until there are enough: runners use their buffers again."""
        if len(self.inputs) == self.limit:
            return
        self.inputs.append(_copy_storable(feeds))
        for run, values in by_run.items():
            row = {
                "outputs": _copy_storable(values),
                "runtime": seconds.get(run),
                "runner_name": run,
                _CLASS: "IterationResult",
            }
            self.outputs.setdefault(run, []).append(row)

    def write(self, folder: Path, *, overwrite: bool) -> Names:
        """results.json (RunResults) and inputs.json (a list of feeds); both readable by `polygraphy run`."""
        results = {"lst": list(self.outputs.items()), _CLASS: "RunResults"}
        for name, value in ((RESULTS, results), (INPUTS, self.inputs)):
            write_text(folder / name, _to_json(value), overwrite=overwrite)
        return str(folder / RESULTS), str(folder / INPUTS)


def save_feeds(path: Path, feeds: Feeds) -> None:
    """Write one sample's feeds as Polygraphy's JSON of inputs, over an earlier file."""
    write_text(path, _to_json([_copy_storable(feeds)]), overwrite=True)


def _to_json(value: Any) -> str:
    return json.dumps(
        value, indent=4, default=lambda array: {"array": encode_array(array), _CLASS: "ndarray"}
    )


def _copy_storable(values: RunValues) -> ArrayDict:
    """Copies of the arrays that numpy can write and read back without pickling."""
    return {
        name: value.astype(_STORED.get(value.dtype.kind, value.dtype))
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    }


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """One runner's outputs from a file, sample by sample. origin: tells it from a run of the same name, "" alone."""

    name: str
    path: str
    samples: tuple[Feeds, ...]
    origin: str = ""


def load_results(path: AnyPath) -> tuple[LoadedRun, ...]:
    """The runs in a Polygraphy results file, a folder of per-iteration files, or a folder that a comparison saved.

    Raises DataError for anything else.
    """
    place = Path(path)
    file = place / RESULTS if os.path.isfile(place / RESULTS) else place
    if not os.path.exists(file):
        raise DataError(
            path,
            "there is no such file or folder",
            "save one with `onnxq diff` and `out=…`",
            code="Q217",
        )
    files = sorted(file.glob("*.json")) if os.path.isdir(file) else [file]
    for one in files:
        check_input_kind(one, DataError)
    found: dict[str, list[Feeds]] = {}
    try:
        for one in files:
            document = json.loads(one.read_text(encoding="utf-8"), object_hook=_decode)
            for name, iterations in document["lst"]:
                samples = found.setdefault(_STAMP.sub("", str(name)), [])
                for iteration in iterations:
                    outputs = iteration["outputs"].items()
                    samples.append({name: np.asarray(value) for name, value in outputs})
    # The file may hold anything; numpy and json each complain in their own way.
    except Exception as error:
        fix = "save one with `onnxq diff` and `out=…`, or `polygraphy run --save-outputs`"
        raise DataError(
            path, f"holds no Polygraphy RunResults ({shorten_error(error)})", fix, code="Q217"
        ) from error
    if not any(found.values()):
        raise DataError(
            path, "holds no results", "save some with `onnxq diff` and `out=…`", code="Q217"
        )
    return tuple(LoadedRun(name, str(path), tuple(samples)) for name, samples in found.items())


def _decode(found: JsonObject) -> Any:
    """An object of Polygraphy's JSON: arrays as such, lazy or not, others as the dict of their fields."""
    if found.get(_CLASS) == "ndarray":
        return decode_array(found["array"])
    # LazyNumpyArray in earlier releases.
    return found["values"] if found.get(_CLASS) in ("LazyArray", "LazyNumpyArray") else found


def find_inputs_beside(path: AnyPath) -> Path | None:
    """The inputs that were saved with some results; None when there are none."""
    place = Path(path)
    file = (place if os.path.isdir(place) else place.parent) / INPUTS
    return file if os.path.isfile(file) else None
