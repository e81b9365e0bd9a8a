"""Folders of arrays, ONNX test data and images."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from PIL import Image

from onnxq.config import DataConfig, ImageConfig
from onnxq.data import augment_sample, load_data
from onnxq.errors import DataError, MissingDependencyError
from onnxq.graph import ValueInfo

X = ValueInfo("x", TensorProto.FLOAT, ("N", 3))
IDS = ValueInfo("ids", TensorProto.INT64, ("N", "L"))
RNG = np.random.default_rng(0)


def rows(count: int) -> np.ndarray:
    return RNG.standard_normal((count, 3)).astype(np.float32)


def write_pb(path: Path, array: np.ndarray, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(onnx.numpy_helper.from_array(array, name).SerializeToString())


def test_npy_files_of_one_input_follow_each_other_in_natural_order(tmp_path: Path) -> None:
    parts = {name: rows(n) for name, n in (("s10", 1), ("s2", 3), ("s1", 2))}
    for name, array in parts.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / ".hidden.npy").write_bytes(b"no")
    found = np.concatenate([sample["x"] for sample in load_data(tmp_path, [X]).samples()])
    np.testing.assert_array_equal(found, np.concatenate([parts["s1"], parts["s2"], parts["s10"]]))


def test_npy_files_named_after_the_inputs_hold_one_array_each(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", rows(4))
    np.save(tmp_path / "ids.npy", np.arange(20).reshape(4, 5))
    dataset = load_data(tmp_path, [X, IDS])
    assert len(dataset) == 4
    np.testing.assert_array_equal(dataset[2]["ids"], [[10, 11, 12, 13, 14]])
    (tmp_path / "ids.npy").unlink()
    with pytest.raises(DataError, match=r"ids\.npy"):
        load_data(tmp_path, [X, IDS])


def test_npz_files_may_be_ragged(tmp_path: Path) -> None:
    for k, length in enumerate((4, 7, 7, 4)):
        np.savez(tmp_path / f"{k}.npz", x=rows(1), ids=np.full((1, length), k))
    dataset = load_data(tmp_path, [X, IDS])
    batches = list(dataset.batches(8))
    assert [sample["ids"].shape[1] for sample in dataset.samples()] == [4, 7, 7, 4]
    assert [batch.count for batch in batches] == [1, 2, 1]
    np.testing.assert_array_equal(batches[1].feeds["ids"], np.repeat([[1], [2]], 7, axis=1))


@pytest.mark.parametrize(("symbol", "count"), [("nodes", 3), ("D", 3), ("N", 8), ("batch_frames", 8), ("unk__1", 8)])
@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_each_of_several_files_is_a_run_where_axis_0_is_no_batch(
    tmp_path: Path, symbol: str, count: int, suffix: str
) -> None:
    value = ValueInfo("x", TensorProto.FLOAT, (symbol, 3))
    for k, size in enumerate((3, 4, 1)):
        path = tmp_path / f"{k}.{suffix}"
        if suffix == "npz":
            np.savez(path, x=rows(size))
        else:
            np.save(path, rows(size))
    dataset = load_data(tmp_path, [value])
    assert len(dataset) == count
    assert dataset[0]["x"].shape == (3 if count == 3 else 1, 3)
    # Of a single file nothing else tells the samples.
    assert len(load_data(tmp_path / f"0.{suffix}", [value])) == 3


def test_a_folder_for_each_input(tmp_path: Path) -> None:
    for k in (1, 2, 10):
        for name, array in (("x", np.full((1, 3), k, np.float32)), ("ids", np.full((1, k), k))):
            (tmp_path / name).mkdir(exist_ok=True)
            np.save(tmp_path / name / f"{k}.npy", array)
    assert [sample["ids"].shape[1] for sample in load_data(tmp_path, [X, IDS]).samples()] == [1, 2, 10]
    (tmp_path / "x" / "1.npy").unlink()
    with pytest.raises(DataError, match="'x' has 2, 'ids' has 3"):
        load_data(tmp_path, [X, IDS])


@pytest.mark.parametrize("named", [True, False])
def test_onnx_test_data(tmp_path: Path, named: bool) -> None:
    for k in (0, 2, 10):
        folder = tmp_path / f"test_data_set_{k}"
        first, second = ("ids", "x") if named else ("", "")
        values = {"x": np.full((1, 3), k, np.float32), "ids": np.full((1, 4), k)}
        order = ("ids", "x") if named else ("x", "ids")
        write_pb(folder / "input_0.pb", values[order[0]], first)
        write_pb(folder / "input_1.pb", values[order[1]], second)
        write_pb(folder / "output_0.pb", np.zeros(1, np.float32))
    (tmp_path / "model.onnx").write_bytes(b"")
    dataset = load_data(tmp_path, [X, IDS])
    assert [int(sample["ids"][0, 0]) for sample in dataset.samples()] == [0, 2, 10]
    assert [float(sample["x"][0, 0]) for sample in dataset.samples()] == [0, 2, 10]
    alone = load_data(tmp_path / "test_data_set_2", [X, IDS])
    assert len(alone) == 1
    assert alone.name(0) == "test_data_set_2"


def test_a_single_pb_file(tmp_path: Path) -> None:
    write_pb(tmp_path / "input_0.pb", rows(1))
    assert len(load_data(tmp_path / "input_0.pb", [X])) == 1


def pack_tensor(raw: bytes = b"", **fields: object) -> bytes:
    """A tensor of three floats."""
    return onnx.TensorProto(data_type=TensorProto.FLOAT, dims=[1, 3], raw_data=raw, **fields).SerializeToString()


ELSEWHERE = [onnx.StringStringEntryProto(key="location", value="/etc/hostname")]


@pytest.mark.parametrize(
    ("content", "inputs", "told"),
    [
        (b"\xff\xff\xff", [X], "not an ONNX tensor"),
        (b"", [X], "not an ONNX tensor"),
        (pack_tensor(bytes(8)), [X], "damaged"),
        (pack_tensor(name="x", data_location=onnx.TensorProto.EXTERNAL, external_data=ELSEWHERE), [X], "another file"),
        (pack_tensor(bytes(12)), [X, IDS], "1 input files, the model has 2"),
    ],
)
def test_pb_files_that_do_not_fit(tmp_path: Path, content: bytes, inputs: list[ValueInfo], told: str) -> None:
    (tmp_path / "input_0.pb").write_bytes(content)
    with pytest.raises(DataError, match=told):
        load_data(tmp_path, inputs)


def test_inputs_that_are_no_tensors_are_refused_before_files_are_read(tmp_path: Path) -> None:
    """A sequence's bytes can look like those of a tensor, damaged."""
    (tmp_path / "input_0.pb").write_bytes(numpy_helper.from_list([rows(1)], "s").SerializeToString())
    with pytest.raises(DataError, match="files of samples hold tensors") as caught:
        load_data(tmp_path, [ValueInfo("s", 0, None)])
    assert (caught.value.subject, caught.value.code) == ("input 's'", "Q206")
    with pytest.raises(DataError, match="is not an ONNX tensor"):
        load_data(tmp_path, [X])


