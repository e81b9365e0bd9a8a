"""Samples from lists of feeds, arrays, datasets, and iterables, which come only once."""

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
from tests.data.kit import FRAMES, X, feed, firsts
from tests.networks import parse_text


def test_a_list_of_feeds() -> None:
    assert firsts(load_data([feed(k) for k in range(5)], [X])) == [0, 1, 2, 3, 4]


def test_a_feed_is_cut_only_where_its_axis_is_surely_the_batch() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert len(load_data([{"x": rows}], [X])) == 4
    kept = load_data([{"frames": rows}], [FRAMES])
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0]["frames"], rows)
    fixed = ValueInfo("x", TensorProto.FLOAT, (2, 3))
    assert [sample["x"].shape for sample in load_data([{"x": rows}], [fixed]).samples()] == [(2, 3), (2, 3)]


def test_feeds_with_inputs_that_cannot_be_cut_stay_whole() -> None:
    state = ValueInfo("state", TensorProto.FLOAT, (2, None))
    item = {"x": np.ones((4, 3), np.float32), "state": np.ones((2, 4), np.float32)}
    dataset = load_data([item], [X, state])
    assert len(dataset) == 1
    assert {name: value.shape for name, value in dataset[0].items()} == {"x": (4, 3), "state": (2, 4)}


def test_bare_arrays_for_one_input_and_objects_that_act_like_arrays() -> None:
    class Tensor:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.full((1, 3), 7, np.float32)

    assert firsts(load_data([np.full((1, 3), 7, np.float32), Tensor()], [X])) == [7, 7]
    assert firsts(load_data(iter([Tensor()]), [X])) == [7]
    assert firsts(load_data({"x": Tensor()}, [X])) == [7]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ([], "empty"),
        (iter([]), "empty"),
        ({}, "no array for the model's input 'x'"),
        ([3], "item 0: is a int"),
        (iter([feed(0), "hello"]), "item 1: is a str"),
        ([{"x": [[1.0, 2.0, 3.0], [1.0]]}], "item 0"),
        (iter([feed(0), {"y": np.zeros((1, 3), np.float32)}]), "item 1: has no array"),
        (iter([{"x": np.zeros((1, 4), np.float32)}]), "item 0, input 'x': axis 1"),
        (42, "is a int"),
    ],
)
def test_what_is_no_data(source: object, told: str) -> None:
    with pytest.raises(DataError, match=told):
        load_data(source, [X])


def test_a_dataset_goes_through_if_it_is_of_this_model() -> None:
    dataset = load_data([feed(1)], [X])
    assert load_data(dataset, [X]) is dataset
    with pytest.raises(DataError, match="frames"):
        load_data(dataset, [FRAMES])


@pytest.mark.parametrize("source", [None, [{"x": [np.zeros(2, np.float32)]}]])
def test_an_input_that_is_a_sequence_is_told(source: object) -> None:
    proto = parse_text("g (seq(float[N]) x) => (float[M] y) { y = ConcatFromSequence<axis = 0>(x) }")
    with pytest.raises(DataError, match="input 'x': is a sequence, and samples hold tensors") as caught:
        load_data(source, [ValueInfo("x", 0, None)], model=proto)
    assert caught.value.code == "Q206"


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
