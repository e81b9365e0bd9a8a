"""Which weights of a file can overflow 16-bit sums, and what keeps a kernel exact: on graphs of one product.

Every weight here is 100 or -100, two of which are over the limit of 128 in one sum.
"""

import numpy as np
import pytest
from onnx import helper

from onnxq.annotate import WeightSums, find_saturating
from onnxq.graph import GraphIndex
from tests.engines.kit import graph

BIG = np.full((4, 2), 100, np.int8)
_DATA = "xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)"
_WEIGHT = "wd = DequantizeLinear(w, s, wz)"
_RESULT = "yq = QuantizeLinear(p, s, z) y = DequantizeLinear(yq, s, z)"
_SHAPE = "(float[1,4] x) => (float[1,2] y)"
_CONV_SHAPE = "(float[1,4,3,3] x) => (float[1,2,3,3] y)"


def found(nodes: str, shape: str = _SHAPE, opset: int = 17, **arrays: object) -> tuple[WeightSums, ...]:
    """The weights of a graph with uint8 data, int8 weights and a scale of .1, unless `arrays` says otherwise."""
    held = {"s": np.float32(0.1), "z": np.uint8(128), "wz": np.int8(0), "w": BIG, **arrays}
    proto = graph(f"{shape} {{ {nodes} }}", opset, **{name: held[name] for name in held if held[name] is not None})
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return find_saturating(GraphIndex(proto))


def matmul(**arrays: object) -> tuple[WeightSums, ...]:
    return found(f"{_DATA} {_WEIGHT} y = MatMul(xd, wd)", **arrays)


def test_a_weight_is_counted_in_rows_and_sums():
    mixed = np.array([[100, 100], [100, -100], [1, 60], [2, 60]], np.int8)
    assert matmul(w=mixed) == (
        WeightSums(node="y/MatMul", op="MatMul", weight="w", data="uint8", rows=1, all_rows=2, sums=1, all_sums=4),
    )


@pytest.mark.parametrize(
    ("weight", "saturates"),
    [
        pytest.param([[64], [64]], False, id="128 is still exact"),
        pytest.param([[65], [64]], True, id="129 is not"),
        pytest.param([[-64], [-64]], False, id="-128 is still exact"),
        pytest.param([[-64], [-65]], True, id="-129 is not"),
        pytest.param([[127], [-128]], False, id="of different signs"),
        pytest.param([[0], [100], [100], [0]], False, id="large ones that are no neighbours"),
        pytest.param([[0], [0], [127]], False, id="the last of an odd number is alone"),
        pytest.param([[60], [60], [60], [60]], False, id="small ones"),
    ],
)
def test_two_neighbours_of_one_sign_may_add_up_to_128(weight, saturates):
    (one,) = matmul(w=np.array(weight, np.int8))
    assert (one.saturates, one.sums, one.rows, one.all_rows) == (saturates, saturates, saturates, 1)


@pytest.mark.parametrize(("nodes", "weights"), [
    pytest.param(f"{_DATA} {_WEIGHT} y = Gemm(xd, wd)", ["w"], id="Gemm"),
    pytest.param(f"{_DATA} {_WEIGHT} t = Transpose(wd) y = Gemm<transB=1>(xd, t)", ["w"], id="a transposed weight"),
    pytest.param(f"{_DATA} wq = QuantizeLinear(wf, s, wz) wd = DequantizeLinear(wq, s, wz) y = MatMul(xd, wd)",
                 ["wf"], id="a float weight with a whole pair behind it"),
    pytest.param(f"{_DATA} wd = DequantizeLinear(w, s) y = MatMul(xd, wd)", ["w"], id="no zero point"),
    pytest.param(f"{_DATA} {_WEIGHT} r = Flatten(xd) y = MatMul(r, wd)", ["w"], id="data through a move"),
    pytest.param("xq = QuantizeLinear(x, s, z) y = MatMulInteger(xq, w, z)", ["w"], id="MatMulInteger"),
    pytest.param("xq = QuantizeLinear(x, s) y = MatMulInteger(xq, w)", ["w"], id="uint8 by default"),
    pytest.param("xq, a, b = DynamicQuantizeLinear(x) y = MatMulInteger(xq, w, b)", ["w"], id="dynamic data"),
    pytest.param("xq, a, b = DynamicQuantizeLinear(x) r = Flatten(xq) y = MatMulInteger(r, w)", ["w"],
                 id="dynamic data through a move"),
    pytest.param("xq = QuantizeLinear(x, s, z) y = QLinearMatMul(xq, s, z, w, s, wz, s, z)", ["w"],
                 id="QLinearMatMul"),
    pytest.param("y = com.microsoft.DynamicQuantizeMatMul(x, w, s, wz)", ["w"], id="a kernel that quantizes"),
])  # fmt: skip
def test_int8_weights_of_integer_products_are_found(nodes, weights):
    ones = found(nodes, wf=np.full((4, 2), 10, np.float32))
    assert [one.weight for one in ones] == weights
    assert [(one.data, one.rows, one.all_rows, one.saturates) for one in ones] == [("uint8", 2, 2, True)]


