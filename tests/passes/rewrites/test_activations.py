"""Chains in every spelling become one node that computes the same; near misses stay."""

import math
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import parser

from onnxq.graph import GraphIndex, find_opset, name_nodes
from onnxq.passes.rewrites.activations import fuse_activations
from onnxq.runtime import optimize_graph
from tests.passes import kit

F = np.float32
SHAPES = {"[]": (), "[1]": (1,), "[1,1,1,1]": (1, 1, 1, 1)}
IMAGE = "float[N,4,5,5]"
NUMBERS = {"three": 3.0, "minus": -3.0, "zero": 0.0, "six": 6.0, "sixth": 1 / 6, "half": 0.5, "one": 1.0, "two": 2.0}
NUMBERS |= {"root": math.sqrt(2), "inverse": 1 / math.sqrt(2), "k": 0.044715, "tip": math.sqrt(2 / math.pi)}
NUMBERS |= {"beta": 1.702, "inf": math.inf}


def chain(
    lines: str,
    head: str = f"{IMAGE} x",
    out: str = f"{IMAGE} y",
    *,
    opset: int = 17,
    shape: tuple[int, ...] = (),
    dtype: type = F,
    **other: Any,
) -> onnx.ModelProto:
    """A model of these lines; the numbers that they read are constants of a shape, where Clip allows one."""
    bounds = ("zero", "six", "one") if "Clip" in lines else ()
    held = {name: np.full(() if name in bounds else shape, value, dtype) for name, value in NUMBERS.items()}
    held |= {name: np.asarray(value, dtype) if isinstance(value, float) else value for name, value in other.items()}
    return kit.parse(f"g ({head}) => ({out}) {{ {lines} }}", opset=opset, **kit.read_by(lines, held))


class Kind(NamedTuple):
    """An activation: the opset that a model of an older one gets, its operator, and every spelling by name."""

    before: int
    after: int
    op: str
    spellings: dict[str, str]


