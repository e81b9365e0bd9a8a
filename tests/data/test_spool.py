"""Samples of iterables, which come only once."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.config import DataConfig
from onnxq.data import load_data, sources
from onnxq.errors import DataError
from onnxq.graph import ValueInfo

X = ValueInfo("x", TensorProto.FLOAT, ("N", 3))


def feed(k: int, rows: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), k, np.float32)}


def firsts(dataset: object) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in dataset.samples()]  # type: ignore[attr-defined]


def test_a_generator_is_read_once_and_only_as_far_as_needed() -> None:
    asked: list[int] = []

    def endless() -> Iterator[dict[str, np.ndarray]]:
        for k in itertools.count():
            asked.append(k)
            yield feed(k)

    dataset = load_data(endless(), [X], DataConfig(samples=4))
    assert firsts(dataset) == [0, 1, 2, 3]
    assert firsts(dataset) == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 3]


def test_a_stream_may_fill_one_buffer_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.zeros((1, 3), np.float32)

    def reused() -> Iterator[dict[str, np.ndarray]]:
        for k in range(5):
            buffer[:] = k
            yield {"x": buffer}

    assert firsts(load_data(reused(), [X])) == [0, 1, 2, 3, 4]
    monkeypatch.setattr(sources, "_IN_MEMORY", 2 * buffer.nbytes)
    assert firsts(load_data(reused(), [X])) == [0, 1, 2, 3, 4]


def test_what_does_not_fit_in_memory_goes_to_disk_and_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = load_data((feed(k) for k in range(3)), [X])
    assert len(list(tmp_path.rglob("*.npy"))) == 3
    assert firsts(dataset) == [0, 1, 2]
    del dataset
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_files_are_mapped_only_while_a_sample_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pages of files count as the process's memory, and a container is stopped for them."""
    monkeypatch.setattr(sources, "_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = load_data((feed(k, rows=2) for k in range(3)), [X])
    assert firsts(dataset) == [0, 0, 1, 1, 2, 2]
    assert dataset.name(3) == "data, item 1, sample 1"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_what_the_generator_raises_is_told_as_its_own() -> None:
    def failing() -> Iterator[dict[str, np.ndarray]]:
        yield feed(0)
        raise RuntimeError("disk on fire")

    with pytest.raises(DataError, match="raised RuntimeError: disk on fire"):
        load_data(failing(), [X])


def test_nan_in_a_stream_names_the_item() -> None:
    bad = [feed(0), feed(1), {"x": np.array([[1, np.nan, 2]], np.float32)}]
    with pytest.raises(DataError, match=r"item 2, input 'x': holds NaN"):
        list(load_data(iter(bad), [X]).samples())