@pytest.mark.parametrize(("nodes", "arrays"), [
    pytest.param(f"{_DATA} y = MatMul(xd, f)", {}, id="a float weight"),
    pytest.param(f"{_WEIGHT} y = MatMul(x, wd)", {}, id="float data"),
    pytest.param(f"{_DATA} wd = DequantizeLinear(w, s, wz) y = MatMul(xd, wd)",
                 {"w": np.full((4, 2), 200, np.uint8), "wz": np.uint8(0)}, id="uint8 weights"),
    pytest.param(f"{_DATA} wq = QuantizeLinear(f, s, z) wd = DequantizeLinear(wq, s, z) y = MatMul(xd, wd)", {},
                 id="a float weight behind a uint8 pair"),
    pytest.param(f"{_DATA} wq = QuantizeLinear(f, zero, wz) wd = DequantizeLinear(wq, zero, wz) y = MatMul(xd, wd)",
                 {}, id="a float weight with a scale of 0"),
    pytest.param(f"{_DATA} wq = QuantizeLinear(inf, s, wz) wd = DequantizeLinear(wq, s, wz) y = MatMul(xd, wd)", {},
                 id="a float weight that is not finite"),
    pytest.param(f"{_DATA} wc = Cast<to=1>(w) y = MatMul(xd, wc)", {}, id="an int8 weight that is only cast"),
    pytest.param("xq = QuantizeLinear(x, s, wz) y = MatMulInteger(xq, w, wz)", {}, id="int8 data of MatMulInteger"),
    pytest.param("xq = QuantizeLinear(x, s, z) wi = Identity(w) c = Cast<to=3>(x) y = MatMulInteger(xq, c, z)", {},
                 id="a weight that is computed"),
    pytest.param(f"{_DATA} wd = DequantizeLinear<axis=0, block_size=2>(w, ws) y = MatMul(xd, wd)",
                 {"opset": 21, "ws": np.full((2, 2), 0.1, np.float32)}, id="a weight in blocks"),
])  # fmt: skip
def test_other_weights_are_left_out(nodes, arrays):
    floats = {"f": np.full((4, 2), 10, np.float32), "zero": np.float32(0), "inf": np.full((4, 2), np.inf, np.float32)}
    assert found(nodes, **{**floats, **arrays}) == ()


def test_graphs_of_float16_have_no_integer_kernels():
    half = np.float16(0.1)
    nodes = f"{_DATA} {_WEIGHT} y = MatMul(xd, wd)"
    assert found(nodes, "(float16[1,4] x) => (float16[1,2] y)", 19, s=half) == ()
    assert len(found(nodes, opset=19)) == 1


def test_a_float_weight_is_quantized_with_the_scales_of_its_channels():
    # Channel 0 has values of 100, channel 1 of 10.
    weight = "wq = QuantizeLinear<axis=1>(f, ws, wz) wd = DequantizeLinear<axis=1>(wq, ws, wz)"
    arrays = {"ws": np.array([0.1, 1], np.float32), "wz": np.zeros(2, np.int8), "f": np.full((4, 2), 10, np.float32)}
    (one,) = found(f"{_DATA} {weight} y = MatMul(xd, wd)", **arrays)
    assert (one.rows, one.all_rows) == (1, 2)


@pytest.mark.parametrize(
    ("perm", "rows"),
    [
        # [K, N] as MatMul reads it: two rows of four 100s, or four rows, each one of two.
        pytest.param("", 2, id="reversed by default"),
        pytest.param("<perm=[1,0]>", 2, id="swapped"),
        pytest.param("<perm=[0,1]>", 4, id="not moved"),
    ],
)
def test_a_transposed_weight_is_counted_as_the_operator_reads_it(perm, rows):
    (one,) = found(f"{_DATA} {_WEIGHT} t = Transpose{perm}(wd) y = MatMul(xd, t)", w=np.full((2, 4), 100, np.int8))
    assert (one.rows, one.all_rows, one.all_sums) == (rows, rows, 4)


_SIGNED = "xq = QuantizeLinear(x, s, wz) xd = DequantizeLinear(xq, s, wz)"


