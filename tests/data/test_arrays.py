"""Arrays in files and in memory: cut by rank, converted within their kind, refused with names when they do not fit."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.errors import DataError
from onnxq.graph import ValueInfo

FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE
INT64, INT32, UINT8 = TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8
BOOL, STRING = TensorProto.BOOL, TensorProto.STRING
X = ValueInfo("x", FLOAT, ("N", 3, 4))
IDS = ValueInfo("ids", INT64, ("N", "L"))
MASK = ValueInfo("mask", INT64, ("N", "L"))
RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((6, 3, 4)).astype(np.float32)


def all_of(dataset: Dataset) -> list[dict[str, np.ndarray]]:
    return list(dataset.samples())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_cut_along_axis_0(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "calib.npz", x=ROWS)
    dataset = load_data(tmp_path / "calib.npz", [X])
    found = all_of(dataset)
    assert len(dataset) == len(found) == 6
    for k, sample in enumerate(found):
        assert sample["x"].shape == (1, 3, 4)
        assert sample["x"].dtype == np.float32
        np.testing.assert_array_equal(sample["x"][0], ROWS[k])
    assert dataset.describe() == "calib.npz: 6 samples"
    assert not dataset.synthetic


def test_one_axis_more_holds_one_sample_per_leading_index() -> None:
    state = ValueInfo("state", FLOAT, (2, None, 3))
    rate = ValueInfo("rate", INT64, ())
    arrays = {
        "x": RNG.standard_normal((5, 7, 3, 4)).astype(np.float32),
        "state": RNG.standard_normal((5, 2, 1, 3)).astype(np.float32),
        "rate": np.arange(5),
    }
    found = all_of(load_data(arrays, [X, state, rate]))
    assert [sample["rate"].shape for sample in found] == [()] * 5
    for k, sample in enumerate(found):
        for name, value in sample.items():
            np.testing.assert_array_equal(value, arrays[name][k])


def test_a_fixed_batch_takes_slices_of_its_size_and_tells_of_the_rest() -> None:
    eight = ValueInfo("x", FLOAT, (8, 2))
    rows = np.arange(40, dtype=np.float32).reshape(20, 2)
    dataset = load_data(rows, [eight])
    found = all_of(dataset)
    assert [sample["x"].shape for sample in found] == [(8, 2), (8, 2)]
    np.testing.assert_array_equal(np.concatenate([s["x"] for s in found]), rows[:16])
    assert "4 rows left over" in dataset.describe()
    assert [batch.count for batch in dataset.batches(4)] == [1, 1]


def test_the_batch_axis_may_lie_elsewhere() -> None:
    state = ValueInfo("state", FLOAT, (2, "N", 3))
    arrays = {"x": ROWS, "state": RNG.standard_normal((2, 6, 3)).astype(np.float32)}
    dataset = load_data(arrays, [X, state])
    np.testing.assert_array_equal(all_of(dataset)[4]["state"], arrays["state"][:, 4:5])
    both = next(iter(dataset.batches(6)))
    assert both.count == 6
    for name, value in arrays.items():
        np.testing.assert_array_equal(both.feeds[name], value)


def test_what_cannot_be_cut_is_used_for_every_sample_and_told() -> None:
    anchors = ValueInfo("anchors", FLOAT, (9, 2))
    scalar = ValueInfo("rate", FLOAT, ())
    arrays = {"x": ROWS, "anchors": np.ones((9, 2), np.float32), "rate": np.float32(3)}
    dataset = load_data(arrays, [X, anchors, scalar])
    found = all_of(dataset)
    assert len(found) == 6
    assert all(sample["anchors"].shape == (9, 2) and sample["rate"] == 3 for sample in found)
    assert "anchors: one array, used for every sample" in dataset.describe()


@pytest.mark.parametrize(
    ("symbol", "told"),
    [("D", True), ("seq_len", True), ("num_nodes", True), ("N", False), ("batch_len", False), ("unk__7", False)],
)
def test_an_axis_that_is_no_batch_by_its_name_is_cut_and_told(symbol: str, told: bool) -> None:
    """A range of samples of one step is not that of the sequences that the model will get."""
    value = ValueInfo("x", FLOAT, (symbol, 4))
    for shape in ((5, 4), (5, 2, 4)):
        dataset = load_data({"x": np.ones(shape, np.float32)}, [value])
        assert len(dataset) == 5
        assert (f"5 samples along '{symbol}'" in dataset.describe()) == (told and len(shape) == 2)


@pytest.mark.parametrize(
    ("given_dtype", "wanted", "value"),
    [
        (np.float16, FLOAT, 0.5),
        (np.float64, FLOAT, 0.5),
        (np.float32, HALF, 0.5),
        (np.float32, DOUBLE, 0.5),
        (np.int32, INT64, -3),
        (np.int64, INT32, -3),
        (np.uint8, INT64, 200),
        (np.int64, UINT8, 200),
    ],
)
def test_conversions_within_a_kind_are_made_and_told(given_dtype: type, wanted: int, value: float) -> None:
    dataset = load_data(np.full((2, 3), value, given_dtype), [ValueInfo("v", wanted, ("N", 3))])
    assert all((sample["v"] == value).all() for sample in dataset.samples())
    assert f"input v: {np.dtype(given_dtype)} converted to" in dataset.describe()


INTS, OTHER_INTS = np.zeros((2, 5), np.int64), np.zeros((3, 5), np.int64)


def vectors(wanted: int, size: int = 3) -> list[ValueInfo]:
    return [ValueInfo("v", wanted, ("N", size))]


REFUSED: dict[str, tuple[dict[str, np.ndarray], list[ValueInfo], str]] = {
    # Of another kind: the error names both.
    "integers for floats": ({"v": np.zeros((2, 3), np.int64)}, vectors(FLOAT), "'v'|int64"),
    "bytes for floats": ({"v": np.zeros((2, 3), np.uint8)}, vectors(FLOAT), "'v'|uint8"),
    "floats for integers": ({"v": np.zeros((2, 3), np.float32)}, vectors(INT64), "'v'|float32"),
    "bools for integers": ({"v": np.zeros((2, 3), bool)}, vectors(INT64), "'v'|bool"),
    "bytes for bools": ({"v": np.zeros((2, 3), np.int8)}, vectors(BOOL), "'v'|int8"),
    "words for floats": ({"v": np.full((2, 3), "a")}, vectors(FLOAT), "'v'|<U1"),
    # Values that the type cannot hold.
    "too large an integer": ({"v": np.array([[2**40]])}, vectors(INT32, 1), "int32 cannot"),
    "one below 0": ({"v": np.array([[-1]])}, vectors(UINT8, 1), "uint8 cannot"),
    "too large a float": ({"v": np.array([[1e6]], np.float32)}, vectors(HALF, 1), "too large for float16"),
    # Names, counts and ranks of two inputs.
    "another name": ({"id": INTS, "mask": INTS}, [IDS, MASK], "'ids'|did you mean 'id'"),
    "one is missing": ({"ids": INTS}, [IDS, MASK], "'mask'|'ids'"),
    "other counts": ({"ids": INTS, "mask": OTHER_INTS}, [IDS, MASK], "disagree|'ids' has 2|'mask' has 3"),
    "another rank": ({"ids": INTS[0], "mask": INTS}, [IDS, MASK], "'ids'|1 dimensions|wants 2"),
    "nothing in two": ({"ids": INTS[:0], "mask": INTS[:0]}, [IDS, MASK], "'ids'|empty"),
    # Shapes of one input.
    "another size": ({"x": np.zeros((6, 3, 5), np.float32)}, [X], "axis 2|is 5|wants 4"),
    "another size of a stack": ({"x": np.zeros((6, 2, 3, 5), np.float32)}, [X], "axis 3|is 5|wants 4"),
    "no batch axis": ({"x": np.zeros((3, 4), np.float32)}, [X], "2 dimensions|batch axis"),
    "too many axes": ({"x": np.zeros((6, 1, 1, 3, 4), np.float32)}, [X], "5 dimensions"),
    "nothing": ({"x": np.zeros((0, 3, 4), np.float32)}, [X], "empty"),
    "a stack of nothing": ({"x": np.zeros((0, 1, 3, 4), np.float32)}, [X], "empty"),
    "another layout": (
        {"x": np.zeros((2, 8, 9, 3), np.float32)}, [ValueInfo("x", FLOAT, ("N", 3, 8, 9))], "NHWC|(0, 3, 1, 2)",
    ),
    "too few rows": ({"x": np.zeros((3, 2), np.float32)}, [ValueInfo("x", FLOAT, (8, 2))], "3 rows; the model takes 8"),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "inputs", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_told(arrays: dict[str, np.ndarray], inputs: list[ValueInfo], words: str) -> None:
    with pytest.raises(DataError) as raised:
        load_data(arrays, inputs)
    assert [word for word in words.split("|") if word not in str(raised.value)] == []


def test_strings() -> None:
    dataset = load_data({"v": np.array([["a", "b"], ["c", "d"]])}, [ValueInfo("v", STRING, ("N", 2))])
    assert [list(sample["v"][0]) for sample in dataset.samples()] == [["a", "b"], ["c", "d"]]


def test_the_minus_inf_of_a_mask_is_taken(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[4, 1, 2] = -np.inf
    np.savez(tmp_path / "calib.npz", x=rows)
    samples = [sample["x"] for sample in load_data(tmp_path / "calib.npz", [X]).samples()]
    assert [np.isneginf(value).sum() for value in samples].count(1) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_name_input_and_sample(tmp_path: Path, bad: float) -> None:
    rows = ROWS.copy()
    rows[4, 1, 2] = bad
    np.savez(tmp_path / "calib.npz", x=rows)
    dataset = load_data(tmp_path / "calib.npz", [X])
    with pytest.raises(DataError) as raised:
        all_of(dataset)
    assert raised.value.subject == "calib.npz, sample 4, input 'x'"
    assert "[0, 1, 2]" in raised.value.cause
    assert ("NaN" if np.isnan(bad) else "inf") in raised.value.cause


def test_arrays_nobody_asked_for_are_told() -> None:
    dataset = load_data({"x": ROWS, "label": np.arange(6)}, [X])
    assert "array 'label' is no input of the model: not used" in dataset.describe()
    assert set(dataset[0]) == {"x"}


def test_one_array_needs_no_name_when_there_is_one_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ROWS)
    np.save(tmp_path / "a.npy", ROWS)
    for source in (ROWS, tmp_path / "a.npz", tmp_path / "a.npy", str(tmp_path / "a.npy")):
        assert len(load_data(source, [X])) == 6
    with pytest.raises(DataError, match="without a name"):
        load_data(ROWS, [IDS, MASK])
    with pytest.raises(DataError, match=r"one array.*2 inputs"):
        load_data(tmp_path / "a.npy", [IDS, MASK])


def test_fortran_order_and_names_with_slashes(tmp_path: Path) -> None:
    value = ValueInfo("serving/x:0", FLOAT, ("N", 3, 4))
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "f.npz", **{"serving/x:0": np.asfortranarray(ROWS)})
        np.testing.assert_array_equal(load_data(tmp_path / "f.npz", [value])[3]["serving/x:0"][0], ROWS[3])


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    trap = np.empty(1, object)
    trap[0] = Trap()
    np.save(tmp_path / "trap.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "trap.npz", x=trap)
    for name in ("trap.npy", "trap.npz"):
        with pytest.raises(DataError, match="never loaded"):
            load_data(tmp_path / name, [X])
    assert not (tmp_path / "ran").exists()


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"hello")
    (tmp_path / "a.dat").write_bytes(b"hello")
    (tmp_path / "calib.npz").mkdir()
    zipfile.ZipFile(tmp_path / "none.npz", "w").close()
    for name, said in (
        ("a.npz", r"not a readable array file.*\[Q204\]"),
        ("a.dat", "of no kind"),
        ("calb.npz", r"no such file.*\n.*calib\.npz"),
        ("none.npz", "empty"),
    ):
        with pytest.raises(DataError, match=said):
            load_data(tmp_path / name, [X])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    fixed=st.sampled_from([None, 1, 2, 3]),
    stacked=st.booleans(),
    batch=st.integers(1, 5),
    samples=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_samples_are_the_array_whatever_the_batch(
    count: int, fixed: int | None, stacked: bool, batch: int, samples: int, seed: int
) -> None:
    size = fixed or 1
    shape = (count, size, 2) if stacked else (count * size, 2)
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    value = ValueInfo("x", FLOAT, (fixed if fixed is not None else "N", 2))
    config = DataConfig(samples=samples, seed=seed)
    dataset = load_data({"x": array}, [value], config)
    found = [sample["x"] for sample in dataset.samples()]
    every = array.reshape(count, size, 2)
    assert len(dataset) == len(found) == min(samples, count)
    rows = [int(np.flatnonzero((every == one.reshape(size, 2)).all((1, 2)))[0]) for one in found]
    assert rows == sorted(set(rows))
    again = [sample["x"] for sample in load_data({"x": array}, [value], config).samples()]
    np.testing.assert_array_equal(found, again)
    batches = list(dataset.batches(batch))
    np.testing.assert_array_equal(np.concatenate([b.feeds["x"] for b in batches]), np.concatenate(found))
    assert sum(b.count for b in batches) == len(found)
    assert [b.first_index for b in batches] == list(np.cumsum([0, *(b.count for b in batches[:-1])]))
    assert all(b.count <= (batch if fixed is None else 1) for b in batches)
