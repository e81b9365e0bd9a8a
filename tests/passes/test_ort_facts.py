"""What preparation and placement count on in ONNX Runtime, each seen in its optimized graph and in its numbers.

When one of these fails after an upgrade of ORT, a rule built on it must be measured again. Weights stay within ±63,
which no CPU's 8-bit multiply-add saturates on.
"""

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


def pair(old: str, new: str, scale: str = "s", point: str = "z") -> str:
    """Nodes that write `old` as `new`, quantized."""
    return f" {new}_q = QuantizeLinear({old}, {scale}, {point}) {new} = DequantizeLinear({new}_q, {scale}, {point}) "


PAIR_IN, PAIR_OUT = pair("x", "d"), pair("v", "y", "t", "u")
CONV = "k = DequantizeLinear <axis = 0> (w, sw) c = Conv(d, k) "
HELD = {"w": WEIGHT, "sw": SCALES, "s": 0.03, "z": np.uint8(120)}
OUT = {"t": 0.04, "u": np.uint8(120)}
SQUARE = {**HELD, "w": WEIGHT.reshape(16, 16)}


def quantized(
    middle: str,
    scale: float = 0.04,
    zero: np.generic | int = 120,
    opset: int = 17,
    out: str = "A,B,C,D",
    **other: np.ndarray | np.generic | float,
) -> ModelProto:
    """pair, Conv with int8 weights writing c, `middle` from c to v, pair."""
    text = f"g (float[1,16,14,14] x) => (float[{out}] y) {{ {PAIR_IN}{CONV}{middle}{PAIR_OUT} }}"
    point = zero if isinstance(zero, np.generic) else np.uint8(zero)
    return parse(text, opset=opset, t=scale, u=point, **HELD, **other)


