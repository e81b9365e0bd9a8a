"""Values that models take and give, in files between processes: arrays, text, sequences and maps of ONNX Runtime.

Nothing is pickled: numpy would pickle text, which comes as objects, and maps.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import RunValues


def write_values(path: Path, values: RunValues) -> None:
    """Write a new .npz of values by name."""
    arrays = []

    def encode_value(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(np.asarray(value, str) if value.dtype.kind == "O" else value)
            return {"array": f"arr_{len(arrays) - 1}"}
        if isinstance(value, Mapping):
            # Keys may be integers, which those of JSON's objects are not.
            return {"map": [[key, encode_value(item)] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            return [encode_value(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    places = json.dumps({name: encode_value(value) for name, value in values.items()})
    with path.open("wb") as file:
        np.savez(file, *arrays, places=np.array(places))


def read_values(path: Path) -> dict[str, Any]:
    """The values that `write_values` wrote."""
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:

        def decode_value(value: Any) -> Any:
            if isinstance(value, list):
                return [decode_value(item) for item in value]
            if not isinstance(value, dict):
                return value
            if "map" in value:
                return {key: decode_value(item) for key, item in value["map"]}
            array = file[value["array"]]
            # Strings are stored as numpy's own, since objects would have to be pickled;
            # ORT takes objects.
            return array.astype(object) if array.dtype.kind == "U" else array

        return {
            name: decode_value(value) for name, value in json.loads(file["places"].item()).items()
        }
