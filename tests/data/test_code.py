"""Data from Python: iterables, a person's own script, Polygraphy's JSON; and what a Dataset does with it."""

from __future__ import annotations

import base64
import gc
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from onnxq.config import DataConfig
from onnxq.data import load_data, spool, synthetic
from onnxq.errors import DataError
from onnxq.graph import ValueInfo

X = ValueInfo("x", TensorProto.FLOAT, ("N", 3))
FRAMES = ValueInfo("frames", TensorProto.FLOAT, (None, 3))
IDS = ValueInfo("ids", TensorProto.INT64, ("N", "L"))


def feed(k: int, rows: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), k, np.float32)}


def firsts(dataset: object) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in dataset.samples()]  # type: ignore[attr-defined]


def test_a_list_of_feeds() -> None:
    assert firsts(load_data([feed(k) for k in range(5)], [X])) == [0, 1, 2, 3, 4]


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
    monkeypatch.setattr(spool, "_IN_MEMORY", 2 * buffer.nbytes)
    assert firsts(load_data(reused(), [X])) == [0, 1, 2, 3, 4]


def test_what_does_not_fit_in_memory_goes_to_disk_and_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spool, "_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = load_data((feed(k) for k in range(3)), [X])
    assert len(list(tmp_path.rglob("*.npy"))) == 3
    assert firsts(dataset) == [0, 1, 2]
    del dataset
    gc.collect()
    assert list(tmp_path.iterdir()) == []


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


SCRIPT = """
import numpy as np
from neighbour import LEVEL

def load_data():
    for k in range(3):
        yield {"x": np.full((1, 3), LEVEL + k, np.float32)}

def as_arrays():
    return {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}

def as_path():
    return __file__.replace("loader.py", "calib.npz")

def wants(count):
    return []

def fails():
    raise ValueError("no such camera")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("LEVEL = 5\n")
    (tmp_path / "loader.py").write_text(SCRIPT)
    np.savez(tmp_path / "calib.npz", x=np.ones((2, 3), np.float32))
    return tmp_path / "loader.py"


def test_scripts_give_what_their_function_returns(script: Path) -> None:
    assert firsts(load_data(script, [X])) == [5, 6, 7]
    assert firsts(load_data(f"{script}:load_data", [X])) == [5, 6, 7]
    assert firsts(load_data(f"{script}:as_arrays", [X])) == [0, 3, 6, 9]
    assert firsts(load_data(f"{script}:as_path", [X])) == [1, 1]
    assert load_data(script, [X]).describe() == "loader.py:load_data: 3 samples"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("laod_data", "did you mean 'load_data'"),
        ("wants", "wants arguments"),
        ("fails", "raised ValueError: no such camera"),
    ],
)
def test_scripts_that_do_not_work(script: Path, function: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        load_data(f"{script}:{function}", [X])


def test_scripts_that_do_not_run(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(DataError, match="nothing_of_that_name"):
        load_data(tmp_path / "bad.py", [X])
    with pytest.raises(DataError, match="no such file"):
        load_data(f"{tmp_path}/absent.py:load", [X])


def encoded(array: np.ndarray) -> dict[str, str]:
    """As Polygraphy 0.49 to 0.53 write an array."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return {"array": base64.b64encode(out.getvalue()).decode(), "polygraphy_class": "ndarray"}


def test_polygraphy_inputs(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps([{"x": encoded(feed(k)["x"])} for k in range(3)]))
    assert firsts(load_data(path, [X])) == [0, 1, 2]
    folder = tmp_path / "iterations"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k:010}.json").write_text(json.dumps([{"x": encoded(feed(k)["x"])}]))
    assert firsts(load_data(folder, [X])) == [0, 1, 2]


def test_polygraphy_itself_writes_that(tmp_path: Path) -> None:
    polygraphy_json = pytest.importorskip("polygraphy.json")
    polygraphy_json.save_json([feed(4)], str(tmp_path / "inputs.json"))
    assert firsts(load_data(tmp_path / "inputs.json", [X])) == [4]