HARD_SWISH = {
    "paddle": "p = Add(x, three) c = Clip(p, zero, six) m = Mul(x, c) y = Div(m, six)",
    "clip on the left": "p = Add(three, x) c = Clip(p, zero, six) m = Mul(c, x) y = Div(m, six)",
    "divide first": "p = Add(x, three) c = Clip(p, zero, six) d = Div(c, six) y = Mul(x, d)",
    "multiply by a sixth": "p = Add(x, three) c = Clip(p, zero, six) d = Mul(sixth, c) y = Mul(d, x)",
    "scale x first": "p = Add(x, three) c = Clip(p, zero, six) s = Mul(x, sixth) y = Mul(s, c)",
    "divide x first": "p = Add(x, three) c = Clip(p, zero, six) s = Div(x, six) y = Mul(c, s)",
    "relu6 of two": "p = Add(x, three) r = Relu(p) c = Min(r, six) m = Mul(x, c) y = Div(m, six)",
    "max and min": "p = Add(x, three) r = Max(p, zero) c = Min(six, r) m = Mul(x, c) y = Div(m, six)",
    "min and max": "p = Add(x, three) r = Min(p, six) c = Max(zero, r) m = Mul(x, c) y = Div(m, six)",
    "subtract": "p = Sub(x, minus) c = Clip(p, zero, six) m = Mul(x, c) y = Div(m, six)",
    "hard-sigmoid": "h = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x) y = Mul(x, h)",
    "hard-sigmoid of paddle": "h = HardSigmoid <alpha = 0.1666667, beta = 0.5> (x) y = Mul(h, x)",
    "unit clip": "s = Mul(x, sixth) p = Add(s, half) c = Clip(p, zero, one) y = Mul(x, c)",
}
HARD_SIGMOID = {
    "divided": "p = Add(x, three) c = Clip(p, zero, six) y = Div(c, six)",
    "multiplied": "p = Add(three, x) c = Clip(p, zero, six) y = Mul(sixth, c)",
    "inside": "s = Mul(x, sixth) p = Add(s, half) y = Clip(p, zero, one)",
    "inside, divided": "s = Div(x, six) p = Add(half, s) r = Relu(p) y = Min(r, one)",
    "falling": "p = Sub(three, x) c = Clip(p, zero, six) y = Div(c, six)",
    "of the negative": "n = Neg(x) p = Add(n, three) c = Clip(p, zero, six) y = Div(c, six)",
}
GELU = {
    "huggingface": "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    "half of x": "d = Div(x, root) e = Erf(d) a = Add(one, e) h = Mul(half, x) y = Mul(h, a)",
    "half of the sum": "d = Mul(x, inverse) e = Erf(d) a = Add(e, one) h = Mul(a, half) y = Mul(h, x)",
    "twice divided": "d = Mul(inverse, x) e = Erf(d) h = Div(e, two) a = Add(h, half) y = Mul(x, a)",
}
TANH = {
    "pow": "p = Pow(x, three) q = Mul(p, k) s = Add(x, q) u = Mul(s, tip) t = Tanh(u) a = Add(t, one) m = Mul(x, a)"
    " y = Mul(m, half)",
    "times": "v = Mul(x, x) p = Mul(v, x) q = Mul(k, p) s = Add(q, x) u = Mul(tip, s) t = Tanh(u) a = Add(one, t)"
    " h = Mul(x, half) y = Mul(a, h)",
    "tensorflow": "v = Mul(x, x) q = Mul(v, k) w = Add(q, one) z = Mul(x, w) u = Mul(z, tip) t = Tanh(u)"
    " a = Add(t, one) h = Mul(a, half) y = Mul(x, h)",
    "square": "v = Pow(x, two) p = Mul(v, x) q = Mul(k, p) s = Add(q, x) u = Mul(tip, s) t = Tanh(u) a = Add(one, t)"
    " h = Mul(x, half) y = Mul(a, h)",
}
SILU = {
    "plain": "s = Sigmoid(x) y = Mul(x, s)",
    "other side": "s = Sigmoid(x) y = Mul(s, x)",
    "paddle's one": "b = Mul(x, one) s = Sigmoid(b) y = Mul(x, s)",
    "beta": "b = Mul(beta, x) s = Sigmoid(b) y = Mul(x, s)",
}
KINDS = {
    "hard-swish": Kind(13, 14, "HardSwish", HARD_SWISH),
    "hard-sigmoid": Kind(13, 13, "HardSigmoid", HARD_SIGMOID),
    "gelu": Kind(17, 20, "Gelu", GELU),
    "gelu by tanh": Kind(17, 20, "Gelu", TANH),
    "silu": Kind(17, 17, "QuickGelu", SILU),
}


@pytest.mark.parametrize(("kind", "spelling"), [(name, one) for name, kind in KINDS.items() for one in kind.spellings])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_spelling_becomes_one_node(kind: str, spelling: str, shape: str) -> None:
    before, after, op, spellings = KINDS[kind]
    model = chain(spellings[spelling], opset=before, shape=SHAPES[shape])
    result, report = kit.assert_rewritten(fuse_activations, model, {op: 1}, 1e-5 if op == "Gelu" else 2e-6)
    assert find_opset(result) == after
    assert [node.name for node in result.graph.node] == [model.graph.node[-1].name]
    assert (len(report.changed), report.skipped) == (1, ())
    assert not result.graph.initializer
    attrs = GraphIndex(result).nodes[0].attrs
    assert attrs.get("approximate", "none") == ("tanh" if kind == "gelu by tanh" else "none")


@pytest.mark.parametrize("spelling", SILU)
def test_silu_becomes_quickgelu_for_ort_only(spelling: str) -> None:
    model = chain(SILU[spelling], shape=(1,))
    node = GraphIndex(kit.apply(fuse_activations, model)[0]).nodes[0]
    assert node.domain == "com.microsoft"
    assert node.attrs["alpha"] == pytest.approx(1.702 if spelling == "beta" else 1.0)
    assert kit.ops(kit.rewrite_model(model, target="trt").proto)["QuickGelu"] == 0


