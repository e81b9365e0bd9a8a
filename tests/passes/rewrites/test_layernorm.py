"""Written-out layer normalization becomes LayerNormalization; what only looks like it stays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.graph import GraphIndex, find_opset
from onnxq.passes.rewrites.normalizations import fuse_layernorm
from tests.passes.kit import assert_changed, assert_rewritten, assert_untouched, in_branch, parse, read_by

F = np.float32
HEAD = "g (float[N,T,8] x) => (float[N,T,8] y)"
MEAN = "u = ReduceMean <axes = [-1]> (x) d = Sub(x, u) "
PLAIN = (
    MEAN + "p = Pow(d, two) v = ReduceMean <axes = [-1]> (p) e = Add(v, eps) s = Sqrt(e) n = Div(d, s) "
    "m = Mul(n, gamma) y = Add(m, beta)"
)
# As JAX writes the variance, and TensorFlow the product with the scale.
JAX = PLAIN.replace("p = Pow(d, two)", "p = Mul(x, x)").replace(
    "e = Add(v, eps)", "q = Mul(u, u) w = Sub(v, q) b = Max(w, zero) e = Add(b, eps)"
)
TENSORFLOW = PLAIN.replace(
    "n = Div(d, s) m = Mul(n, gamma) y = Add(m, beta)",
    "r = Reciprocal(s) f = Mul(r, gamma) a = Mul(x, f) o = Neg(u) b = Mul(o, f) c = Add(b, beta) y = Add(a, c)",
)
SPELLINGS = {
    "jax": JAX,
    "jax without a bound": JAX.replace("b = Max(w, zero) e = Add(b, eps)", "e = Add(w, eps)"),
    "tensorflow": TENSORFLOW,
    "tensorflow, subtracted": TENSORFLOW.replace(
        "o = Neg(u) b = Mul(o, f) c = Add(b, beta)", "b = Mul(f, u) c = Sub(beta, b)"
    ),
    "tensorflow, pooled": TENSORFLOW.replace("ReduceMean <axes = [-1]>", "GlobalAveragePool"),
    "pow": PLAIN,
    "square": PLAIN.replace("Pow(d, two)", "Mul(d, d)"),
    "other sides": PLAIN.replace("Add(v, eps)", "Add(eps, v)")
    .replace("Mul(n, gamma)", "Mul(gamma, n)")
    .replace("Add(m, beta)", "Add(beta, m)"),
    "reciprocal": PLAIN.replace("n = Div(d, s)", "r = Reciprocal(s) n = Mul(d, r)"),
    "one over": PLAIN.replace("n = Div(d, s)", "r = Div(one, s) n = Mul(r, d)"),
    "subtracted twice": PLAIN.replace("n = Div(d, s)", "d2 = Sub(x, u) n = Div(d2, s)"),
    "averaged twice": PLAIN.replace("n = Div(d, s)", "u2 = ReduceMean <axes = [2]> (x) d2 = Sub(x, u2) n = Div(d2, s)"),
    "no beta": PLAIN.replace("m = Mul(n, gamma) y = Add(m, beta)", "y = Mul(n, gamma)"),
    "positive axis": PLAIN.replace("[-1]", "[2]"),
}


def held(lines: str, size: int = 8, **other: np.ndarray | float) -> dict[str, np.ndarray | float]:
    rng = np.random.default_rng(0)
    affine = {"gamma": rng.uniform(0.5, 2, size).astype(F), "beta": rng.standard_normal(size).astype(F)}
    return read_by(lines, {"two": 2.0, "one": 1.0, "zero": 0.0, "eps": 1e-5, **affine, **other})


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("opset", [13, 17])
def test_every_spelling(spelling: str, opset: int) -> None:
    lines = SPELLINGS[spelling]
    model = parse(f"{HEAD} {{ {lines} }}", opset=opset, **held(lines))
    result, _ = assert_rewritten(fuse_layernorm, model, {"LayerNormalization": 1}, rtol=1e-5)
    (node,) = GraphIndex(result).nodes
    assert find_opset(result) == 17
    assert node.attrs["epsilon"] == pytest.approx(1e-5)
    assert len([name for name in node.inputs if name]) == (2 if spelling == "no beta" else 3)


def test_axes_as_an_input() -> None:
    lines = PLAIN.replace(" <axes = [-1]> (x)", "(x, ax)").replace(" <axes = [-1]> (p)", "(p, ax)")
    model = parse(f"{HEAD} {{ {lines} }}", opset=18, **held(lines), ax=np.array([-1]))
    assert_rewritten(fuse_layernorm, model, {"LayerNormalization": 1}, rtol=1e-5)


@pytest.mark.recent_ort
@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 3), st.floats(1e-6, 1e-2), st.booleans())
def test_any_trailing_axes(shape: list[int], count: int, eps: float, full: bool) -> None:
    count = min(count, len(shape))
    dims, axes = ",".join(map(str, shape)), ",".join(str(k) for k in range(-count, 0))
    lines = PLAIN.replace("[-1]", f"[{axes}]")
    rng = np.random.default_rng(1)
    gamma = rng.uniform(0.5, 2, shape[-count:] if full else [1] * count).astype(F)
    values = {**held(lines), "eps": eps, "gamma": gamma, "beta": np.asarray(F(0.3))}
    model = parse(f"g (float[{dims}] x) => (float[{dims}] y) {{ {lines} }}", **values)
    assert_rewritten(fuse_layernorm, model, {"LayerNormalization": 1}, rtol=3e-5)


def test_half_precision() -> None:
    values = {key: np.asarray(value, np.float16) for key, value in held(PLAIN, eps=1e-3).items()}
    model = parse(f"{HEAD.replace('float', 'float16')} {{ {PLAIN} }}", **values)
    assert_rewritten(fuse_layernorm, model, {"LayerNormalization": 1}, rtol=4e-3)


def test_inside_a_branch() -> None:
    model = in_branch(parse(f"{HEAD} {{ {PLAIN} }}", **held(PLAIN)))
    assert len(assert_changed(fuse_layernorm, model, rtol=1e-5)[1].changed) == 1


NEAR_MISSES = {
    "cubed": (PLAIN, {"two": 3.0}),
    "another middle": (PLAIN.replace("Sub(x, u)", "Sub(u, x)"), {}),
    "variance of x": (PLAIN.replace("Pow(d, two)", "Pow(x, two)"), {}),
    "upside down": (PLAIN.replace("Div(d, s)", "Div(s, d)"), {}),
    "sizes along time": (PLAIN, {"gamma": np.ones((3, 8), F)}),
    "not centred": (PLAIN.replace("Div(d, s)", "Div(x, s)"), {}),
    "first axis": (PLAIN.replace("[-1]", "[0]"), {"gamma": 1.0, "beta": 0.0}),
    "different axes": (PLAIN.replace("v = ReduceMean <axes = [-1]>", "v = ReduceMean <axes = [1]>"), {}),
    "two over": (PLAIN.replace("n = Div(d, s)", "r = Div(two, s) n = Mul(r, d)"), {}),
    "negative epsilon": (PLAIN, {"eps": -1e-5}),
    "jax, another bound": (JAX, {"zero": 1e-3}),
    "jax, another mean": (JAX.replace("q = Mul(u, u)", "k = ReduceMean <axes = [1]> (x) q = Mul(k, k)"), {}),
    "jax, the other way round": (JAX.replace("Sub(v, q)", "Sub(q, v)"), {}),
    "tensorflow, another mean": (TENSORFLOW.replace("o = Neg(u)", "k = ReduceMean <axes = [1]> (x) o = Neg(k)"), {}),
    "tensorflow, not negated": (TENSORFLOW.replace("o = Neg(u) b = Mul(o, f)", "b = Mul(u, f)"), {}),
    "tensorflow, the other way round": (
        TENSORFLOW.replace("o = Neg(u) b = Mul(o, f) c = Add(b, beta)", "b = Mul(u, f) c = Sub(b, beta)"),
        {},
    ),
    "tensorflow, other values": (TENSORFLOW.replace("a = Mul(x, f)", "k = Relu(x) a = Mul(k, f)"), {}),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    lines, other = NEAR_MISSES[name]
    text = f"{HEAD.replace('N,T', '2,3')} {{ {lines} }}"
    assert_untouched(fuse_layernorm, parse(text, **held(lines, **other)))


@pytest.mark.parametrize("tensor", ["u", "d", "p", "v", "e", "s", "n"])
def test_what_others_see_stays(tensor: str) -> None:
    size = 1 if tensor in "uves" else 8
    head = HEAD.replace("y)", f"y, float[N,T,{size}] z)")
    assert_untouched(fuse_layernorm, parse(f"{head} {{ {PLAIN} z = Relu({tensor}) }}", **held(PLAIN)))


def test_a_scale_seen_by_others_ends_the_chain_there() -> None:
    """m is an output too: the normalization without beta is whole, and the Add stays."""
    model = parse(f"{HEAD.replace('y)', 'y, float[N,T,8] m)')} {{ {PLAIN} }}", **held(PLAIN))
    assert_rewritten(fuse_layernorm, model, {"LayerNormalization": 1, "Add": 1}, rtol=1e-5)


def test_sizes_must_be_known_for_a_single_number() -> None:
    text = f"{HEAD.replace('8', 'C')} {{ {PLAIN} }}"
    assert_untouched(fuse_layernorm, parse(text, **held(PLAIN, gamma=2.0, beta=1.0)))
    model = parse(text, **held(PLAIN, size=3))
    assert_rewritten(fuse_layernorm, model, {"LayerNormalization": 1}, rtol=1e-5)
