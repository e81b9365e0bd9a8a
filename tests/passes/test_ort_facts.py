"""What preparation and placement count on in ONNX Runtime, each seen in its optimized graph and in its numbers.

When one of these fails after an upgrade of ORT, a rule built on it must be measured again. Weights stay within ±63,
which no CPU's 8-bit multiply-add saturates on.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq.runtime import optimize_graph
from tests.passes.kit import infer, ops, parse, read_by

pytestmark = pytest.mark.recent_ort

F = np.float32
RNG = np.random.default_rng(0)
WEIGHT = RNG.integers(-63, 64, (16, 16, 1, 1)).astype(np.int8)
WIDE = RNG.integers(-63, 64, (16, 16, 3, 3)).astype(np.int8)
SCALES = RNG.uniform(0.002, 0.01, 16).astype(F)
PAIR_IN = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) "
CONV = "k = DequantizeLinear <axis = 0> (w, sw) c = Conv(d, k) "
PAIR_OUT = " o = QuantizeLinear(v, t, u) y = DequantizeLinear(o, t, u)"
HELD = {"w": WEIGHT, "sw": SCALES, "s": np.asarray(F(0.03)), "z": np.uint8(120)}


def quantized(
    middle: str,
    scale: float = 0.04,
    zero: np.generic | int = 120,
    opset: int = 17,
    x: str = "1,16,14,14",
    out: str = "A,B,C,D",
    conv: str = CONV,
    **other: np.ndarray | np.generic,
) -> ModelProto:
    """pair, Conv with int8 weights writing c, `middle` from c to v, pair."""
    text = f"g (float[{x}] x) => (float[{out}] y) {{ {PAIR_IN}{conv}{middle}{PAIR_OUT} }}"
    held = HELD if conv else {name: HELD[name] for name in "sz"}
    point = zero if isinstance(zero, np.generic) else np.uint8(zero)
    return parse(text, opset=opset, t=np.asarray(F(scale)), u=point, **held, **other)


def both(model: ModelProto, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(unoptimized, optimized) output on random data."""
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(seed).standard_normal(dims).astype(F) * 2}
    return infer(model, feeds)[0], infer(model, feeds, optimize=True)[0]


def steps_apart(model: ModelProto, scale: float = 0.04, seeds: int = 3) -> tuple[float, float]:
    """(largest difference in output steps, share of outputs that differ), optimized against not."""
    pairs = [both(model, seed) for seed in range(seeds)]
    largest = max(float(np.abs(on.astype(np.float64) - off).max()) for off, on in pairs) / scale
    return largest, float(np.mean([np.mean(on != off) for off, on in pairs]))


# ---- (a) Relu and Clip vanish exactly when quantizing does the same: Q(low) is the lowest level, Q(high) the highest.


def fuses(model: ModelProto) -> bool:
    return ops(optimize_graph(model))["QLinearConv"] == 1


def level(value: float, scale: np.float32, zero: int) -> int:
    return int(np.clip(np.rint(F(value) / scale) + zero, 0, 255))


@settings(max_examples=60)
@given(st.floats(0.01, 50), st.sampled_from([1.0, 1 + 1e-7, 1.0005, 1.0015, 1.0025, 1.01, 0.9]))
def test_clip_from_zero(high: float, stretch: float) -> None:
    """A range a little wider than the bound still fuses: up to half a step."""
    scale = F(F(high) / F(255) * F(stretch))
    ratio = float(F(high)) / float(scale)
    assume(abs(ratio - 254.5) > 1e-3)
    model = quantized("v = Clip(c, low, high)", float(scale), 0, low=np.asarray(F(0)), high=np.asarray(F(high)))
    assert fuses(model) == (level(high, scale, 0) == 255) == (ratio > 254.5)