@given(st.floats(0.05, 0.9), st.floats(0.05, 0.95), st.floats(0.5, 8))
def test_any_clipped_line_is_a_hard_sigmoid(alpha: float, beta: float, height: float) -> None:
    lines = "s = Mul(x, a) p = Add(s, b) c = Clip(p, zero, h) y = Div(c, h)"
    model = chain(lines, a=alpha * height, b=beta * height, h=height)
    kit.assert_rewritten(fuse_activations, model, {"HardSigmoid": 1}, rtol=5e-6)


@pytest.mark.parametrize("lines", [HARD_SWISH["paddle"], GELU["huggingface"]], ids=["hard-swish", "gelu"])
def test_half_precision(lines: str) -> None:
    model = chain(lines, "float16[N,4,5,5] x", "float16[N,4,5,5] y", dtype=np.float16)
    _, report = kit.assert_changed(fuse_activations, model, rtol=4e-3)
    assert len(report.changed) == 1


@pytest.mark.parametrize("lines", [HARD_SWISH["paddle"], SILU["plain"], TANH["times"]], ids=["hswish", "silu", "gelu"])
@pytest.mark.parametrize("outer", [False, True], ids=["constants inside", "constants outside"])
def test_inside_a_branch(lines: str, outer: bool) -> None:
    model = kit.in_branch(chain(lines, opset=20))
    if outer:
        inner = model.graph.node[0].attribute[0].g
        model.graph.initializer.extend(inner.initializer)
        del inner.initializer[:]
    result, report = kit.assert_changed(fuse_activations, model, rtol=1e-5)
    assert len(report.changed) == 1
    assert not result.graph.initializer


