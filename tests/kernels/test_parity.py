"""Forward is bit for bit what onnxq.numerics and ONNX Runtime compute; the arithmetic's edges."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnxq.kernels import DType, Flag, find_layout
from onnxq.numerics import fake_quant, quantize
from onnxq.runtime import Session
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.kernels.machines import Case, Machine, case

KINDS = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16}


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Case, QParams, QuantSpec, np.ndarray, tuple[int, ...]]:
    """A case whose memory order is any permutation of its dimensions, and the same in onnxq's words."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.booleans()):
        shape = (*shape[:-1], draw(st.integers(1, 700)))
    axis = draw(st.integers(0, len(shape) - 1))
    grain = draw(st.sampled_from([PerTensor(), PerChannel(axis), PerBlock(axis, draw(st.integers(1, 20)))]))
    signed, symmetric = draw(st.booleans()), draw(st.booleans())
    spec = QuantSpec(
        bits=draw(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16])), signed=signed, symmetric=symmetric,
        narrow_range=signed and draw(st.booleans()), granularity=grain,
    )  # fmt: skip
    dtype = draw(st.sampled_from(list(KINDS)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    memory = np.empty([shape[dim] for dim in order], np.int8)
    strides = [memory.strides[order.index(dim)] for dim in range(len(shape))]
    block = grain.size if isinstance(grain, PerBlock) else 0
    layout = find_layout(shape, strides, None if grain == PerTensor() else axis, block)
    assert layout is not None
    wanted = [-(-dim // block) if block and k == axis else dim for k, dim in enumerate(shape)]
    wanted = wanted if block else [] if grain == PerTensor() else [shape[axis]]
    scale = (2.0 ** rng.uniform(-12, 4, wanted)).astype(np.float32)
    if draw(st.booleans()):
        scale = (2.0 ** rng.integers(-12, 4, wanted)).astype(np.float32)
    zero = np.full(wanted, 0 if signed else 1 << (spec.bits - 1), np.int32)
    if not symmetric:
        zero = rng.integers(spec.qmin, spec.qmax + 1, wanted, dtype=np.int32)
    far = draw(st.sampled_from([1.0, 1.0, 1e6, 1e38]))
    levels = rng.uniform(spec.qmin - 3, spec.qmax + 3, shape)
    levels = np.where(rng.random(shape) < 0.4, np.floor(levels) + 0.5, levels) * far
    # Halves times a power of two are ties, in every type.
    steps = np.broadcast_to(scale if not block else scale.flat[0], shape) if not wanted or block else np.moveaxis(
        np.broadcast_to(scale, [*np.delete(shape, axis), shape[axis]]), -1, axis)  # fmt: skip
    with np.errstate(all="ignore"):
        x = (levels * steps).astype(KINDS[dtype])
    x = np.where(np.isnan(x), KINDS[dtype](0), x).astype(KINDS[dtype])
    laid = np.ascontiguousarray(x.transpose(order)).reshape(-1)
    numbers = [values.transpose(layout.order) if block else values for values in (scale, zero.astype(np.float32))]
    flat = [np.ascontiguousarray(values).reshape(-1) for values in numbers]
    flags = Flag.SCALE_AS_X if dtype is DType.F16 else Flag(0)
    # Dimensions of size 1 may stand elsewhere in layout.order; it is the same memory.
    one = Case(laid, *flat, layout, spec.qmin, spec.qmax, flags, np.zeros_like(laid))
    return one, QParams(scale, zero), spec, x, order


@settings(max_examples=150)
@given(tensors())
def test_the_cpu_twin_gives_what_numerics_gives(cpu: Machine, drawn) -> None:
    one, qparams, spec, x, order = drawn
    expected = np.ascontiguousarray(fake_quant(x, qparams, spec).transpose(order)).reshape(-1)
    y = cpu(one, True, True)[0]
    assert np.array_equal(bits(y), bits(expected.astype(y.dtype)))


@settings(max_examples=40)
@given(tensors())
def test_the_cuda_kernels_give_what_numerics_gives(grid: Machine, drawn) -> None:
    one, qparams, spec, x, order = drawn
    expected = np.ascontiguousarray(fake_quant(x, qparams, spec).transpose(order)).reshape(-1)
    y = grid(one, True, True)[0]
    assert np.array_equal(bits(y), bits(expected.astype(y.dtype)))


TYPES = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535), TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
}  # fmt: skip


def run_ort(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, kind: int, axis: int) -> np.ndarray:
    """QuantizeLinear, then DequantizeLinear."""
    attrs = {"axis": axis} if scale.ndim else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attrs),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attrs),
    ]
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", element, x.shape)], [helper.make_tensor_value_info("y", element, x.shape)],
        [numpy_helper.from_array(scale.astype(x.dtype), "s"),
         helper.make_tensor("z", kind, scale.shape, zero.astype(np.int64).reshape(-1).tolist())],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return Session(model, optimize=False).run({"x": x})["y"]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", TYPES, ids=TensorProto.DataType.Name)