# A .npy whose header is no dictionary of one.
ODD_HEADER = base64.b64encode(b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((\n     ").decode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{not json", "is not JSON"),
        ("\0", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ('[{"x": ' + "9" * 5000 + "}]", "is not JSON|not a list of"),
        (f'[{{"x": {{"array": "{ODD_HEADER}", "polygraphy_class": "ndarray"}}}}]', "cannot be decoded"),
        ("[]", "empty"),
        ('[{"x": [1, 2]}]', "not a list of"),
        ('{"runners": []}', "not a list of"),
        ('[{"x": {"tensor": "AAAA", "polygraphy_class": "Tensor"}}]', "Polygraphy Tensor"),
        ('[{"x": {"array": "!!!!", "polygraphy_class": "ndarray"}}]', "cannot be decoded"),
        ('[{"x": {"array": "AAAA", "polygraphy_class": "ndarray"}}]', "cannot be decoded"),
    ],
)
def test_json_that_is_no_inputs_file(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=told):
        load_data(tmp_path / "a.json", [X])


def test_pickled_polygraphy_arrays_are_never_loaded(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}], object), allow_pickle=True)
    content = [{"x": {"array": base64.b64encode(out.getvalue()).decode(), "polygraphy_class": "ndarray"}}]
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="cannot be decoded"):
        load_data(tmp_path / "a.json", [X])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    wanted=st.one_of(st.none(), st.integers(1, 14)),
    holdout=st.integers(0, 14),
    seed=st.integers(0, 3),
)
def test_splits_are_disjoint_where_they_can_be(count: int, wanted: int | None, holdout: int, seed: int) -> None:
    dataset = load_data(
        {"x": np.arange(count * 3, dtype=np.float32).reshape(count, 3)}, [X], DataConfig(samples=wanted)
    )
    calibration, held = dataset.split(holdout, seed)
    mine, theirs = firsts(calibration), firsts(held)
    everything = firsts(dataset)
    assert mine
    assert theirs
    assert mine == sorted(mine)
    assert theirs == sorted(theirs)
    assert set(mine) <= set(everything)
    if holdout == 0 or count == 1:
        assert mine == theirs == everything
        return
    assert not set(mine) & set(theirs)
    assert len(theirs) == min(holdout, count - len(mine))
    spare = count - len(everything)
    assert len(mine) == max(1, len(everything) - max(0, holdout - spare))
    again = dataset.split(holdout, seed)
    assert [firsts(part) for part in again] == [mine, theirs]


def test_a_split_of_a_split_takes_only_what_it_was_given() -> None:
    dataset = load_data({"x": np.arange(60, dtype=np.float32).reshape(20, 3)}, [X], DataConfig(samples=12))
    calibration, held = dataset.split(4)
    few, rest = calibration.split(len(calibration) - 3)
    assert len(calibration) == 12
    assert len(few) == 3
    assert len(rest) == 9
    assert not set(firsts(held)) & (set(firsts(few)) | set(firsts(rest)))
    assert len(calibration.take(5)) == 5
    assert set(firsts(calibration.take(5))) <= set(firsts(calibration))


def test_batches_are_only_made_of_what_belongs_together() -> None:
    several = {"x": ValueInfo("x", TensorProto.FLOAT, ("A", 3)), "z": ValueInfo("z", TensorProto.FLOAT, ("B", 3))}
    arrays = {name: np.ones((4, 3), np.float32) for name in several}
    assert [b.count for b in load_data(arrays, list(several.values())).batches(4)] == [1] * 4
    square = ValueInfo("x", TensorProto.FLOAT, ("N", "N"))
    assert [b.count for b in load_data(np.ones((4, 1), np.float32), [square]).batches(4)] == [1] * 4
    scalar = ValueInfo("s", TensorProto.FLOAT, ())
    found = load_data({"x": np.ones((4, 3), np.float32), "s": np.ones(4, np.float32)}, [X, scalar])
    assert [b.count for b in found.batches(4)] == [1] * 4
    long = load_data([{"frames": np.ones((5, 3), np.float32)}] * 2, [FRAMES])
    assert [b.count for b in long.batches(2)] == [1, 1]