@settings(max_examples=40)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 254), st.floats(0.97, 1.03))
def test_clip_on_both_sides(low: float, high: float, zero: int, stretch: float) -> None:
    scale = F(min(low / zero, high / (255 - zero)) * stretch)
    near = [abs((value / float(scale)) % 1 - 0.5) for value in (low, high)]
    assume(min(near) > 1e-3)
    model = quantized("v = Clip(c, low, high)", float(scale), zero, low=np.asarray(F(-low)), high=np.asarray(F(high)))
    assert fuses(model) == (level(-low, scale, zero) == 0 and level(high, scale, zero) == 255)


def test_symmetric_clip_at_eight_bits() -> None:
    """Clip(-1, 1): 2/255 puts an end half a step outside, 1/128 fits."""
    bounds = {"low": np.asarray(F(-1)), "high": np.asarray(F(1))}
    assert not fuses(quantized("v = Clip(c, low, high)", 2 / 255, 128, **bounds))
    assert not fuses(quantized("v = Clip(c, low, high)", 1 / 127, 127, **bounds))
    assert fuses(quantized("v = Clip(c, low, high)", 1 / 128, 128, **bounds))
    assert fuses(quantized("v = Clip(c, low, high)", 1 / 128, 127, **bounds))
    assert fuses(quantized("v = Clip(c, low, high)", 2 / 255 * (1 - 1e-6), 128, **bounds))


@pytest.mark.parametrize(
    ("zero", "wanted"), [(0, True), (1, False), (128, False), (np.int8(-128), True), (np.int8(0), False)]
)
def test_relu_needs_the_lowest_zero_point(zero: np.generic | int, wanted: bool) -> None:
    model = quantized("v = Relu(c)", 0.02, zero)
    assert fuses(model) == wanted
    assert ops(optimize_graph(model))["FusedConv"] == (0 if wanted else 1)  # float


# ---- (b) Activations behind a convolution.

