"""DynamicQuantizeLinear in numpy beside ONNX Runtime's, bit for bit."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import parser

from onnxq.runtime import Session
from tests.numerics.reference import fake_quant_dynamic, quantize_dynamic

MODEL = """<ir_version: 8, opset_import: ["" : 13]>
agraph (float[N] x) => (uint8[N] q, float s, uint8 z, float[N] y) {
    q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)
}"""
# Not so small that 1 / scale is infinite, nor so large that the range is.
VALUES = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 2.0**-99)


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(parser.parse_model(MODEL), optimize=False)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.one_of(VALUES, st.floats(-3, 3, width=16))))
@example(np.zeros(3, np.float32))
@example(np.float32([-1.5, -0.5]))
@example(np.float32([0.5, 127.5, 255.0, 1.5, 2.5]))
def test_integers_scale_and_zero_point_are_those_of_onnx_runtime(session: Session, x: NDArray[np.float32]) -> None:
    got = session.run({"x": x})
    q, numbers = quantize_dynamic(x)
    assert q.dtype == np.uint8
    np.testing.assert_array_equal(q, got["q"])
    assert numbers.scale.tobytes() == np.asarray(got["s"]).tobytes()
    assert int(numbers.zero_point) == int(got["z"])
    assert fake_quant_dynamic(x).tobytes() == got["y"].tobytes()