PADDLE = HARD_SWISH["paddle"]
DOUBLE = {"head": "double[N,4,5,5] x", "out": "double[N,4,5,5] y", "dtype": np.float64}
NEAR_MISSES: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped at 5": (PADDLE, {"six": 5.0}),
    "plus 2": (PADDLE, {"three": 2.0}),
    "from -1": (PADDLE, {"zero": -1.0}),
    "hard-sigmoid of keras": ("h = HardSigmoid (x) y = Mul(x, h)", {}),
    "a plain clip": ("y = Clip(x, zero, six)", {}),
    "a scaled clip": ("c = Clip(x, zero, six) y = Div(c, six)", {}),
    "a clip of one side": ("p = Add(x, three) c = Clip(p, zero) m = Mul(x, c) y = Div(m, six)", {}),
    "erf of 2": (GELU["huggingface"], {"root": 2.0}),
    "a third": (GELU["huggingface"], {"half": 1 / 3}),
    "plus 2, gelu": (GELU["huggingface"], {"one": 2.0}),
    "another cubic": (TANH["pow"], {"k": 0.05}),
    "squared": (TANH["pow"], {"three": 2.0}),
    "a fourth power": (TANH["pow"], {"three": 4.0}),
    "the fourth power of a product": (TANH["times"].replace("p = Mul(v, x)", "p = Mul(v, v)"), {}),
    "a root": (TANH["pow"], {"three": 0.5}),
    "an exponent of x": (TANH["pow"].replace("Pow(x, three)", "Pow(three, x)"), {}),
    "sigmoid doubled": ("s = Sigmoid(x) t = Mul(s, two) y = Mul(x, t)", {}),
    "sigmoid alone": ("y = Sigmoid(x)", {}),
    "sigmoid of x + 1": ("b = Add(x, one) s = Sigmoid(b) y = Mul(x, s)", {}),
    "sigmoid of 1 / x": ("b = Div(one, x) s = Sigmoid(b) y = Mul(x, s)", {}),
    "sigmoid of x / 0": ("b = Div(x, zero) s = Sigmoid(b) y = Mul(x, s)", {}),
    "sigmoid of an exponential": ("e = Exp(x) b = Add(x, e) s = Sigmoid(b) y = Mul(x, s)", {}),
    "sigmoid of another tensor": ("r = Relu(x) s = Sigmoid(r) y = Mul(s, x)", {}),
    "times x + 1": ("p = Add(x, one) s = Sigmoid(x) y = Mul(s, p)", {}),
    "times infinity": ("s = Sigmoid(x) t = Mul(s, inf) y = Mul(x, t)", {}),
    "divided the other way": ("p = Add(x, three) c = Clip(p, zero, six) m = Mul(x, c) y = Div(six, m)", {}),
    "a constant per channel": (PADDLE, {"three": np.array([3, 3, 3, 2.5], F).reshape(4, 1, 1)}),
    "a number that is an input": (PADDLE.replace("three", "t"), {"head": f"{IMAGE} x, float t"}),
    "a number that callers may override": (PADDLE.replace("three", "t"), {"head": f"{IMAGE} x, float t", "t": 3.0}),
    "a constant that raises the rank": (
        PADDLE, {"head": "float[N,5] x", "out": "float[1,N,5] y", "three": np.full((1, 1, 1), 3, F)},
    ),
    "sigmoid of another input": (SILU["plain"].replace("(x)", "(z)"), {"head": f"{IMAGE} x, {IMAGE} z"}),
    "a clip of another input": (PADDLE.replace("p = Add(x", "p = Add(z"), {"head": f"{IMAGE} x, {IMAGE} z"}),
    "a pair between": (
        PADDLE.replace("c = Clip(p,", "q = QuantizeLinear(p, s, z) d = DequantizeLinear(q, s, z) c = Clip(d,"),
        {"s": 0.1, "z": np.uint8(3)},
    ),
    # ORT runs most of these chains in double, and none of the single nodes.
    "hard-swish of doubles": (PADDLE, DOUBLE),
    "hard-sigmoid of doubles": (HARD_SIGMOID["divided"], DOUBLE),
    "gelu of doubles": (GELU["huggingface"], DOUBLE),
    "gelu by tanh of doubles": (TANH["times"], DOUBLE),
    # Each number off by a hundredth.
    **{f"{name} times {by}": (PADDLE, {name: NUMBERS[name] * by}) for name in ("three", "six") for by in (0.99, 1.01)},
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    lines, other = NEAR_MISSES[name]
    kit.assert_untouched(fuse_activations, chain(lines, opset=20, **other))


GATED = "s = Sigmoid(x) a = Mul(x, s)"


