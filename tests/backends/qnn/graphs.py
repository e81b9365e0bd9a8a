"""Small Q/DQ graphs for Qualcomm's NPU, and what becomes of them there."""

from functools import cache
from importlib.util import find_spec

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.engines.prove.proof import Proof
from tests.engines.kit import graph

needs_qnn = pytest.mark.skipif(find_spec("onnxruntime_qnn") is None, reason="no onnxruntime-qnn")
_RNG = np.random.default_rng(0)
# Scale and zero point of data in [-4, 4].
_GRIDS = {
    np.uint8: (np.float32(1 / 32), np.uint8(128)),
    np.uint16: (np.float32(1 / 8192), np.uint16(32768)),
    np.int16: (np.float32(1 / 8192), np.int16(0)),
}


def _pair(name: str, zero: str = "z") -> str:
    return f"{name}q = QuantizeLinear({name}, s, {zero}) {name}d = DequantizeLinear({name}q, s, {zero})"


_TEXTS = {
    # The lowest level of the pair behind the Relu is 0, so that it does what the Relu does.
    "conv": f"""(float[batch,3,8,8] x) => (float[batch,8,6,6] yd) {{
        {_pair("x")} wd = DequantizeLinear <axis=0> (w, ws, wz)
        c = Conv(xd, wd) y = Relu(c) {_pair("y", "low")} }}""",
    # The result has no pair, which HTP's FullyConnected with an integer bias does not take.
    "gemm": f"""(float[batch,8] x) => (float[batch,8] y) {{
        {_pair("x")} vd = DequantizeLinear(v, vs, vz) bd = DequantizeLinear(b, bs, bz)
        y = Gemm(xd, vd, bd) }}""",
    # Erf cuts the network in two.
    "cut": f"""(float[batch,8] x) => (float[batch,8] yd) {{
        {_pair("x")} a = Sigmoid(xd) {_pair("a")} e = Erf(ad) {_pair("e")} y = Tanh(ed) {_pair("y")} }}""",
}


def make_graph(name: str, data: type = np.uint8, weight: type = np.int8, batch: str = "1") -> onnx.ModelProto:
    """conv: all in integers; gemm: refused by the validator; cut: an operator in the middle that the NPU lacks."""
    scale, zero = _GRIDS[data]
    arrays = {"s": scale, "z": zero}
    if name == "conv":
        values = _RNG.integers(1, 100, (8, 3, 3, 3)).astype(weight)
        arrays |= {"w": values, "ws": np.full(8, 0.003, np.float32), "wz": np.zeros(8, weight)}
        arrays["low"] = data(np.iinfo(data).min)
    if name == "gemm":
        arrays |= {"v": _RNG.integers(-90, 90, (8, 8)).astype(np.int8), "vs": np.float32(0.01), "vz": np.int8(0)}
        arrays |= {"b": np.arange(8, dtype=np.int32), "bs": np.float32(scale * 0.01), "bz": np.int32(0)}
    return graph(_TEXTS[name].replace("float[batch,", f"float[{batch},"), 21, **arrays)


@cache
def prove(name: str, data: type = np.uint8, weight: type = np.int8, **overrides: object) -> Proof:
    """The proof of a graph, which is compiled once for all tests."""
    return onnxq.prove(make_graph(name, data, weight), overrides={"engine": "qnn", **overrides})
