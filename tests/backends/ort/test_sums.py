"""The operators that add products of int8 weights in 16 bits, and which two weights meet in each of those sums."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.backends.base import Data
from onnxq.backends.ort.limits import INTEGER_PRODUCTS, find_product, pair_weights
from onnxq.backends.ort.rules import find_sum_order
from onnxq.graph import NodeRef
from onnxq.numerics import pair_neighbours


def node(op: str, domain: str = "", **attrs: Any) -> NodeRef:
    held: Mapping[str, Any] = attrs
    return NodeRef("n", op, domain, ("x", "w"), ("y",), held, "", 0)


@pytest.mark.parametrize(
    ("op", "domain", "reads"),
    [
        ("Conv", "", Data.PAIR),
        ("QLinearConv", "", Data.STORED),
        ("QLinearConv", "com.microsoft", Data.STORED),
        ("QGemm", "com.microsoft", Data.STORED),
        ("DynamicQuantizeLSTM", "com.microsoft", Data.DYNAMIC),
        ("QGemm", "", None),
        ("Conv", "com.microsoft", None),
        # Their kernels are exact.
        ("ConvInteger", "", None),
        ("MatMulNBits", "com.microsoft", None),
    ],
)
def test_the_table_is_by_domain_and_operator(op: str, domain: str, reads: Data | None) -> None:
    found = find_product(node(op, domain))
    assert (None if found is None else found.reads) == reads


def test_every_entry_says_where_its_type_stands() -> None:
    for product in INTEGER_PRODUCTS:
        assert (product.zero >= 0) is (product.reads is Data.STORED)
        assert product.zero not in product.weights
        assert product.data == 0


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "order"),
    [
        ("Conv", (8, 4, 3, 3), {}, (0, 2, 3, 1)),
        ("Conv", (8, 4, 5), {}, (0, 2, 1)),
        ("QLinearConv", (8, 4, 3, 3), {"group": 2}, (0, 2, 3, 1)),
        # One input and one output channel a group: an exact kernel.
        ("Conv", (8, 1, 3, 3), {"group": 8}, None),
        ("Conv", (16, 1, 3, 3), {"group": 8}, (0, 2, 3, 1)),
        ("Conv", (8, 1, 3, 3), {"group": 1}, (0, 2, 3, 1)),
        ("Gemm", (4, 8), {}, (1, 0)),
        ("Gemm", (4, 8), {"transB": 1}, (0, 1)),
        ("QGemm", (4, 8), {"transB": 1}, (0, 1)),
        ("MatMul", (4, 8), {}, (1, 0)),
        ("MatMul", (2, 4, 8), {}, None),
        ("ConvTranspose", (8, 4, 3, 3), {}, None),
        ("Conv", (8, 4), {}, None),
    ],
)
def test_the_order_in_which_kernels_read_a_weight(op: str, shape: tuple, attrs: dict, order: tuple | None) -> None:
    assert find_sum_order(node(op, **attrs), shape) == order


def test_pairs_of_a_convolution_are_input_channels_of_one_tap() -> None:
    weight = np.arange(2 * 4 * 1 * 2, dtype=np.int8).reshape(2, 4, 1, 2)
    found = pair_weights(node("Conv"), weight)
    assert found.shape == (2, 4, 2)
    # Of the first filter: channels 0 and 1 of the first tap, 2 and 3 of it, then the second tap's.
    assert found[0].tolist() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert pair_weights(node("Conv", group=2), weight[:, :1]) is None


def test_pairs_of_a_matrix_lie_along_what_is_summed() -> None:
    weight = np.arange(12, dtype=np.int8).reshape(4, 3)
    down = pair_weights(node("MatMul"), weight)
    across = pair_weights(node("Gemm", transB=1), weight)
    assert down.tolist() == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]
    assert [row[0] for row in across.tolist()] == [[0, 1], [3, 4], [6, 7], [9, 10]]


@given(st.lists(st.integers(1, 5), min_size=3, max_size=4))
@settings(max_examples=20)
def test_each_column_of_a_stack_of_matrices_is_a_row_of_sums(shape: list[int]) -> None:
    weight = np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)
    found = pair_weights(node("DynamicQuantizeLSTM"), weight)
    assert found is not None
    matrices = weight.reshape(-1, *shape[-2:])
    each = np.concatenate([pair_neighbours(matrix, (1, 0)) for matrix in matrices])
    np.testing.assert_array_equal(found, each)


def test_a_vector_is_one_row_and_a_number_none() -> None:
    assert pair_weights(node("MatMul"), np.int8([1, 2, 3, 4])).tolist() == [[[1, 2], [3, 4]]]
    assert pair_weights(node("MatMul"), np.asarray(np.int8(3))) is None