ACTIVATIONS = {
    "LeakyRelu <alpha = 0.1>": {"QLinearLeakyRelu": 1},
    "Sigmoid": {"QLinearSigmoid": 1},
    "HardSwish": {"HardSigmoid": 1, "Mul": 1},
    "HardSigmoid": {"HardSigmoid": 1},
    "Gelu": {"Gelu": 1},
    "com.microsoft.QuickGelu <alpha = 1.0>": {"QuickGelu": 1},
    "Elu": {"Elu": 1},
    "Tanh": {"Tanh": 1},
    "Softplus": {"Softplus": 1},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_needs_a_pair_in_front_of_it(name: str) -> None:
    """Without one the convolution is float; with one it is quantized, and LeakyRelu and Sigmoid are too."""
    op, attrs = name.split(" ", 1) if " " in name else (name, "")
    bare = quantized(f"v = {op} {attrs}(c)", opset=20)
    assert ops(optimize_graph(bare))["QLinearConv"] == 0
    paired = quantized(f"i = QuantizeLinear(c, s, z) e = DequantizeLinear(i, s, z) v = {op} {attrs}(e)", opset=20)
    found = ops(optimize_graph(paired))
    assert found["QLinearConv"] == 1
    assert {kernel: found[kernel] for kernel in ACTIVATIONS[name]} == ACTIVATIONS[name]
    inner = next(iter(ACTIVATIONS[name])).startswith("QLinear")
    assert found["DequantizeLinear"] == (1 if inner else 2)
    assert steps_apart(paired)[0] <= 1.01


def test_silu_of_quantized_halves() -> None:
    middle = (
        "i = QuantizeLinear(c, s, z) e = DequantizeLinear(i, s, z) g = Sigmoid(e) h = QuantizeLinear(g, r, n) "
        "f = DequantizeLinear(h, r, n) v = Mul(e, f)"
    )
    model = quantized(middle, r=np.asarray(F(1 / 255)), n=np.uint8(0))
    found = ops(optimize_graph(model))
    assert (found["QLinearConv"], found["QLinearSigmoid"], found["QLinearMul"]) == (1, 1, 1)


# ---- (c) Biases.


def biased(bias: str, kernel: int) -> ModelProto:
    weight = WEIGHT if kernel == 1 else WIDE
    numbers = np.random.default_rng(2).standard_normal(16)
    step = (F(0.03) * SCALES).astype(F)
    held: dict[str, np.ndarray] = {}
    line = f"k = DequantizeLinear <axis = 0> (w, sw) v = Conv <pads = [{','.join([str(kernel // 2)] * 4)}]> "
    if bias == "float":
        line, held = f"{line} (d, k, b)", {"b": numbers.astype(F)}
    elif bias == "int32":
        held = {"bi": np.rint(numbers / step).astype(np.int32), "bs": step}
        line = f"b = DequantizeLinear <axis = 0> (bi, bs) {line} (d, k, b)"
    else:
        line += "(d, k)"
    text = f"g (float[1,16,14,14] x) => (float[1,16,14,14] y) {{ {PAIR_IN}{line}{PAIR_OUT} }}"
    return parse(text, **{**HELD, "w": weight}, t=np.asarray(F(0.04)), u=np.uint8(120), **held)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("bias", ["none", "int32"])
def test_a_convolution_with_int32_bias_is_the_same_either_way(kernel: int, bias: str) -> None:
    model = biased(bias, kernel)
    assert fuses(model)
    largest, share = steps_apart(model)
    assert largest <= 1.01
    assert share < 2e-4  # a tie tipped by float rounding, now and then


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_float_bias_is_rounded_by_ort(kernel: int) -> None:
    model = biased("float", kernel)
    assert fuses(model)
    largest, share = steps_apart(model)
    assert 0.99 < largest <= 1.01
    assert 2e-4 < share < 0.02


def gemm(bias: str, paired: bool, point: bool = True) -> ModelProto:
    numbers = np.random.default_rng(2).standard_normal(16)
    step = (F(0.03) * SCALES).astype(F)
    line = f"k = DequantizeLinear <axis = 0> ({'w, sw, zw' if point else 'w, sw'}) "
    held: dict[str, np.ndarray] = {"float": {"b": numbers.astype(F)}, "none": {}}.get(bias) or {}
    if bias == "int32":
        held = {"bi": np.rint(numbers / step).astype(np.int32), "bs": step}
        line += "b = DequantizeLinear <axis = 0> (bi, bs) "
    line += f"{'v' if paired else 'y'} = Gemm <transB = 1> ({'d, k' if bias == 'none' else 'd, k, b'})"
    held |= {"t": np.asarray(F(0.04)), "u": np.uint8(120)} if paired else {}
    held |= {"zw": np.zeros(16, np.int8)} if point else {}
    text = f"g (float[64,16] x) => (float[64,16] y) {{ {PAIR_IN}{line}{PAIR_OUT if paired else ''} }}"
    return parse(text, **{**HELD, "w": WEIGHT.reshape(16, 16)}, **held)


@pytest.mark.parametrize(
    ("bias", "paired", "kernel"),
    [
        ("none", True, "QGemm"),
        ("int32", True, "QGemm"),
        ("float", True, "QGemm"),
        ("none", False, "QGemm"),
        ("int32", False, "QGemm"),
        ("float", False, "Gemm"),
    ],
)
def test_gemm(bias: str, paired: bool, kernel: str) -> None:
    """Without a pair behind it a Gemm is quantized only if its bias is int32, or missing."""
    model = gemm(bias, paired)
    assert ops(optimize_graph(model))[kernel] == 1
    largest, share = steps_apart(model)
    if paired:
        assert largest <= 1.01
        assert share < (0.02 if bias == "float" else 2e-3)
    else:
        assert largest < 1e-4


def test_gemm_asks_for_the_weights_zero_point() -> None:
    """Conv and MatMul take weights without one."""
    assert ops(optimize_graph(gemm("none", True, point=False)))["Gemm"] == 1


# ---- (d) MatMul: see test_matmul_bias.py for the bias.


@pytest.mark.parametrize("shape", ["16", "7,16", "1,16", "2,7,16", "2,3,7,16", "N,T,16"])
@pytest.mark.parametrize("paired", [False, True])
def test_matmul_of_any_rank(shape: str, paired: bool) -> None:
    dims = shape.replace("N", "2").replace("T", "7")
    line = f"k = DequantizeLinear <axis = 1> (w, sw) {'v' if paired else 'y'} = MatMul(d, k)"
    held = {"t": np.asarray(F(0.04)), "u": np.uint8(120)} if paired else {}
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ {PAIR_IN}{line}{PAIR_OUT if paired else ''} }}"
    model = parse(text, **{**HELD, "w": WEIGHT.reshape(16, 16)}, **held)
    assert ops(optimize_graph(model))["QLinearMatMul" if paired else "MatMulIntegerToFloat"] == 1
    feeds = {"x": RNG.standard_normal([int(d) for d in dims.split(",")]).astype(F)}
    (off,), (on,) = infer(model, feeds), infer(model, feeds, optimize=True)
    if paired:
        assert np.abs(on - off).max() <= 0.041
    else:
        np.testing.assert_allclose(on, off, rtol=0, atol=1e-6 * np.abs(off).max())


