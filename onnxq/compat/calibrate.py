"""Readers of samples, and ranges of tensors in a file, by the names that onnxruntime.quantization gives them.

Readers, calibrators and the classes of ranges are onnxruntime's own, handed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.arrays import Interval
from onnxq.compat.options import name_value
from onnxq.compat.theirs import hand_on, take_choices
from onnxq.errors import ConfigError
from onnxq.sites import Role

if TYPE_CHECKING:
    from onnxq.plan import Plan

__getattr__ = hand_on("calibrate")
CalibrationMethod = take_choices(
    "calibrate", "CalibrationMethod", "MinMax Entropy Percentile Distribution"
)
# The plan of the run that a cache was written by, beside the ranges, which is all that onnxruntime reads of it.
_PLAN = "onnxq.plan"


def read_samples(reader: Any, stride: int | None = None) -> Any:
    """The samples of a reader one after the other, none of which is kept; other data as it is.

    A reader that was read to its end before, and can `rewind`, begins again. stride: samples that `set_range` asks for
    at a time.
    """
    return _read(reader, stride) if hasattr(reader, "get_next") else reader


def _read(reader: Any, stride: int | None) -> Iterator[Any]:
    count = 0
    for start in range(0, len(reader), stride) if stride else (None,):
        if stride and start is not None:
            reader.set_range(start_index=start, end_index=start + stride)
        for sample in drain_reader(reader):
            count += 1
            yield sample
    # A reader that somebody has read to its end before.
    if not count and hasattr(reader, "rewind"):
        reader.rewind()
        yield from drain_reader(reader)


def drain_reader(reader: Any) -> Iterator[Any]:
    """Yield what `get_next` gives, up to None. An array is no None, but cannot be compared with it either."""
    while (sample := reader.get_next()) is not None:
        yield sample


def write_cache(plan: Plan, method: Any, path: Path) -> None:
    """Write the ranges of a plan's activations as `save_tensors_data` does, and the plan beside them."""
    from onnxq.plan import to_json

    ranges = {}
    for site in plan.sites:
        if site.role is Role.ACTIVATION and site.qparams is not None and site.tensor is not None:
            scale = float(site.qparams.scale)
            zero = float(site.qparams.zero_point)
            ends = ((end - zero) * scale for end in (site.spec.qmin, site.spec.qmax))
            low, high = ({"data": end, "dtype": "float32", "CLS": "numpy.array"} for end in ends)
            ranges[site.tensor.name] = {"lowest": low, "highest": high, "CLS": "TensorData"}
    kind = {"CLS": "CalibrationMethod", "value": f"CalibrationMethod.{name_value(method)}"}
    cache = {
        "CLS": "TensorsData",
        "data": ranges,
        "calibration_method": kind,
        "smooth_quant": False,
    }
    path.write_text(json.dumps({**cache, _PLAN: json.loads(to_json(plan))}))


def read_cache(path: Path) -> Plan | dict[str, Interval]:
    """The plan in a cache of onnxq, or that the file is; else the range of each tensor.

    Raises ConfigError for a file of another kind, and PlanError for a plan that is none.
    """
    from onnxq.plan import from_json

    text = path.read_text()
    try:
        cache = json.loads(text)
        if "calibration_method" not in cache:
            return from_json(text)
        if _PLAN in cache:
            return from_json(json.dumps(cache[_PLAN]))
        # Arrays stand as mappings; numbers come from older versions.
        ends = {
            name: [
                _read_number(end["data"] if isinstance(end, Mapping) else end)
                for end in (entry["lowest"], entry["highest"])
            ]
            for name, entry in cache["data"].items()
        }
        # A range of nothing says nothing.
        return {name: (min(a, 0.0), max(b, 0.0)) for name, (a, b) in ends.items() if a < b}
    except (ValueError, KeyError, TypeError) as error:
        fix = "delete it, so that it is written anew, or name a cache of quantize_static"
        raise ConfigError(path, "is no calibration cache", fix, code="Q304") from error


def add_ranges(tensors: dict[str, Any], ranges: dict[str, Interval], model: Any) -> None:
    """Add ranges to the overrides of tensors, whose own come first.

    Those that Relu, Clip and operators that move values make of them are added as well: caches leave these out.
    """
    from onnxq.graph import load_model
    from onnxq.graph.base import LAYOUT_OPS

    spread = dict(ranges)
    for node in load_model(model).proto.graph.node if ranges else ():
        source = spread.get(next(iter(node.input), ""))
        if source is not None and node.op_type in LAYOUT_OPS | {
            "Clip",
            "MaxPool",
            "Relu",
            "Slice",
            "Split",
        }:
            for name in node.output:
                spread.setdefault(
                    name, (0.0, max(source[1], 0.0)) if node.op_type == "Relu" else source
                )
    for name, (low, high) in spread.items():
        if low < high:
            tensors[name] = [{"rmin": low, "rmax": high, **(tensors.get(name) or [{}])[0]}]


def _read_number(value: Any) -> float:
    """A number, which stands in lists for those of an array."""
    while isinstance(value, list):
        (value,) = value
    return float(value)
