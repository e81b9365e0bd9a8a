"""Chains of ONNX nodes that `op_costs.py` times: what is built, and which shapes are covered.

Quantized as ONNX Runtime likes it: activations uint8 (zero point 0 behind Relu), weights int8 by output channel with
zero point 0, a pair on both sides of every node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]
SHORT, LONG = 2, 10


class Builder:
    """Emits nodes, with pairs when int8, and notes every node as a case of the cost model."""

    def __init__(self, int8: bool, shape: Shape, signed: bool = False) -> None:
        self.int8, self.signed = int8, signed
        self.nodes: list[onnx.NodeProto] = []
        self.inits: list[onnx.TensorProto] = []
        self.shapes: dict[str, Shape] = {"x": shape}
        self.cases: list[dict[str, Any]] = []
        self.rng = np.random.default_rng(0)

    def const(self, array: Any) -> str:
        name = f"c{len(self.inits)}"
        self.inits.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: Sequence[str], shape: Shape, **attrs: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **attrs))
        self.shapes[name] = shape
        return name

    def pair(self, x: str, zero: int = 0, scale: float = 0.02) -> str:
        s, shape = self.const(np.float32(scale)), self.shapes[x]
        z = self.const(np.int8(0) if self.signed else np.uint8(zero))
        return self.node(
            "DequantizeLinear", [self.node("QuantizeLinear", [x, s, z], shape), s, z], shape
        )

    def out(self, x: str, zero: int = 0, scale: float = 0.02) -> str:
        return self.pair(x, zero, scale) if self.int8 else x

    def weight(self, shape: Shape, axis: int, int8: bool, act: str = "") -> str:
        w = self.rng.standard_normal(shape) / math.sqrt(math.prod(shape) / shape[axis])
        # Values keep their size from unit to unit: kernels that clamp one by one are slower where signs change.
        gain = math.sqrt(2) if act else 1.0
        if not int8:
            return self.const((gain * w).astype(np.float32))
        q = np.clip(np.rint(w * 40), -127, 127).astype(np.int8)
        scale = np.full(shape[axis], gain / 40, np.float32)
        zero = self.const(np.zeros(shape[axis], np.int8))
        return self.node(
            "DequantizeLinear", [self.const(q), self.const(scale), zero], shape, axis=axis
        )

    def note(self, op: str, inputs: Sequence[str], out: Shape, **more: Any) -> None:
        self.cases.append(
            {"op_type": op, "inputs": [self.shapes[i] for i in inputs], "output": out, **more}
        )

    def conv(
        self,
        x: str,
        cout: int,
        k: int | Shape,
        stride: int = 1,
        group: int = 1,
        act: str = "Relu",
        guard: bool = False,
    ) -> str:
        batch, cin, *spatial = self.shapes[x]
        kernel = (k,) * len(spatial) if isinstance(k, int) else k
        pads = [v // 2 for v in kernel] + [(v - 1) // 2 for v in kernel]
        shape = (batch, cout, *(-(-d // stride) for d in spatial))
        weight = (cout, cin // group, *kernel)
        int8 = self.int8 and not guard
        self.note("Conv", [x], shape, weight=weight, group=group, kernel=kernel, strides=(stride,) * len(spatial),
                  activation=act)  # fmt: skip
        x = self.node("Clip", [x], self.shapes[x]) if guard else x
        bias = self.const(np.full(cout, 0.1, np.float32))
        y = self.node("Conv", [x, self.weight(weight, 0, int8, act), bias], shape, kernel_shape=kernel, pads=pads,
                      strides=(stride,) * len(spatial), group=group)  # fmt: skip
        if not act:
            return self.out(y, 128)
        bounds = [self.const(np.float32(0)), self.const(np.float32(6))] if act == "Clip" else []
        # Behind a float Conv it stays float.
        return (
            self.out(self.node(act, [y, *bounds], shape))
            if guard
            else self.activate(act, [y, *bounds], shape)
        )

    def activate(self, op: str, inputs: Sequence[str], shape: Shape) -> str:
        """Relu or Clip behind a product, with its pair."""
        return self.out(self.node(op, inputs, shape))

    def plain(
        self,
        op: str,
        inputs: Sequence[str],
        shape: Shape,
        *,
        zero: int = 0,
        strides: Shape = (),
        **attrs: Any,
    ) -> str:
        kernel = tuple(attrs.get("kernel_shape", ()))
        self.note(
            op, [i for i in inputs if i in self.shapes], shape, kernel=kernel, strides=strides
        )
        attrs |= {"strides": strides} if strides else {}
        return self.out(self.node(op, inputs, shape, **attrs), zero)

    def model(self, out: str) -> bytes:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shapes["x"])
        y = helper.make_tensor_value_info(out, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.inits)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(model.SerializeToString())


Unit = Callable[[Builder, str], str]


@dataclass(frozen=True)
class Plan:
    """A unit to time; `minus` is timed too and taken off, its cases as well."""

    family: str
    shape: Shape
    unit: Unit
    minus: Unit | None = None
    boundary: bool = False
    head: bool = (
        False  # a Conv in front of the first unit, so that what enters it is in the Convs' layout
    )
    branches: bool = (
        False  # units side by side on one tensor, joined by Adds that belong to the sample
    )
    quantize_input: bool = True
    op: str = ""
    signed: bool = False  # int8 activations with zero point 0


def chain(
    unit: Unit, plan: Plan, int8: bool, units: int, builder: type[Builder] = Builder
) -> tuple[bytes, list[dict[str, Any]]]:
    """A model of so many units, and the nodes of one of them."""
    b = builder(int8, plan.shape, plan.signed)
    x = b.pair("x") if int8 and plan.quantize_input else "x"
    if plan.head:
        x = b.conv(x, plan.shape[1], 1)
    y = x
    for count in range(units):
        b.cases.clear()
        if not plan.branches:
            y = unit(b, y)
        else:
            z = unit(b, x)
            y = b.plain("Add", [y, z], b.shapes[z], zero=128) if count else z
    return b.model(y), b.cases


def cases_of(plan: Plan) -> list[dict[str, Any]]:
    """The nodes a sample is the cost of."""
    cases = chain(plan.unit, plan, True, SHORT)[1]
    skip = 0 if plan.minus is None else len(chain(plan.minus, plan, True, SHORT)[1])
    if plan.boundary:
        elements = math.prod(plan.shape)
        return [
            {"boundary": side, "elements": elements, "conv": plan.op == "conv"}
            for side in ("dequantize", "quantize")
        ]
    return cases[skip:]


# --- what is measured -----------------------------------------------------------------------------------------------
# fmt: off
MAPS = ((1, 1), (4, 4), (7, 7), (10, 10), (14, 14), (20, 20), (28, 28), (56, 56), (112, 112))
CHANNEL_PAIRS = (
    (1, 16), (3, 16), (3, 32), (8, 32), (16, 96), (16, 8), (24, 144), (32, 64), (32, 128), (40, 240), (64, 256),
    (64, 384), (96, 576), (112, 672), (192, 1152), (320, 1280), (512, 128), (48, 20),
)
# narrow, wide, side
BLOCKS = (
    (8, 32, 14), (16, 48, 14), (16, 96, 56), (24, 144, 28), (24, 144, 56), (40, 240, 28), (32, 192, 7), (64, 192, 14),
    (80, 480, 14), (112, 672, 14), (128, 384, 7), (192, 1152, 7), (320, 960, 7),
)
CLIP_BLOCKS = (
    (8, 32, 14, 3), (16, 96, 56, 3), (24, 144, 28, 5), (64, 192, 14, 3), (80, 480, 14, 5), (112, 672, 14, 3),
    (128, 384, 7, 5), (192, 1152, 7, 5), (16, 96, 112, 3),
)
# in, out, side, kernel, stride, groups
STRIDED = (
    (32, 32, 28, 3, 2, 1), (64, 64, 28, 3, 2, 1), (64, 128, 14, 3, 2, 1), (64, 128, 28, 1, 2, 1),
    (128, 256, 14, 1, 2, 1), (32, 32, 56, 3, 2, 32), (96, 96, 112, 3, 2, 96), (144, 144, 56, 5, 2, 144),
    (240, 240, 28, 3, 2, 240), (672, 672, 14, 5, 2, 672), (64, 64, 28, 3, 2, 64), (64, 64, 14, 3, 1, 1),
    (16, 16, 28, 3, 2, 16),
)
STEMS = (
    (1, 16, 28, 3, 1), (1, 32, 28, 3, 2), (1, 8, 28, 3, 1), (3, 16, 56, 3, 2), (3, 32, 112, 3, 2), (3, 64, 112, 7, 2),
    (3, 64, 56, 3, 1), (3, 32, 224, 3, 2), (4, 32, 112, 3, 2), (3, 24, 28, 5, 1),
)
MATRICES = (
    (16, 16), (64, 64), (64, 10), (128, 128), (256, 256), (256, 64), (384, 384), (384, 1536), (512, 512), (1152, 320),
    (1280, 1000),
)
ELEMENT_MAPS = (
    (16, 7, 7), (16, 28, 28), (16, 56, 56), (32, 14, 14), (64, 7, 7), (64, 28, 28), (64, 56, 56), (96, 1, 1),
    (128, 14, 14), (128, 28, 28), (24, 28, 28), (120, 14, 14), (256, 7, 7), (256, 1, 1), (512, 14, 14), (64, 6, 40),
)
# fmt: on


def _convs(*channels: int, k: int | Shape = 1, group: int = 1, act: str = "Relu") -> Unit:
    """From the first channel count over the others back to the first; group -1 is depthwise."""

    def unit(b: Builder, x: str) -> str:
        for cout in (*channels[1:], channels[0]):
            x = b.conv(x, cout, k, group=b.shapes[x][1] if group < 0 else group, act=act)
        return x

    return unit


def _block(wide: int, k: int, act: str = "Relu") -> Unit:
    """Expand, depthwise, project: where depthwise convolutions live."""

    def unit(b: Builder, x: str) -> str:
        c = b.shapes[x][1]
        return b.conv(
            b.conv(b.conv(x, wide, 1, act=act), wide, k, group=wide, act=act), c, 1, act=""
        )

    return unit


def _behind(op: Callable[[Builder, str], str]) -> Unit:
    """An operator behind a 1x1 convolution."""

    def unit(b: Builder, x: str) -> str:
        return op(b, b.conv(x, b.shapes[x][1], 1))

    return unit


def _dense_plans() -> Iterator[Plan]:
    for k in (1, 3, 5, 7):
        for c in (
            1,
            3,
            4,
            6,
            8,
            12,
            16,
            20,
            24,
            32,
            40,
            48,
            64,
            96,
            128,
            160,
            192,
            256,
            320,
            512,
            1152,
        ):
            for h, w in (*MAPS, (6, 40), (12, 80)):
                if h * w * c * c * k * k < 9e7 and c * h * w < 600_000 and (k < 5 or c < 200):
                    yield Plan("dense", (1, c, h, w), _convs(c, k=k))
    for a, c in CHANNEL_PAIRS:
        for h in (1, 7, 14, 28, 56):
            for k in (1, 3):
                if h * h * a * c * k * k < 9e7 and max(a, c) * h * h < 600_000:
                    yield Plan("pair", (1, a, h, h), _convs(a, c, k=k))


def _depthwise_plans() -> Iterator[Plan]:
    for k in (3, 5, 7):
        for c in (
            1,
            4,
            8,
            16,
            20,
            24,
            32,
            48,
            64,
            72,
            100,
            128,
            144,
            240,
            256,
            480,
            512,
            672,
            1152,
        ):
            for h, w in (*MAPS, (12, 80)):
                if c * h * w < 600_000 and (k < 7 or c < 200):
                    yield Plan("depthwise", (1, c, h, w), _convs(c, k=k, group=-1))
    for c, wide, h in BLOCKS:
        for k in (3, 5):
            yield Plan("block", (1, c, h, h), _block(wide, k))


def _large_plans() -> Iterator[Plan]:
    """Maps that leave the second-level cache."""
    for a, c, h in (
        (16, 96, 112),
        (24, 144, 80),
        (32, 64, 112),
        (64, 128, 80),
        (64, 256, 56),
        (128, 256, 56),
    ):
        yield Plan("large", (1, a, h, h), _convs(a, c))
    for c, h, k in (
        (32, 112, 3),
        (64, 112, 3),
        (96, 112, 3),
        (144, 80, 3),
        (144, 80, 5),
        (256, 56, 3),
    ):
        yield Plan("large", (1, c, h, h), _convs(c, k=k, group=-1))
        if c * c * h * h * k * k < 5e8:
            yield Plan("large", (1, c, h, h), _convs(c, k=k))
    for c, wide, h, k in CLIP_BLOCKS:
        yield Plan("clip", (1, c, h, h), _block(wide, k, "Clip"))
    for c, h, k in ((16, 28, 3), (64, 14, 1), (64, 28, 3), (128, 14, 3), (256, 14, 1)):
        yield Plan("clip", (1, c, h, h), _convs(c, k=k, act="Clip"))


def _grouped_plans() -> Iterator[Plan]:
    for c, h in ((32, 14), (64, 14), (128, 14), (128, 28), (256, 14), (512, 7), (96, 28)):
        for g in (2, 4, 8, 16, 32):
            for k in (1, 3):
                yield Plan("grouped", (1, c, h, h), _convs(c, k=k, group=g))


def _line_plans() -> Iterator[Plan]:
    for c in (1, 4, 16, 32, 64, 128, 256):
        for length, k in ((64, 1), (64, 3), (256, 3), (1024, 3), (256, 9), (1024, 1)):
            if length * c * c * k < 9e7:
                yield Plan("line", (1, c, length), _convs(c, k=k))
                if c > 1 and k > 1:
                    yield Plan("line", (1, c, length), _convs(c, k=k, group=-1))
    for length, k in ((1, 255), (1, 31), (8, 63)):
        yield Plan("line", (1, 1, length, 512), _convs(1, k=(1, k)))


def _strided_plans() -> Iterator[Plan]:
    for cin, cout, h, k, s, group in STRIDED:
        yield Plan("strided", (1, cin, h, h), _strided(cout, k, s, group), head=True, branches=True)
    for cin, cout, h, k, s in STEMS:
        yield Plan("stem", (1, cin, h, h), _strided(cout, k, s, 1), branches=True)


def _strided(cout: int, k: int, stride: int, group: int) -> Unit:
    return lambda b, x: b.conv(x, cout, k, stride, group)


def _linear_plans() -> Iterator[Plan]:
    for k, n in MATRICES:
        for m in (1, 4, 16, 64, 128, 512):
            if m * k * n < 1.3e8:
                yield Plan("gemm", (m, k), lambda b, x, k=k, n=n: _gemm(b, _gemm(b, x, n), k))
                yield Plan(
                    "matmul",
                    (1, m, k),
                    lambda b, x, k=k, n=n: _matmul(b, _matmul(b, x, n), k),
                    quantize_input=False,
                )
                yield Plan(
                    "pointwise", (1, m, k), lambda b, x, k=k, n=n: _pointwise(b, _pointwise(b, x, n), k),
                    quantize_input=False,
                )  # fmt: skip


def _gemm(b: Builder, x: str, n: int) -> str:
    m, k = b.shapes[x]
    b.note("Gemm", [x], (m, n), weight=(n, k))
    y = b.node(
        "Gemm",
        [x, b.weight((n, k), 0, b.int8, "Relu"), b.const(np.full(n, 0.01, np.float32))],
        (m, n),
        transB=1,
    )
    return b.activate("Relu", [y], (m, n))


def _matmul(b: Builder, x: str, n: int) -> str:
    shape, k = (*b.shapes[x][:-1], n), b.shapes[x][-1]
    b.note("MatMul", [x], shape, weight=(k, n))
    y = b.node("MatMul", [b.out(x, 128), b.weight((k, n), 1, b.int8)], shape)
    if b.int8:
        b.cases.append({"boundary": "quantize", "elements": math.prod(b.shapes[x]), "conv": False})
    return b.node("Add", [y, b.const(np.full((1, 1, n), 0.01, np.float32))], shape)


def _pointwise(b: Builder, x: str, n: int) -> str:
    """MatMul, whose integers a Conv of one tap multiplies."""
    if not b.int8:
        return _matmul(b, x, n)
    (batch, m, k), y = b.shapes[x], b.out(x, 128)
    b.note("MatMul", [x], (batch, m, n), weight=(k, n), pointwise=True)
    b.cases.append({"boundary": "quantize", "elements": batch * m * k, "conv": False})
    y = b.node("Transpose", [y], (batch, k, m), perm=[0, 2, 1])
    y = b.node("Conv", [y, b.weight((n, k, 1), 0, True)], (batch, n, m), kernel_shape=[1])
    y = b.node("Transpose", [y], (batch, m, n), perm=[0, 2, 1])
    return b.node("Add", [y, b.const(np.full((1, 1, n), 0.01, np.float32))], (batch, m, n))


def _element_plans() -> Iterator[Plan]:
    for c, h, w in ELEMENT_MAPS:
        shape = (1, c, h, w)
        for op in (_maxpool, _avgpool, _sigmoid, _leaky, _gate, _square):
            if h > 1 or op in (_sigmoid, _leaky):
                yield Plan(
                    "elements", shape, _behind(op), _behind(lambda _, x: x), op=op.__name__[1:]
                )
        for n in (1, 2):
            yield Plan(
                "elements",
                shape,
                _residual(n, True),
                _residual(n, False),
                head=True,
                op=f"residual{n}",
            )
        if h > 1:
            yield Plan("elements", shape, _behind(_halve), head=True, branches=True, op="halve")
            yield Plan("elements", shape, _behind(_double), head=True, branches=True, op="double")
        yield Plan("elements", shape, _concat, op="concat")
        guarded = _behind(lambda b, x: b.conv(x, b.shapes[x][1], 1, guard=b.int8))
        yield Plan("boundary", shape, guarded, _behind(lambda _, x: x), boundary=True, op="conv")
    for n in (64, 512, 4096, 32768, 262144):
        yield Plan(
            "boundary", (1, n), _round_trip(True), _round_trip(False), boundary=True, op="plain"
        )


def _maxpool(b: Builder, x: str) -> str:
    return b.plain("MaxPool", [x], b.shapes[x], kernel_shape=[3, 3], pads=[1] * 4)


def _sigmoid(b: Builder, x: str) -> str:
    return b.plain("Sigmoid", [x], b.shapes[x])


def _leaky(b: Builder, x: str) -> str:
    return b.plain("LeakyRelu", [x], b.shapes[x], zero=30, alpha=0.1)


def _pooled(b: Builder, x: str) -> str:
    return b.plain("GlobalAveragePool", [x], (*b.shapes[x][:2], 1, 1))


def _gate(b: Builder, x: str) -> str:
    return b.plain("Mul", [x, _pooled(b, x)], b.shapes[x])


def _avgpool(b: Builder, x: str) -> str:
    return b.plain("AveragePool", [x], b.shapes[x], kernel_shape=[3, 3], pads=[1] * 4)


def _square(b: Builder, x: str) -> str:
    return b.plain("Mul", [x, b.plain("Sigmoid", [x], b.shapes[x])], b.shapes[x])


def _halve(b: Builder, x: str) -> str:
    n, c, h, w = b.shapes[x]
    return b.plain("MaxPool", [x], (n, c, h // 2, w // 2), strides=(2, 2), kernel_shape=[3, 3],
                   pads=[1, 1, 0, 0])  # fmt: skip


def _double(b: Builder, x: str) -> str:
    n, c, h, w = b.shapes[x]
    scales = b.const(np.array([1, 1, 2, 2], np.float32))
    return b.plain("Resize", [x, "", scales], (n, c, 2 * h, 2 * w), mode="nearest", nearest_mode="floor",
                   coordinate_transformation_mode="asymmetric")  # fmt: skip


def _residual(convs: int, add: bool) -> Unit:
    """x + Convs(x): ORT does the Add inside the last Conv."""

    def unit(b: Builder, x: str) -> str:
        y = x
        for left in reversed(range(convs)):
            y = b.conv(y, b.shapes[x][1], 1, act="Relu" if left else "")
        return b.plain("Add", [x, y], b.shapes[x], zero=128) if add else y

    return unit


def _concat(b: Builder, x: str) -> str:
    """Concat of two 1x1 Convs read by a third."""
    n, c, h, w = b.shapes[x]
    y, z = b.conv(x, c, 1), b.conv(x, c, 1)
    return b.conv(b.plain("Concat", [y, z], (n, 2 * c, h, w), axis=1), c, 1)


def _round_trip(pair: bool) -> Unit:
    def unit(b: Builder, x: str) -> str:
        y = b.node("Softplus", [x], b.shapes[x])
        return b.node("Clip", [b.out(y) if pair else y], b.shapes[x])

    return unit


def _unplaced_plans() -> Iterator[Plan]:
    """What no rule for OpenVINO quantizes: products of two activations, transposed Convs, activations by themselves."""
    for signed in (False, True):
        for heads, m, d in ((4, 40, 30), (12, 64, 32), (12, 128, 32), (6, 197, 64)):
            yield Plan("attention", (1, heads, m, d), _attend, op="signed" * signed, signed=signed)
        for c, h in ((16, 28), (64, 14), (64, 28), (128, 14)):
            yield Plan("transposed", (1, c, h, h), _transposed, op="signed" * signed, signed=signed)
    for shape in ((1, 64, 28, 28), (1, 128, 14, 14), (1, 32, 56, 56)):
        for op in (_gelu, _hard_swish, _square):
            yield Plan(
                "activations", shape, _behind(op), _behind(lambda _, x: x), op=op.__name__[1:]
            )


def _attend(b: Builder, x: str) -> str:
    """Both products of attention, without the softmax between."""
    n, h, m, d = b.shapes[x]
    keys = b.plain("Transpose", [x], (n, h, d, m), zero=128, perm=[0, 1, 3, 2])
    return b.plain(
        "MatMul", [b.plain("MatMul", [x, keys], (n, h, m, m), zero=128), x], (n, h, m, d), zero=128
    )


def _transposed(b: Builder, x: str) -> str:
    c = b.shapes[x][1]
    b.note("ConvTranspose", [x], b.shapes[x], kernel=(3, 3))
    weight = b.weight((c, c, 3, 3), 1, b.int8, "Relu")
    y = b.node("ConvTranspose", [x, weight], b.shapes[x], kernel_shape=[3, 3], pads=[1] * 4)
    return b.out(b.node("Relu", [y], b.shapes[x]))


def _gelu(b: Builder, x: str) -> str:
    """By its parts, which engines fuse."""
    shape, half, one, root = (
        b.shapes[x],
        *(b.const(np.float32(value)) for value in (0.5, 1.0, math.sqrt(2))),
    )
    shifted = b.node("Add", [b.node("Erf", [b.node("Div", [x, root], shape)], shape), one], shape)
    b.note("Gelu", [x], shape)
    return b.out(b.node("Mul", [b.node("Mul", [x, shifted], shape), half], shape), 20)


def _hard_swish(b: Builder, x: str) -> str:
    return b.plain("HardSwish", [x], b.shapes[x], zero=20)


FAMILIES: tuple[Callable[[], Iterator[Plan]], ...] = (
    _dense_plans, _depthwise_plans, _large_plans, _grouped_plans,
    _line_plans, _strided_plans, _linear_plans, _element_plans, _unplaced_plans,
)  # fmt: skip