# ---- (e) What happens to other nodes between pairs. ORT's kernel, and how many steps it may be off.

BETWEEN: dict[str, tuple[str, str, float]] = {
    "MaxPool": ("v = MaxPool <kernel_shape = [2,2], strides = [2,2]> (e)", "NhwcMaxPool", 0),
    "Concat": ("v = Concat <axis = 1> (e, e2)", "QLinearConcat", 0),
    "Resize": ('v = Resize <mode = "nearest"> (e, , by)', "Resize", 0),
    "Flatten": ("v = Flatten(e)", "Flatten", 0),
    "Reshape": ("v = Reshape(e, to)", "Reshape", 0),
    "Transpose": ("v = Transpose <perm = [0,2,3,1]> (e)", "Transpose", 0),
    "Slice": ("v = Slice(e, one, two, one)", "Slice", 0),
    "ReduceMax": ("v = ReduceMax <axes = [2,3]> (e)", "ReduceMax", 0),
    "DepthToSpace": ("v = DepthToSpace <blocksize = 2> (e)", "DepthToSpace", 0),
    "GlobalAveragePool": ("v = GlobalAveragePool(e)", "QLinearGlobalAveragePool", 1),
    "AveragePool": ("v = AveragePool <kernel_shape = [2,2]> (e)", "QLinearAveragePool", 1),
    "Add": ("v = Add(e, e2)", "QLinearAdd", 1),
    "Mul": ("v = Mul(e, e2)", "QLinearMul", 1),
    "Softmax": ("v = Softmax(e)", "QLinearSoftmax", 1),
}
FLOAT = {
    "ReduceMean": "v = ReduceMean <axes = [2,3]> (e)",
    "linear Resize": 'v = Resize <mode = "linear"> (e, , by)',
    "Sub": "v = Sub(e, e2)",
    "Min": "v = Min(e, e2)",
    "Mul by a number": "v = Mul(e, by1)",
    "Pad": "v = Pad(e, pads)",
    "Split": "v, v2 = Split <axis = 1> (e, halves)",
    "Add, Relu, zero point 5": "a = Add(e, e2) v = Relu(a)",
}
NUMBERS = {
    "by": np.array([1, 1, 2, 2], F),
    "by1": np.asarray(F(0.3)),
    "to": np.array([1, -1, 14]),
    "one": np.array([1]),
    "two": np.array([9]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "halves": np.array([8, 8]),
}


def between(lines: str, zero: int = 100, **scales: float) -> ModelProto:
    """Pairs of one scale around a node that reads a quantized convolution, or two of them."""
    front = "i = QuantizeLinear(c, t, u) e = DequantizeLinear(i, t, u) "
    if "e2" in lines:
        front += "c2 = Conv(d, k) i2 = QuantizeLinear(c2, t2, u) e2 = DequantizeLinear(i2, t2, u) "
    held = read_by(lines, NUMBERS)
    if "e2" in lines:
        held["t2"] = np.asarray(F(0.05))
    rank = {"Flatten": 2, "Reshape": 3}.get(lines.split("= ")[1].split("(")[0], 4)
    text = lines
    if "out" in scales:
        text = lines.replace("v =", "v0 =") + " o0 = QuantizeLinear(v0, t9, u) v = DequantizeLinear(o0, t9, u)"
        held["t9"] = np.asarray(F(scales["out"]))
    return quantized(front + text, 0.04, zero, out=",".join("ABCD"[:rank]), **held)


@pytest.mark.parametrize("name", BETWEEN)
def test_what_becomes_an_integer_kernel(name: str) -> None:
    lines, kernel, off = BETWEEN[name]
    model = between(lines)
    found = ops(optimize_graph(model))
    assert found[kernel] >= 1
    assert (found["QuantizeLinear"], found["DequantizeLinear"]) == (1, 1)  # only at the model's own ends
    assert steps_apart(model)[0] <= off + 0.01


@pytest.mark.parametrize("name", FLOAT)
def test_what_stays_float(name: str) -> None:
    model = between(FLOAT[name], zero=5 if "Relu" in FLOAT[name] else 100)
    found = ops(optimize_graph(model))
    assert found["DequantizeLinear"] >= 2
    assert not any(op.startswith("QLinear") and op != "QLinearConv" for op in found)


@pytest.mark.parametrize("name", ["MaxPool", "Reshape", "Transpose", "Flatten"])
def test_passing_integers_on_needs_one_scale(name: str) -> None:
    lines = BETWEEN[name][0]
    front = "i = QuantizeLinear(c, r, u) e = DequantizeLinear(i, r, u) "
    held = read_by(lines, NUMBERS)
    rank = {"Flatten": 2, "Reshape": 3}.get(name, 4)
    model = quantized(front + lines, r=np.asarray(F(0.05)), out=",".join("ABCD"[:rank]), **held)
    assert ops(optimize_graph(model))["DequantizeLinear"] == 2


def test_residual_add_and_relu() -> None:
    """QLinearAdd takes a Relu behind it only with the zero point at the lowest level."""
    lines = "a = Add(e, e2) v = Relu(a)"
    front = (
        "i = QuantizeLinear(c, r, n) e = DequantizeLinear(i, r, n) c2 = Conv(d, k) "
        "i2 = QuantizeLinear(c2, r, n) e2 = DequantizeLinear(i2, r, n) "
    )
    held = {"r": np.asarray(F(0.05)), "n": np.uint8(110)}
    model = quantized(front + lines, zero=0, **held)
    assert ops(optimize_graph(model))["QLinearAdd"] == 1
    assert steps_apart(model)[0] <= 1.01


# ---- (f) Opsets.


@pytest.mark.parametrize("opset", [13, 17, 20, 21, 22, 23])
def test_the_opset_changes_nothing(opset: int) -> None:
    assert fuses(quantized("v = Relu(c)", 0.02, 0, opset=opset))
    text = f"g (float[2,7,16] x) => (float[2,7,16] y) {{ {PAIR_IN} k = DequantizeLinear <axis = 1> (w, sw)"
    text += " m = MatMul(d, k) y = Add(m, b) }"
    held = {**HELD, "w": WEIGHT.reshape(16, 16), "b": np.ones((1, 1, 16), F)}
    assert ops(optimize_graph(parse(text, opset=opset, **held)))["MatMulIntegerToFloat"] == 1
