from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, numpy_helper

from onnxq.numerics import pack_int4, unpack_int4

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)
SIGNED = hnp.arrays(np.int8, SHAPES, elements=st.integers(-8, 7))
UNSIGNED = hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 15))


@given(st.one_of(SIGNED, UNSIGNED))
def test_round_trip_and_onnx_agree(values: Any) -> None:
    signed = values.dtype == np.int8
    packed = pack_int4(values)
    assert packed.dtype == np.uint8
    assert packed.size == (values.size + 1) // 2
    back = unpack_int4(packed, values.shape, signed=signed)
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(back, values)
    kind = TensorProto.INT4 if signed else TensorProto.UINT4
    tensor = TensorProto(data_type=kind, dims=values.shape, raw_data=packed.tobytes())
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(values.dtype), values)


def test_the_first_value_is_in_the_low_half() -> None:
    assert pack_int4(np.int8([1, -1, 7])).tolist() == [0xF1, 0x07]


@pytest.mark.parametrize("values", [np.int8([8]), np.int8([-9]), np.uint8([16]), np.int32([1])])
def test_what_is_not_4_bits_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="4-bit"):
        pack_int4(values)


def test_the_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        unpack_int4(np.zeros(3, np.uint8), (2, 2), signed=True)
