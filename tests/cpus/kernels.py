"""ONNX Runtime's integer kernels one by one: a model, an input, and the answer for a given way to multiply."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper

from tests.numerics.reference import multiply_saturating

Array = np.ndarray[Any, Any]
Multiply = Callable[[Array, Array], Array]

# Set by tests/cpus/run.py to the kind of CPU it emulates, so that an emulation that does not happen fails.
EXPECTED = "ONNXQ_TEST_CPU"
# Output steps of kernels that write uint8: powers of two, so that requantization rounds nothing but the sum itself.
_STEP = np.float32(512)


def multiply_exactly(x: Array, w: Array) -> Array:
    """x @ w without any overflow: [..., K] times [K, N], int32."""
    return (x.astype(np.int64) @ w.astype(np.int64)).astype(np.int32)


@cache
def cpu_saturates() -> bool:
    """True where ONNX Runtime adds two products of uint8 and int8 in 16 bits."""
    case = matrix_case("MatMulInteger", np.full((1, 2), 255, np.uint8), np.full((2, 16), 127, np.int8))
    found = {int(value) for value in case.run().ravel()}
    assert found in ({2 * 255 * 127}, {2**15 - 1}), found
    saturates = found == {2**15 - 1}
    expected = os.environ.get(EXPECTED)
    assert expected in (None, "saturating" if saturates else "exact"), f"this CPU is not {expected}"
    return saturates


@dataclass(frozen=True, eq=False)
class Case:
    """A model of one kernel, and the exact or saturating answer in numpy.

    answer: from a function that multiplies stored integers, x [..., K] times w [K, N].
    saturates: its kernel adds in 16 bits on CPUs without VNNI.
    """

    model: onnx.ModelProto
    x: Array
    answer: Callable[[Multiply], Array]
    saturates: bool

    def run(self) -> Array:
        """What ONNX Runtime computes."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            self.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return np.asarray(session.run(None, {"x": self.x})[0])

    def expected(self) -> Array:
        """The answer on this CPU."""
        return self.answer(multiply_saturating if self.saturates and cpu_saturates() else multiply_exactly)


def _model(op: str, names: str, constants: dict[str, Any], x: Array, output: int, **attrs: Any) -> onnx.ModelProto:
    domain = "com.microsoft" if op in ("QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul") else ""
    node = helper.make_node(op, names.split(), ["y"], domain=domain, **attrs)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "kernel",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", output, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _requantized(sums: Array) -> Array:
    return np.clip(np.rint(sums.astype(np.float32) / _STEP) + 128, 0, 255).astype(np.uint8)


def matrix_case(op: str, x: Array, w: Array, *, x_zero: int = 0, w_zero: int = 0, turned: bool = False) -> Case:
    """x [M, K] times w [K, N] in one of the operators that multiply matrices. turned: w is stored as [N, K]."""
    one, x_zp, w_zp = np.float32(1), x.dtype.type(x_zero), w.dtype.type(w_zero)
    stored = np.ascontiguousarray(w.T) if turned else w
    scales = {"xs": one, "xz": x_zp, "w": stored, "ws": one, "wz": w_zp}
    attrs: dict[str, Any] = {}
    names, output, fed = "x xs xz w ws wz", TensorProto.FLOAT, x
    if op == "MatMulInteger":
        names, output = "x w xz wz", TensorProto.INT32
        scales = {"w": stored, "xz": x_zp, "wz": w_zp}
    elif op == "QLinearMatMul":
        names, output = f"{names} ys yz", TensorProto.UINT8
        scales |= {"ys": _STEP, "yz": np.uint8(128)}
    elif op == "QGemm":
        attrs = {"transB": int(turned)}
    elif op == "MatMulIntegerToFloat":
        names = "x w xs ws xz wz"
    else:
        # Data up to 255 in float, 0 always in range: the scale that it finds is 1, the zero point 0.
        names, fed = "x w ws wz", x.astype(np.float32)
        scales = {"w": stored, "ws": one, "wz": w_zp}
        assert (x.max(), x_zero) == (255, 0)

    def answer(multiply: Multiply) -> Array:
        wide = x.astype(np.int64), w.astype(np.int64)
        sums = multiply(x, w) - x_zero * wide[1].sum(axis=0) - w_zero * (wide[0] - x_zero).sum(axis=1)[:, None]
        return _requantized(sums) if op == "QLinearMatMul" else sums.astype(helper.tensor_dtype_to_np_dtype(output))

    saturates = (x.dtype, w.dtype) == (np.uint8, np.int8)
    return Case(_model(op, names, scales, fed, output, **attrs), fed, answer, saturates)


