"""The numbers of fake_quantize: bit for bit those of onnxq.numerics and of ONNX Runtime."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ml_dtypes
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxq import numerics
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.fake_quant.grid import Grid
from torch_frontend.fake_quant.reference import compute_forward

SEEDS = st.integers(0, 2**32 - 1)
SPECS = st.builds(
    QuantSpec,
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16]),
    signed=st.booleans(),
    symmetric=st.just(False),
    narrow_range=st.booleans(),
)
rounds_float16 = pytest.mark.skipif(
    tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < (1, 30),
    reason="ONNX Runtime before 1.30 truncates float16 in QuantizeLinear (microsoft/onnxruntime#32452)",
)


def _ours(x: Any, numbers: QParams, spec: QuantSpec) -> Any:
    """fake_quantize of a numpy array; the compiled kernel and the reference must agree first."""
    values = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else None
    values = torch.from_numpy(x) if values is None else values
    grain = spec.granularity
    axis = None if isinstance(grain, PerTensor) else grain.axis
    block = grain.size if isinstance(grain, PerBlock) else 0
    scale, zero = torch.from_numpy(numbers.scale), torch.from_numpy(numbers.zero_point.astype(np.float32))
    y = fake_quantize(values, scale, zero, qmin=spec.qmin, qmax=spec.qmax, axis=axis, block_size=block)
    assert y.dtype == values.dtype
    assert y.shape == values.shape
    same_bits(y, compute_forward(values, scale, zero, Grid(spec.qmin, spec.qmax, axis, block)))
    return y.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if values.dtype == torch.bfloat16 else y.numpy()


def same_bits(one: Any, other: Any) -> None:
    """Equal bit for bit, except that one NaN is as good as another."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = (one.view(width) == other.view(width)) | (one.isnan() & other.isnan())
    assert same.all(), (one[~same][:5], other[~same][:5])


def _numbers(rng: Any, spec: QuantSpec, shape: tuple[int, ...], centre: float) -> QParams:
    scale = np.asarray(centre * rng.uniform(0.0625, 16, shape), np.float32)
    return QParams(scale, np.asarray(rng.integers(spec.qmin, spec.qmax, shape, endpoint=True), np.int32))


def _awkward(rng: Any, scale: Any, shape: tuple[int, ...]) -> Any:
    """Any bit pattern of float32 but NaN (denormals, infinities), and ties and levels of the scale with neighbours."""
    count = int(np.prod(shape))
    with np.errstate(all="ignore"):
        any_bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
        steps = rng.integers(-(2 ** rng.integers(2, 18)), 2**18, count).astype(np.float32) / np.float32(2)
        levels = steps * rng.choice(np.ravel(scale), count)
        beside = np.nextafter(levels, rng.choice(np.float32([-np.inf, 0, np.inf]), count))
    x = np.choose(rng.integers(0, 3, count), [any_bits, levels, beside]).astype(np.float32).reshape(shape)
    return np.where(np.isnan(x), np.float32(0), x)


@settings(max_examples=80)
@given(spec=SPECS, seed=SEEDS, shape=st.lists(st.integers(0, 9), min_size=0, max_size=4), data=st.data())
def test_equals_numerics(spec: QuantSpec, seed: int, shape: list[int], data: Any) -> None:
    """Shapes, axes, granularities, ranges, ties and extremes, in float32, float16 and bfloat16."""
    rng = np.random.default_rng(seed)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    kind = data.draw(st.sampled_from(["tensor", "channel", "block"] if shape else ["tensor"]))
    size = data.draw(st.integers(1, 5))
    grain, scales = {
        "tensor": lambda: (PerTensor(), ()),
        "channel": lambda: (PerChannel(axis), (shape[axis],)),
        "block": lambda: (PerBlock(axis, size), _blocked(shape, axis, size)),
    }[kind]()
    spec = QuantSpec(
        bits=spec.bits, signed=spec.signed, symmetric=False, narrow_range=spec.narrow_range, granularity=grain
    )
    numbers = _numbers(rng, spec, scales, 2.0 ** data.draw(st.integers(-16, 90)))
    x = _awkward(rng, numbers.scale if numbers.scale.size else np.float32([1]), tuple(shape))
    with np.errstate(all="ignore"):
        assert _ours(x, numbers, spec).tobytes() == numerics.fake_quant(x, numbers, spec).tobytes()
        short = x.astype(ml_dtypes.bfloat16)
        wanted = numerics.fake_quant(short, numbers, spec).astype(ml_dtypes.bfloat16)
        assert _ours(short, numbers, spec).tobytes() == wanted.tobytes()
    numbers = _numbers(rng, spec, scales, 2.0 ** data.draw(st.integers(-14, 8)))
    half = rng.integers(0, 2**16, tuple(shape)).astype(np.uint16).view(np.float16)
    half = np.where(np.isnan(half), np.float16(1), half)
    assert _ours(half, numbers, spec).tobytes() == numerics.fake_quant(half, numbers, spec).tobytes()