@pytest.mark.parametrize(("nodes", "exact"), [
    pytest.param("y = MatMul(xd, wd)", "", id="no other reader: made uint8"),
    pytest.param("p = MatMul(xd, wd) e = Relu(xd) n = ReduceMax(e) y = Add(p, n)", "other readers",
                 id="a second reader of the float tensor"),
    pytest.param("p = MatMul(xd, wd) e = DequantizeLinear(xq, s, wz) n = ReduceMax(e) y = Add(p, n)",
                 "other readers", id="a second reader of the quantized tensor"),
])  # fmt: skip
def test_int8_data_counts_only_where_it_is_made_uint8(nodes, exact):
    (one,) = found(f"{_SIGNED} {_WEIGHT} {nodes}")
    assert (one.data, one.rows) == ("int8", 2)
    assert exact in one.exact
    assert one.saturates == (not exact)


def test_int8_data_that_is_an_output_or_an_input_stays_int8():
    as_output = found(f"{_SIGNED} {_WEIGHT} y = MatMul(xd, wd)", "(float[1,4] x) => (float[1,2] y, float[1,4] xd)")
    as_input = found(
        f"xd = DequantizeLinear(xq, s, wz) {_WEIGHT} y = MatMul(xd, wd)", "(int8[1,4] xq) => (float[1,2] y)"
    )
    assert ["other readers" in one.exact for one in (*as_output, *as_input)] == [True, True]


@pytest.mark.parametrize(("nodes", "arrays", "exact"), [
    pytest.param("p = Conv(xd, wd) " + _RESULT, {}, "", id="a quantized result"),
    pytest.param("y = Conv(xd, wd)", {}, "its result is not quantized", id="a float result"),
    pytest.param("c = Conv(xd, wd) p = Relu(c) " + _RESULT, {"z": np.uint8(0)}, "", id="Relu, levels from 0"),
    pytest.param("c = Conv(xd, wd) p = Relu(c) " + _RESULT, {}, "the Relu stays", id="Relu, levels below 0"),
    pytest.param("c = Conv(xd, wd) p = Relu(c) yq = QuantizeLinear(p, s) y = DequantizeLinear(yq, s)", {}, "",
                 id="Relu, no zero point"),
    pytest.param("c = Conv(xd, wd) p = Clip(c, s) " + _RESULT, {}, "", id="a Clip in between"),
    pytest.param("c = Conv(xd, wd) p = MaxPool<kernel_shape=[1,1]>(c) " + _RESULT, {}, "", id="a pool in between"),
    pytest.param("c = Conv(xd, wd) p = Sigmoid(c) " + _RESULT, {}, "its result is not quantized",
                 id="another operator in between"),
    pytest.param("c = Conv(xd, wd) r = Relu(c) p = Add(r, c) " + _RESULT, {}, "its result is not quantized",
                 id="two readers, none of which quantizes"),
])  # fmt: skip
def test_a_convolution_is_an_integer_kernel_only_with_a_quantized_result(nodes, arrays, exact):
    (one,) = found(f"{_DATA} {_WEIGHT} {nodes}", _CONV_SHAPE, w=np.full((2, 4, 1, 1), 100, np.int8), **arrays)
    assert exact in one.exact
    assert one.saturates == (not exact)


@pytest.mark.parametrize(
    ("nodes", "exact"),
    [
        pytest.param("y = Gemm(xd, wd)", "", id="no bias"),
        pytest.param("y = Gemm(xd, wd, b)", "neither its bias nor its result", id="a float bias and result"),
        pytest.param("p = Gemm(xd, wd, b) " + _RESULT, "", id="a quantized result"),
        pytest.param("bd = DequantizeLinear(bi, s) y = Gemm(xd, wd, bd)", "", id="a quantized bias"),
        pytest.param("y = MatMul(xd, wd)", "", id="MatMul never needs a result"),
    ],
)
def test_a_gemm_needs_a_quantized_bias_or_result(nodes, exact):
    (one,) = found(f"{_DATA} {_WEIGHT} {nodes}", b=np.ones(2, np.float32), bi=np.ones(2, np.int32))
    assert exact in one.exact
    assert one.saturates == (not exact)


def test_weights_come_in_the_order_of_execution():
    second = "hq = QuantizeLinear(h, s, z) hd = DequantizeLinear(hq, s, z) vd = DequantizeLinear(v, s, wz)"
    ones = found(f"{_DATA} {_WEIGHT} h = MatMul(xd, wd) {second} y = MatMul(hd, vd)", v=np.full((2, 2), 5, np.int8))
    assert [(one.node, one.weight, one.saturates) for one in ones] == [
        ("h/MatMul", "w", True),
        ("y/MatMul", "v", False),
    ]
