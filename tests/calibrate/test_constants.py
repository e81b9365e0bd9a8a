"""Constants that hold NaN or inf: errors name them and the node that they break."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.calibrate.constants import check_constants
from onnxq.errors import CalibrationError
from onnxq.graph import GraphIndex, name_nodes
from tests.calibrate.kit import model


def index_of(body: str, value: float) -> GraphIndex:
    """A model of this body, in which one element of the constant c is `value`."""
    proto = model(f"g (float[2,4] x, bool[2,4] b) => (float[n,k] y) {{ {body} }}")
    constant = np.ones((4, 4), np.float32)
    constant[1, 2] = value
    proto.graph.initializer.append(numpy_helper.from_array(constant, "c"))
    return GraphIndex(name_nodes(onnx.shape_inference.infer_shapes(proto)))


PRODUCTS = ("y = MatMul(x, c)", "y = Gemm(x, c)", "t = Transpose(c) h = Cast<to=1>(t) y = MatMul(x, h)")
# A NaN is one whatever it is added to or multiplied by; infinities are masks, or make 0 of what they divide.
SUMS = ("h = MatMul(x, x) y = Add(h, c)", "y = Mul(c, c)", "y = LayerNormalization(x, c, c)", "y = Gemm(x, x, c)")
LEGAL = ("y = Where(b, x, c)", "y = Gather(c, x)", "y = Max(x, c)", "h = IsNaN(c) y = Cast<to=1>(h)")


@pytest.mark.parametrize("body", PRODUCTS + SUMS)
def test_a_weight_that_holds_nan_is_named_with_its_node(body: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        check_constants(index_of(body, np.nan))
    assert (caught.value.code, caught.value.subject) == ("Q503", "c")
    assert re.fullmatch(r"is a weight of \S+ \(\w+\) and holds 1 NaN", caught.value.cause)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_weight_of_a_product_is_broken_and_any_other_is_not(value: float) -> None:
    for body in PRODUCTS:
        with pytest.raises(CalibrationError, match="holds 1 inf"):
            check_constants(index_of(body, value))
    for body in SUMS + LEGAL:
        check_constants(index_of(body, value))


@pytest.mark.parametrize("body", LEGAL)
def test_a_value_that_may_not_be_used_is_legal(body: str) -> None:
    check_constants(index_of(body, np.nan))
