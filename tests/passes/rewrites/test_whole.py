"""Masks that a scale can hold, Splits as Slices, MatMuls with biases as Gemms: for targets that take whole graphs."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from onnx import shape_inference

from onnxq.graph import infer_shapes
from onnxq.passes.rewrites import whole
from tests.passes import kit

F = np.float32
LOW, SCORES = float(np.finfo(F).min), "float[2,4,4] y"
TRIANGLE = np.tri(4, dtype=bool)
VALUES = {
    "low": np.where(TRIANGLE, F(0), F(LOW)), "infinite": np.where(TRIANGLE, F(0), F(-np.inf)), "never": F(-1e9),
    "yes": TRIANGLE, "two": F(2), "kept": TRIANGLE.astype(F), "one": F(1), "large": F(5000), "small": F(-900),
}  # fmt: skip


def model(lines: str, head: str = "float[2,4,4] x", out: str = SCORES, opset: int = 18, **other: Any) -> Any:
    return kit.parse(f"g ({head}) => ({out}) {{ {lines} }}", opset=opset, **kit.read_by(lines, {**VALUES, **other}))


def test_attention_that_reads_constants_is_written_out() -> None:
    lines = "y = Attention(x, keys, v)"
    size = "float[1,2,4,8]"
    before = model(lines, f"{size} x, {size} v", f"{size} y", opset=23, keys=np.ones((1, 2, 4, 8), F))
    after, report = kit.assert_changed(whole.write_out_attention, before, "qnn")
    assert len(report.changed) == 1
    assert "Attention" not in kit.ops(after)


# The nodes, and the name and the input of the one that reads the mask.
MASKS = {
    "added": ("s = Add(x, low) y = Softmax(s)", "s/Add", 1),
    "of infinities": ("s = Add(infinite, x) y = Softmax(s)", "s/Add", 0),
    "added to scaled scores": ("a = Div(x, two) s = Add(a, low) y = Softmax(s)", "s/Add", 1),
    "a limit": ("s = Max(x, never) y = Softmax(s)", "s/Max", 1),
    "chosen": ("s = Where(yes, x, never) y = Softmax(s)", "s/Where", 2),
    "computed": ("a = Sub(one, kept) m = Mul(a, never) s = Add(x, m) y = Softmax(s)", "m/Mul", 1),
    # Whoever else reads the constant, not in front of a Softmax, reads the value it had.
    "shared": ("s = Add(x, low) p = Softmax(s) m = Max(x, low) y = Add(p, m)", "s/Add", 1),
}


@pytest.mark.parametrize(("lines", "node", "k"), MASKS.values(), ids=MASKS)
def test_masks_have_values_that_a_scale_can_hold(lines: str, node: str, k: int) -> None:
    before = model(lines)
    after, report = kit.assert_changed(whole.bound_masks, before, "qnn")
    assert len(report.changed) == 1
    old, new = kit.constant(before, node, k), kit.constant(after, node, k)
    np.testing.assert_array_equal(new, np.where(old < -1e3, F(-64), old))


@pytest.mark.parametrize("opset", [13, 18])
def test_rows_in_which_everything_is_masked_stay_zeros(opset: int) -> None:
    """As torch exports attention: the Softmax of such a row is NaN, which a Where replaces."""
    lines = "m = Where(real, zero, infinity) s = Add(x, m) p = Softmax(s) n = IsNaN(p) y = Where(n, zero, p)"
    before = model(lines, "float[2,4,4] x, bool[2,1,4] real", opset=opset, zero=F(0), infinity=F(-np.inf))
    after, report = kit.apply(whole.bound_masks, before, "qnn")
    assert len(report.changed) == 2
    assert "IsNaN" not in kit.ops(after)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 4)).astype(F), "real": np.zeros((2, 1, 4), bool)}
    feeds["real"][1, :, 1:] = True
    (expected,), (answer,) = kit.infer(before, feeds), kit.infer(after, feeds)
    np.testing.assert_allclose(answer, expected, atol=1e-6)
    assert not answer[0].any()
    assert answer[1].any()


@pytest.mark.parametrize(
    ("lines", "out"),
    [
        pytest.param("s = Add(x, small) y = Softmax(s)", SCORES, id="within reach of scores"),
        pytest.param("y = Add(x, low)", SCORES, id="without a softmax"),
        pytest.param("s = Mul(x, large) y = Softmax(s)", SCORES, id="factor of the scores"),
        pytest.param("s = Div(x, large) y = Softmax(s)", SCORES, id="divisor of the scores"),
        pytest.param("s = Add(x, low) y = Softmax(s)", f"{SCORES}, float[2,4,4] s", id="given out by the model"),
    ],
)
def test_what_is_no_mask_stays(lines: str, out: str) -> None:
    kit.assert_untouched(whole.bound_masks, model(lines, out=out))


# The nodes, the outputs, the opset, and the slices that are expected.
UNEVEN = {"sizes": np.array([1, 3])}
SPLITS = {
    "sizes as an input": ("a, b = Split <axis=2> (x, sizes) c = Relu(b) y = Concat <axis=2> (c, a)", 18, 2),
    "sizes as an attribute": ("a, b = Split <axis=1, split=[3,1]> (x) y = Concat <axis=1> (b, a)", 11, 2),
    "from behind": ("a, b = Split <axis=-2> (x, sizes) y = Concat <axis=1> (b, a)", 13, 2),
    "alike": ("a, b = Split <axis=-1> (x) y = Concat <axis=-1> (b, a)", 13, 2),
    "the last is smaller": ("a, b, c = Split <axis=2, num_outputs=3> (x5) y = Concat <axis=2> (c, b, a)", 18, 3),
}


@pytest.mark.parametrize(("lines", "opset", "count"), SPLITS.values(), ids=SPLITS)
def test_splits_become_slices(lines: str, opset: int, count: int) -> None:
    head, out = ("float[2,4,5] x5", "float[2,4,5] y") if "x5" in lines else ("float[2,4,4] x", "float[2,n,m] y")
    after, report = kit.assert_changed(whole.cut_splits, model(lines, head, out, opset, **UNEVEN), "qnn")
    assert report.changed == (f"a/Split: {count} Slices instead of a Split",)
    assert (kit.ops(after)["Split"], kit.ops(after)["Slice"]) == (0, count)


@pytest.mark.parametrize(
    ("lines", "out"),
    [
        ("y, a = Split <axis=1> (x)", "float[2,2,4] y"),
        ("a, b = Split <axis=1> (x, given) y = Add(a, b)", "float[2,n,4] y"),
    ],
    ids=["an output of the model", "sizes that are computed"],
)
def test_splits_that_stay(lines: str, out: str) -> None:
    head = "float[2,4,4] x" + (", int64[2] given" if "given" in lines else "")
    kit.assert_untouched(whole.cut_splits, model(lines, head, out, 13))


@pytest.mark.parametrize(("target", "left"), [("qnn", 0), ("ort", 1), ("trt", 1)])
def test_only_targets_that_take_whole_graphs_ask_for_them(target: str, left: int) -> None:
    lines = "a, b = Split <axis=1> (x) c = Add(a, b) s = Add(c, never) y = Softmax(s)"
    after, reports = kit.rewrite_model(model(lines, out="float[2,2,4] y"), target=target)
    assert kit.ops(after)["Split"] == left
    assert {report.name for report in reports if report.changed} >= ({"masks", "splits"} if not left else set())
    assert ("masks" in {report.name for report in reports}) is (not left)


BIASES = {"w": np.eye(4, 3, dtype=F) + F(0.5), "b": np.arange(3, dtype=F), "row": np.ones((1, 1, 3), F), "half": F(0.5)}
ROWS = "float[2,5,4] x"
# The nodes, the input, the output, and the operators that are expected beside the Gemm.
PRODUCTS = {
    "of a matrix": ("p = MatMul(x, w) y = Add(b, p)", "float[2,4] x", "float[2,3] y", {}),
    "of rows": ("p = MatMul(x, w) y = Add(p, row)", ROWS, "float[2,5,3] y", {"Reshape": 2}),
    "one bias for all": ("p = MatMul(x, w) y = Add(p, half)", ROWS, "float[2,5,3] y", {"Reshape": 2}),
    "in front of a Relu": ("p = MatMul(x, w) a = Add(p, b) y = Relu(a)", ROWS, "float[2,5,3] y",
                           {"Reshape": 2, "Relu": 1}),
    "in front of a Clip": ("p = MatMul(x, w) a = Add(p, b) c = Clip(a, , half) y = Abs(c)", ROWS, "float[2,5,3] y",
                           {"Reshape": 2, "Clip": 1, "Abs": 1}),
    # Both read the same matrix.
    "twice": ("p = MatMul(x, w) a = Add(p, b) q = MatMul(x, w) c = Add(q, row) y = Mul(a, c)", ROWS, "float[2,5,3] y",
              {"Reshape": 3, "Mul": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "head", "out", "others"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_bias_is_added_before_its_product_is_rounded(lines: str, head: str, out: str, others: dict[str, int]) -> None:
    wanted = {"Gemm": lines.count("MatMul"), **others}
    after, report = kit.assert_rewritten(whole.fuse_biases, model(lines, head, out, **BIASES), wanted, target="qnn")
    # No size is declared that is another one now.
    shape_inference.infer_shapes(after, strict_mode=True)
    assert report.changed[0] == f"p/MatMul: took in {'y' if ' y = Add' in lines else 'a'}/Add"


@pytest.mark.parametrize(
    ("lines", "head", "out"),
    [
        ("p = MatMul(x, w) q = Abs(p) a = Add(p, b) y = Add(a, q)", ROWS, "float[2,5,3] y"),
        ("p = MatMul(x, w) y = Add(p, given)", f"{ROWS}, float[3] given", "float[2,5,3] y"),
        ("p = MatMul(x, w) y = Add(p, b)", "float[n,5,4] x", "float[n,5,3] y"),
    ],
    ids=["read without it, too", "a bias that is computed", "a size that is not fixed"],
)
def test_products_that_stay(lines: str, head: str, out: str) -> None:
    kit.assert_untouched(whole.fuse_biases, model(lines, head, out, **BIASES))


@pytest.mark.parametrize(
    ("lines", "operators"),
    [
        ("a = Exp(x) r = Reciprocal(a) y = Mul(x, r)", ["Exp", "Div"]),
        ("a = Exp(x) r = Reciprocal(a) y = Mul(r, two)", ["Exp", "Div"]),
        ("a = Exp(x) y = Reciprocal(a)", ["Exp", "Div"]),
        ("a = Exp(x) r = Reciprocal(a) y = Mul(r, r)", ["Exp", "Div", "Mul"]),
        ("a = Exp(x) r = Reciprocal(a) s = Mul(r, x) y = Sub(s, r)", ["Exp", "Div", "Mul", "Sub"]),
    ],
)
def test_a_reciprocal_is_a_division(lines: str, operators: list[str]) -> None:
    _, report = kit.assert_rewritten(whole.replace_reciprocals, model(lines), Counter(operators), target="qnn")
    assert len(report.changed) == 1


# Of maps of 5 x 6 values.
POOLS = {
    "two by two": "kernel_shape=[2,2], strides=[2,2]",
    "counting pads that are none": "kernel_shape=[2,2], strides=[2,2], count_include_pad=1",
    "with pads": "kernel_shape=[3,3], strides=[2,2], pads=[1,1,0,0]",
    "with an empty mode": 'kernel_shape=[2,2], strides=[2,2], auto_pad=""',
    "exactly": "kernel_shape=[3,2], strides=[2,2]",
}


def make_pool(options: str, size: str = "5,6") -> Any:
    """An AveragePool that rounds its size up."""
    lines = f"p = AveragePool <ceil_mode=1, {options}> (x) y = Neg(p)"
    return kit.parse(f"g (float[2,4,{size}] x) => (float[2,4,P,Q] y) {{ {lines} }}", opset=19)


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_an_average_pool_has_pads_in_the_place_of_a_size_rounded_up(options: str) -> None:
    after, report = kit.assert_changed(whole.pad_pools, infer_shapes(make_pool(options)), "qnn")
    assert len(report.changed) == 1
    assert not any(attribute.name == "ceil_mode" for attribute in after.graph.node[0].attribute)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        pytest.param("kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1", "5,6", id="counts"),
        pytest.param("kernel_shape=[3,3], strides=[2,3], pads=[0,0,0,1]", "5,6", id="a window beyond all values"),
        pytest.param("kernel_shape=[2,2], strides=[2,2]", "H,6", id="a free size"),
    ],
)
def test_a_pool_stays_for_which_no_pads_say_the_same(options: str, size: str) -> None:
    kit.assert_untouched(whole.pad_pools, infer_shapes(make_pool(options, size)))


SWISH = "s = Sigmoid(x) y = Mul(x, s)"


@pytest.mark.parametrize(
    "lines", [SWISH, "s = Sigmoid(x) z = Mul(s, x) y = Neg(z)", "s = Sigmoid(x) z = Mul(s, x) y = Add(z, x)"]
)
def test_x_by_its_sigmoid_of_10_rows_is_of_one_row(lines: str) -> None:
    proto = model(lines, "float[2,3,10,4] x", "float[2,3,10,4] y")
    after, report = kit.assert_changed(whole.flatten_swishes, infer_shapes(proto), "qnn")
    assert len(report.changed) == 1
    assert Counter(node.op_type for node in after.graph.node)["Reshape"] == 2


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [
        (SWISH, "2,3,8,10"),
        (SWISH, "2,3,13,4"),
        (SWISH, "3,9,10"),
        (SWISH, "2,3,H,4"),
        ("a = Neg(x) s = Sigmoid(a) y = Mul(x, s)", "2,3,10,4"),
        ("s = Sigmoid(x) a = Mul(x, s) y = Add(a, s)", "2,3,10,4"),
        ("a = RandomUniform <shape=[2,3,10,4]>() y = Add(x, a)", "2,3,10,4"),
    ],
)
def test_a_sigmoid_stays_that_the_npu_computes_right(lines: str, sizes: str) -> None:
    proto = model(lines, f"float[{sizes}] x", f"float[{sizes}] y")
    kit.assert_untouched(whole.flatten_swishes, infer_shapes(proto))
