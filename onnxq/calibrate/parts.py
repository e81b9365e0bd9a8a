"""Parts of a calibration: the observers of some of the samples in a file, merged with those of the others elsewhere.

A part names, by hashes, the model whose tensors were observed, the observers, and the samples. Parts that do not belong
together are refused, and so is a run whose model, configuration or samples are others.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.calibrate.activations import Want, Watch
from onnxq.calibrate.chunks import Readers, list_wants, merge_observers
from onnxq.config.schema import JsonText, Loose, Natural, SchemaNumber
from onnxq.data import Dataset
from onnxq.errors import CalibrationError
from onnxq.files import read_text
from onnxq.observers import create_observer
from onnxq.runtime.crew import hash_feeds, hash_parts
from onnxq.spec import ObserverSpec, QuantSpec
from onnxq.wording import abbreviate
from onnxq.workers import count_threads, pack_value, unpack_value

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

    source: str
    keys: dict[str, str]
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
    keys: dict[str, str]
    total: Natural
    samples: dict[str, str]
    value: str
    arrays: tuple[str, ...]


def make_keys(model: str, readers: Readers, dataset: Dataset) -> dict[str, str]:
    """The hashes that parts of one calibration share. model: digest of the prepared model."""
    # Most data sets differ in one or the other; the rest shows when contents are compared, sample by sample.
    data = f"{len(dataset)} {hash_feeds(dataset[0])}"
    return {
        "version of onnxq": version("onnxq"),
        "model": model,
        "configuration": hash_parts(f"{readers!r} {count_threads()}".encode()),
        "data": hash_parts(data.encode()),
    }


def make_part(keys: dict[str, str], readers: Readers, watch: Watch, dataset: Dataset, positions: Sequence[int]) -> Part:
    """The part of the samples at these positions, which `watch` has observed."""
    samples = {k: hash_feeds(dataset[k]) for k in positions}
    wants = tuple(list_wants(readers))
    # As they come out of a file.
    packed = unpack_value(*pack_value([watch.observers[want] for want in wants]))
    return Part("", keys, len(dataset), samples, wants, tuple(packed))


def write_part(part: Part) -> str:
    """The part as JSON."""
    rows = [
        [want.key, want.observer.name, dict(want.observer.options), _list_fields(want.quant)] for want in part.wants
    ]
    value, arrays = pack_value({"wants": rows, "observers": list(part.observers)})
    texts = [base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii") for array in arrays]
    samples = {str(k): digest for k, digest in sorted(part.samples.items())}
    whole = {
        "schema": _SCHEMA, "kind": "onnxq.ranges", "keys": part.keys, "total": part.total, "samples": samples,
        "value": value, "arrays": texts,
    }  # fmt: skip
    return json.dumps(whole, indent=1) + "\n"


def read_part(path: str | Path) -> Part:
    """Read what `write_part` wrote. Raises CalibrationError for another file."""
    text = read_text(path, CalibrationError, _AGAIN, limit=_MOST_BYTES, code="Q513")
    file = JsonText(str(path), text)
    row: Any = file.parse(CalibrationError, _AGAIN, code="Q513")
    if not isinstance(row, dict) or (row.get("kind"), row.get("schema")) != ("onnxq.ranges", _SCHEMA):
        raise CalibrationError(Path(path), "is no part of a calibration of this version", _AGAIN, code="Q513")
    found = file.read(_PartFile, CalibrationError, _AGAIN, code="Q513")
    try:
        arrays = [np.frombuffer(zlib.decompress(base64.b64decode(one)), np.uint8) for one in found.arrays]
        value = unpack_value(found.value, arrays)
        wants = tuple(
            Want(key, ObserverSpec(name, tuple(options.items())), QuantSpec(**quant))
            for key, name, options, quant in value["wants"]
        )
        samples = {int(k): digest for k, digest in found.samples.items()}
        part = Part(str(path), found.keys, found.total, samples, wants, tuple(value["observers"]))
        # Its observers must take the numbers.
        join_parts([part])
    except CalibrationError:
        raise
    except Exception as error:  # of whatever kind a damaged value leads to
        raise CalibrationError(Path(path), f"is damaged ({type(error).__name__})", _AGAIN, code="Q513") from error
    return part


def join_parts(parts: Sequence[Part]) -> Part:
    """One part of all their samples.

    Raises CalibrationError for parts of another model, configuration, data set or version than the first, and for
    samples that two of them hold.
    """
    first = parts[0]
    watch = Watch({want: create_observer(want.observer, want.quant) for want in first.wants})
    samples: dict[int, str] = {}
    for part in parts:
        check_keys(part, first.keys, first.source)
        twice = sorted(samples.keys() & part.samples.keys())
        if twice:
            cause = f"holds sample {twice[0]}, which another part holds too"
            raise CalibrationError(part.source, cause, "give each part once", code="Q512")
        samples |= part.samples
        merge_observers(watch, first.wants, part.observers)
    merged = unpack_value(*pack_value([watch.observers[want] for want in first.wants]))
    return replace(first, samples=samples, observers=tuple(merged))


def check_keys(part: Part, keys: dict[str, str], other: str) -> None:
    """Raise CalibrationError, with the name of the difference, for a part with other keys than those of `other`."""
    for name, value in keys.items():
        if part.keys.get(name) != value:
            cause = f"was made with another {name} than {other}"
            fix = "make all parts, and quantize, with the same model, samples, options, version and kind of machine"
            raise CalibrationError(part.source, cause, fix, code="Q511")


def check_samples(part: Part, dataset: Dataset) -> None:
    """Raise CalibrationError where samples are missing from a part, or are not those of the data set."""
    if part.missing:
        listed = ", ".join(dataset.name(k) for k in part.missing[:_SHOWN])
        more = f" and {len(part.missing) - _SHOWN} more" if len(part.missing) > _SHOWN else ""
        cause = f"lacks {len(part.missing)} of {part.total} samples: {listed}{more}"
        raise CalibrationError(part.source, cause, "merge the parts of all shards", code="Q512")
    for k in range(len(dataset)):
        if hash_feeds(dataset[k]) != part.samples[k]:
            cause = f"was made with other values of {dataset.name(k)}"
            raise CalibrationError(part.source, cause, "make its part again with this data", code="Q511")


def _list_fields(spec: QuantSpec) -> dict[str, Any]:
    """The fields of an activation's spec, which is for the whole tensor."""
    return {name: getattr(spec, name) for name in ("bits", "signed", "symmetric", "narrow_range", "storage")}