def test_folders_that_say_nothing_or_too_much(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        load_data(tmp_path, [X])
    np.save(tmp_path / "a.npy", rows(1))
    np.savez(tmp_path / "a.npz", x=rows(1))
    with pytest.raises(DataError, match=r"\.npz files and \.npy files"):
        load_data(tmp_path, [X])


PICTURE = ValueInfo("pixels", TensorProto.FLOAT, ("N", 3, 4, 6))


def picture(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def images(**given: object) -> DataConfig:
    return DataConfig(images=ImageConfig(**{"size": (4, 6), **given}))  # type: ignore[arg-type]


def test_images_are_scaled_normalised_and_laid_out(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 6, 3), np.uint8)
    picture(tmp_path / "b" / "two.png", pixels)
    picture(tmp_path / "a" / "one.PNG", 255 - pixels)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    dataset = load_data(tmp_path, [PICTURE], images(mean=mean, std=std))
    assert [dataset.name(k) for k in range(2)] == [str(Path("a") / "one.PNG"), str(Path("b") / "two.png")]
    expected = ((pixels / 255.0 - mean) / std).transpose(2, 0, 1)[None]
    found = dataset[1]["pixels"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)
    bgr = load_data(tmp_path, [PICTURE], images(color="BGR", range=(-1.0, 1.0)))[1]["pixels"]
    np.testing.assert_allclose(bgr[0], (pixels[:, :, ::-1] / 127.5 - 1).transpose(2, 0, 1), atol=1e-6)


def test_image_layouts_and_integer_inputs(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 6, 3), np.uint8)
    picture(tmp_path / "one.png", pixels)
    last = ValueInfo("pixels", TensorProto.UINT8, (1, 4, 6, 3))
    found = load_data(tmp_path / "one.png", [last], images(layout="NHWC"))[0]["pixels"]
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found[0], pixels)
    with pytest.raises(DataError, match="pixels as they are"):
        load_data(tmp_path, [last], images(layout="NHWC", mean=(0.5,)))
    gray = ValueInfo("pixels", TensorProto.FLOAT16, (1, 1, 4, 6))
    found = load_data(tmp_path, [gray], images(color="GRAY"))[0]["pixels"]
    assert found.shape == (1, 1, 4, 6)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found[0, 0], np.asarray(Image.fromarray(pixels).convert("L")) / 255, atol=1e-3)


