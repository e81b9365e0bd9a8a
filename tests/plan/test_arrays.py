"""Arrays in JSON: both forms, at every size and type, and the marks that say which spec numbers belong to."""

import base64
import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxq.plan.forms import read_array, read_mark, write_array, write_mark
from onnxq.spec import PerChannel, QParams, QuantSpec

dtypes = st.sampled_from([np.float32, np.int32, np.int8, np.uint8, np.int16, np.uint16])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(dtypes))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=9))
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else None
    return draw(hnp.arrays(dtype, shape, elements=finite))


@given(arrays())
def test_arrays_survive_json(array: np.ndarray) -> None:
    back = read_array(json.loads(json.dumps(write_array(array))), array.dtype)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


@pytest.mark.parametrize(("size", "packed"), [(0, False), (1, False), (64, False), (65, True)])
def test_long_arrays_are_packed(size: int, packed: bool) -> None:
    raw = write_array(np.arange(size, dtype=np.int32))
    assert isinstance(raw, dict) == packed
    assert read_array(raw, np.int32).tolist() == list(range(size))


def test_a_person_may_write_either_form_at_any_size() -> None:
    long = list(range(200))
    assert read_array(long, np.int32).tolist() == long
    short = {"shape": [2], "zlib64": base64.b64encode(zlib.compress(np.array([3, 5], "<i4").tobytes())).decode()}
    assert read_array(short, np.int32).tolist() == [3, 5]


def pack(data: bytes, shape: object) -> dict[str, object]:
    return {"shape": shape, "zlib64": base64.b64encode(zlib.compress(data)).decode()}


REFUSED = {
    "a word": ("x", np.float32, "must be numbers, not str"),
    "a truth value": ([True], np.int32, "must be numbers, not bool"),
    "nothing": ([None], np.float32, "must be numbers, not NoneType"),
    "ragged": ([[1, 2], [3]], np.int32, "lists of one length at each depth"),
    "beyond float32": ([1e39], np.float32, "must be finite float32 numbers"),
    "not a number": ([float("nan")], np.float32, "must be finite float32 numbers"),
    "beyond int8": ([128], np.int8, "whole numbers from -128 to 127"),
    "a fraction": ([0.5], np.int32, "must be whole numbers"),
    "another key": ({"shape": [1], "zlib": "x"}, np.int32, "must be numbers, or"),
    "a negative dim": (pack(b"", [-1]), np.int32, "a shape of whole numbers"),
    "a huge shape": (pack(b"", [2**20, 2**20]), np.int32, "must be smaller"),
    "too few bytes": (pack(b"1234", [2]), np.int32, "must hold 8 bytes"),
    "too many bytes": (pack(b"1" * 1000, [2]), np.int32, "must hold 8 bytes"),
    "no base64": ({"shape": [1], "zlib64": "?"}, np.int32, "cannot be unpacked"),
    "no deflate": ({"shape": [1], "zlib64": base64.b64encode(b"1234").decode()}, np.int32, "cannot be unpacked"),
    "a packed NaN": (pack(np.array([np.nan], "<f4").tobytes(), [1]), np.float32, "must be finite"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_wrong_array_says_what_it_must_be(name: str) -> None:
    raw, dtype, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        read_array(raw, dtype)


def test_a_bomb_is_not_inflated() -> None:
    """A megabyte of zeros deflates to a kilobyte: no more is inflated than the shape allows."""
    with pytest.raises(ValueError, match="must hold 4 bytes"):
        read_array(pack(bytes(2**20), [1]), np.int32)


SPEC = QuantSpec(bits=4, signed=True, storage="int8", granularity=PerChannel(0))


def numbers(*scales: float, computed_for: str = "") -> QParams:
    scale = np.asarray(scales, np.float32)
    return QParams(scale, np.zeros(scale.shape, np.int32), computed_for=computed_for)


def test_a_mark_names_the_spec_of_its_numbers() -> None:
    assert read_mark(write_mark(numbers(0.5, 0.25), SPEC), numbers(0.5, 0.25)) == SPEC.levels
    older = write_mark(numbers(0.5, computed_for="8 bits signed symmetric"), SPEC)
    assert read_mark(older, numbers(0.5)) == "8 bits signed symmetric"


def test_a_mark_is_void_once_the_numbers_are_edited() -> None:
    mark = write_mark(numbers(0.5, 0.25), SPEC)
    assert read_mark(mark, numbers(0.5, 0.125)) == ""
    shifted = QParams(np.asarray([0.5, 0.25], np.float32), np.asarray([0, 1], np.int32))
    assert read_mark(mark, shifted) == ""
    assert read_mark("", numbers(0.5)) == ""
    assert read_mark("8 bits signed symmetric", numbers(0.5)) == ""
