"""An Einsum is a MatMul between Transposes and Reshapes, where it is one product of matrices; stacks are parted."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, helper, shape_inference

from onnxq import OnnxqError, quantize
from onnxq.graph import infer_shapes
from onnxq.passes.rewrites.products import (
    flatten_tables,
    part_gemms,
    part_stacks,
    write_lookups,
    write_out_einsums,
    write_out_upsampling,
)
from onnxq.runtime import Session, optimize_graph
from tests.passes.kit import apply, assert_changed, assert_untouched, infer, ops, parse, random_weights, read_by

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 2, "h": 3, "i": 6, "j": 7, "k": 4, "n": 2, "t": 3, "v": 5, "w": 4}
# By the operators that are left of them, with all sizes fixed.
EQUATIONS = {
    "a weight": ("bte,ed->btd", ["MatMul"]),
    "a weight of heads": ("bte,ehd->bthd", ["Reshape", "MatMul", "Reshape"]),
    "heads joined by a weight": ("bthd,hde->bte", ["Reshape", "Reshape", "MatMul"]),
    "scores": ("bhid,bhjd->bhij", ["Transpose", "MatMul"]),
    "scores of heads behind": ("nihd,njhd->nijh", ["Transpose", "Transpose", "MatMul", "Transpose"]),
    "turned scores": ("aecd,abcd->acbe", ["Transpose", "Transpose", "MatMul"]),
    "positions in rows": ("bhwc,hkc->bhwk", ["Transpose", "Reshape", "Transpose", "MatMul", "Reshape", "Transpose"]),
    "masks of queries": ("bic,bchw->bihw", ["Reshape", "MatMul", "Reshape"]),
    "graphs": ("nkctv,kvw->nctw", ["Transpose", "Reshape", "Reshape", "MatMul"]),
    "the weight in front": ("di,bi->bd", ["Transpose", "MatMul"]),
    "convolution of one tap": ("dc,bchw->bdhw", ["Transpose", "Transpose", "MatMul", "Transpose"]),
    "rows alone": ("bi,bid->bd", ["Transpose", "Reshape", "MatMul", "Reshape"]),
    "vectors": ("i,i->", ["MatMul"]),
    "a vector and a matrix": ("a,ab->b", ["MatMul"]),
    "a stack to be turned and a vector": ("dbi,d->bi", ["Transpose", "MatMul"]),
    "a matrix and a vector": ("bid,d->bi", ["MatMul"]),
    "no result": ("ij,jk", ["MatMul"]),
    "result in order": ("kj,ji", ["Transpose", "Transpose", "MatMul"]),
    "ellipsis": ("...d,ed->...e", ["Transpose", "MatMul"]),
    "ellipsis of both": ("...id,...jd->...ij", ["Transpose", "MatMul"]),
    "ellipsis and no result": ("...id,dj", ["MatMul"]),
    "blanks": ("b t e, e d -> b t d", ["MatMul"]),
}
LEFT = {
    "one operand": "ij->ji",
    "a diagonal": "iij,jk->ik",
    "a sum of one operand": "ij,k->ik",
    "elements": "ij,ij->ij",
    "an outer product": "i,j->ij",
}


def make(equation: str, free: Sequence[str] = (), sizes: dict[str, int] = SIZES) -> ModelProto:
    """x and z to y; the axes of these letters have no fixed size."""
    operands = equation.replace(" ", "").partition("->")[0].replace("...", "bt").split(",")
    shapes = [",".join(axis.upper() if axis in free else str(sizes[axis]) for axis in axes) for axes in operands]
    inputs = dict(zip("xz", shapes, strict=False))
    declared = ", ".join(f"float[{shape}] {name}" for name, shape in inputs.items())
    text = f'g ({declared}) => (float y) {{ y = Einsum<equation = "{equation}">({", ".join(inputs)}) }}'
    return infer_shapes(parse(text))


def feed(equation: str) -> dict[str, np.ndarray]:
    rng, operands = np.random.default_rng(0), equation.partition("->")[0].split(",")
    shapes = ([SIZES[axis] for axis in axes] for axes in operands)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in zip("xz", shapes, strict=True)}


@pytest.mark.parametrize(("equation", "operators"), EQUATIONS.values(), ids=EQUATIONS)
def test_a_product_of_matrices_is_a_matmul(equation: str, operators: list[str]) -> None:
    after, _ = assert_changed(write_out_einsums, make(equation))
    assert [node.op_type for node in after.graph.node] == operators


@pytest.mark.parametrize("equation", LEFT.values(), ids=LEFT)
def test_what_is_no_product_of_matrices_stays(equation: str) -> None:
    assert_untouched(write_out_einsums, make(equation))
    # Nor does a size of one that is repeated go.
    text = 'g (float[3,4] x, float[1,5] z) => (float[3,5] y) { y = Einsum<equation = "ij,jk->ik">(x, z) }'
    assert_untouched(write_out_einsums, infer_shapes(parse(text)))


@pytest.mark.parametrize("equation", ["ij->ij", "ij,jk,kl->il", ""])
def test_an_equation_of_another_number_of_operands_is_left_to_onnx_runtime(equation: str) -> None:
    before = make("ij,jk->ik")
    before.graph.node[0].attribute[0].s = equation.encode()
    after, report = apply(write_out_einsums, before)
    assert not report.changed
    assert [node.op_type for node in after.graph.node] == ["Einsum"]


def test_free_sizes_are_copied_or_follow_from_the_others() -> None:
    for equation, free in {"bic,bchw->bihw": "bicw", "bthd,hde->bte": "bt", "bhwc,hkc->bhwk": "hb"}.items():
        after, report = apply(write_out_einsums, make(equation, free))
        assert report.changed
        feeds = feed(equation)
        np.testing.assert_allclose(infer(after, feeds)[0], np.einsum(equation, *feeds.values()), rtol=1e-5, atol=1e-5)
    # Neither of the two that would have to be parted is known.
    assert_untouched(write_out_einsums, make("bic,bchw->bihw", "hw"))


AXES = "abcdehij"


@pytest.mark.parametrize(
    "equation", ["a,ab->b", "ab,a->b", "dbi,d->bi", "bid,d->ib", "bid,d->bi", "bi,bid->bd", "di,bi->bd"]
)
def test_the_product_is_the_same_with_optimizations(equation: str) -> None:
    """ONNX Runtime fuses a Transpose in front of a product with a vector into the product without it."""
    before, feeds = make(equation), feed(equation)
    after, _ = apply(write_out_einsums, before)
    expected = Session(before, optimize=False).run(feeds)["y"]
    np.testing.assert_allclose(Session(after, optimize=True).run(feeds)["y"], expected, rtol=1e-5, atol=1e-5)


@given(data=st.data())
def test_any_equation_gives_the_same_numbers(data: st.DataObject) -> None:
    letters = st.lists(st.sampled_from(AXES), unique=True, min_size=1, max_size=5)
    left, right = data.draw(letters), data.draw(letters)
    both = list(dict.fromkeys(left + right))
    result = data.draw(st.permutations(both).flatmap(lambda axes: st.integers(0, len(axes)).map(lambda k: axes[:k])))
    equation = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    free = data.draw(st.lists(st.sampled_from(AXES), unique=True, max_size=3))
    after, report = apply(write_out_einsums, make(equation, free))
    # Every axis is stacked, a row, a column or summed over, and one at least is summed over.
    product = bool({*left} & {*right} - {*result}) and {*left} ^ {*right} <= {*result}
    assert bool(report.changed) <= product
    if report.changed:
        assert ops(after)["MatMul"] == 1
        feeds = feed(equation)
        np.testing.assert_allclose(infer(after, feeds)[0], np.einsum(equation, *feeds.values()), rtol=1e-4, atol=1e-5)
    elif product:
        assert free


def test_a_constant_is_arranged_in_the_file() -> None:
    table = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    text = 'g (float[B,3,4,4] x) => (float[B,3,4,4] y) { y = Einsum<equation = "bhwc,hkc->bhwk">(x, table) }'
    after, _ = assert_changed(write_out_einsums, infer_shapes(parse(text, table=table)))
    assert [node.op_type for node in after.graph.node].count("Transpose") == 2


def test_the_columns_of_a_constant_keep_a_scale_each() -> None:
    text = 'g (float[3,4] x) => (float[2,3,5] y) { y = Einsum<equation = "td,edf->etf">(x, w) }'
    before = infer_shapes(parse(text, w=np.random.default_rng(0).standard_normal((2, 4, 5)).astype(np.float32)))
    after, _ = assert_changed(write_out_einsums, before)
    product = after.graph.node[0]
    assert (product.op_type, product.input[0]) == ("MatMul", "x")
    assert [list(tensor.dims) for tensor in after.graph.initializer if tensor.name == product.input[1]] == [[4, 10]]


def make_stack(rows: str, *sizes: int, text: str = "y = MatMul(x, w)") -> ModelProto:
    weights = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    return infer_shapes(parse(f"g (float[{rows}] x) => (float y) {{ {text} }}", w=weights))


STACKS = {
    "experts": ("2,3,128", (2, 128, 128), ["Slice", "MatMul", "Slice", "MatMul", "Concat"]),
    "of free sizes": ("B,2,T,256", (2, 256, 64), ["Slice", "MatMul", "Slice", "MatMul", "Concat"]),
    "in front of an axis": ("2,5,3,128", (2, 1, 128, 128), ["Slice", "MatMul", "Slice", "MatMul", "Concat"]),
    "of one": ("B,3,128", (1, 128, 128), ["MatMul"]),
    "the same rows": ("T,128", (3, 128, 128), ["MatMul", "Reshape", "Transpose"]),
    "the same rows, of one": ("T,128", (1, 128, 128), ["MatMul", "Reshape", "Transpose"]),
    "heads": ("1,T,256", (8, 256, 32), ["MatMul", "Reshape", "Transpose"]),
    "heads of samples": ("B,1,T,256", (1, 8, 256, 32), ["MatMul", "Reshape", "Transpose"]),
}


@pytest.mark.parametrize(("rows", "sizes", "operators"), STACKS.values(), ids=STACKS)
def test_a_product_with_a_stack_is_one_with_each_matrix(
    rows: str, sizes: tuple[int, ...], operators: list[str]
) -> None:
    after, _ = assert_changed(part_stacks, make_stack(rows, *sizes))
    assert [node.op_type for node in after.graph.node] == operators
    assert all(len(tensor.dims) < 3 for tensor in after.graph.initializer)


@pytest.mark.parametrize("stack", [
    make_stack("2,3,64", 2, 64, 64),
    make_stack("B,3,128", 2, 128, 128),
    make_stack("1,2,3,128", 2, 1, 128, 128),
    make_stack("2,2,3,128", 2, 2, 128, 128),
    make_stack("3,128", 1, 2, 128, 128),
    make_stack("1,3,128", 1, 2, 128, 128),
    make_stack("2,3,128", 2, 128, 128, text="z = MatMul(x, w) y = MatMul(z, w)"),
    make_stack("128,128", 2, 128, 128, text="y = MatMul(w, x)"),
], ids=["small", "unknown", "repeated", "two axes", "more axes", "an axis", "two readers", "on the left"])  # fmt: skip
def test_other_stacks_stay(stack: ModelProto) -> None:
    assert_untouched(part_stacks, stack)


def test_experts_compute_in_integers() -> None:
    text = "u = MatMul(x, w) r = Relu(u) y = MatMul(r, v)"
    weights = {name: np.random.default_rng(0).standard_normal((4, 128, 128)).astype(np.float32) / 11 for name in "wv"}
    net = infer_shapes(parse(f"g (float[T,128] x) => (float[4,T,128] y) {{ {text} }}", **weights))
    samples = [{"x": np.random.default_rng(k).standard_normal((32, 128)).astype(np.float32)} for k in range(8)]
    for mode in ("static", "weight-only"):
        result = quantize(net, samples, overrides={"mode": mode, "latency": False})
        assert [(count.op, count.quantized, count.total) for count in result.report.ops] == [("MatMul", 5, 5)]
        assert result.report.output_bytes < 0.3 * result.report.source_bytes


# As PyTorch writes the weights of each row's own expert, `w[rows]`.
CHOSEN = """g (int64[T] rows, float[T,1,128] x) => (float[T,1,64] y) {
    k = Unsqueeze(rows, last) m = GatherND(w, k) y = MatMul(x, m) }"""


def make_lookup(text: str = CHOSEN, last: int = -1) -> ModelProto:
    weights = np.random.default_rng(0).standard_normal((6, 128, 64)).astype(np.float32) / 11
    return infer_shapes(parse(text, w=weights, last=np.array([last])))


def test_matrices_of_a_stack_are_looked_up_as_rows() -> None:
    gathered, _ = assert_changed(write_lookups, make_lookup())
    assert [node.op_type for node in gathered.graph.node] == ["Gather", "MatMul"]
    after, _ = assert_changed(flatten_tables, infer_shapes(gathered))
    assert [node.op_type for node in after.graph.node] == ["Gather", "Reshape", "MatMul"]


@pytest.mark.parametrize("lookup", [
    make_lookup("g (int64[6] rows) => (float y) { k = Unsqueeze(rows, last) y = GatherND<batch_dims=1>(w, k) }"),
    make_lookup("g (int64[2] rows) => (float y) { k = Unsqueeze(rows, last) y = GatherND(w, k) }", 0),
], ids=["of each batch", "of several axes"])  # fmt: skip
def test_other_lookups_stay(lookup: ModelProto) -> None:
    assert_untouched(write_lookups, lookup)


def test_a_stack_of_several_lookups_stays() -> None:
    text = "g (int64[T] rows) => (float y, float z) { y = Gather(w, rows) z = Gather(w, last) }"
    assert_untouched(flatten_tables, make_lookup(text))


def test_experts_of_each_row_are_stored_in_integers() -> None:
    rng = np.random.default_rng(0)
    samples = [
        {"rows": rng.integers(6, size=8), "x": rng.standard_normal((8, 1, 128)).astype(np.float32)} for _ in range(8)
    ]
    for overrides in ({}, {"mode": "weight-only", "embeddings": "int4"}):
        report = quantize(make_lookup(), samples, overrides={"latency": False, **overrides}).report
        assert report.output_bytes < (0.2 if overrides else 0.3) * report.source_bytes
        assert report.figures[0].sqnr_db > (15 if overrides else 30)


@pytest.mark.parametrize(
    ("gemm", "inputs", "behind"),
    [
        ("Gemm<beta=0.0>(x, w, c)", 2, []),
        ("Gemm<beta=0.0>(x, w)", 2, []),
        ("Gemm<alpha=2.0, beta=0.5, transB=1>(x, w, b)", 3, []),
        ("Gemm<alpha=2.0>(x, w)", 2, []),
        ("Gemm<transB=1>(x, w, one)", 2, ["Add"]),
        ("Gemm<alpha=2.0>(x, w, x)", 2, ["Add"]),
        # As many values as columns, and one a row.
        ("Gemm(x, w, rows)", 2, ["Add"]),
    ],
)
def test_a_gemm_is_a_product_and_one_bias_a_column(gemm: str, inputs: int, behind: list[str]) -> None:
    weights = random_weights({"w": (8, 8), "b": (8,), "c": (1, 8), "one": (), "rows": (8, 1)})
    before = infer_shapes(parse(f"g (float[8,8] x) => (float[8,8] y) {{ y = {gemm} }}", **read_by(gemm, weights)))
    after, _ = assert_changed(part_gemms, before)
    node, *others = after.graph.node
    assert (len(node.input), [other.op_type for other in others]) == (inputs, behind)
    assert [attribute.name for attribute in node.attribute] == ["transB"] * ("transB" in gemm)
    overrides = {"latency": False, "cpu": "vnni", "rules": [{"op": "Gemm", "set": {"quantize": True}}]}
    result = quantize(before, random_weights({"x": (8, 8, 8)}), overrides=overrides)
    assert not result.report.refusals
    assert result.plan.sites


@pytest.mark.parametrize(("weight", "attributes"), [((8, 8), {"beta": [0.5, 0.5]}), ((8,), {})])
def test_a_gemm_that_is_no_gemm_is_left_to_onnx_runtime(weight: tuple[int, ...], attributes: dict[str, object]) -> None:
    text = "g (float[3,8] x) => (float[3,8] y) { y = Gemm(x, w, b) }"
    before = infer_shapes(parse(text, **random_weights({"w": weight, "b": (8,)})))
    before.graph.node[0].attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    with pytest.raises(OnnxqError):
        quantize(before, random_weights({"x": (4, 3, 8)}))


def test_a_computed_bias_keeps_its_factor() -> None:
    text = "g (float[3,8] x, float[3,8] z) => (float[3,8] y) { y = Gemm<beta=0.5>(x, w, z) }"
    assert_untouched(part_gemms, infer_shapes(parse(text, **random_weights({"w": (8, 8)}))))


@pytest.mark.parametrize(
    ("nodes", "behind"),
    [
        ("y = ConvTranspose<strides=[2,2], pads=[0,0,0,0], group=1>(x, w, b)", ["DepthToSpace"]),
        ("m = ConvTranspose<strides=[2,2], kernel_shape=[2,2]>(x, w) y = LeakyRelu(m)", ["LeakyRelu", "DepthToSpace"]),
        ("m = ConvTranspose<strides=[2,2]>(x, w, b) n = Relu(m) y = Add(m, n)", ["DepthToSpace", "Relu", "Add"]),
        ("y = ConvTranspose<strides=[2,2]>(x, w, zeros)", ["DepthToSpace"]),
        ("y = ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(x, v, b)", ["DepthToSpace"]),
        ("y = ConvTranspose<strides=[2,2], pads=[1,0,1,2]>(x, v)", ["DepthToSpace"]),
        ("y = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, u, b)", ["DepthToSpace"]),
        ("y = ConvTranspose<strides=[2,2], pads=[0,1,1,0]>(x, u)", ["DepthToSpace"]),
        ("y = ConvTranspose<strides=[2,2], pads=[0,0,0,2]>(x, v)", ["DepthToSpace"]),
        ("y = ConvTranspose<pads=[1,1,1,1]>(x, u)", []),
        ("m = ConvTranspose<strides=[1,1], pads=[0,1,2,1], output_padding=[0,0]>(x, v, b) y = Relu(m)", ["Relu"]),
    ],
)
def test_what_enlarges_by_its_stride_is_a_conv_and_a_depth_to_space(nodes: str, behind: list[str]) -> None:
    shapes = {"w": (64, 32, 2, 2), "u": (64, 32, 3, 3), "v": (64, 32, 4, 4), "b": (32,)}
    weights = {**random_weights(shapes), "zeros": np.zeros(32, np.float32)}
    text = f"g (float[1,64,6,8] x) => (float y) {{ {nodes} }}"
    before = infer_shapes(parse(text, **read_by(nodes, weights)))
    after, _ = assert_changed(write_out_upsampling, before)
    assert [node.op_type for node in after.graph.node] == ["Conv", *behind]
    result = quantize(before, random_weights({"x": (8, 64, 6, 8)}), overrides={"latency": False, "cpu": "vnni"})
    assert not result.report.refusals
    assert "QLinearConv" in {node.op_type for node in optimize_graph(result.model).graph.node}


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_no_size_is_declared_that_is_another_one_now(activation: str) -> None:
    """onnxruntime-web refuses such a model."""
    nodes = f"m = ConvTranspose<strides=[2,2]>(x, w) y = {activation}(m)"
    text = f"g (float[1,64,6,8] x) => (float[1,32,12,16] y) {{ {nodes} }}"
    before = infer_shapes(parse(text, **random_weights({"w": (64, 32, 2, 2)})))
    after, _ = assert_changed(write_out_upsampling, before)
    shape_inference.infer_shapes(after, strict_mode=True)


@pytest.mark.parametrize(
    "asked", [{"node": "y/ConvTranspose"}, {"op": "ConvTranspose"}, {"tensor": "x"}, {"role": "activation"}]
)
def test_a_transposed_convolution_that_a_rule_leaves_float_stays_one(asked: dict[str, str]) -> None:
    text = "g (float[1,64,6,8] x) => (float[1,32,12,16] y) { y = ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(x, v) }"
    model = parse(text, **random_weights({"v": (64, 32, 4, 4)}))
    rules = [{**asked, "set": {"float": True}}]
    result = quantize(model, random_weights({"x": (8, 64, 6, 8)}), overrides={"latency": False, "rules": rules})
    assert [node.op_type for node in result.model.graph.node] == ["ConvTranspose"]


@pytest.mark.parametrize(("kernel", "step", "pads"), [(16, 8, (4, 4)), (4, 2, (1, 1)), (2, 2, (0, 0)), (5, 3, (2, 0))])
def test_signals_are_enlarged_by_a_conv_and_a_transpose(kernel: int, step: int, pads: tuple[int, int]) -> None:
    convs = f"m = ConvTranspose<strides=[{step}], pads={list(pads)}>(x, w, b) n = LeakyRelu(m) y = Conv(n, v)"
    text = f"g (float[2,64,15] x) => (float[2,8,{15 * step}] y) {{ {convs} }}"
    before = infer_shapes(parse(text, **random_weights({"w": (64, 64, kernel), "b": (64,), "v": (8, 64, 1)})))
    after, _ = assert_changed(write_out_upsampling, before)
    moved = ["Reshape", "Transpose", "Reshape"]
    assert [node.op_type for node in after.graph.node] == ["Conv", "LeakyRelu", *moved, "Conv"]
    result = quantize(before, random_weights({"x": (8, 64, 15)}), overrides={"latency": False, "cpu": "vnni"})
    assert not result.report.refusals
    assert "ConvTranspose" not in {node.op_type for node in optimize_graph(result.model).graph.node}


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ("strides=[2,2]", (64, 32, 3, 3)),
        ("strides=[2,2,2]", (64, 32, 2, 2, 2)),
        ("strides=[2,2], pads=[1,1,1,1]", (64, 32, 2, 2)),
        ("strides=[2,2], pads=[1,1,1,1]", (64, 32, 3, 3)),
        ("strides=[2,2], pads=[1,1,1,1]", (512, 3, 4, 4)),
        ("strides=[4,4], output_padding=[2,2]", (64, 128, 2, 2)),
        ("strides=[2,2], output_padding=[1,1]", (64, 32, 2, 2)),
        ("strides=[2,2], dilations=[2,2]", (64, 32, 2, 2)),
        ("strides=[2,2], group=2", (64, 32, 2, 2)),
        ("strides=[1,2]", (64, 32, 1, 2)),
        ('strides=[2,2], auto_pad="SAME_UPPER"', (64, 32, 2, 2)),
        ("strides=[2,2]", (64, 4, 2, 2)),
        ("pads=[2,2,2,2]", (64, 32, 2, 2)),
        ("group=2", (64, 32, 3, 3)),
    ],
)
def test_other_transposed_convolutions_stay(attributes: str, shape: tuple[int, ...]) -> None:
    size = [1, *shape[:1], 6, 8, 4][: len(shape)]
    text = f"g (float{size} x) => (float y) {{ y = ConvTranspose<{attributes}>(x, w) }}".replace("<>", "")
    assert_untouched(write_out_upsampling, infer_shapes(parse(text, **random_weights({"w": shape}))))
