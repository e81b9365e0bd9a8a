"""Models and samples through the folder of a crew: they come back as they were, and the same one has one name."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.errors import ModelError
from onnxq.graph import attach_weights, strip_weights
from onnxq.graph.storage import StoredArray, open_data
from onnxq.runtime.crew import Crew, hash_array, hash_model, open_array, open_model, read_feeds
from onnxq.workers import read_value, write_value
from onnxq.workers.processes import ProcessWorkers
from tests.pipeline.models import residual

FEEDS = {
    "x/1": np.arange(6, dtype=np.float32).reshape(2, 3),
    "text": np.array(["a", "bc"], object),
    "file": np.int64(3)[None],
}


def test_models_and_samples_come_back() -> None:
    proto = residual()
    with Crew() as crew:
        shared = crew.share_model(strip_weights(proto))
        assert shared == crew.share_model(proto)
        assert shared.digest == hash_model(proto) != hash_model(residual(seed=1))
        # Weights lie in the file once.
        size = (Path(shared.folder) / "weights").stat().st_size
        crew.share_model(proto)
        assert (Path(shared.folder) / "weights").stat().st_size == size > 0
        found = attach_weights(open_model(shared))
        for one, other in zip(found.graph.initializer, proto.graph.initializer, strict=True):
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(one), onnx.numpy_helper.to_array(other))
        feeds = read_feeds(crew.share_feeds(FEEDS))
        assert list(feeds) == list(FEEDS)
        for name, value in FEEDS.items():
            assert feeds[name].dtype == value.dtype
            np.testing.assert_array_equal(feeds[name], value)
    # Windows removes nothing that is mapped; the next run does.
    assert os.name == "nt" or not Path(shared.folder).exists()


def test_an_array_is_found_where_it_lies_as_long_as_that_is_the_same_file(tmp_path: Path) -> None:
    path, values = tmp_path / "data", np.arange(5000, dtype=np.float32)
    path.write_bytes(b"head" + values.tobytes())
    stored = StoredArray(open_data(path), 4, values.dtype, (50, 100))
    # No process is started before there is work.
    with Crew(ProcessWorkers(2)) as crew:
        there, here = crew.share_array(stored), crew.share_array(values)
        assert there.path == str(path.resolve())
        np.testing.assert_array_equal(open_array(there), values.reshape(50, 100))
        np.testing.assert_array_equal(open_array(here), values)
        assert hash_array(stored) == hash_array(values)
        with pytest.raises(ModelError, match=r"was changed while the run read it.*\[Q106\]"):
            open_array(replace(there, stamp=(1, 2)))
    assert Crew().share_array(stored) is stored


# ---- Arrays, text, sequences and maps come back from a file as they are.

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
    write_value(tmp_path / "values.npz", VALUES)
    found = read_value(tmp_path / "values.npz")
    assert list(found) == list(VALUES)
    np.testing.assert_equal(found[name], VALUES[name])


def test_numbers_of_maps_are_plain(tmp_path: Path) -> None:
    write_value(tmp_path / "values.npz", {"y": [{0: np.float32(0.5)}]})
    assert read_value(tmp_path / "values.npz") == {"y": [{0: 0.5}]}
