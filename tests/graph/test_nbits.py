from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import helper

from onnxq.graph import GraphIndex
from onnxq.graph.nbits import pack_bits, read_lookups, read_nbits, unpack_bits, write_nbits
from onnxq.runtime import Session
from tests.graph.kit import model

K, N = 70, 12
X = np.random.default_rng(0).normal(size=(5, K)).astype(np.float32)


@given(st.data(), st.sampled_from((2, 4, 8)), st.integers(1, 40))
def test_packing_is_undone(data: Any, bits: int, count: int) -> None:
    values = data.draw(arrays.arrays(np.uint8, (3, count), elements=st.integers(0, 2**bits - 1)))
    packed = pack_bits(values, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack_bits(packed, bits, count), values)
    # The first integer lies in the lowest bits.
    assert (packed[:, 0] & (2**bits - 1) == values[:, 0]).all()


def _pairs(kind: str, size: int, *, bits: int = 8, zero: bool = True, half: bool = False) -> tuple[Any, Any]:
    """A MatMul behind a DequantizeLinear in blocks, twice the same weight, and the weight that it stands for."""
    rng = np.random.default_rng(1)
    number = onnx.TensorProto.DataType.Value(kind.upper())
    width = min(bits, 4 if kind.endswith("4") else 8)
    low = -(2 ** (width - 1)) if kind.startswith("int") else 0
    count = -(-K // size)
    levels = rng.integers(low, low + 2**width, (K, N))
    middle = np.full((count, N), low + 2 ** (width - 1))
    zeros = rng.integers(low, low + 2**width, (count, N)) if zero else middle
    scale = rng.uniform(0.01, 0.1, (count, N)).astype(np.float16 if half else np.float32)
    w = (levels - np.repeat(zeros, size, 0)[:K]) * np.repeat(scale, size, 0)[:K].astype(np.float32)
    kinds = ("float16" if half else "float", f"{K}", f"{N}")
    text = """net ({0}[rows,{1}] x) => ({0}[rows,{2}] y, {0}[rows,{2}] y2) {{
        d = DequantizeLinear<axis = 0, block_size = {3}>(q, s, z) [m] y = MatMul(x, d) [m2] y2 = MatMul(x, d) }}"""
    held = {"q": helper.make_tensor("q", number, (K, N), levels.ravel().tolist()), "s": scale}
    held["z"] = helper.make_tensor("z", number, zeros.shape, zeros.ravel().tolist())
    proto = model(text.format(*kinds, size), 21, 10, **held)
    proto.graph.node[0].name = "w/DequantizeLinear"
    proto.graph.node[0].metadata_props.add(key="onnxq.bits", value=str(bits))
    return proto, w


def _run(proto: onnx.ModelProto, x: Any = X) -> Any:
    return Session(proto, optimize=False).run({"x": x})["y"]


@pytest.mark.recent_ort
@pytest.mark.parametrize("level", [0, 1, 4])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(
    ("kind", "size", "bits"), [("uint4", 16, 2), ("int4", 32, 2), ("uint4", 32, 3), ("int4", 64, 4), ("uint8", 128, 8)]
)
def test_the_kernel_computes_with_the_weight_of_pairs(kind: str, size: int, bits: int, zero: bool, level: int) -> None:
    proto, w = _pairs(kind, size, bits=bits, zero=zero)
    done = write_nbits(proto, level, {"w/DequantizeLinear": bits})
    assert [(node.name, node.op_type) for node in done.graph.node] == [("m", "MatMulNBits"), ("m2", "MatMulNBits")]
    # Both read one copy, with the zero points of a middle left out.
    assert done.graph.node[0].input == done.graph.node[1].input
    usual = not zero and bits != 3
    assert len(done.graph.node[0].input) == (3 if usual else 4)
    wanted = X.astype(np.float64) @ w
    # Level 4 rounds data to int8.
    allowed = 0.02 if level == 4 else 1e-5
    assert np.abs(_run(done) - wanted).max() <= allowed * np.abs(wanted).max()


@pytest.mark.parametrize(("kind", "bits"), [("uint4", 2), ("int4", 4), ("int8", 8), ("uint8", 8)])
def test_reading_gives_the_pairs_again(kind: str, bits: int) -> None:
    proto, w = _pairs(kind, 32, bits=bits)
    again = read_nbits(write_nbits(proto, 1, {"w/DequantizeLinear": bits}))
    onnx.checker.check_model(again)
    assert [node.name for node in again.graph.node] == ["w/DequantizeLinear", "m", "m2"]
    index = GraphIndex(again)
    pair = index.find_node("w/DequantizeLinear")
    levels, scale, zero = (np.asarray(index.input_value(pair, k)).astype(np.float32) for k in range(3))
    np.testing.assert_array_equal((levels - np.repeat(zero, 32, 0)[:K]) * np.repeat(scale, 32, 0)[:K], w.astype("f4"))


def test_float16_stays_float16() -> None:
    proto, w = _pairs("uint4", 32, half=True)
    got = _run(write_nbits(proto, 0, {}), X.astype(np.float16))
    assert got.dtype == np.float16
    assert np.abs(got - X @ w).max() < 0.01 * np.abs(X @ w).max()


def test_what_the_operator_does_not_take_stays() -> None:
    text = """net (float[N, 32] x, float[32, 32] w) => (float[N, 32] y)
    <float[32] s, int8[32, 32] q> {[d] d = DequantizeLinear (q, s) [m] h = MatMul (x, d) [k] y = MatMul (h, w)}"""
    proto = model(text, 21, 10)
    assert write_nbits(proto, 0, {}) is proto
    assert read_nbits(proto) is proto
    small, _ = _pairs("uint4", 8)
    assert write_nbits(small, 0, {}) is small


def _quantize_by_tool(w: Any, symmetric: bool) -> onnx.ModelProto:
    """The product of data and w, as ONNX Runtime's own tool writes it."""
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    # Below opset 21 ONNX has no blocks, ONNX Runtime's own operator does.
    proto = model(f"net (float[rows,{K}] x) => (float[rows,{N}] y) {{ [m] y = MatMul(x, w) }}", ir=9, w=w)
    tool = quantizer.MatMulNBitsQuantizer(proto, block_size=32, is_symmetric=symmetric, accuracy_level=1)
    tool.process()
    return tool.model.model


@pytest.mark.parametrize("symmetric", [True, False])
def test_files_of_onnxruntimes_quantizer_are_read(symmetric: bool) -> None:
    made = _quantize_by_tool(np.random.default_rng(2).normal(size=(K, N)).astype(np.float32), symmetric)
    again = read_nbits(made)
    assert [node.op_type for node in again.graph.node] == ["DequantizeLinear", "MatMul"]
    np.testing.assert_allclose(_run(again), _run(made), atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_scale_0_are_zeros_of_another(symmetric: bool) -> None:
    w = np.random.default_rng(2).normal(size=(K, N)).astype(np.float32)
    # A row of padding in a table that the projection shares.
    w[:, 3] = 0
    made = _quantize_by_tool(w, symmetric)
    scales = next(tensor for tensor in made.graph.initializer if tensor.name.endswith("scales"))
    assert (onnx.numpy_helper.to_array(scales) == 0).any()
    # What the integers are does not matter then.
    packed = next(tensor for tensor in made.graph.initializer if tensor.data_type == onnx.TensorProto.UINT8)
    codes = onnx.numpy_helper.to_array(packed).copy()
    codes[3] = 0x5A
    packed.raw_data = codes.tobytes()
    again = read_nbits(made)
    pair = GraphIndex(again).find_node(again.graph.node[0].name)
    assert (np.asarray(GraphIndex(again).input_value(pair, 1)) != 0).all()
    np.testing.assert_allclose(_run(again), _run(made), atol=1e-5)


def test_float_zero_points_and_an_order_of_columns_stay_operators() -> None:
    text = """net (float[N, 32] x) => (float[N, 16] y)
    {[m] y = com.microsoft.MatMulNBits <K = 32, N = 16, bits = 4, block_size = 32> (x, b, s, z)}"""
    codes = np.random.default_rng(0).integers(0, 255, (16, 1, 16)).astype(np.uint8)
    proto = model(text, ir=10, b=codes, s=np.ones(16, "f4"), z=np.ones(16, "f4"))
    assert read_nbits(proto) is proto


def _table(kind: str, bits: int, zero: bool) -> dict[str, Any]:
    """Constants of 12 rows of 96 in blocks of 32, as GatherBlockQuantized has them."""
    rng = np.random.default_rng(3)
    levels, zeros = (rng.integers(0, 2**bits, (12, count)).astype(np.uint8) for count in (96, 3))
    scale = (rng.uniform(0.01, 0.1, zeros.shape) * rng.choice([-1, 1], zeros.shape)).astype(np.float32)
    held: dict[str, Any] = {"q": pack_bits(levels, bits), "s": scale, "z": pack_bits(zeros, bits)}
    if kind != "uint8":
        number, offset = onnx.TensorProto.DataType.Value(kind.upper()), 8 if kind == "int4" else 0
        for name, part in (("q", levels), ("z", zeros)):
            held[name] = helper.make_tensor(name, number, part.shape, (part.astype(int) - offset).ravel().tolist())
    return held if zero else {"q": held["q"], "s": scale}


@pytest.mark.recent_ort
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(("kind", "bits"), [("uint8", 2), ("uint8", 4), ("uint8", 8), ("uint4", 4), ("int4", 4)])
def test_a_lookup_is_a_pair_and_a_gather(kind: str, bits: int, zero: bool) -> None:
    held = _table(kind, bits, zero)
    text = f"""g (int64[n] i) => (float[n, 96] y) {{ [look] y = com.microsoft.GatherBlockQuantized
        <bits = {bits}, block_size = 32, gather_axis = 0, quantize_axis = 1>(q, i, s{", z" if zero else ""}) }}"""
    proto = model(text, 21, 10, **held)
    again = read_lookups(proto)
    onnx.checker.check_model(again)
    assert [(node.name, node.op_type) for node in again.graph.node][1] == ("look", "Gather")
    x = {"i": np.asarray([3, 0, -1, 3])}
    # The operator itself, not what optimizations make of it.
    wanted, got = (Session(one, optimize=False).run(x)["y"] for one in (proto, again))
    np.testing.assert_array_equal(wanted, got)


@pytest.mark.recent_ort
@pytest.mark.parametrize("zero", [True, False])
def test_a_table_that_a_product_reads_too(zero: bool) -> None:
    """As genai's builder ties them: one packed table in the shape of the projection's weight."""
    held = _table("uint8", 4, zero)
    held |= {"q": held["q"].reshape(12, 3, 16), "shape": np.asarray([12, -1])}
    more = ", z" if zero else ""
    text = f"""g (int64[n] i) => (float[n, 12] y) {{ [flat] t = Reshape(q, shape)
        [look] x = com.microsoft.GatherBlockQuantized<bits = 4, block_size = 32, gather_axis = 0>(t, i, s{more})
        [m] y = com.microsoft.MatMulNBits<K = 96, N = 12, bits = 4, block_size = 32>(x, q, s{more}) }}"""
    proto = model(text, 21, 10, **held)
    again = read_nbits(read_lookups(proto))
    assert [node.op_type for node in again.graph.node] == ["DequantizeLinear", "Gather", "DequantizeLinear", "MatMul"]
    x = {"i": np.asarray([3, 0, 11])}
    wanted, got = (Session(one, optimize=False).run(x)["y"] for one in (proto, again))
    np.testing.assert_allclose(wanted, got, atol=1e-5)
