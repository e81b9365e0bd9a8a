"""Samples from lists of feeds, arrays and datasets."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, parser

from onnxq.data import load_data
from onnxq.errors import DataError
from onnxq.graph import ValueInfo

X = ValueInfo("x", TensorProto.FLOAT, ("N", 3))


FRAMES = ValueInfo("frames", TensorProto.FLOAT, (None, 3))


def feed(k: int, rows: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), k, np.float32)}


def firsts(dataset: object) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in dataset.samples()]  # type: ignore[attr-defined]


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
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (seq(float[N]) x) => (float[M] y) { y = ConcatFromSequence<axis = 0>(x) }""")
    with pytest.raises(DataError, match="input 'x': is a sequence, and samples hold tensors") as caught:
        load_data(source, [ValueInfo("x", 0, None)], model=proto)
    assert caught.value.code == "Q206"