def test_onnx_runtime_gives_the_same(machine: Machine, kind: int, channels: bool) -> None:
    low, high = TYPES[kind]
    shape = (6, 50, 8)
    one = case(shape, 1 if channels else None, 0, DType.F32, low, high, kind)
    scale = one.scale if channels else one.scale.reshape(())
    zero = one.zero_point if channels else one.zero_point.reshape(())
    expected = run_ort(one.x.reshape(shape), scale, zero, kind, 1)
    assert np.array_equal(bits(machine(one, True, True)[0]), bits(expected.reshape(-1)))


@pytest.mark.recent_ort
def test_onnx_runtime_gives_the_same_in_float16(machine: Machine) -> None:
    one = case((4000,), None, 0, DType.F16, -128, 127, 5, flags=Flag.SCALE_AS_X)
    expected = run_ort(one.x, one.scale.reshape(()), one.zero_point.reshape(()), TensorProto.INT8, 0)
    assert np.array_equal(bits(machine(one, True, True)[0]), bits(expected))


def whole(x: np.ndarray, scale: float, zero: float = 0.0, **more) -> Case:
    width = np.float64 if x.dtype == np.float64 else np.float32
    layout = find_layout(x.shape, [1])
    return Case(x, np.array([scale], width), np.array([zero], width), layout, -128, 127, dy=np.ones_like(x), **more)


@pytest.mark.parametrize("dtype", [*KINDS.values(), np.float64])
def test_nan_stays_infinity_saturates_and_zero_has_no_sign(machine: Machine, dtype: type) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, -0.1, 0.25, 0.75, -0.25, 1e4, -1e4] * 7, dtype)
    y, dx, dscale, _ = machine(whole(x, 0.5), True, True)
    assert np.isnan(y[::10]).all()
    assert y[1:10].tolist() == [63.5, -64.0, 0.0, 0.0, 0.0, 1.0, 0.0, 63.5, -64.0]
    assert not np.signbit(y[3:8]).any()
    # A gradient through NaN passes, and the scale's says that something is wrong; what was cut off gets none.
    assert dx[:10].tolist() == [1, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert np.isnan(dscale).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_half_is_read_and_written_exactly(machine: Machine, dtype: type) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    # Asking bfloat16's signalling NaNs what they are warns.
    numbers = bits(every) & 0x7FFF <= bits(np.array([np.inf], dtype))
    x = np.zeros_like(every)
    dx = machine(replace(whole(x, 1.0), dy=every), True, True)[1]
    assert np.array_equal(bits(dx)[numbers], bits(every)[numbers])
    assert np.isnan(dx[~numbers]).all()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_levels_round_to_half_types_as_numpy_rounds(machine: Machine, dtype: DType) -> None:
    """Every level times scales from the smallest subnormal to overflow."""
    levels = np.arange(-32768, 32768, 5, dtype=np.float32)
    scales = np.float32(1.2345678) * 2.0 ** np.arange(-40, 14, dtype=np.float32)
    x = np.broadcast_to(np.inf, (len(scales), 2)).astype(NUMPY_OF[dtype])
    for zero in levels[::600]:
        # x saturates at both ends: y = (end - zero) * scale.
        x[:, 1] = -np.inf
        layout = find_layout(x.shape, (2, 1), 0)
        zeros = np.full(len(scales), zero, np.float32)
        one = Case(x.reshape(-1), scales, zeros, layout, -32768, 32767, dy=np.zeros(x.size, x.dtype))
        ends = np.array([32767 - zero, -32768 - zero], np.float32)
        with np.errstate(over="ignore"):
            expected = (ends * scales[:, None]).astype(np.float32).astype(NUMPY_OF[dtype])
        assert np.array_equal(bits(machine(one, True, True)[0]), bits(expected.reshape(-1)))


NUMPY_OF = {DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16}


def test_a_scale_may_be_rounded_to_the_tensors_type_or_not(machine: Machine) -> None:
    x = np.linspace(-40, 40, 999).astype(np.float16)
    scale = 0.1
    exact, rounded = (machine(whole(x, scale, flags=flag), True, True)[0] for flag in (Flag(0), Flag.SCALE_AS_X))
    assert not np.array_equal(exact, rounded)
    spec = QuantSpec(bits=8)
    qparams = QParams(np.float32(scale), np.int32(0))
    assert np.array_equal(rounded, fake_quant(x, qparams, spec))
    levels = quantize(x.astype(np.float32), qparams, spec).astype(np.float32)
    assert np.array_equal(exact, (levels * np.float32(scale)).astype(np.float16))


def test_without_zero_points_they_are_zero_and_fractions_are_rounded(machine: Machine) -> None:
    one = case((40, 30), 1, 0, DType.F32, -8, 7, 3)
    zeros, none = replace(one, zero_point=np.zeros_like(one.scale)), replace(one, zero_point=None)
    assert np.array_equal(machine(zeros, True, True)[0], machine(none, True, True)[0])
    near = replace(one, zero_point=one.zero_point + np.float32(0.3))
    assert np.array_equal(machine(near, True, True)[0], machine(one, True, True)[0])