def _blocked(shape: list[int], axis: int, size: int) -> tuple[int, ...]:
    return tuple(-(-dim // size) if k == axis % len(shape) else dim for k, dim in enumerate(shape))


@cache
def _session(kind: int, storage: int, rank: int, grain: int, attrs: tuple[tuple[str, int], ...]) -> Any:
    nodes = [
        helper.make_node("Cast", ["zero"], ["z"], to=storage),
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **dict(attrs)),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **dict(attrs)),
    ]
    inputs = [("x", kind, rank), ("s", kind, grain), ("zero", TensorProto.INT32, grain)]
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info(n, t, [None] * r) for n, t, r in inputs],
        [helper.make_tensor_value_info("y", kind, [None] * rank)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _engine(x: Any, numbers: QParams, spec: QuantSpec) -> Any:
    """QuantizeLinear -> DequantizeLinear in ONNX Runtime."""
    grain = spec.granularity
    attrs: dict[str, int] = {} if isinstance(grain, PerTensor) else {"axis": grain.axis}
    if isinstance(grain, PerBlock):
        attrs["block_size"] = grain.size
    kind = TensorProto.FLOAT if x.dtype == np.float32 else TensorProto.FLOAT16
    storage = getattr(TensorProto, spec.storage.upper())
    session = _session(kind, storage, x.ndim, np.ndim(numbers.scale), tuple(attrs.items()))
    return session.run(None, {"x": x, "s": numbers.scale.astype(x.dtype), "zero": numbers.zero_point})[0]


@pytest.mark.parametrize("storage", ["int8", "uint8", "int16", "uint16", "int4", "uint4"])
@settings(max_examples=12)
@given(seed=SEEDS, exponent=st.integers(-16, 60), axis=st.integers(-3, 2))
def test_equals_onnxruntime(storage: str, seed: int, exponent: int, axis: int) -> None:
    rng = np.random.default_rng(seed)
    bits, signed = int(storage.lstrip("uint")), not storage.startswith("u")
    shape = (6, 10, 8)
    for grain, scales in (
        (PerTensor(), ()),
        (PerChannel(axis), (shape[axis],)),
        (PerBlock(axis, 2), _blocked(list(shape), axis, 2)),
    ):
        spec = QuantSpec(bits=bits, signed=signed, storage=storage, symmetric=False, granularity=grain)
        numbers = _numbers(rng, spec, scales, 2.0**exponent)
        # Where |x / scale| reaches 2**31, some of the engine's loops wrap; onnxq.numerics saturates, as ONNX says.
        most = min(2.0**30 * float(numbers.scale.min()), 2.0**127)
        x = np.clip(_awkward(rng, numbers.scale, shape), np.float32(-most), np.float32(most))
        assert _ours(x, numbers, spec).tobytes() == _engine(x, numbers, spec).tobytes()


@rounds_float16
@pytest.mark.parametrize("storage", ["int8", "uint8", "int16", "uint16"])
def test_every_float16_equals_onnxruntime(storage: str) -> None:
    """All values that are finite; from |x / scale| = 2**31 on the engine's float16 kernel wraps."""
    bits, signed = int(storage.lstrip("uint")), not storage.startswith("u")
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False)
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)]
    for step in (2.0**-14, 0.1, 0.37, 1.0, 100.0):
        for zero in (spec.qmin, (spec.qmin + spec.qmax) // 2, spec.qmax):
            numbers = QParams(np.asarray(step, np.float32), np.asarray(zero, np.int32))
            assert _ours(every, numbers, spec).tobytes() == _engine(every, numbers, spec).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grain", ["tensor", "channel", "block"])
def test_nan_stays_and_infinities_saturate(dtype: Any, grain: str) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.25, -0.25, -0.0]] * 20, dtype=dtype)
    axis, block, shape = {"tensor": (None, 0, ()), "channel": (1, 0, (6,)), "block": (0, 4, (5, 6))}[grain]
    scale, zero = torch.full(shape, 0.5), torch.full(shape, 3.0)
    y = fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=axis, block_size=block)
    assert y[:, 0].isnan().all()
    assert y[:, 1:].tolist() == [[2.0, -5.5, 0.0, 0.0, 0.0]] * 20
    assert not y[:, 1:].signbit()[:, 2:].any()


def test_float64_is_computed_in_float64() -> None:
    x = torch.tensor([0.5 + 1e-12, 0.5 - 1e-12, 0.5, 1.5], dtype=torch.float64)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    y = fake_quantize(x, torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0), qmin=-8, qmax=7)
    assert y.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert fake_quantize(x, third, torch.tensor(0.0), qmin=-8, qmax=7)[0] == 2 * third


def test_a_zero_point_between_levels_is_rounded() -> None:
    x = torch.linspace(-3, 3, 50)
    one = fake_quantize(x, torch.tensor(0.3), torch.tensor(2.4), qmin=0, qmax=15)
    assert torch.equal(one, fake_quantize(x, torch.tensor(0.3), torch.tensor(2.0), qmin=0, qmax=15))
    tie = fake_quantize(x, torch.tensor(0.3), torch.tensor(2.5), qmin=0, qmax=15)
    assert torch.equal(tie, one)
