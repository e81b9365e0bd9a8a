"""Chains in every spelling become one node that computes the same; near misses stay."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import parser

from onnxq.graph import GraphIndex, find_opset, name_nodes
from onnxq.passes.rewrites.activations import fuse_activations
from onnxq.runtime import optimize_graph
from tests.passes.kit import apply, assert_same, assert_untouched, in_branch, ops, parse, rewrite_model

F = np.float32
SHAPES = {"[]": (), "[1]": (1,), "[1,1,1,1]": (1, 1, 1, 1)}


def graph(lines: str, head: str = "float[N,4,5,5] x", out: str = "float[N,4,5,5] y") -> str:
    return f"g ({head}) => ({out}) {{ {lines} }}"


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
NUMBERS = {"three": 3.0, "minus": -3.0, "zero": 0.0, "six": 6.0, "sixth": 1 / 6, "half": 0.5, "one": 1.0, "two": 2.0}


def numbers(lines: str, shape: tuple[int, ...] = (), dtype: type = F, **other: float) -> dict[str, np.ndarray]:
    held = {**NUMBERS, **other}
    bounds = ("zero", "six", "one")
    return {
        name: np.full(() if name in bounds and "Clip" in lines else shape, value, dtype)
        for name, value in held.items()
        if name in lines.replace("(", " ").replace(")", " ").replace(",", " ").split()
    }


@pytest.mark.parametrize("spelling", HARD_SWISH)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_spelling_of_hard_swish(spelling: str, shape: str) -> None:
    lines = HARD_SWISH[spelling]
    model = parse(graph(lines), opset=13, **numbers(lines, SHAPES[shape]))
    result, report = apply(fuse_activations, model)
    assert ops(result) == {"HardSwish": 1}
    assert find_opset(result) == 14
    assert [node.name for node in result.graph.node] == [model.graph.node[-1].name]
    assert len(report.changed) == 1
    assert not result.graph.initializer
    assert_same(model, result)


HARD_SIGMOID = {
    "divided": "p = Add(x, three) c = Clip(p, zero, six) y = Div(c, six)",
    "multiplied": "p = Add(three, x) c = Clip(p, zero, six) y = Mul(sixth, c)",
    "inside": "s = Mul(x, sixth) p = Add(s, half) y = Clip(p, zero, one)",
    "inside, divided": "s = Div(x, six) p = Add(half, s) r = Relu(p) y = Min(r, one)",
}


@pytest.mark.parametrize("spelling", HARD_SIGMOID)
def test_every_spelling_of_hard_sigmoid(spelling: str) -> None:
    lines = HARD_SIGMOID[spelling]
    model = parse(graph(lines), opset=13, **numbers(lines))
    result, _ = apply(fuse_activations, model)
    assert ops(result) == {"HardSigmoid": 1}
    assert find_opset(result) == 13
    assert_same(model, result)


@given(st.floats(0.05, 0.9), st.floats(0.05, 0.95), st.floats(0.5, 8))
def test_any_clipped_line_is_a_hard_sigmoid(alpha: float, beta: float, height: float) -> None:
    lines = "s = Mul(x, a) p = Add(s, b) c = Clip(p, zero, h) y = Div(c, h)"
    model = parse(graph(lines), a=alpha * height, b=beta * height, zero=0.0, h=height)
    result, _ = apply(fuse_activations, model)
    assert ops(result) == {"HardSigmoid": 1}
    assert_same(model, result, rtol=5e-6)


ROOT = math.sqrt(2)
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
}
CONSTANTS = {"root": ROOT, "inverse": 1 / ROOT, "k": 0.044715, "tip": math.sqrt(2 / math.pi)}


@pytest.mark.parametrize("spelling", [*GELU, *TANH])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_spelling_of_gelu(spelling: str, shape: str) -> None:
    lines = {**GELU, **TANH}[spelling]
    model = parse(graph(lines), **numbers(lines, SHAPES[shape], **CONSTANTS))
    result, _ = apply(fuse_activations, model)
    assert ops(result) == {"Gelu": 1}
    assert find_opset(result) == 20
    approximate = GraphIndex(result).nodes[0].attrs.get("approximate", "none")
    assert approximate == ("tanh" if spelling in TANH else "none")
    assert_same(model, result, rtol=1e-5)


SILU = {
    "plain": "s = Sigmoid(x) y = Mul(x, s)",
    "other side": "s = Sigmoid(x) y = Mul(s, x)",
    "paddle's one": "b = Mul(x, one) s = Sigmoid(b) y = Mul(x, s)",
    "beta": "b = Mul(beta, x) s = Sigmoid(b) y = Mul(x, s)",
}


@pytest.mark.parametrize("spelling", SILU)
def test_silu_becomes_quickgelu_for_ort_only(spelling: str) -> None:
    lines = SILU[spelling]
    model = parse(graph(lines), **numbers(lines, (1,), beta=1.702))
    result, _ = apply(fuse_activations, model)
    node = GraphIndex(result).nodes[0]
    assert (node.domain, node.op_type) == ("com.microsoft", "QuickGelu")
    assert node.attrs["alpha"] == pytest.approx(1.702 if spelling == "beta" else 1.0)
    assert_same(model, result)
    for_trt = rewrite_model(model, target="trt").proto
    assert ops(for_trt)["QuickGelu"] == 0


@pytest.mark.parametrize("lines", [HARD_SWISH["paddle"], GELU["huggingface"]], ids=["hard-swish", "gelu"])
def test_half_precision(lines: str) -> None:
    held = numbers(lines, (), np.float16, **CONSTANTS)
    model = parse(graph(lines, "float16[N,4,5,5] x", "float16[N,4,5,5] y"), **held)
    result, report = apply(fuse_activations, model)
    assert len(report.changed) == 1
    assert_same(model, result, rtol=4e-3)


@pytest.mark.parametrize("lines", [HARD_SWISH["paddle"], HARD_SIGMOID["divided"], GELU["huggingface"], TANH["times"]])
def test_double_stays(lines: str) -> None:
    """ORT runs most of these chains in double, and none of the single nodes."""
    held = numbers(lines, (), np.float64, **CONSTANTS)
    assert_untouched(fuse_activations, parse(graph(lines, "double[N,4,5,5] x", "double[N,4,5,5] y"), opset=20, **held))


@pytest.mark.parametrize("lines", [HARD_SWISH["paddle"], SILU["plain"], TANH["times"]], ids=["hswish", "silu", "gelu"])
def test_inside_a_branch(lines: str) -> None:
    model = in_branch(parse(graph(lines), opset=20, **numbers(lines, **CONSTANTS)))
    result, report = apply(fuse_activations, model)
    assert len(report.changed) == 1
    assert_same(model, result, rtol=1e-5)


def test_constants_of_an_outer_scope() -> None:
    lines = HARD_SWISH["paddle"]
    model = in_branch(parse(graph(lines), opset=14, **numbers(lines)))
    inner = model.graph.node[0].attribute[0].g
    model.graph.initializer.extend(inner.initializer)
    del inner.initializer[:]
    result, _ = apply(fuse_activations, model)
    assert ops(result)["HardSwish"] == 1
    assert not result.graph.initializer
    assert_same(model, result)


NEAR_MISSES = {
    "clipped at 5": (HARD_SWISH["paddle"], {"six": 5.0, "three": 3.0}),
    "plus 2": (HARD_SWISH["paddle"], {"three": 2.0}),
    "from -1": (HARD_SWISH["paddle"], {"zero": -1.0}),
    "hard-sigmoid of keras": ("h = HardSigmoid (x) y = Mul(x, h)", {}),
    "a plain clip": ("y = Clip(x, zero, six)", {}),
    "a scaled clip": ("c = Clip(x, zero, six) y = Div(c, six)", {}),
    "erf of 2": (GELU["huggingface"], {"root": 2.0}),
    "a third": (GELU["huggingface"], {"half": 1 / 3}),
    "plus 2, gelu": (GELU["huggingface"], {"one": 2.0}),
    "another cubic": (TANH["pow"], {"k": 0.05}),
    "squared": (TANH["pow"], {"three": 2.0}),
    "sigmoid doubled": ("s = Sigmoid(x) t = Mul(s, two) y = Mul(x, t)", {}),
    "sigmoid alone": ("y = Sigmoid(x)", {}),
    "sigmoid of x + 1": ("b = Add(x, one) s = Sigmoid(b) y = Mul(x, s)", {}),
    "divided the other way": ("p = Add(x, three) c = Clip(p, zero, six) m = Mul(x, c) y = Div(six, m)", {}),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    lines, other = NEAR_MISSES[name]
    held = numbers(lines, **{**CONSTANTS, **other})
    assert_untouched(fuse_activations, parse(graph(lines), opset=20, **held))


def test_the_gate_of_another_tensor_stays() -> None:
    lines = "s = Sigmoid(z) y = Mul(x, s)"
    assert_untouched(fuse_activations, parse(graph(lines, "float[N,4,5,5] x, float[N,4,5,5] z")))
    lines = "p = Add(z, three) c = Clip(p, zero, six) m = Mul(x, c) y = Div(m, six)"
    assert_untouched(fuse_activations, parse(graph(lines, "float[N,4,5,5] x, float[N,4,5,5] z"), **numbers(lines)))


@pytest.mark.parametrize("tensor", ["p", "c", "m"])
@pytest.mark.parametrize("how", ["output", "reader"])
def test_what_others_see_stays(tensor: str, how: str) -> None:
    lines = HARD_SWISH["paddle"]
    more = f"z = Identity({tensor})" if how == "reader" else ""
    outs = f"float[N,4,5,5] y, float[N,4,5,5] {'z' if how == 'reader' else tensor}"
    assert_untouched(fuse_activations, parse(graph(lines + more, out=outs), opset=14, **numbers(lines)))


def test_x_may_have_any_readers() -> None:
    lines = "x = Relu(w)" + HARD_SWISH["paddle"] + "z = Neg(x)"
    text = graph(lines, "float[N,4,5,5] w", "float[N,4,5,5] y, float[N,4,5,5] z, float[N,4,5,5] x")
    model = parse(text, opset=14, **numbers(lines))
    result, _ = apply(fuse_activations, model)
    assert ops(result) == {"Relu": 1, "HardSwish": 1, "Neg": 1}
    assert_same(model, result)


def test_a_number_that_is_not_constant_stays() -> None:
    lines = "p = Add(x, t) c = Clip(p, zero, six) m = Mul(x, c) y = Div(m, six)"
    assert_untouched(fuse_activations, parse(graph(lines, "float[N,4,5,5] x, float[1] t"), opset=14, **numbers(lines)))
    # An initializer that a caller may override is no constant either.
    model = parse(graph(lines, "float[N,4,5,5] x, float[1] t"), opset=14, t=np.full(1, 3, F), **numbers(lines))
    assert_untouched(fuse_activations, model)


def test_a_constant_per_channel_stays() -> None:
    lines = HARD_SWISH["paddle"]
    held = {**numbers(lines), "three": np.array([3, 3, 3, 2.5], F).reshape(4, 1, 1)}
    assert_untouched(fuse_activations, parse(graph(lines), opset=14, **held))


def test_a_constant_that_raises_the_rank_stays() -> None:
    lines = HARD_SWISH["paddle"]
    held = {**numbers(lines), "three": np.full((1, 1, 1), 3, F)}
    assert_untouched(fuse_activations, parse(graph(lines, "float[N,5] x", "float[1,N,5] y"), opset=14, **held))


def test_unknown_rank_takes_true_scalars_only() -> None:
    lines = "h = Reshape(x, shape)" + HARD_SWISH["paddle"].replace("(x", "(h")
    for shape, fused in (((), True), ((1,), False)):
        text = graph(lines, "float[N,4] x, int64[k] shape", "float[A,B] y")
        model = parse(text, opset=14, **numbers(lines, shape))
        _, report = apply(fuse_activations, model)
        assert bool(report.changed) == fused


def test_wrong_constants_on_purpose() -> None:
    """Each number of the chain off by a hundredth: none of them fires."""
    lines = HARD_SWISH["paddle"]
    for name, sign in itertools.product(("three", "six"), (-1, 1)):
        held = numbers(lines, **{name: NUMBERS[name] * (1 + 0.01 * sign)})
        assert_untouched(fuse_activations, parse(graph(lines), opset=14, **held))


def test_pairs_are_not_crossed() -> None:
    lines = "p = Add(x, three) q = QuantizeLinear(p, s, z) d = DequantizeLinear(q, s, z)"
    lines += " c = Clip(d, zero, six) m = Mul(x, c) y = Div(m, six)"
    held = {**numbers(lines, s=0.1), "z": np.uint8(3)}
    assert_untouched(fuse_activations, parse(graph(lines), opset=14, **{k: np.asarray(v) for k, v in held.items()}))


def test_an_opset_that_cannot_be_raised_is_reported() -> None:
    """A function of opset 17 holds the model there: the chain stays, and the report says why."""
    lines = GELU["huggingface"]
    model = parse(graph(lines), **numbers(lines, **CONSTANTS))
    model.opset_import.add(domain="local", version=1)
    function = "<domain: 'local', opset_import: ['' : 17]> f (a) => (b) { b = ReduceMean <axes = [1]> (a) }"
    model.functions.append(parser.parse_function(function.replace("'", '"')))
    model.graph.node.add(op_type="f", domain="local", input=["x"], output=["z"], name="call")
    model = name_nodes(model)
    result, report = apply(fuse_activations, model)
    assert ops(result) == ops(model)
    assert find_opset(result) == 17
    assert [(refusal.subject, refusal.rule) for refusal in report.skipped] == [("y/Mul", "activations")]
    assert "Gelu needs opset 20" in report.skipped[0].reason


def test_the_newest_opset_is_kept() -> None:
    lines = HARD_SWISH["paddle"]
    result, _ = apply(fuse_activations, parse(graph(lines), opset=22, **numbers(lines)))
    assert find_opset(result) == 22
    assert ops(result) == {"HardSwish": 1}


@pytest.mark.parametrize("lines", [SILU["plain"], HARD_SWISH["paddle"], GELU["huggingface"]])
def test_one_node_needs_one_dequantize(lines: str) -> None:
    """Between pairs ORT copies the DequantizeLinear for every reader of it, so chains lose their own fusions."""
    kernels = {"s": ("QuickGelu",), "p": ("HardSigmoid", "HardSwish"), "d": ("Gelu",)}[lines[0]]
    text = "q = QuantizeLinear(w, s0, z0) x = DequantizeLinear(q, s0, z0) " + lines.replace("y =", "v =")
    text += " r = QuantizeLinear(v, s0, z0) y = DequantizeLinear(r, s0, z0)"
    held = {**numbers(lines, **CONSTANTS), "s0": np.float32(0.05), "z0": np.uint8(90)}
    model = parse(graph(text, "float[N,4,5,5] w"), opset=20, **{k: np.asarray(v) for k, v in held.items()})
    chain, single = ops(optimize_graph(model)), ops(optimize_graph(apply(fuse_activations, model)[0]))
    assert single["DequantizeLinear"] == 2
    assert chain["DequantizeLinear"] == 3
    assert any(single[kernel] for kernel in kernels)
    assert sum(single.values()) < sum(chain.values())
