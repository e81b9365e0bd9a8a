"""Other views of pictures: what they keep, and what is no picture."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.data import augment_sample

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


@pytest.mark.parametrize(
    "shape", [(1, 3, 15, 40), (1, 16, 32, 32), (1, 128), (3, 32, 32), (1, 3, 8, 32, 32), (0, 3, 32, 32)]
)
def test_no_pictures(shape: tuple[int, ...]) -> None:
    assert augment_sample({"x": np.zeros(shape, np.float32)}) == ()


def test_masks_and_caches_are_no_pictures() -> None:
    drawn = np.zeros((1, 1, 32, 32), np.float32)
    assert augment_sample({"mask": drawn, "ids": np.zeros((1, 32), np.int64)}) == ()
    assert augment_sample({"cache": np.zeros((1, 4, 32, 64), np.float32), "x": np.zeros((1, 1, 384), np.float32)}) == ()
    drawn[0, 0, 0, 1] = -np.inf
    assert augment_sample({"mask": drawn}) == ()


def test_text_is_no_picture() -> None:
    assert augment_sample({"x": np.full((1, 1, 16, 16), "a")}) == ()
