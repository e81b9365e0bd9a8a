"""Arrays, text, sequences and maps come back from a file as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxq.runtime.exchange import read_values, write_values

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES: dict[str, Any] = {
    # An argument of numpy.savez, and a path: both are names of tensors.
    "file": FLOATS,
    "a/b": [FLOATS, np.zeros((0, 2), np.int8)],
    "probabilities": [{0: 0.25, 1: 0.5}, {"cat": 1.0, "dog": float("inf")}],
    "label": np.array(["cat", "a longer one"], object),
    "nothing": None,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(tmp_path: Path, name: str) -> None:
    write_values(tmp_path / "values.npz", VALUES)
    found = read_values(tmp_path / "values.npz")
    assert list(found) == list(VALUES)
    np.testing.assert_equal(found[name], VALUES[name])


def test_numbers_of_maps_are_plain(tmp_path: Path) -> None:
    write_values(tmp_path / "values.npz", {"y": [{0: np.float32(0.5)}]})
    assert read_values(tmp_path / "values.npz") == {"y": [{0: 0.5}]}
