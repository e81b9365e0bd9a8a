"""The integer arithmetic of Qualcomm's NPU, the codes that its products make of their exact sums, beside its emulator.

    python benchmarks/npu_arithmetic.py

Qualcomm publishes none of this. It was found by experiment in the emulator of onnxruntime-qnn 2.7, see docs/engines.md.
8-bit results are exact. A multiplier of a 16-bit result may differ by its last bit, since the compiler computes it in
float32. Prints how many of 24,576 codes differ from the emulator's, and how many those of ONNX's rounding do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto, helper, numpy_helper

from measure import table
from npu_emulator import Emulator
from onnxq.arrays import Array, Shape
from onnxq.spec import QuantSpec

UINT8 = QuantSpec(signed=False, symmetric=False)
# Type of data and result, zero point of the result, groups.
CASES = (
    (UINT8, 131, 1),
    (UINT8, 0, 24),
    (QuantSpec(), 7, 1),
    (QuantSpec(bits=16, signed=False, symmetric=False), 33000, 1),
    (QuantSpec(bits=16), 0, 1),
)
# Bits of a sum below one code of the result, and of the multiplier, by the bits of data and result.
_FRACTION = {8: 4, 16: 8}
_MULTIPLIER = {8: 12, 16: 22}


def requantize_product(
    sums: ArrayLike, offsets: ArrayLike, multiplier: ArrayLike, zero_point: int, spec: QuantSpec
) -> Array:
    """Compute the result of Conv, ConvTranspose, Gemm or MatMul by a weight of int8 or int4, without a bias.

    sums: of data times weight, both as stored. offsets: zero point of the data times the sum of the weights.
    multiplier: scale of the data times scale of the weight, divided by the scale of the result; it broadcasts to the
    sums. zero_point, spec: of the result; the data has the same type.
    """
    exact, start = np.asarray(sums, np.float64), np.asarray(offsets, np.float64)
    factor = np.asarray(multiplier, np.float64)
    if spec.bits == 16:
        # 16-bit data is multiplied byte by byte, and the lowest byte of the sum is dropped.
        exact, start, factor = np.floor(exact / 256), np.floor(start / 256 + 0.5), factor * 256
    mantissa, exponent = np.frexp(factor)
    steps = np.rint(np.ldexp(mantissa, _MULTIPLIER[spec.bits]))
    # The sum is cut to a grid, of which the multiplier sees the middle of each cell.
    cells = np.floor(np.ldexp(exact - start, exponent - 1 + _FRACTION[spec.bits])) + 0.5
    codes = np.floor(
        np.ldexp(cells * steps, 1 - _FRACTION[spec.bits] - _MULTIPLIER[spec.bits]) + 0.5
    )
    clipped: Array = np.clip(codes + zero_point, spec.qmin, spec.qmax).astype(spec.numpy_storage)
    return clipped


def convolve(weight: Array, scales: dict[str, Array], groups: int, shape: Shape) -> ModelProto:
    """A 1x1 convolution between pairs, whose input `x` and result are integers."""
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["y"], group=groups),
        helper.make_node("QuantizeLinear", ["y", "ys", "yz"], ["yq"]),
    ]
    constants = {"w": weight[:, :, None, None], **scales}
    types = {"x": scales["xz"].dtype, "yq": scales["yz"].dtype}
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
        for name, dtype in types.items()
    ]
    tensors = [
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def compare_codes(
    emulator: Emulator, spec: QuantSpec, zero_point: int, groups: int
) -> tuple[int, int]:
    """Codes of a 1x1 convolution that differ between formula and emulator, and between ONNX and emulator."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, (24, 24 // groups)).astype(np.int8)
    middle = (spec.qmin + spec.qmax + 1) // 2 + 5 * (spec.bits == 8)
    data = (
        rng.normal(middle, (spec.qmax - spec.qmin) / 6, (24, 1024))
        .round()
        .clip(spec.qmin, spec.qmax)
    )
    scales = {
        "xs": np.float32(2.0**-6),
        "xz": np.asarray(middle, spec.numpy_storage),
        "ws": np.exp2(rng.uniform(-9, -8, 24)).astype(np.float32),
        "wz": np.zeros(24, np.int8),
        "ys": np.float32(2.0**-5 if groups == 1 else 2.0**-7),
        "yz": np.asarray(zero_point, spec.numpy_storage),
    }
    weights = np.diag(weight[:, 0]) if groups == 24 else weight
    sums, offsets = (
        weights.astype(np.int64) @ data,
        middle * weights.sum(axis=1, keepdims=True, dtype=np.int64),
    )
    multiplier = (scales["xs"] * scales["ws"].astype(np.float64) / scales["ys"])[:, None]
    expected = requantize_product(sums, offsets, multiplier, zero_point, spec)
    model = convolve(weight, scales, groups, (1, 24, 32, 32))
    reply = emulator.run(
        model.SerializeToString(), {"x": data.reshape(1, 24, 32, 32).astype(spec.numpy_storage)}
    )
    assert not reply.error, reply.error
    codes = reply.results[0].reshape(24, -1)
    rounded = (np.rint((sums - offsets) * multiplier) + zero_point).clip(spec.qmin, spec.qmax)
    return np.count_nonzero(codes != expected), np.count_nonzero(codes != rounded)


def main() -> None:
    """Print a row for each case."""
    emulator, rows = Emulator({}), []
    for spec, zero_point, groups in CASES:
        formula, rounding = compare_codes(emulator, spec, zero_point, groups)
        rows.append([spec.storage, str(zero_point), str(groups), str(formula), str(rounding)])
    emulator.close()
    print(table(rows, ["type", "zero point", "groups", "the formula", "ONNX's rounding"]))


if __name__ == "__main__":
    main()
