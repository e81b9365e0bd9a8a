"""BatchNormalization and constant arithmetic go into the weights beside them; everything else stays where it is."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.passes.rewrites.normalizations import fold_batchnorm, fold_scalars
from tests.passes import kit

F = np.float32
RNG = np.random.default_rng(0)


def normal(*shape: int, seed: int = 0, dtype: type = F) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# The statistics of six channels.
STATS = {
    "gamma": RNG.uniform(0.5, 2, 6).astype(F),
    "beta": normal(6, seed=6),
    "mean": normal(6, seed=7),
    "var": RNG.uniform(0.1, 2, 6).astype(F),
}
VALUES: dict[str, Any] = {
    **STATS,
    "w": normal(6, 4, 3, 3),
    "w44": normal(4, 4, 3, 3),
    "matrix": normal(4, 6),
    "stack": normal(2, 4, 6),
    "ints": np.ones((4, 6), np.int32),
    "twos": np.full((), 2, np.int32),
    "data": normal(3, 4),
    "two": np.asarray(F(2)),
    "half": np.asarray(F(0.5)),
    "negative": -np.ones(6, F),
    "zero": np.zeros((6, 1, 1), F),
    "nothing": np.asarray(F(0)),
    "nan": np.full(1, np.nan, F),
    "inf": np.asarray(F(np.inf)),
    "one": np.ones(1, F),
    "deep": np.ones((1, 1, 1, 1, 1), F),
    "channels": normal(6, 1, 1),
    "inputs": normal(4, 1, 1),
    "four": np.abs(normal(4)) + F(0.5),
    "columns": normal(7),
    "image": normal(1, 6, 7, 7),
    "row": normal(6),
    "rows": normal(3, 6),
    "cube": np.full((1, 1, 1), 2, F),
    "stored": np.ones((6, 4, 3, 3), np.int8),
    "step": np.asarray(F(0.1)),
    "point": np.asarray(np.uint8(128)),
}
IMAGE, OUT = "float[N,4,7,7] x", "float[N,6,7,7] y"
CONV = "h = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
OPEN = "Conv <kernel_shape = [3,3]>"
PAIR = "q = QuantizeLinear(h, step, point) d = DequantizeLinear(q, step, point)"
BN = "BatchNormalization <epsilon = 0.001> (h, gamma, beta, mean, var)"
TRAINING = "BatchNormalization <training_mode = 1> (h, gamma, beta, mean, var)"
OTHER = "v = ReduceMax <axes = [0,2,3], keepdims = 0> (h) y = BatchNormalization (image, gamma, beta, mean, v)"


def model(lines: str, head: str = IMAGE, out: str = OUT, **other: Any) -> onnx.ModelProto:
    """A model of these lines, with the constants that they read."""
    inputs = {part.split()[-1] for part in head.split(",") if " " in part.strip()}
    held = {name: value for name, value in {**VALUES, **other}.items() if name not in inputs}
    return kit.parse(f"g ({head}) => ({out}) {{ {lines} }}", **kit.read_by(lines, held))


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
def test_batchnorm_behind_a_convolution(kind: str, groups: int, bias: bool, rank: int) -> None:
    kernel, spatial = ",".join(["2"] * rank), ",".join(["7"] * rank)
    shape = (6, 4 // groups) if kind == "Conv" else (4, 6 // groups)
    before = model(
        f"h = {kind} <group = {groups}, kernel_shape = [{kernel}]> (x, w{', b' if bias else ''}) y = {BN}",
        f"float[N,4,{spatial}] x",
        f"float[N,6,{','.join('AB'[:rank])}] y",
        w=normal(*shape, *[2] * rank),
        b=normal(6, seed=1),
    )
    result, report = kit.assert_rewritten(fold_batchnorm, before, {kind: 1})
    assert report.changed == (f"h/{kind}: took in y/BatchNormalization",)
    assert {tensor.name for tensor in result.graph.initializer} == {"w", "b" if bias else f"h/{kind}/bias"}
    assert kit.apply(fold_scalars, before)[1].changed == report.changed  # it takes what arithmetic brought into reach


def test_depthwise_and_a_bias_left_out_by_name() -> None:
    lines = f"h = Conv <group = 6> (x, w) y = {BN}"
    before = model(lines, "float[N,6,7,7] x", "float[N,6,5,5] y", w=normal(6, 1, 3, 3))
    before.graph.node[0].input.append("")
    kit.assert_rewritten(fold_batchnorm, before, {"Conv": 1})


@pytest.mark.parametrize("flip", [0, 1])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (1,), (), None])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_batchnorm_behind_a_gemm(flip: int, shape: tuple[int, ...] | None, beta: float) -> None:
    read = "x, w" if shape is None else "x, w, c"
    before = model(
        f"h = Gemm <transB = {flip}, alpha = 0.7, beta = {beta}> ({read}) y = {BN}",
        "float[N,4] x",
        "float[N,6] y",
        w=normal(6, 4) if flip else normal(4, 6),
        c=np.full((), 0.8, F) if not shape else normal(*shape, seed=1),
    )
    result, _ = kit.assert_rewritten(fold_batchnorm, before, {"Gemm": 1})
    assert kit.constant(result, "h/Gemm", 2).shape == (6,)


SMALL = "float[N,6,5,5] y"
# Inputs and outputs.
IN_SMALL, BESIDE = (IMAGE, SMALL), (IMAGE, f"{SMALL}, float[N,6,5,5] z")
MATRIX, CUBE = ("float[3,4] x", "float[3,6] y"), ("float[N,3,4] x", "float[N,3,6] y")
FRONT = f"y = {OPEN} (p, w)"
# By name: the nodes, and inputs and outputs where they are not those of a padded convolution.
STAYS: dict[str, tuple[str, ...]] = {
    "a norm alone": (f"y = {BN}", "float[N,6,5,5] h", SMALL),
    "a norm in front": (f"n = BatchNormalization (x, four, four, four, four) y = {OPEN} (n, w)", *IN_SMALL),
    "a norm behind an output": (f"h = {OPEN} (x, w) y = {BN}", IMAGE, f"{SMALL}, float[N,6,5,5] h"),
    "a norm beside a reader": (f"h = {OPEN} (x, w) y = {BN} z = Relu(h)", *BESIDE),
    "weights that are given": (f"h = {OPEN} (x, w) y = {BN}", f"{IMAGE}, float[6,4,3,3] w", SMALL),
    "a bias that is given": (f"h = {OPEN} (x, w, b) y = Mul(h, two)", f"{IMAGE}, float[6] b", SMALL),
    "a norm of negative variances": (f"h = {OPEN} (x, w) y = {BN.replace('var', 'negative')}", *IN_SMALL),
    "a norm in training": (f"h = {OPEN} (x, w) y, m, v = {TRAINING}", *IN_SMALL),
    "a norm of which it is the variance": (f"h = {OPEN} (x, w) {OTHER}", "float[1,4,7,7] x", "float[1,6,7,7] y"),
    "a norm over another axis": (f"m = MatMul(x, matrix) h = Add(m, row) y = {BN}", "float[N,6,4] x", "float[N,6,6] y"),
    "a factor for each column": (f"{CONV} y = Mul(h, columns)",),
    "a factor for each value": (f"{CONV} y = Mul(h, image)",),
    "a reciprocal": (f"{CONV} y = Div(one, h)",),
    "a square": (f"{CONV} y = Mul(h, h)",),
    "a division by 0": (f"{CONV} y = Div(h, zero)",),
    "a computed factor": (f"{CONV} y = Mul(h, x6)", f"{IMAGE}, float[1,6,1,1] x6"),
    "a shift by NaN": (f"{CONV} y = Add(h, nan)",),
    "a factor of more axes": (f"{CONV} y = Mul(h, deep)", IMAGE, "float[1,N,6,7,7] y"),
    "another operator between": (f"{CONV} r = Relu(h) y = Add(r, channels)",),
    "a shift of a bare MatMul": ("m = MatMul(x, matrix) a = Sub(m, one) y = Mul(a, row)", *CUBE),
    "a C that differs by row": ("h = Gemm(x, matrix, rows) y = Mul(h, two)", *MATRIX),
    "a stack of matrices": ("h = MatMul(x, stack) y = Mul(h, two)", "float[2,3,4] x", "float[2,3,6] y"),
    "two constants": ("h = MatMul(data, matrix) m = Mul(h, two) y = Add(m, x)", "float[3,6] x", MATRIX[1]),
    "integers": ("h = MatMul(x, ints) y = Mul(h, twos)", "int32[3,4] x", "int32[3,6] y"),
    "a weight behind a pair": (f"v = DequantizeLinear(stored, step) h = {OPEN} (x, v) y = Mul(h, two)", *IN_SMALL),
    "arithmetic behind a pair": (f"{CONV} {PAIR} y = Mul(d, two)",),
    "channel factors in front": (f"p = Mul(x, inputs) {FRONT}", *IN_SMALL),
    "a reciprocal in front": (f"p = Div(two, x) {FRONT}", *IN_SMALL),
    "a division by 0 in front": (f"p = Div(x, nothing) {FRONT}", *IN_SMALL),
    "an infinite factor in front": (f"p = Mul(x, inf) {FRONT}", *IN_SMALL),
    "a square in front": (f"p = Mul(x, x) {FRONT}", *IN_SMALL),
    "a factor in front of more axes": ("p = Mul(x, cube) y = MatMul(p, matrix)", MATRIX[0], "float[1,3,6] y"),
    "a shift in front of padding": (f"p = Add(x, half) {CONV.replace('(x', '(p')} y = Relu(h)",),
    "a factor in front beside a reader": (f"p = Mul(x, half) {FRONT} z = Relu(p)", IMAGE, f"{SMALL}, float[N,4,7,7] z"),
    "a factor in front that is an output": (f"p = Mul(x, half) {FRONT}", IMAGE, f"{SMALL}, float[N,4,7,7] p"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_no_weight_can_take_stays(name: str) -> None:
    proto = model(*STAYS[name])
    kit.assert_untouched(fold_batchnorm, proto)
    kit.assert_untouched(fold_scalars, proto)


ARITHMETIC = {
    "Mul": "{new} = Mul({old}, {k})",
    "Mul left": "{new} = Mul({k}, {old})",
    "Div": "{new} = Div({old}, {k})",
    "Add": "{new} = Add({k}, {old})",
    "Sub": "{new} = Sub({old}, {k})",
    "Sub from": "{new} = Sub({k}, {old})",
}
ROWS = st.lists(st.sampled_from(sorted(ARITHMETIC)), min_size=1, max_size=5)
WEIGHTS = {"Conv": normal(6, 4, 3, 3), "ConvTranspose": normal(4, 6, 3, 3)}


@settings(max_examples=60)
@given(ROWS, st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMulAdd"]), st.booleans(), st.integers(0, 1000))
def test_any_row_of_arithmetic_behind(row: list[str], kind: str, channels: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = kind.startswith("Conv")
    shapes = [(1,), (), (6, 1, 1) if image else (6,), (1, 6, 1, 1) if image else (1, 6)]
    held = {"w": WEIGHTS.get(kind, normal(4, 6, seed=2)), "c": normal(6, seed=4)}
    lines = {"Gemm": "t0 = Gemm(x, w)", "MatMulAdd": "m = MatMul(x, w) t0 = Add(m, c)"}.get(
        kind, f"t0 = {kind} <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
    )
    for k, step in enumerate(row):
        shape = shapes[int(rng.integers(0, 4 if channels else 2))]
        held[f"k{k}"] = np.asarray(rng.uniform(0.3, 2, shape) * rng.choice([-1, 1], shape), F)
        new = f"t{k + 1}" if k + 1 < len(row) else "y"
        lines += " " + ARITHMETIC[step].format(old=f"t{k}", new=new, k=f"k{k}")
    ends = ("float[N,4,6,6] x", "float[N,6,6,6] y") if image else ("float[N,4] x", "float[N,6] y")
    wanted = {"MatMul": 1, "Add": 1} if kind == "MatMulAdd" else {kind: 1}
    _, report = kit.assert_rewritten(fold_scalars, model(lines, *ends, **held), wanted, rtol=2e-5, seed=seed)
    assert len(report.changed) == 1


@settings(max_examples=60)
@given(
    ROWS.filter(lambda row: len(row) < 5),
    st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulAdd"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_row_of_scalars_in_front(row: list[str], kind: str, padded: bool, bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = kind.startswith("Conv")
    held = {"w": WEIGHTS.get(kind, normal(4, 6, seed=2)), "b": normal(6, seed=5), "c": normal(6, seed=4)}
    lines = ""
    for k, step in enumerate(row):
        held[f"k{k}"] = np.asarray(rng.uniform(0.3, 2) * rng.choice([-1, 1]), F)
        lines += ARITHMETIC[step].format(old=f"t{k}" if k else "x", new=f"t{k + 1}", k=f"k{k}") + " "
    read = f"t{len(row)}, w, b" if bias and (image or kind == "Gemm") else f"t{len(row)}, w"
    lines += {
        "Gemm": f"y = Gemm({read})",
        "MatMul": f"m = MatMul({read}) y = Relu(m)",
        "MatMulAdd": f"m = MatMul({read}) y = Add(m, c)",
    }.get(kind, f"y = {kind} <kernel_shape = [3,3], pads = {[int(padded)] * 4}> ({read})")
    ends = ("float[N,4,6,6] x", "float[N,6,A,B] y") if image else ("float[N,4] x", "float[N,6] y")
    before = model(lines, *ends, **held)
    result, _ = kit.apply(fold_scalars, before)
    kit.assert_same(before, result, rtol=3e-5, seed=seed)
    left = sum(kit.ops(result)[op] for op in ("Mul", "Div", "Add", "Sub")) - (kind == "MatMulAdd")
    shifts = any(step.startswith(("Add", "Sub")) for step in row)
    takes_shift = kind in ("Gemm", "MatMulAdd") or (kind == "Conv" and not padded)
    assert left == (0 if takes_shift or not shifts else 1)


# By name: the operators that are left, nodes, inputs and outputs.
PRODUCT, CUBES = "m = MatMul(x, matrix)", ("float[2,3,4] x", "float[2,3,6] y")
BOTH = f"p = Mul(x, half) q = {OPEN} (p, w) r = Mul(q, half) h = Add(r, half) n = {BN} y = Sub(n, half)"
FOLDS: dict[str, tuple[str, str, str, str]] = {
    "factors of a bare MatMul": ("MatMul Relu", f"{PRODUCT} s = Mul(m, row) r = Div(s, two) y = Relu(r)", *CUBE),
    "up to a shift": ("MatMul Sub", f"{PRODUCT} s = Mul(m, row) y = Sub(s, two)", *CUBE),
    "a norm behind a flat MatMul": ("MatMul Add", f"{PRODUCT} h = Add(m, row) y = {BN}", *MATRIX),
    "an Add of a value for each position": ("MatMul Add", f"{PRODUCT} s = Mul(m, two) y = Add(s, rows)", *CUBES),
    "up to a second reader": ("Conv Relu Add", f"{CONV} a = Mul(h, two) b = Relu(a) y = Add(a, b)", IMAGE, OUT),
    "as far back as it goes": ("Relu Conv", f"r = Relu(x) q = Mul(r, two) p = Div(q, half) {FRONT}", *IN_SMALL),
    "both sides and a norm in one row": ("Conv", BOTH, *IN_SMALL),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_row_is_taken_as_far_as_it_goes(name: str) -> None:
    wanted, *rest = FOLDS[name]
    _, report = kit.assert_rewritten(fold_scalars, model(*rest), dict.fromkeys(wanted.split(), 1))
    assert name != "as far back as it goes" or report.changed == ("y/Conv: took in q/Mul, p/Div",)


def test_without_the_pass_of_norms_a_row_ends_at_one() -> None:
    before = model(f"q = {OPEN} (x, w) h = Mul(q, half) n = {BN} y = Sub(n, half)", *IN_SMALL)
    result, _ = kit.apply(fold_scalars, before, skip=("batchnorm",))
    assert kit.ops(result) == {"Conv": 1, "BatchNormalization": 1, "Sub": 1}
    kit.assert_same(before, result)


def test_a_shared_weight_gets_a_copy() -> None:
    text = f"{CONV.replace('w)', 'w44, b)')} y = Mul(h, two) n = Neg(x)"
    text += " i = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (n, w44, b) z = Relu(i)"
    before = model(text, IMAGE, "float[N,4,7,7] y, float[N,4,7,7] z", b=normal(4, seed=1))
    result, _ = kit.assert_changed(fold_scalars, before)
    assert {tensor.name for tensor in result.graph.initializer} == {"w44", "b", "w44/h/Conv", "b/h/Conv"}
    np.testing.assert_array_equal(kit.constant(result, "i/Conv", 1), VALUES["w44"])


def test_a_tensor_that_keeps_its_name_keeps_its_value() -> None:
    """y is the graph's output and the last node's: the Conv writes it now, and h (another value) is gone."""
    result, _ = kit.apply(fold_scalars, model(f"{CONV} a = Mul(h, half) y = Add(a, half)"))
    assert [(node.name, list(node.output)) for node in result.graph.node] == [("h/Conv", ["y"])]


@pytest.mark.parametrize(
    ("run", "lines"),
    [(fold_batchnorm, f"{CONV} y = {BN}"), (fold_scalars, f"{CONV} a = Mul(h, channels) y = Add(a, half)")],
)
def test_inside_a_branch(run: Any, lines: str) -> None:
    _, report = kit.assert_rewritten(run, kit.in_branch(model(lines)), {"If": 1, "Conv": 1, "Identity": 1})
    assert len(report.changed) == 1


def test_a_convolution_that_a_branch_reads_stays() -> None:
    """The Conv stands outside, its sole reader inside a branch: the branch may not run."""
    inside = kit.in_branch(model("y = Mul(h, two)", "float[N,6,7,7] h", OUT))
    outside = model(f"{CONV} y = Relu(h)")
    nodes = [outside.graph.node[0], *inside.graph.node]
    del outside.graph.node[:], outside.graph.output[:]
    outside.graph.node.extend(nodes)
    outside.graph.output.extend(inside.graph.output)
    outside.graph.input.append(inside.graph.input[0])
    kit.assert_untouched(fold_scalars, outside)


HALF = ("float16[N,4,7,7] x", "float16[N,6,5,5] y")


def test_half_precision() -> None:
    held = {"w": normal(6, 4, 3, 3, dtype=np.float16), "b": normal(6, dtype=np.float16), "k": np.float16([1.5])}
    before = model(f"h = {OPEN} (x, w, b) a = Mul(h, k) y = Add(a, k)", *HALF, **held)
    result, _ = kit.assert_rewritten(fold_scalars, before, {"Conv": 1}, rtol=2e-3)
    assert kit.constant(result, "h/Conv", 1).dtype == np.float16


@pytest.mark.parametrize("factor", [np.float16(6e4), np.float16(1e-6)], ids=["overflow", "underflow"])
@pytest.mark.parametrize("lines", [f"h = {OPEN} (x, w) y = Mul(h, k)", f"h = Mul(x, k) y = {OPEN} (h, w)"])
def test_a_fold_that_half_precision_cannot_hold_is_reported(lines: str, factor: np.float16) -> None:
    proto = model(lines, *HALF, w=normal(6, 4, 3, 3, dtype=np.float16), k=np.asarray(factor))
    report = kit.assert_untouched(fold_scalars, proto)
    conv = next(node.name for node in proto.graph.node if node.op_type == "Conv")
    assert [(refusal.subject, refusal.rule, refusal.code) for refusal in report.skipped] == [(conv, "scalars", "R112")]


def test_empty_batch() -> None:
    before = model(f"{CONV} y = Mul(h, two)")
    result, _ = kit.apply(fold_scalars, before)
    feeds = {"x": np.zeros((0, 4, 7, 7), F)}
    assert kit.infer(result, feeds)[0].shape == kit.infer(before, feeds)[0].shape == (0, 6, 7, 7)