def infer_both(model: ModelProto, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(unoptimized, optimized) output on random data."""
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(seed).standard_normal(dims).astype(F) * 2}
    return infer(model, feeds)[0], infer(model, feeds, optimize=True)[0]


def steps_apart(model: ModelProto) -> tuple[float, float]:
    """(largest difference in output steps, share of outputs that differ), optimized against not."""
    pairs = [infer_both(model, seed) for seed in range(3)]
    largest = max(float(np.abs(on.astype(np.float64) - off).max()) for off, on in pairs) / 0.04
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
    model = quantized("v = Clip(c, low, high)", float(scale), 0, low=0.0, high=high)
    assert fuses(model) == (level(high, scale, 0) == 255) == (ratio > 254.5)


@settings(max_examples=40)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 254), st.floats(0.97, 1.03))
def test_clip_on_both_sides(low: float, high: float, zero: int, stretch: float) -> None:
    scale = F(min(low / zero, high / (255 - zero)) * stretch)
    assume(min([abs((value / float(scale)) % 1 - 0.5) for value in (low, high)]) > 1e-3)
    model = quantized("v = Clip(c, low, high)", float(scale), zero, low=-low, high=high)
    assert fuses(model) == (level(-low, scale, zero) == 0 and level(high, scale, zero) == 255)


@pytest.mark.parametrize(
    ("scale", "zero", "wanted"),
    [(2 / 255, 128, False), (1 / 127, 127, False), (1 / 128, 128, True), (1 / 128, 127, True),
     (2 / 255 * (1 - 1e-6), 128, True)],
)  # fmt: skip
def test_symmetric_clip_at_eight_bits(scale: float, zero: int, wanted: bool) -> None:
    """Clip(-1, 1): 2/255 puts an end half a step outside, 1/128 fits."""
    assert fuses(quantized("v = Clip(c, low, high)", scale, zero, low=-1.0, high=1.0)) == wanted


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
    assert ops(optimize_graph(quantized(f"v = {op} {attrs}(c)", opset=20)))["QLinearConv"] == 0
    paired = quantized(f"{pair('c', 'e')} v = {op} {attrs}(e)", opset=20)
    found = ops(optimize_graph(paired))
    assert found["QLinearConv"] == 1
    assert {kernel: found[kernel] for kernel in ACTIVATIONS[name]} == ACTIVATIONS[name]
    inner = next(iter(ACTIVATIONS[name])).startswith("QLinear")
    assert found["DequantizeLinear"] == (1 if inner else 2)
    assert steps_apart(paired)[0] <= 1.01


def test_silu_of_quantized_halves() -> None:
    middle = f"{pair('c', 'e')} g = Sigmoid(e) {pair('g', 'f', 'r', 'n')} v = Mul(e, f)"
    found = ops(optimize_graph(quantized(middle, r=1 / 255, n=np.uint8(0))))
    assert (found["QLinearConv"], found["QLinearSigmoid"], found["QLinearMul"]) == (1, 1, 1)


# ---- (c) Biases.


NUMBERS = np.random.default_rng(2).standard_normal(16)
STEP = (F(0.03) * SCALES).astype(F)
# By name: the nodes that make the bias, what the operator reads, and the constants.
BIASES = {
    "none": ("", "d, k", {}),
    "float": ("", "d, k, b", {"b": NUMBERS.astype(F)}),
    "int32": (
        "b = DequantizeLinear <axis = 0> (bi, bs)", "d, k, b",
        {"bi": np.rint(NUMBERS / STEP).astype(np.int32), "bs": STEP},
    ),
}  # fmt: skip


def biased(bias: str, kernel: int) -> ModelProto:
    weight = WEIGHT if kernel == 1 else WIDE
    front, read, held = BIASES[bias]
    line = f"k = DequantizeLinear <axis = 0> (w, sw) {front} v = Conv <pads = {[kernel // 2] * 4}> ({read})"
    text = f"g (float[1,16,14,14] x) => (float[1,16,14,14] y) {{ {PAIR_IN}{line}{PAIR_OUT} }}"
    return parse(text, **{**HELD, "w": weight}, **OUT, **held)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("bias", BIASES)
def test_a_convolution_is_the_same_either_way_but_for_a_float_bias_which_ort_rounds(kernel: int, bias: str) -> None:
    model = biased(bias, kernel)
    assert fuses(model)
    largest, share = steps_apart(model)
    assert largest <= 1.01
    if bias == "float":
        assert largest > 0.99
        assert 2e-4 < share < 0.02
    else:
        assert share < 2e-4  # a tie tipped by float rounding, now and then


def gemm(bias: str, paired: bool, point: bool = True) -> ModelProto:
    front, read, held = BIASES[bias]
    weight = f"k = DequantizeLinear <axis = 0> ({'w, sw, zw' if point else 'w, sw'})"
    line = f"{weight} {front} {'v' if paired else 'y'} = Gemm <transB = 1> ({read}){PAIR_OUT if paired else ''}"
    zero = {"zw": np.zeros(16, np.int8)} if point else {}
    text = f"g (float[64,16] x) => (float[64,16] y) {{ {PAIR_IN}{line} }}"
    return parse(text, **SQUARE, **(OUT if paired else {}), **zero, **held)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("paired", [True, False])
def test_gemm(bias: str, paired: bool) -> None:
    """Without a pair behind it a Gemm is quantized only if its bias is int32, or missing."""
    model = gemm(bias, paired)
    assert ops(optimize_graph(model))["Gemm" if bias == "float" and not paired else "QGemm"] == 1
    largest, share = steps_apart(model)
    if paired:
        assert largest <= 1.01
        assert share < (0.02 if bias == "float" else 2e-3)
    else:
        assert largest < 1e-4


def test_gemm_asks_for_the_weights_zero_point() -> None:
    """Conv and MatMul take weights without one."""
    assert ops(optimize_graph(gemm("none", True, point=False)))["Gemm"] == 1


# ---- (d) MatMul: see assembly/test_guards.py for the bias.


@pytest.mark.parametrize("shape", ["16", "7,16", "1,16", "2,7,16", "2,3,7,16", "N,T,16"])
@pytest.mark.parametrize("paired", [False, True])
def test_matmul_of_any_rank(shape: str, paired: bool) -> None:
    dims = shape.replace("N", "2").replace("T", "7")
    line = f"k = DequantizeLinear <axis = 1> (w, sw) {'v' if paired else 'y'} = MatMul(d, k)"
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ {PAIR_IN}{line}{PAIR_OUT if paired else ''} }}"
    model = parse(text, **SQUARE, **(OUT if paired else {}))
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
CONSTANTS = {
    "by": np.array([1, 1, 2, 2], F),
    "by1": 0.3,
    "t2": 0.05,
    "to": np.array([1, -1, 14]),
    "one": np.array([1]),
    "two": np.array([9]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "halves": np.array([8, 8]),
}


def put_between_pairs(lines: str, zero: int = 100, scale: str = "t", **held: float) -> ModelProto:
    """Pairs around a node that reads a quantized convolution, or two of them. scale: of what the node reads."""
    text = pair("c", "e", scale, "u")
    if "e2" in lines:
        text += f"c2 = Conv(d, k) {pair('c2', 'e2', 't2', 'u')}"
    text += lines
    rank = {"Flatten": 2, "Reshape": 3}.get(lines.split("= ")[1].split("(")[0], 4)
    return quantized(text, 0.04, zero, out=",".join("ABCD"[:rank]), **read_by(text, CONSTANTS), **held)


@pytest.mark.parametrize("name", BETWEEN)
def test_what_becomes_an_integer_kernel(name: str) -> None:
    lines, kernel, off = BETWEEN[name]
    model = put_between_pairs(lines)
    found = ops(optimize_graph(model))
    assert found[kernel] >= 1
    assert (found["QuantizeLinear"], found["DequantizeLinear"]) == (1, 1)  # only at the model's own ends
    assert steps_apart(model)[0] <= off + 0.01


@pytest.mark.parametrize("name", FLOAT)
def test_what_stays_float(name: str) -> None:
    found = ops(optimize_graph(put_between_pairs(FLOAT[name], zero=5 if "Relu" in FLOAT[name] else 100)))
    assert found["DequantizeLinear"] >= 2
    assert not any(op.startswith("QLinear") and op != "QLinearConv" for op in found)


@pytest.mark.parametrize("name", ["MaxPool", "Reshape", "Transpose", "Flatten"])
def test_passing_integers_on_needs_one_scale(name: str) -> None:
    model = put_between_pairs(BETWEEN[name][0], zero=120, scale="r", r=0.05)
    assert ops(optimize_graph(model))["DequantizeLinear"] == 2


def test_residual_add_and_relu() -> None:
    """QLinearAdd takes a Relu behind it only with the zero point at the lowest level."""
    branches = f"{pair('c', 'e', 'r', 'n')} c2 = Conv(d, k) {pair('c2', 'e2', 'r', 'n')}"
    model = quantized(f"{branches} a = Add(e, e2) v = Relu(a)", zero=0, r=0.05, n=np.uint8(110))
    assert ops(optimize_graph(model))["QLinearAdd"] == 1
    assert steps_apart(model)[0] <= 1.01


# ---- (f) Opsets.


@pytest.mark.parametrize("opset", [13, 17, 20, 21, 22, 23])
def test_the_opset_changes_nothing(opset: int) -> None:
    assert fuses(quantized("v = Relu(c)", 0.02, 0, opset=opset))
    text = f"g (float[2,7,16] x) => (float[2,7,16] y) {{ {PAIR_IN} k = DequantizeLinear <axis = 1> (w, sw)"
    text += " m = MatMul(d, k) y = Add(m, b) }"
    found = ops(optimize_graph(parse(text, opset=opset, **SQUARE, b=np.ones((1, 1, 16), F))))
    assert found["MatMulIntegerToFloat"] == 1
