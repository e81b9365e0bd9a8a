"""Models as the tools of the field write them, small."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxq.annotate import Origin, PairInfo
from tests.networks import parse_text

_SHAPE = "float[a,b,c,d]"


def rng() -> np.random.Generator:
    """The same numbers at every call."""
    return np.random.default_rng(0)


def tensor(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(array), name)


def packed(dtype: int, values: np.ndarray) -> onnx.TensorProto:
    return helper.make_tensor("", dtype, values.shape, values.ravel().tolist())


def save(folder: Path, proto: onnx.ModelProto, **how: Any) -> Path:
    """The model as a file."""
    onnx.save(proto, folder / "m.onnx", **how)
    return folder / "m.onnx"


def forget(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without metadata."""
    bare = onnx.ModelProto.FromString(proto.SerializeToString())
    for holder in (bare, *bare.graph.node):
        del holder.metadata_props[:]
    return bare


def model(
    nodes: str, opset: int = 17, functions: str = "", **arrays: np.ndarray | np.generic | TensorProto
) -> onnx.ModelProto:
    """A model of x and y from the text of its nodes; a slash in a node's name is written as two underscores."""
    held = {name: one if isinstance(one, TensorProto) else np.atleast_1d(one) for name, one in arrays.items()}
    text = f"g (float[1,4,8,8] x) => ({_SHAPE} y) {{ {nodes} }} {functions}"
    proto = parse_text(text, "com.microsoft", "local", opset=opset, ir=10, **held)
    for node in proto.graph.node:
        node.name = node.name.replace("__", "/")
    onnx.checker.check_model(proto)
    return proto


def pair(source: str, made: str, numbers: str = "s, z", names: tuple[str, str] = ("", "")) -> str:
    """The text of a pair. numbers: its scale and its zero point."""
    first, second = (f"[{name}] " if name else "" for name in names)
    quantize = f"{first}{made}_q = QuantizeLinear({source}, {numbers})"
    return f"{quantize} {second}{made} = DequantizeLinear({made}_q, {numbers})"


def float_conv() -> onnx.ModelProto:
    """Two convolutions and a residual Add, for a quantizer to work on."""
    text = """[conv1] c1 = Conv <pads=[1,1,1,1]>(x, w1, b1) [relu1] r1 = Relu(c1)
        [conv2] c2 = Conv <pads=[1,1,1,1]>(r1, w2) [add] y = Add(c2, r1)"""
    numbers = rng()
    w1, w2 = (numbers.normal(size=(4, 4, 3, 3)).astype(np.float32) for _ in range(2))
    return model(text, w1=w1, b1=numbers.normal(size=4).astype(np.float32), w2=w2)


def two_widths() -> onnx.ModelProto:
    """u8 input pair, 4-bit float Clip in front of an s8 pair, int8 weight that uses 4 bits, int32 bias, output pair."""
    text = f"""{pair("x", "xd", "xs, xz", ("in_q", "in_dq"))}
        [w_dq] wd = DequantizeLinear <axis=0>(w_quantized, ws, wz)
        [b_DequantizeLinear] bd = DequantizeLinear <axis=0>(b_quantized, bs)
        [conv] c = Conv <pads=[1,1,1,1]>(xd, wd, bd) [c__Clip] cc = Clip(c, lo, hi)
        {pair("cc", "cd", "cs, cz", ("c__QuantizeLinear", "c__DequantizeLinear"))}
        [relu] y_float = Relu(cd) {pair("y_float", "y", "xs, xz", ("out_q", "out_dq"))}"""
    levels = rng().integers(-7, 8, size=(4, 4, 3, 3)).astype(np.int8)
    levels.flat[:2] = (-7, 7)
    step = np.float32(0.3)
    numbers = {"xs": np.float32(0.02), "xz": np.uint8(128), "cs": step, "cz": np.int8(0)}
    bounds = {"lo": step * -8, "hi": step * 7}
    weight = {"w_quantized": levels, "ws": np.array([0.1, 0.2, 0.05, 0.3], np.float32), "wz": np.zeros(4, np.int8)}
    bias = rng().integers(-900, 900, size=4).astype(np.int32)
    scales = np.array([0.002, 0.004, 0.001, 0.006], np.float32)
    return model(text, **numbers, **bounds, **weight, b_quantized=bias, bs=scales)


def qcdq(low: int = -7, high: int = 7) -> onnx.ModelProto:
    """Brevitas' form: a Clip on integers between Q and DQ, and between a stored weight and its DQ."""
    text = """xq = QuantizeLinear(x, s, z) xc = Clip(xq, lo, hi) xd = DequantizeLinear(xc, s, z)
        wc = Clip(w_int, wlo, whi) wd = DequantizeLinear <axis=1>(wc, ws, wz) y = MatMul(xd, wd)"""
    bounds = {name: np.int8(bound) for name, bound in (("lo", low), ("hi", high), ("wlo", -1), ("whi", 1))}
    weight = rng().integers(-1, 2, size=(8, 4)).astype(np.int8)
    scales = {"s": np.float32(0.1), "z": np.int8(0), "ws": np.full(4, 0.2, np.float32), "wz": np.zeros(4, np.int8)}
    return model(text, **bounds, **scales, w_int=weight)