# The nodes, the operators that are left, and inputs and outputs where they are not x and y.
ENDS: dict[str, tuple[str, ...]] = {
    "a shift": (f"{GATED} y = Add(a, one)", "QuickGelu Add"),
    "a second product": (f"{GATED} y = Mul(a, x)", "QuickGelu Mul"),
    "a reciprocal": (f"{GATED} y = Div(one, a)", "QuickGelu Div"),
    "two readers": (f"{GATED} b = Relu(a) y = Add(a, b)", "QuickGelu Relu Add"),
    "a square in front": (f"q = Mul(x, x) {HARD_SIGMOID['divided'].replace('(x', '(q')}", "HardSigmoid Mul"),
    "other readers of x": (
        f"x = Relu(w) {PADDLE} z = Neg(x)", "Relu HardSwish Neg", f"{IMAGE} w", f"{IMAGE} y, {IMAGE} z, {IMAGE} x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_chain_ends_where_the_activation_does(name: str) -> None:
    lines, wanted, *ends = ENDS[name]
    kit.assert_rewritten(fuse_activations, chain(lines, *ends), dict.fromkeys(wanted.split(), 1))


def test_formulas_are_read_to_a_depth_that_activations_need() -> None:
    shifts = " ".join(f"t{k + 1} = Add(t{k}, half)" for k in range(14))
    model = chain(f"t0 = Neg(x) {shifts} c = Clip(t14, zero, six) y = Div(c, six)")
    kit.assert_rewritten(fuse_activations, model, {"Neg": 1, "Add": 4, "HardSigmoid": 1})
    for count, fused in ((10, True), (11, False)):
        sums = " ".join(f"t{k + 1} = Add({f't{k}' if k else 'x'}, x)" for k in range(count))
        _, report = kit.apply(fuse_activations, chain(f"{sums} s = Sigmoid(t{count}) y = Mul(s, x)"))
        assert bool(report.changed) == fused


@pytest.mark.parametrize("tensor", ["p", "c", "m"])
@pytest.mark.parametrize("how", ["output", "reader"])
def test_what_others_see_stays(tensor: str, how: str) -> None:
    more = f" z = Identity({tensor})" if how == "reader" else ""
    outs = f"{IMAGE} y, {IMAGE} {'z' if how == 'reader' else tensor}"
    kit.assert_untouched(fuse_activations, chain(PADDLE + more, out=outs, opset=14))


@pytest.mark.parametrize(
    ("front", "rank"),
    [
        ("h = Reshape(x, shape)", 0),
        ("e = Reshape(x, shape) h = Conv(e, w)", 3),
        ("e = Reshape(x, shape) h = Flatten(e)", 2),
    ],
)
def test_constants_have_no_more_axes_than_a_tensor_of_unknown_rank_has_at_least(front: str, rank: int) -> None:
    for axes, fused in ((rank, True), (rank + 1, False)):
        lines, shape = f"{front} {PADDLE.replace('(x', '(h')}", (1,) * axes
        model = chain(
            lines, f"{IMAGE} x, int64[k] shape", "float[A,B] y", opset=14, shape=shape, w=np.ones((4, 4, 1, 1), F)
        )
        assert bool(kit.apply(fuse_activations, model)[1].changed) == fused


def test_an_opset_that_cannot_be_raised_is_reported() -> None:
    """A function of opset 17 holds the model there: the chain stays, and the report says why."""
    model = chain(GELU["huggingface"])
    model.opset_import.add(domain="local", version=1)
    function = "<domain: 'local', opset_import: ['' : 17]> f (a) => (b) { b = ReduceMean <axes = [1]> (a) }"
    model.functions.append(parser.parse_function(function.replace("'", '"')))
    model.graph.node.add(op_type="f", domain="local", input=["x"], output=["z"], name="call")
    model = name_nodes(model)
    result, report = kit.apply(fuse_activations, model)
    assert kit.ops(result) == kit.ops(model)
    assert find_opset(result) == 17
    (refusal,) = report.skipped
    assert (refusal.subject, refusal.rule, refusal.code) == ("y/Mul", "activations", "R112")
    assert "Gelu needs opset 20" in report.skipped[0].reason


def test_the_newest_opset_is_kept() -> None:
    result, _ = kit.apply(fuse_activations, chain(PADDLE, opset=22))
    assert find_opset(result) == 22
    assert kit.ops(result) == {"HardSwish": 1}


@pytest.mark.parametrize("lines", [SILU["plain"], PADDLE, GELU["huggingface"]])
def test_one_node_needs_one_dequantize(lines: str) -> None:
    """Between pairs ORT copies the DequantizeLinear for every reader of it, so chains lose their own fusions."""
    kernels = {"s": ("QuickGelu",), "p": ("HardSigmoid", "HardSwish"), "d": ("Gelu",)}[lines[0]]
    text = "q = QuantizeLinear(w, s0, z0) x = DequantizeLinear(q, s0, z0) " + lines.replace("y =", "v =")
    text += " r = QuantizeLinear(v, s0, z0) y = DequantizeLinear(r, s0, z0)"
    model = chain(text, f"{IMAGE} w", opset=20, s0=0.05, z0=np.asarray(np.uint8(90)))
    single, several = kit.ops(optimize_graph(kit.apply(fuse_activations, model)[0])), kit.ops(optimize_graph(model))
    assert single["DequantizeLinear"] == 2
    assert several["DequantizeLinear"] == 3
    assert any(single[kernel] for kernel in kernels)
    assert sum(single.values()) < sum(several.values())