def conv_case(
    op: str, x: Array, w: Array, *, group: int = 1, x_zero: int = 0, w_zero: int = 0, **attrs: list[int]
) -> Case:
    """QLinearConv or ConvInteger. attrs: pads, strides, dilations."""
    one, x_zp, w_zp = np.float32(1), x.dtype.type(x_zero), w.dtype.type(w_zero)
    if op == "QLinearConv":
        names, output = "x xs xz w ws wz ys yz", TensorProto.UINT8
        constants = {"xs": one, "xz": x_zp, "w": w, "ws": one, "wz": w_zp, "ys": _STEP, "yz": np.uint8(128)}
    else:
        names, output = "x w xz wz", TensorProto.INT32
        constants = {"w": w, "xz": x_zp, "wz": w_zp}
    rows, shape = _windows(x, w.shape, group, x_zero, **attrs)
    # [groups, K, outputs of a group]; K as of `_windows`.
    grouped = np.moveaxis(w, 1, -1).reshape(group, w.shape[0] // group, -1)
    columns = np.ascontiguousarray(grouped.transpose(0, 2, 1))

    def answer(multiply: Multiply) -> Array:
        parts = []
        for g in range(group):
            near = rows[:, g].astype(np.int64) - x_zero
            sums = multiply(rows[:, g], columns[g]) - x_zero * columns[g].astype(np.int64).sum(axis=0)
            parts.append(sums - w_zero * near.sum(axis=1)[:, None])
        sums = np.moveaxis(np.concatenate(parts, axis=1).reshape(len(x), *shape, -1), -1, 1)
        return _requantized(sums) if op == "QLinearConv" else sums.astype(np.int32)

    alone = w.shape[1] == 1 and w.shape[0] == group
    saturates = op == "QLinearConv" and not alone and (x.dtype, w.dtype) == (np.uint8, np.int8)
    return Case(_model(op, names, constants, x, output, group=group, **attrs), x, answer, saturates)


def _windows(
    x: Array,
    weight: tuple[int, ...],
    group: int,
    x_zero: int,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    dilations: list[int] | None = None,
) -> tuple[Array, tuple[int, ...]]:
    """(inputs [positions, groups, K] of every output position, shape of the output's map); K: taps, then channels."""
    kernel, rank = weight[2:], x.ndim - 2
    pads, strides, dilations = pads or [0] * 2 * rank, strides or [1] * rank, dilations or [1] * rank
    around = [(0, 0), (0, 0), *((pads[k], pads[k + rank]) for k in range(rank))]
    padded = np.pad(x, around, constant_values=x_zero)
    reach = tuple((size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True))
    found = sliding_window_view(padded, reach, axis=tuple(range(2, x.ndim)))
    every = [slice(None)] * 2 + [slice(None, None, step) for step in (*strides, *dilations)]
    found = found[tuple(every)]
    shape = found.shape[2 : 2 + rank]
    parted = found.reshape(len(x), group, -1, *found.shape[2:])
    order = (0, *range(3, 3 + rank), 1, *range(3 + rank, 3 + 2 * rank), 2)
    return parted.transpose(order).reshape(-1, group, weight[1] * int(np.prod(kernel))), shape


MATRIX_OPS = ("MatMulInteger", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")

# name -> (shape of the input, shape of the weight, groups, other attributes)
CONVS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, list[int]]]] = {
    "1-D": ((2, 6, 11), (8, 6, 3), 1, {"pads": [1, 0]}),
    "2-D": ((1, 8, 6, 7), (12, 8, 3, 3), 1, {"pads": [1, 1, 1, 1]}),
    "3-D": ((1, 4, 4, 5, 4), (6, 4, 2, 3, 2), 1, {}),
    "pointwise": ((2, 16, 5, 5), (9, 16, 1, 1), 1, {}),
    "odd-channels": ((1, 3, 7, 7), (8, 3, 3, 3), 1, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "one-channel": ((1, 1, 8, 8), (8, 1, 3, 3), 1, {}),
    "one-channel-1-D": ((1, 1, 16), (8, 1, 5), 1, {}),
    "grouped": ((1, 6, 6, 6), (8, 3, 3, 3), 2, {"dilations": [2, 1]}),
    "depthwise": ((1, 8, 6, 6), (8, 1, 3, 3), 8, {"pads": [1, 1, 1, 1]}),
    "depthwise-1-D": ((1, 8, 9), (8, 1, 5), 8, {}),
    "depthwise-twice": ((1, 8, 6, 6), (16, 1, 3, 3), 8, {"pads": [1, 1, 1, 1]}),
    "one-to-one": ((1, 1, 7, 7), (1, 1, 3, 3), 1, {}),
}


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Mostly large activations, so that sums overflow; 0 and 255 among them."""
    found = np.asarray(255 - rng.integers(0, 256, shape) // rng.integers(1, 9, shape), np.uint8)
    found.flat[0], found.flat[-1] = 0, 255
    return found


def cases() -> dict[str, Callable[[], Case]]:
    """Every kernel, with random data: depth odd and even, zero points, groups, one to three dimensions."""
    found: dict[str, Callable[[], Case]] = {}

    def matrix(op: str, size: int, **more: Any) -> Case:
        rng = np.random.default_rng(size)
        kinds = more.pop("x_type", np.uint8), more.pop("w_type", np.int8)
        x, w = large(rng, (5, size)), rng.integers(-127, 128, (size, 19))
        x = (x.astype(np.int16) - 128).astype(np.int8) if kinds[0] == np.int8 else x
        w = np.asarray(w + 128 if kinds[1] == np.uint8 else w, kinds[1])
        return matrix_case(op, x, w, **more)

    for op in MATRIX_OPS:
        for size in (2, 7, 64, 131):
            found[f"{op}-{size}"] = partial(matrix, op, size)
        if op != "DynamicQuantizeMatMul":
            found[f"{op}-x-zero"] = partial(matrix, op, 33, x_zero=117)
        found[f"{op}-w-zero"] = partial(matrix, op, 33, w_zero=5)
    found["QGemm-turned"] = partial(matrix, "QGemm", 33, turned=True)
    found["MatMulInteger-u8u8"] = partial(matrix, "MatMulInteger", 33, w_type=np.uint8, w_zero=120)
    found["MatMulInteger-s8s8"] = partial(matrix, "MatMulInteger", 33, x_type=np.int8)

    def conv(op: str, name: str, **more: int) -> Case:
        shape, weight, group, attrs = CONVS[name]
        rng = np.random.default_rng(len(name))
        w = np.asarray(rng.integers(-127, 128, weight), np.int8)
        return conv_case(op, large(rng, shape), w, group=group, **more, **attrs)

    for name in CONVS:
        found[f"QLinearConv-{name}"] = partial(conv, "QLinearConv", name)
        found[f"ConvInteger-{name}"] = partial(conv, "ConvInteger", name)
    found["QLinearConv-x-zero"] = partial(conv, "QLinearConv", "2-D", x_zero=97)
    found["QLinearConv-w-zero"] = partial(conv, "QLinearConv", "2-D", x_zero=97, w_zero=3)
    return found