def test_synthetic_inputs_fit_and_repeat() -> None:
    inputs = [
        ValueInfo("image", TensorProto.FLOAT, ("batch", 3, None, None)),
        ValueInfo("half", TensorProto.FLOAT16, ("batch", 5)),
        ValueInfo("ids", TensorProto.INT64, ("batch", "seq")),
        ValueInfo("attention_mask", TensorProto.INT64, ("batch", "seq")),
        ValueInfo("flag", TensorProto.BOOL, ()),
    ]
    dataset = load_data(None, inputs, DataConfig(samples=3, seed=7))
    first = dataset[0]
    assert dataset.synthetic
    assert len(dataset) == 3
    assert "SYNTHETIC" in dataset.describe()
    assert {name: value.shape for name, value in first.items()} == {
        "image": (1, 3, 224, 224),
        "half": (1, 5),
        "ids": (1, 32),
        "attention_mask": (1, 32),
        "flag": (),
    }
    assert first["half"].dtype == np.float16
    assert set(np.unique(first["ids"])) <= {0, 1}
    assert (first["attention_mask"] == 1).all()
    again = load_data(None, inputs, DataConfig(samples=3, seed=7))
    for a, b in zip(dataset.samples(), again.samples(), strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    other = load_data(None, inputs, DataConfig(samples=3, seed=8))
    assert not np.array_equal(other[0]["image"], first["image"])
    assert not np.array_equal(dataset[1]["image"], first["image"])
    assert all(part.synthetic for part in dataset.split(1))


def test_synthetic_sizes_can_be_given() -> None:
    dataset = synthetic([IDS, ValueInfo("y", TensorProto.FLOAT, (None, "L"))], samples=1, dims={"L": 9, "y:0": 2})
    assert {name: value.shape for name, value in dataset[0].items()} == {"ids": (1, 9), "y": (2, 9)}


@pytest.mark.parametrize(
    "value",
    [ValueInfo("s", TensorProto.STRING, (1,)), ValueInfo("u", TensorProto.FLOAT, None), ValueInfo("q", 0, (1,))],
)
def test_synthetic_inputs_that_cannot_be_made(value: ValueInfo) -> None:
    with pytest.raises(DataError, match="give `data="):
        load_data(None, [value])


def test_a_dataset_goes_through_if_it_is_of_this_model() -> None:
    dataset = load_data([feed(1)], [X])
    assert load_data(dataset, [X]) is dataset
    with pytest.raises(DataError, match="frames"):
        load_data(dataset, [FRAMES])


def test_synthetic_sizes_are_tried_on_the_model() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,3,H,W] x) => (float[M,3,64,64] y) <int64[4] s = {-1, 3, 64, 64}> { [fit] y = Reshape(x, s) }"""
    )
    value = ValueInfo("x", TensorProto.FLOAT, ("N", 3, "H", "W"))
    assert load_data(None, [value])[0]["x"].shape == (1, 3, 224, 224)
    assert load_data(None, [value], DataConfig(samples=2), proto)[0]["x"].shape == (1, 3, 64, 64)


def test_a_model_no_size_fits_says_so() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,L] x) => (float[7,11] y) <int64[2] shape = {7, 11}> { [fit] y = Reshape(x, shape) }"""
    )
    with pytest.raises(DataError, match=r"none of the sizes tried \(node 'fit'"):
        load_data(None, [ValueInfo("x", TensorProto.FLOAT, ("N", "L"))], None, proto)