def sub_byte() -> onnx.ModelProto:
    """INT4 per channel, UINT4 per block, and a float8 pair, opset 21."""
    text = f"""[a__DequantizeLinear] ad = DequantizeLinear <axis=1>(a_int, as) [m1] m = MatMul(x, ad)
        bd = DequantizeLinear <axis=0, block_size=4>(b_int, bs, bz) [m2] n = MatMul(m, bd)
        nq = QuantizeLinear <output_dtype={TensorProto.FLOAT8E4M3FN}>(n, fs) y = DequantizeLinear(nq, fs)"""
    weights = {
        "a_int": packed(TensorProto.INT4, rng().integers(-8, 8, size=(8, 8))),
        "b_int": packed(TensorProto.UINT4, rng().integers(0, 16, size=(8, 8))),
        "bz": packed(TensorProto.UINT4, np.full((2, 8), 7)),
    }
    scales = {"as": np.linspace(0.1, 0.8, 8, dtype=np.float32), "bs": np.full((2, 8), 0.5, np.float32)}
    return model(text, 21, **weights, **scales, fs=np.float32(1))


def branches() -> onnx.ModelProto:
    """An If whose bodies quantize: one a tensor of its own, one a tensor captured from outside."""
    text = f"""sum = ReduceSum <keepdims=0>(x) cond = Greater(sum, zero) [If_0] y = If(cond) <
        else_branch = e () => ({_SHAPE} e_out) {{ a = Abs(x) {pair("a", "e_out")} }},
        then_branch = t () => ({_SHAPE} t_out) {{ {pair("x", "xd")} t_out = Neg(xd) }}>"""
    return model(text, s=np.float32(0.1), z=np.uint8(3), zero=np.float32(0))


def dedicated() -> onnx.ModelProto:
    """One tensor, a pair for each reader, nodes unnamed; in the domain com.microsoft with 16 bits."""
    pairs = f"{pair('x', 'x1')} {pair('x', 'x2')}"
    for op in ("QuantizeLinear", "DequantizeLinear"):
        pairs = pairs.replace(f"= {op}", f"= com.microsoft.{op}")
    return model(f"{pairs} [relu] r = Relu(x1) [add] y = Add(r, x2)", s=np.float32(0.1), z=np.uint16(9))


def in_function() -> onnx.ModelProto:
    """Pairs inside a model-local function that is called twice."""
    text = "[first] m = local.FakeQuant(x, s, z) [second] y = local.FakeQuant(m, s, z)"
    body = pair("a", "b", "fs, fz")
    function = f'<domain: "local", opset_import: ["" : 17]> FakeQuant (a, fs, fz) => (b) {{ {body} }}'
    return model(text, functions=function, s=np.float32(0.1), z=np.int8(0))


def relu6(high: float) -> onnx.ModelProto:
    """A Clip of the network itself in front of a u8 pair with scale 6/255."""
    text = f"[relu6] c = Clip(x, lo, hi) {pair('c', 'cd', names=('q', 'dq'))} [neg] y = Neg(cd)"
    return model(text, lo=np.float32(0), hi=np.float32(high), s=np.float32(6 / 255), z=np.uint8(0))


def modelopt() -> onnx.ModelProto:
    """ModelOpt's and torch's form: the weight is still float in front of its pair, names end in _Output and numbers."""
    data = pair("x", "x_DequantizeLinear_Output", names=("QuantizeLinear_3", "DequantizeLinear_4"))
    text = f"""{data} [QuantizeLinear_6] w_dq_5_q = QuantizeLinear <axis=0>(w, ws, wz)
        [DequantizeLinear_7] w_dq_5 = DequantizeLinear <axis=0>(w_dq_5_q, ws, wz)
        [Conv_0] y = Conv(x_DequantizeLinear_Output, w_dq_5)"""
    w = rng().normal(size=(4, 4, 1, 1)).astype(np.float32)
    scale = (np.abs(w).max(axis=(1, 2, 3)) / 127).astype(np.float32)
    return model(text, s=np.float32(0.1), z=np.int8(0), w=w, ws=scale, wz=np.zeros(4, np.int8))


def lone_nodes() -> onnx.ModelProto:
    """A quantize node nobody dequantizes, and a scale computed at run time."""
    text = "m = ReduceMax <keepdims=0>(x) [q] xq = QuantizeLinear(x, m, z) [cast] y = Cast <to=1>(xq)"
    return model(text, z=np.uint8(0))


# A model of each tool that ONNX Runtime can run.
RUNNING = (two_widths, qcdq, sub_byte, branches, dedicated, modelopt)


def bare(pairs: Iterable[PairInfo]) -> list[PairInfo]:
    """The pairs wherever their bits were read."""
    return [replace(pair, origin=Origin.TYPE) for pair in pairs]
