"""Narrow types emulated in float32: every tensor rounded where an engine of the type rounds it, which ORT does not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from onnxq.graph import name_nodes
from onnxq.graph.precision.narrow import write_types
from onnxq.graph.precision.widen import emulate_types
from onnxq.runtime import Session
from tests.passes.kit import parse

TEXT = "g (float[4] x) => (float[4] y) { a = Add(x, x) \n b = Mul(a, a) \n y = Sqrt(b) }"


NUMPY = [(TensorProto.FLOAT16, np.float16), (TensorProto.BFLOAT16, ml_dtypes.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), NUMPY)
def test_rounds_and_overflows_as_the_type_does(kind: int, dtype: type) -> None:
    narrow = name_nodes(write_types(parse(TEXT, opset=22), kind, set()))
    x = np.array([1.0001, 300, 1e-4, 20.03], np.float32)
    got = Session(emulate_types(narrow), optimize=False).run({"x": x})["y"]
    with np.errstate(over="ignore"):
        a = (2 * x.astype(dtype).astype(np.float32)).astype(dtype).astype(np.float32)
        b = (a * a).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(got, np.sqrt(b).astype(dtype).astype(np.float32))


@pytest.mark.recent_ort
def test_ort_hides_what_overflows() -> None:
    """Why there is an emulation: (2 · 300)² passes through float32 there, and comes back."""
    narrow = write_types(parse(TEXT, opset=19), TensorProto.FLOAT16, set())
    x = np.full(4, 300, np.float32)
    assert np.isfinite(Session(narrow, optimize=False).run({"x": x})["y"]).all()
    assert np.isinf(Session(emulate_types(name_nodes(narrow)), optimize=False).run({"x": x})["y"]).all()