def test_image_sizes(tmp_path: Path) -> None:
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 200
    picture(tmp_path / "wide.png", pixels)
    value = ValueInfo("pixels", TensorProto.UINT8, (1, 4, 4, 3))

    def load(**given: object) -> np.ndarray:
        config = images(size=(4, 4), layout="NHWC", interpolation="nearest", **given)
        return load_data(tmp_path, [value], config)[0]["pixels"]

    assert (load(crop="center") == 200).all()
    np.testing.assert_array_equal(load(crop="none")[0, 0, :, 0], [0, 200, 200, 0])
    padded = load(crop="pad", fill=7)[0, :, :, 0]
    assert set(padded[0]) == set(padded[-1]) == {7}
    assert 200 in padded[1:3]
    assert load(resize=8)[0, 0].tolist() == [[200] * 3] * 4


@pytest.mark.parametrize(
    ("inputs", "config", "said"),
    [
        ([PICTURE], None, r"\[Q214\]\n.*data: \{images"),
        ([PICTURE], images(size=(5, 6)), r"axis 2.*is 5, the model wants 4"),
        ([PICTURE], images(layout="NHWC"), "NHWC"),
        ([PICTURE, X], images(), "the model has 2"),
        ([X], images(), "does not take images"),
        ([PICTURE], images(input="pixel"), "did you mean 'pixels'"),
    ],
)
def test_what_is_wrong_in_images(tmp_path: Path, inputs: list[ValueInfo], config: DataConfig | None, said: str) -> None:
    picture(tmp_path / "one.png", np.zeros((4, 6, 3), np.uint8))
    with pytest.raises(DataError, match=said):
        load_data(tmp_path, inputs, config)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "one.png", np.zeros((4, 6, 3), np.uint8))
    (tmp_path / "two.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"two\.jpg.*not a readable image"):
        list(load_data(tmp_path, [PICTURE], images()).samples())


def test_absent_pillow_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "one.png", np.zeros((4, 6, 3), np.uint8))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError) as caught:
        load_data(tmp_path, [PICTURE], images())[0]
    assert caught.value.fix == 'pip install "onnxq[images]"'


# ---- Other views of pictures: what they keep, and what is no picture.

CASES = st.tuples(
    st.integers(1, 3), st.sampled_from((1, 3, 4)), st.integers(16, 23), st.integers(16, 23), st.booleans(),
    st.sampled_from((np.float32, np.float16, np.uint8, np.int8)), st.integers(0, 99),
)  # fmt: skip


@given(CASES)
def test_shape_type_and_range_stay(case: tuple[int, int, int, int, bool, type, int]) -> None:
    batch, channels, height, width, last, dtype, seed = case
    shape = (batch, height, width, channels) if last else (batch, channels, height, width)
    drawn = np.random.default_rng(seed).integers(-128 if dtype is np.int8 else 0, 127, shape).astype(dtype)
    seen = augment_sample({"x": drawn})
    assert seen
    for one in seen:
        value = one["x"]
        assert (value.shape, value.dtype) == (shape, np.dtype(dtype))
        assert value.flags.c_contiguous
        assert drawn.min() <= value.min()
        assert value.max() <= drawn.max()
        assert not np.array_equal(value, drawn)


def test_both_layouts_show_the_same() -> None:
    drawn = np.random.default_rng(0).random((1, 3, 17, 20), np.float32)
    first, last = augment_sample({"x": drawn}), augment_sample({"x": drawn.transpose(0, 2, 3, 1)})
    for one, other in zip(first, last, strict=True):
        assert np.array_equal(one["x"].transpose(0, 2, 3, 1), other["x"])


def test_the_sample_itself_is_left_alone_and_so_are_other_inputs() -> None:
    drawn, size = np.random.default_rng(0).random((1, 1, 16, 16), np.float32), np.array([16, 16])
    kept = drawn.copy()
    assert all(one["size"] is size for one in augment_sample({"x": drawn, "size": size}))
    assert np.array_equal(drawn, kept)


DRAWN = np.zeros((1, 1, 32, 32), np.float32)
SHAPES = ((1, 3, 15, 40), (1, 16, 32, 32), (1, 128), (3, 32, 32), (1, 3, 8, 32, 32), (0, 3, 32, 32))


@pytest.mark.parametrize(
    "feeds",
    [
        *({"x": np.zeros(shape, np.float32)} for shape in SHAPES),
        {"mask": DRAWN, "ids": np.zeros((1, 32), np.int64)},
        {"cache": np.zeros((1, 4, 32, 64), np.float32), "x": np.zeros((1, 1, 384), np.float32)},
        {"mask": np.where(np.arange(32) == 1, -np.inf, DRAWN).astype(np.float32)},
        {"x": np.full((1, 1, 16, 16), "a")},
    ],
)
def test_masks_caches_and_text_are_no_pictures(feeds: dict[str, np.ndarray]) -> None:
    assert augment_sample(feeds) == ()
