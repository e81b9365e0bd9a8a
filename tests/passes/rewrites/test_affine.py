"""BatchNormalization and constant arithmetic go into the weights beside them; everything else stays where it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq.passes.rewrites.affine import fold_batchnorm, fold_scalars
from tests.passes.kit import apply, assert_same, assert_untouched, constant, in_branch, infer, ops, parse

F = np.float32


def normal(*shape: int, seed: int = 0, dtype: type = F) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def norm(channels: int, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "gamma": rng.uniform(0.5, 2, channels).astype(F),
        "beta": rng.standard_normal(channels).astype(F),
        "mean": rng.standard_normal(channels).astype(F),
        "var": rng.uniform(0.1, 2, channels).astype(F),
    }


BN = "BatchNormalization <epsilon = 0.001> (h, gamma, beta, mean, var)"


def conv_bn(kind: str, groups: int, bias: bool, rank: int) -> ModelProto:
    """Conv or ConvTranspose of 4 to 6 channels and a BatchNormalization."""
    spatial, kernel = ",".join(["7"] * rank), ",".join(["3"] * rank)
    outs = ",".join("ABC"[:rank])
    attrs = f"<group = {groups}, kernel_shape = [{kernel}]>"
    read = "x, w, b" if bias else "x, w"
    text = f"g (float[N,4,{spatial}] x) => (float[N,6,{outs}] y) {{ h = {kind} {attrs} ({read}) y = {BN} }}"
    shape = (6, 4 // groups) if kind == "Conv" else (4, 6 // groups)
    held = {"w": normal(*shape, *[3] * rank), **norm(6)}
    if bias:
        held["b"] = normal(6, seed=1)
    return parse(text, **held)


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
def test_batchnorm_behind_a_convolution(kind: str, groups: int, bias: bool, rank: int) -> None:
    model = conv_bn(kind, groups, bias, rank)
    result, report = apply(fold_batchnorm, model)
    assert ops(result) == {kind: 1}
    assert report.changed == (f"h/{kind}: took in y/BatchNormalization",)
    assert {tensor.name for tensor in result.graph.initializer} == {"w", "b" if bias else f"h/{kind}/bias"}
    assert_same(model, result)
    assert apply(fold_scalars, model)[1].changed == report.changed  # it takes what arithmetic brought into reach


def test_depthwise_and_a_bias_left_out_by_name() -> None:
    text = f"""g (float[N,6,7,7] x) => (float[N,6,5,5] y)
        {{ h = Conv <group = 6, kernel_shape = [3,3]> (x, w) y = {BN} }}"""
    model = parse(text, w=normal(6, 1, 3, 3), **norm(6))
    model.graph.node[0].input.append("")
    result, _ = apply(fold_batchnorm, model)
    assert ops(result) == {"Conv": 1}
    assert_same(model, result)


@pytest.mark.parametrize("flip", [0, 1])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (1,), (), None])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_batchnorm_behind_a_gemm(flip: int, shape: tuple[int, ...] | None, beta: float) -> None:
    read = "x, w" if shape is None else "x, w, c"
    text = f"""g (float[N,4] x) => (float[N,6] y)
        {{ h = Gemm <transB = {flip}, alpha = 0.7, beta = {beta}> ({read}) y = {BN} }}"""
    held = {"w": normal(6, 4) if flip else normal(4, 6), **norm(6)}
    if shape is not None:
        held["c"] = normal(*shape, seed=1) if shape else np.asarray(F(0.8))
    model = parse(text, **held)
    result, _ = apply(fold_batchnorm, model)
    assert ops(result) == {"Gemm": 1}
    assert constant(result, "h/Gemm", 2).shape == (6,)
    assert_same(model, result)


def test_batchnorm_that_stays() -> None:
    weights = {"w": normal(6, 4, 3, 3), **norm(6)}
    conv = "h = Conv <kernel_shape = [3,3]> (x, w)"
    image = "float[N,4,7,7] x"
    stays = {
        "alone": ("g (float[N,6,5,5] h) => (float[N,6,5,5] y)", BN, norm(6)),
        "in front": (
            "g (float[N,4,7,7] h) => (float[N,6,5,5] y)",
            BN.replace("y =", "") + " y = Conv <kernel_shape = [3,3]> (n, w)",
            {"w": normal(6, 4, 3, 3), **norm(4)},
        ),
        "output between": (f"g ({image}) => (float[N,6,5,5] y, float[N,6,5,5] h)", BN, weights),
        "reader between": (f"g ({image}) => (float[N,6,5,5] y, float[N,6,5,5] z)", f"{BN} z = Relu(h)", weights),
        "weights given": (f"g ({image}, float[6,4,3,3] w) => (float[N,6,5,5] y)", BN, norm(6)),
        "bad variance": (f"g ({image}) => (float[N,6,5,5] y)", BN, {**weights, "var": -np.ones(6, F)}),
    }
    for name, (head, lines, held) in stays.items():
        first = "" if name in ("alone", "in front") else conv
        lines = lines.replace(BN, f"n = {BN}" if name == "in front" else f"y = {BN}")
        assert_untouched(fold_batchnorm, parse(f"{head} {{ {first} {lines} }}", **held))
        assert_untouched(fold_scalars, parse(f"{head} {{ {first} {lines} }}", **held))


def test_batchnorm_in_training_stays() -> None:
    text = """g (float[N,4,7,7] x) => (float[N,6,5,5] y) { h = Conv <kernel_shape = [3,3]> (x, w)
        y, m, v = BatchNormalization <training_mode = 1> (h, gamma, beta, mean, var) }"""
    assert_untouched(fold_batchnorm, parse(text, w=normal(6, 4, 3, 3), **norm(6)))


def test_batchnorm_over_another_axis_than_a_matmul_writes() -> None:
    text = f"g (float[N,6,4] x) => (float[N,6,6] y) {{ m = MatMul(x, w) h = Add(m, c) y = {BN} }}"
    assert_untouched(fold_scalars, parse(text, w=normal(4, 6), c=normal(6), **norm(6)))
    flat = parse(text.replace("N,6,4", "N,4").replace("N,6,6", "N,6"), w=normal(4, 6), c=normal(6), **norm(6))
    result, _ = apply(fold_scalars, flat)
    assert ops(result) == {"MatMul": 1, "Add": 1}
    assert_same(flat, result)


STEPS = {
    "Mul": lambda old, new, k: f"{new} = Mul({old}, {k})",
    "Mul left": lambda old, new, k: f"{new} = Mul({k}, {old})",
    "Div": lambda old, new, k: f"{new} = Div({old}, {k})",
    "Add": lambda old, new, k: f"{new} = Add({k}, {old})",
    "Sub": lambda old, new, k: f"{new} = Sub({old}, {k})",
    "Sub from": lambda old, new, k: f"{new} = Sub({k}, {old})",
}


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMulAdd"]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_row_of_arithmetic_behind(row: list[str], kind: str, channels: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = kind.startswith("Conv")
    shapes = [(1,), (), (6, 1, 1) if image else (6,), (1, 6, 1, 1) if image else (1, 6)]
    held = {"w": {"Conv": normal(6, 4, 3, 3), "ConvTranspose": normal(4, 6, 3, 3)}.get(kind, normal(4, 6, seed=2))}
    lines = {"Gemm": "t0 = Gemm(x, w)", "MatMulAdd": "m = MatMul(x, w) t0 = Add(m, c)"}.get(
        kind, f"t0 = {kind} <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
    )
    if kind == "MatMulAdd":
        held["c"] = normal(6, seed=4)
    for k, step in enumerate(row):
        shape = shapes[int(rng.integers(0, 4 if channels else 2))]
        value = np.asarray(rng.uniform(0.3, 2, shape) * rng.choice([-1, 1], shape), F)
        held[f"k{k}"] = value
        lines += " " + STEPS[step](f"t{k}", f"t{k + 1}" if k + 1 < len(row) else "y", f"k{k}")
    head = "g (float[N,4,6,6] x) => (float[N,6,6,6] y)" if image else "g (float[N,4] x) => (float[N,6] y)"
    model = parse(f"{head} {{ {lines} }}", **held)
    result, report = apply(fold_scalars, model)
    assert ops(result) == ({"MatMul": 1, "Add": 1} if kind == "MatMulAdd" else {kind: 1})
    assert len(report.changed) == 1
    assert_same(model, result, rtol=2e-5, seed=seed)


def test_a_bare_matmul_takes_factors_only() -> None:
    head = "g (float[N,3,4] x) => (float[N,3,6] y)"
    held = {"w": normal(4, 6), "k": normal(6, seed=1), "c": normal(1, seed=2)}
    model = parse(f"{head} {{ m = MatMul(x, w) s = Mul(m, k) r = Div(s, c) y = Relu(r) }}", **held)
    result, _ = apply(fold_scalars, model)
    assert ops(result) == {"MatMul": 1, "Relu": 1}
    assert_same(model, result)
    scaled = parse(f"{head} {{ m = MatMul(x, w) a = Sub(m, c) y = Mul(a, k) }}", **held)
    assert_untouched(fold_scalars, scaled)


CONV = "h = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
HEAD = "g (float[N,4,7,7] x) => (float[N,6,7,7] y)"


@pytest.mark.parametrize(
    "step",
    [
        "y = Mul(h, row)",
        "y = Mul(h, image)",
        "y = Div(one, h)",
        "y = Mul(h, h)",
        "y = Div(h, zero)",
        "y = Mul(h, x6)",
        "y = Add(h, nan)",
        "y = Mul(h, big)",
    ],
)
def test_arithmetic_that_is_none_of_ours_stays(step: str) -> None:
    held = {
        "row": normal(7),
        "image": normal(1, 6, 7, 7),
        "one": np.ones(1, F),
        "zero": np.zeros((6, 1, 1), F),
        "nan": np.full(1, np.nan, F),
        "big": np.ones((1, 1, 1, 1, 1), F),
    }
    used = {name: value for name, value in held.items() if name in step}
    head = HEAD.replace("x)", "x, float[1,6,1,1] x6)") if "x6" in step else HEAD
    head = head.replace("(float[N,6,7,7] y)", "(float[1,N,6,7,7] y)") if "big" in step else head
    assert_untouched(fold_scalars, parse(f"{head} {{ {CONV} {step} }}", w=normal(6, 4, 3, 3), **used))


def test_a_shared_weight_gets_a_copy() -> None:
    text = """g (float[N,4,7,7] x) => (float[N,4,7,7] y, float[N,4,7,7] z) {
        h = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w, b) y = Mul(h, two)
        i = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (h2, w, b) z = Relu(i)
        h2 = Neg(x) }"""
    text = text.replace("i = Conv", "h2 = Neg(x) i = Conv").replace("\n        h2 = Neg(x) }", " }")
    model = parse(text, w=normal(4, 4, 3, 3), b=normal(4, seed=1), two=2.0)
    result, _ = apply(fold_scalars, model)
    assert {tensor.name for tensor in result.graph.initializer} == {"w", "b", "w/h/Conv", "b/h/Conv"}
    np.testing.assert_array_equal(constant(result, "i/Conv", 1), normal(4, 4, 3, 3))
    assert_same(model, result)


def test_a_tensor_that_keeps_its_name_keeps_its_value() -> None:
    """y is the graph's output and the last node's: the Conv writes it now, and h (another value) is gone."""
    model = parse(f"{HEAD} {{ {CONV} a = Mul(h, k) y = Add(a, k) }}", w=normal(6, 4, 3, 3), k=0.5)
    result, _ = apply(fold_scalars, model)
    assert [(node.name, list(node.output)) for node in result.graph.node] == [("h/Conv", ["y"])]


def test_both_sides_and_norm_in_one_row() -> None:
    lines = f"p = Mul(x, k) q = Conv <kernel_shape = [3,3]> (p, w) r = Mul(q, k) h = Add(r, k) n = {BN} y = Sub(n, k)"
    model = parse(
        f"g (float[N,4,7,7] x) => (float[N,6,5,5] y) {{ {lines} }}", w=normal(6, 4, 3, 3), k=F(0.7), **norm(6)
    )
    result, report = apply(fold_scalars, model)
    assert ops(result) == {"Conv": 1}
    assert len(report.changed) == 2
    assert_same(model, result)
    without, _ = apply(fold_scalars, model, skip=("batchnorm",))
    assert ops(without) == {"Conv": 1, "BatchNormalization": 1, "Sub": 1}
    assert_same(model, without)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulAdd"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_row_of_scalars_in_front(row: list[str], kind: str, padded: bool, bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = kind.startswith("Conv")
    held = {"w": {"Conv": normal(6, 4, 3, 3), "ConvTranspose": normal(4, 6, 3, 3)}.get(kind, normal(4, 6, seed=2))}
    lines = ""
    for k, step in enumerate(row):
        held[f"k{k}"] = np.asarray(rng.uniform(0.3, 2) * rng.choice([-1, 1]), F)
        lines += STEPS[step]("x" if k == 0 else f"t{k}", f"t{k + 1}", f"k{k}") + " "
    data, attrs = (
        f"t{len(row)}",
        f"<kernel_shape = [3,3], pads = [{','.join('1' if padded else '0' for _ in range(4))}]>",
    )
    read = f"{data}, w, b" if bias and (image or kind == "Gemm") else f"{data}, w"
    if "b" in read:
        held["b"] = normal(6, seed=5)
    lines += {
        "Gemm": f"y = Gemm({read})",
        "MatMul": f"m = MatMul({read}) y = Relu(m)",
        "MatMulAdd": f"m = MatMul({read}) y = Add(m, c)",
    }.get(kind, f"y = {kind} {attrs} ({read})")
    if kind == "MatMulAdd":
        held["c"] = normal(6, seed=4)
    head = "g (float[N,4,6,6] x) => (float[N,6,A,B] y)" if image else "g (float[N,4] x) => (float[N,6] y)"
    model = parse(f"{head} {{ {lines} }}", **held)
    result, _ = apply(fold_scalars, model)
    left = sum(ops(result)[op] for op in ("Mul", "Div", "Add", "Sub")) - (kind == "MatMulAdd")
    shifts = any(step.split()[0] in ("Add", "Sub") and step != "Sub from" for step in row) or "Sub from" in row
    takes_shift = kind in ("Gemm", "MatMulAdd") or (kind == "Conv" and not padded)
    assert left == (0 if takes_shift or not shifts else 1)
    assert_same(model, result, rtol=3e-5, seed=seed)


def test_channel_factors_in_front_stay() -> None:
    text = "g (float[N,4,7,7] x) => (float[N,6,5,5] y) { p = Mul(x, k) y = Conv <kernel_shape = [3,3]> (p, w) }"
    assert_untouched(fold_scalars, parse(text, w=normal(6, 4, 3, 3), k=normal(4, 1, 1)))


def test_scalars_in_front_that_others_read_stay() -> None:
    lines = "p = Mul(x, k) y = Conv <kernel_shape = [3,3]> (p, w)"
    held = {"w": normal(6, 4, 3, 3), "k": np.asarray(F(0.5))}
    both = "g (float[N,4,7,7] x) => (float[N,6,5,5] y, float[N,4,7,7] {}) {{ {} }}"
    assert_untouched(fold_scalars, parse(both.format("z", lines + " z = Relu(p)"), **held))
    assert_untouched(fold_scalars, parse(both.format("p", lines), **held))


def test_inside_a_branch() -> None:
    for run, step in ((fold_batchnorm, f"y = {BN}"), (fold_scalars, "a = Mul(h, mean) y = Add(a, k)")):
        held = {"w": normal(6, 4, 3, 3), **norm(6)}
        if run is fold_scalars:
            held = {"w": held["w"], "mean": held["mean"].reshape(6, 1, 1), "k": np.asarray(F(0.3))}
        model = in_branch(parse(f"{HEAD} {{ {CONV} {step} }}", **held))
        result, report = apply(run, model)
        assert len(report.changed) == 1
        assert ops(result) == {"If": 1, "Conv": 1, "Identity": 1}
        assert_same(model, result)


def test_a_convolution_that_a_branch_reads_stays() -> None:
    """The Conv stands outside, its sole reader inside a branch: the branch may not run."""
    inside = parse("g (float[N,6,7,7] h) => (float[N,6,7,7] y) { y = Mul(h, k) }", k=2.0)
    model = in_branch(inside)
    outside = parse(f"{HEAD} {{ {CONV} y = Relu(h) }}", w=normal(6, 4, 3, 3))
    nodes = [outside.graph.node[0], *model.graph.node]
    del outside.graph.node[:], outside.graph.output[:]
    outside.graph.node.extend(nodes)
    outside.graph.output.extend(model.graph.output)
    outside.graph.input.append(model.graph.input[0])
    assert_untouched(fold_scalars, outside)


def test_half_precision() -> None:
    head = "g (float16[N,4,7,7] x) => (float16[N,6,5,5] y)"
    lines = "h = Conv <kernel_shape = [3,3]> (x, w, b) a = Mul(h, k) y = Add(a, k)"
    held = {"w": normal(6, 4, 3, 3, dtype=np.float16), "b": normal(6, dtype=np.float16), "k": np.float16([1.5])}
    model = parse(f"{head} {{ {lines} }}", **held)
    result, _ = apply(fold_scalars, model)
    assert ops(result) == {"Conv": 1}
    assert constant(result, "h/Conv", 1).dtype == np.float16
    assert_same(model, result, rtol=2e-3)


@pytest.mark.parametrize("factor", [np.float16(6e4), np.float16(1e-6)], ids=["overflow", "underflow"])
def test_a_fold_that_half_precision_cannot_hold_is_reported(factor: np.float16) -> None:
    head = "g (float16[N,4,7,7] x) => (float16[N,6,5,5] y)"
    lines = "h = Conv <kernel_shape = [3,3]> (x, w) y = Mul(h, k)"
    model = parse(f"{head} {{ {lines} }}", w=normal(6, 4, 3, 3, dtype=np.float16), k=np.asarray([factor]))
    report = assert_untouched(fold_scalars, model)
    assert [(refusal.subject, refusal.rule) for refusal in report.skipped] == [("h/Conv", "scalars")]


def test_weights_behind_a_pair_stay() -> None:
    text = f"{HEAD} {{ v = DequantizeLinear(w, s) {CONV.replace('(x, w)', '(x, v)')} y = Mul(h, k) }}"
    assert_untouched(fold_scalars, parse(text, w=np.ones((6, 4, 3, 3), np.int8), s=0.1, k=2.0))


def test_pairs_are_not_crossed() -> None:
    text = f"{HEAD} {{ {CONV} q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) y = Mul(d, k) }}"
    assert_untouched(fold_scalars, parse(text, w=normal(6, 4, 3, 3), s=0.1, z=np.uint8(128), k=2.0))


def test_empty_batch() -> None:
    model = parse(f"{HEAD} {{ {CONV} y = Mul(h, k) }}", w=normal(6, 4, 3, 3), k=2.0)
    result, _ = apply(fold_scalars, model)
    feeds = {"x": np.zeros((0, 4, 7, 7), F)}
    assert infer(result, feeds)[0].shape == infer(model, feeds)[0].shape == (0, 6, 7, 7)
