"""Where pairs for OpenVINO stand: on what its kernels read, and behind the activations that they compute as well."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import onnxq
from onnxq.backends import Candidate, find_target
from onnxq.backends.costs import OpCase
from onnxq.backends.openvino.misreads import check_transposed
from onnxq.graph import get_index
from onnxq.runtime import Session
from onnxq.sites import Role, TensorId
from tests.backends.openvino.graphs import (
    check_part,
    make_net,
    make_samples,
    needs_openvino,
    quantize_all,
    quantize_beside,
    quantize_net,
)
from tests.codes.kit import model
from tests.passes.kit import random_weights

pytestmark = pytest.mark.usefixtures("engines_here")


def list_pairs(role: Role) -> set[str]:
    return {
        site.site.name for site in quantize_net().plan.sites if site.role is role and isinstance(site.site, TensorId)
    }


def test_pairs_stand_behind_activations_and_nowhere_within_a_kernel() -> None:
    pairs = list_pairs(Role.ACTIVATION)
    assert {"x", "sr", "er", "dr", "r"} <= pairs
    # In front of a Relu, of x * Sigmoid(x) and of a residual sum, and behind what nothing reads in integers.
    assert not pairs & {"s", "e", "d", "p", "h", "hg", "y"}


def test_a_stem_is_left_float_unless_it_is_forced() -> None:
    assert "w0" in list_pairs(Role.WEIGHT)
    free = onnxq.make_plan(make_net(), overrides={"target": "openvino"})
    assert {left.subject: left.rule for left in free.left_float}["stem"] == "stem"


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_tables_of_costs_are_its_own_and_favour_integers_in_wide_products(cpu: str) -> None:
    costs, others = find_target("openvino").costs[cpu], find_target("ort").costs[cpu]
    assert "OpenVINO" in costs.origin
    conv = OpCase(
        op_type="Conv", inputs=((1, 128, 28, 28),), output=(1, 128, 28, 28), weight=(128, 128, 3, 3), kernel=(3, 3)
    )
    cost = costs.predict_node(conv)
    assert 0 < cost.int8_us < cost.float_us < math.inf
    assert cost != others.predict_node(conv)


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_a_stride_makes_a_depthwise_convolution_no_dearer(cpu: str) -> None:
    costs = find_target("openvino").costs[cpu]
    whole, half = (
        OpCase(
            op_type="Conv",
            inputs=((1, 96, 28, 28),),
            output=(1, 96, 28 // stride, 28 // stride),
            weight=(96, 1, 3, 3),
            group=96,
            kernel=(3, 3),
            strides=(stride, stride),
        )
        for stride in (1, 2)
    )
    assert costs.predict_node(half).float_us < costs.predict_node(whole).float_us


@pytest.mark.parametrize("free", [False, True])
def test_matrices_are_convolutions_of_one_tap_unless_the_file_is_for_vnni_alone(free: bool) -> None:
    """Where sizes change from run to run OpenVINO transposes, which takes longer than small products do."""
    rng = np.random.default_rng(0)
    weights = {"w": (512, 512), "v": (8, 8), "u": (512, 32)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    size = "N" if free else "16"
    text = f"""g (float[1,{size},512] x) => (float[1,{size},512] y, float[1,{size},32] z) {{
        [first] h = MatMul(x, w) b = Reshape(h, four) [second] p = MatMul(b, v) y = Reshape(p, three)
        [third] z = MatMul(x, u) }}"""
    net = model(text, four=np.array([1, -1, 64, 8]), three=np.array([1, -1, 512]), **arrays)
    samples = [{"x": rng.standard_normal((1, 16, 512)).astype(np.float32)} for _ in range(8)]

    def quantize(cpu: str) -> tuple[dict[str, str], list[np.ndarray]]:
        result = quantize_all(net, samples, cpu=cpu)
        assert any("while sizes change" in warning for warning in result.plan.warnings) == (free and cpu == "any")
        proto = result.model
        answers = Session(proto, optimize=False).run(samples[0])
        products = {node.name: node.op_type for node in proto.graph.node if node.op_type in ("Conv", "MatMul")}
        return products, [np.asarray(answers[name]) for name in ("y", "z")]

    products, answers = quantize("any")
    small = "MatMul" if free else "Conv"
    assert products == {"first": "Conv", "second": small, "third": small}
    assert quantize("avx2")[0] == products
    matrices, same = quantize("vnni")
    assert matrices == dict.fromkeys(products, "MatMul")
    for answer, other in zip(answers, same, strict=True):
        np.testing.assert_allclose(answer, other, rtol=1e-5, atol=1e-4)


def test_a_matrix_in_integers_pays_for_avx2_as_a_convolution_alone() -> None:
    costs = find_target("openvino").costs["avx2"]
    case = OpCase(op_type="MatMul", inputs=((1, 96, 384),), output=(1, 96, 384), weight=(384, 384))
    plain, convolution = costs.predict_node(case), costs.predict_node(replace(case, pointwise=True))
    assert convolution.int8_us < plain.float_us == convolution.float_us < plain.int8_us


# What reads a convolution c and its Relu a, the bias of c, and whether it is refused where sizes are fixed, and free.
READERS = {
    "one channel": ("y = Gather<axis=2>(a, row)", "", True, True),
    "channels in an order": ("y = Gather<axis=2>(a, rows)", "", True, True),
    "channels in an order of sums with a bias": ("y = Gather<axis=2>(a, rows)", "b", False, False),
    "channels in an order behind a Pad": ("t = Pad(a, around) y = Gather<axis=2>(t, rows)", "", True, True),
    "channels in an order behind a Split": ("t, z = Split<axis=3>(a) y = Gather<axis=2>(t, rows)", "", True, True),
    "channels in an order behind a sign": ("t = Neg(c) y = Gather<axis=2>(t, rows)", "", True, True),
    "one row": ("y = Gather<axis=1>(a, row)", "", False, False),
    "channels of a list": ("y = Gather<axis=2>(a, list)", "", False, False),
    "a sign": ("y = Neg(a)", "", True, True),
    "factors": ("y = Mul(a, factors)", "", True, True),
    "factors behind a pool": ("t = MaxPool<kernel_shape=[2,2]>(a) y = Mul(t, factors)", "", True, True),
    "factors in front of the Relu": ("y = Mul(c, factors)", "", False, False),
    "factors behind a pool in front of the Relu": (
        "t = MaxPool<kernel_shape=[2,2]>(c) y = Mul(t, factors)", "", False, False,
    ),
    "factors of sums with a bias": ("y = Mul(a, factors)", "b", False, False),
    "two readers": ("t = Tanh(c) y = Sub(c, t)", "", False, True),
    "two readers of sums with a bias of zeros": ("t = Tanh(c) y = Sub(c, t)", "zeros", False, True),
    "two readers of sums with a bias": ("t = Tanh(c) y = Sub(c, t)", "b", False, False),
    "a sum with itself": ("y = Add(c, c)", "", False, True),
    "a Swish": ("t = Sigmoid(c) y = Mul(c, t)", "", False, False),
    "a HardSwish": ("t = HardSigmoid(c) y = Mul(c, t)", "", False, False),
    "a gate and another product": ("t = Sigmoid(c) z = Mul(c, factors) y = Add(t, z)", "", False, True),
    "another activation": ("y = Tanh(a)", "", False, False),
}  # fmt: skip


@cache
def quantize_readers(batch: str) -> onnxq.Result:
    """A convolution for each of the readers."""
    rng = np.random.default_rng(3)
    arrays = {
        "w": (rng.standard_normal((8, 3, 1, 1)) * np.linspace(0.1, 2, 8).reshape(8, 1, 1, 1)).astype(np.float32),
        "factors": np.linspace(-2, 1, 8, dtype=np.float32).reshape(8, 1, 1), "row": np.array(3),
        "rows": np.array([[3], [1]]), "list": np.array([3, 1]), "b": rng.standard_normal(8).astype(np.float32),
        "zeros": np.zeros(8, np.float32), "around": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    }  # fmt: skip
    head = f"g (float[{batch},3,16,16] x) => (float[M] y) {{ [conv] c = Conv"
    texts = [f"{head}(x, w{bias and f', {bias}'}) a = Relu(c) {nodes} }}" for nodes, bias, *_ in READERS.values()]
    return quantize_beside(texts, arrays, skip=["rounding"])


@needs_openvino
@pytest.mark.parametrize("batch", ["1", "N"])
@pytest.mark.parametrize("reader", READERS)
def test_no_convolution_is_in_integers_whose_scales_openvino_moves_wrongly_or_loses(reader: str, batch: str) -> None:
    *_, fixed, free = READERS[reader]
    refused = fixed if batch == "1" else free
    check_part(quantize_readers(batch), list(READERS).index(reader), "conv" if refused else "")


# What reads a size of t, the sizes of x, and whether convolutions around t are refused.
SIZES = {
    "a Range": ("w = Gather(s, three) y2 = Range(zero, w, one)", "N,3,H,W", True),
    "a Slice": ("w = Slice(s, last, four) y2 = Slice(c, nil, w, last)", "N,3,H,W", True),
    "a Reshape": ("w = Slice(s, last, four) p = Concat<axis=0>(rows, w) y2 = Reshape(c, p)", "N,3,H,W", True),
    "a Range of the number of samples": ("w = Gather(s, zero) y2 = Range(zero, w, one)", "N,3,16,16", True),
    "a Reshape by the number of samples": (
        "w = Slice(s, nil, one1) p = Concat<axis=0>(w, rows) y2 = Reshape(c, p)", "N,3,16,16", False,
    ),
    "sizes that are fixed": ("w = Gather(s, three) y2 = Range(zero, w, one)", "1,3,16,16", False),
    "an Expand": ("y2 = Expand(twice, s)", "N,3,H,W", False),
    "a Range of one axis": ("w = Gather(s, two) y2 = Range(zero, w, one)", "N,3,L", False),
    "a Slice of one axis": ("w = Slice(s, last, four) y2 = Slice(c, nil, w, last)", "N,3,L", False),
    "a Range, of curves": ("w = Gather(s, three) y2 = Range(zero, w, one)", "N,3,H,W", None),
}  # fmt: skip


@needs_openvino
@pytest.mark.parametrize(("readers", "sizes", "refused"), SIZES.values(), ids=SIZES)
def test_no_convolution_is_in_integers_where_sizes_are_read(readers: str, sizes: str, refused: bool | None) -> None:
    rng, axes = np.random.default_rng(4), sizes.count(",") - 1
    arrays = {f"b{k}": rng.standard_normal(16).astype(np.float32) for k in range(3)}
    for k, channels in enumerate((3, 16, 16)):
        arrays[f"w{k}"] = (rng.standard_normal((16, channels, *[3] * axes)) / (3 * channels**0.5)).astype(np.float32)
    arrays |= {name: np.array(value) for name, value in {"zero": 0, "one": 1, "two": 2, "three": 3}.items()}
    arrays |= {"twice": np.full((1, 1, 1, 1), 2.0, np.float32), "rows": np.array([-1, 16]), "nil": np.array([0])}
    arrays |= {"last": np.array([axes + 1]), "four": np.array([axes + 2]), "one1": np.array([1])}
    # Scales cannot be moved past a Swish.
    curve = "t = Identity(d)" if refused is not None else "f = Mul(d, twice) g = Sigmoid(f) t = Mul(d, g)"
    last = "c = Identity(e)" if refused is not None else "c = HardSwish(e)"
    pads = [1] * 2 * axes
    nodes = f"""[front] a = Conv<pads={pads}>(x, w0, b0) r = Relu(a) [beside] d = Conv<pads={pads}>(r, w1, b1)
        {curve} [behind] e = Conv<pads={pads}>(t, w2, b2) {last} y = Softmax<axis=1>(c)"""
    net = model(f"g (float[{sizes}] x) => (float[M] y, float[M] y2) {{ {nodes} s = Shape(t) {readers} }}", **arrays)
    for value in net.graph.output:
        value.type.tensor_type.ClearField("shape")
    net.graph.output[1].type.tensor_type.elem_type = 7 if "Range" in readers else 1
    samples = [{"x": one["x"].reshape(1, 3, *[-1] * (axes == 1) or (16, 16))} for one in make_samples()]
    result = quantize_all(net, samples)
    subjects = {refusal.subject for refusal in result.plan.refusals}
    assert subjects & {"front", "beside", "behind"} == ({"beside", "behind"} if refused else set())
    assert result.report.engines[0].outputs[0].sqnr_db > 25


OPS = ("Gemm", "MatMul")
# The data of a product, made from x of [2, 4, 6, 8], and whether a pair there is refused.
MEANS = {
    "factors": ("m = ReduceMean<axes=[1,2], keepdims=0>(x) d = Mul(m, factors)", True),
    "a shift and an activation": ("m = ReduceMean<axes=[1,-2], keepdims=0>(x) s = Add(factors, m) d = Relu(s)", True),
    "another reduction": ("m = ReduceMax<axes=[1,2], keepdims=0>(x) d = Div(m, factors)", True),
    "one factor": ("m = ReduceMean<axes=[1,2], keepdims=0>(x) d = Mul(m, two)", False),
    "axes that stay": ("m = ReduceMean<axes=[1,2], keepdims=1>(x) s = Squeeze(m, sides) d = Mul(s, factors)", False),
    "another axis": ("m = ReduceMean<axes=[2], keepdims=0>(x) s = Mul(m, factors) d = Reshape(s, rows)", False),
    "no factors": ("d = ReduceMean<axes=[1,2], keepdims=0>(x)", False),
}
MEAN_NETS = {
    f"{name} {op}": (f"g (float[2,4,6,8] x) => (float[R,16] y) {{ {nodes} [product] y = {op}(d, w) }}", refused)
    for name, (nodes, refused) in MEANS.items()
    for op in OPS
} | {
    f"axis {axis} Conv": (
        f"""g (float[2,8,8,10] x) => (float[2,4,10] y) {{
            m = ReduceMean<axes=[{axis}], keepdims=0>(x) d = Mul(m, columns) [product] y = Conv(d, v, b) }}""",
        refused,
    )
    for axis, refused in ((1, True), (2, False))
}


@cache
def quantize_means() -> onnxq.Result:
    rng = np.random.default_rng(4)
    arrays = {
        "factors": np.linspace(0.2, 3, 8, dtype=np.float32), "two": np.float32(2), "sides": np.array([1, 2]),
        "rows": np.array([-1, 8]), "w": rng.standard_normal((8, 16)).astype(np.float32),
        "columns": np.linspace(0.2, 3, 8, dtype=np.float32).reshape(1, 8, 1),
        "v": rng.standard_normal((4, 8, 1)).astype(np.float32), "b": np.ones(4, np.float32),
    }  # fmt: skip
    return quantize_beside([text for text, _ in MEAN_NETS.values()], arrays, low=0.5, skip=["rounding"])


@needs_openvino
@pytest.mark.parametrize("name", MEAN_NETS)
def test_no_pair_stands_behind_a_mean_and_factors_which_openvino_computes_wrongly(name: str) -> None:
    check_part(quantize_means(), list(MEAN_NETS).index(name), "product" if MEAN_NETS[name][1] else "")


# What leads from x of [1, 32, 8, 8] to a product, and whether a pair there is refused.
LARGEST = [
    ("d = GlobalMaxPool(x) [product] y = Conv(d, w)", True),
    ("d = ReduceMax(x, sides) [product] y = Conv(d, w)", True),
    ("n = ReduceMin(x, sides) d = Relu(n) [product] y = Conv(d, w)", True),
    ("m = ReduceMax<keepdims=0>(x, sides) d = Add(m, half) [product] y = Gemm(d, v)", True),
    ("m = ReduceMax<keepdims=0>(x, sides) [product] y = MatMul(m, v)", True),
    ("m = ReduceMax(x, sides) d = Reshape(m, rows) [product] y = Gemm(d, v)", False),
    ("a = ReduceMean(x, one) b = ReduceMax(x, one) d = Concat<axis=1>(a, b) [product] y = Conv(d, u)", False),
]


@cache
def quantize_largest() -> onnxq.Result:
    arrays = random_weights({"w": (32, 32, 1, 1), "v": (32, 32), "u": (32, 2, 7, 7)})
    arrays |= {"sides": np.array([2, 3]), "one": np.array([1]), "rows": np.array([-1, 32]), "half": np.float32(0.5)}
    texts = [f"g (float[1,32,8,8] x) => (float[M] y) {{ {nodes} }}" for nodes, _ in LARGEST]
    return quantize_beside(texts, arrays, low=0.5, opset=18, skip=["rounding"])


@needs_openvino
@pytest.mark.parametrize("k", range(len(LARGEST)))
def test_no_pair_stands_behind_the_largest_of_values_which_openvino_computes_wrongly(k: int) -> None:
    """As in PointNet and in the attention of CBAM."""
    check_part(quantize_largest(), k, "product" if LARGEST[k][1] else "")


# Rows of x, what leads to a product behind another, and whether a pair there is refused.
CHAINS = [
    ("1", "h = Gemm(x, w, b) r = Relu(h) d = Mul(r, factors)", True),
    ("15", "h = Gemm(x, w, b) r = Relu(h) d = Add(r, factors)", True),
    ("1", "m = MatMul(x, w) h = Add(m, b) r = Relu(h) d = Mul(r, factors)", True),
    ("1", "m = MatMul(x, w) h = Add(m, b) d = Relu(h)", False),
    ("1", "h = Gemm(x, w, b) r = Relu(h) d = Mul(r, two)", False),
    ("1", "h = Gemm(x, w, b) r = Elu(h) d = Mul(r, factors)", False),
    ("16", "h = Gemm(x, w, b) r = Relu(h) d = Mul(r, factors)", False),
    ("N", "h = Gemm(x, w, b) r = Relu(h) d = Mul(r, factors)", False),
    ("1", "p = Concat<axis=1>(x, x, x, x, x) h = Gemm(p, u, b) d = Mul(h, factors)", False),
]


@cache
def quantize_chains() -> onnxq.Result:
    arrays = random_weights({"w": (64, 64), "u": (320, 64), "v": (64, 64), "b": (64,)})
    arrays |= {"factors": np.linspace(0.5, 1.5, 64, dtype=np.float32), "two": np.float32(2)}
    texts = [
        f"g (float[{rows},64] x) => (float[M,64] y) {{ {nodes} [product] y = Gemm(d, v, b) }}"
        for rows, nodes, _ in CHAINS
    ]
    return quantize_beside(texts, arrays, skip=["rounding"])


@needs_openvino
@pytest.mark.parametrize("k", range(len(CHAINS)))
def test_no_pair_stands_between_small_products_and_factors_which_openvino_computes_wrongly(k: int) -> None:
    """As where SmoothQuant divides between the layers of a policy for a robot."""
    check_part(quantize_chains(), k, "product" if CHAINS[k][2] else "")


# Between a Concat and a product.
BETWEEN = ("d = Identity(c)", "d = Mul(c, half)", "d = Relu(c)", "s = Add(c, half) d = Relu(s)")
# Networks, and whether a product is refused.
JOINED = [
    (
        f"""g (float[10,32] x, float[10,{other}] z) => (float[{rows},16] y) {{
            c = Concat<axis={axis}>(x, z) {nodes} [product] y = {op}(d, {weight}) }}""",
        axis == 0,
    )
    for axis, other, rows, weight in ((0, 32, 20, "v"), (1, 16, 10, "u"))
    for nodes in BETWEEN
    for op in OPS
] + [
    (
        f"""g (float[10,32] x) => (float[20,16] y, float[20,16] z) {{
            a = Relu(x) b = Abs(x) c = Concat<axis=0>(a, b) {nodes} [product] y = {op}(d, w)
            [other] z = {op}(c, v) }}""",
        True,
    )
    for nodes in BETWEEN[1:]
    for op in OPS
]


@cache
def quantize_joined() -> onnxq.Result:
    rng = np.random.default_rng(4)
    sizes = {"v": 32, "w": 32, "u": 48}
    arrays = {name: rng.standard_normal((size, 16)).astype(np.float32) for name, size in sizes.items()}
    texts = [text for text, _ in JOINED]
    return quantize_beside(texts, arrays | {"half": np.float32(0.5)}, skip=["rounding", "scalars"])


@needs_openvino
@pytest.mark.parametrize("k", range(len(JOINED)))
def test_no_pair_stands_between_a_concat_of_rows_and_a_product_nor_two_around_what_computes_each_value(k: int) -> None:
    """As RT-DETR joins and masks the values that its decoder reads: OpenVINO refused the network, or crashed."""
    check_part(quantize_joined(), k, "product" if JOINED[k][1] else "")


@needs_openvino
def test_a_gemm_whose_bias_is_one_number_stays_float() -> None:
    rng = np.random.default_rng(4)
    weights = {name: rng.standard_normal((32, 16)).astype(np.float32) for name in ("v", "w")}
    text = """g (float[4,32] x) => (float[4,16] y, float[4,16] z) {
        [one] y = Gemm(x, v, number) [row] z = Gemm(x, w, biases)
    }"""
    net = model(text, number=np.full((1, 1), 0.25, np.float32), biases=np.ones(16, np.float32), **weights)
    samples = [{"x": rng.standard_normal((4, 32)).astype(np.float32)} for _ in range(8)]
    result = quantize_all(net, samples, skip=["addends"])
    (refusal,) = result.plan.refusals
    assert (refusal.subject, refusal.reason) == ("one", "its C input does not hold one bias a column")


@needs_openvino
def test_an_empty_name_in_the_place_of_a_bias_is_taken_out() -> None:
    """OpenVINO, which makes a value of unknown rank of it, refused the whole network."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((64, 32)).astype(np.float32)
    proto = model("g (float[16,64] x) => (float[16,32] y) { h = Gemm(x, w) y = Relu(h) }", w=weight)
    proto.graph.node[0].input.append("")
    samples = [{"x": rng.standard_normal((16, 64)).astype(np.float32)} for _ in range(8)]
    result = onnxq.quantize(proto, samples, overrides={"target": "openvino", "effort": "fast", "latency": False})
    assert result.report.engines[0].outputs[0].sqnr_db > 25


@needs_openvino
def test_transposed_convolutions_run_in_integers_behind_data_that_are_never_negative() -> None:
    """Of several groups and with strides of 4 they have no such kernel, and with gaps OpenVINO computed 2 dB."""
    rng = np.random.default_rng(5)
    net = model(
        """g (float[1,16,8,8] x) => (float[1,8,16,16] a, float[1,8,5,5] b, float[1,8,32,32] c, float[1,16,16,16] d,
                                      float[1,8,23,23] e, float[1,8,16,16] f) {
        h = Conv<pads=[1,1,1,1]>(x, w, v) r = Clip(h, zero, six) m = MaxPool<kernel_shape=[2,2],strides=[2,2]>(r)
        [even] a = ConvTranspose<strides=[2,2]>(r, w2, v2) [odd] b = ConvTranspose<pads=[1,1,1,1]>(m, w4)
        [wide] c = ConvTranspose<strides=[4,4]>(r, w4, v2) [grouped] d = ConvTranspose<strides=[2,2], group=2>(r, w2, v)
        [gaps] e = ConvTranspose<strides=[3,3]>(r, w2, v2) [signed] f = ConvTranspose<strides=[2,2]>(x, w2, v2) }""",
        zero=np.float32(0),
        six=np.float32(6),
        **random_weights({"w": (16, 16, 3, 3), "v": (16,), "w2": (16, 8, 2, 2), "w4": (16, 8, 4, 4), "v2": (8,)}),
    )
    samples = [{"x": rng.standard_normal((1, 16, 8, 8)).astype(np.float32)} for _ in range(8)]
    result = quantize_all(net, samples)
    assert min(output.sqnr_db for output in result.report.engines[0].outputs) > 30
    proof = onnxq.prove(result.model, overrides={"engine": "openvino"})
    assert {node.node: node.type for node in proof.nodes if node.op == "ConvTranspose"} == {
        name: "int8" if name in ("even", "odd") else "float32"
        for name in ("even", "odd", "wide", "grouped", "gaps", "signed")
    }


def test_a_transposed_convolution_by_a_computed_weight_of_unknown_size_stays_float() -> None:
    net = model(
        """g (float[1,16,8,8] x, float[a,b,c,d] k) => (float[1,e,f,g] y) {
        r = Relu(x) w = Relu(k) [by] y = ConvTranspose<strides=[2,2]>(r, w) }"""
    )
    index = get_index(net)
    assert check_transposed(Candidate(index.find_node("by"), index, {})) == "its weight is computed at run time"


@pytest.mark.parametrize("channels", [128, 256])
def test_a_transposed_convolution_pays_but_for_large_ones_with_avx2(channels: int) -> None:
    case = OpCase(
        op_type="ConvTranspose",
        inputs=((1, channels, 28, 28),),
        output=(1, 64, 56, 56),
        weight=(channels, 64, 2, 2),
        strides=(2, 2),
    )
    vnni, avx2 = (find_target("openvino").costs[cpu].predict_node(case) for cpu in ("vnni", "avx2"))
    assert vnni.int8_us < vnni.float_us / 2
    # There they are computed in float.
    assert (avx2.int8_us < avx2.float_us / 1.4) == (channels == 128)
    assert (avx2.int8_us < avx2.float_us) == (channels == 128)


@needs_openvino
@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
def test_no_pairs_come_to_both_operands_of_a_product_of_activations(scheme: str) -> None:
    """As in EfficientViT's linear attention: sums of 16 bits overflowed with AVX2, and what is padded was unset."""
    rng = np.random.default_rng(4)
    arrays = {"w0": np.eye(16, dtype=np.float32).reshape(16, 16, 1, 1), **random_weights({"w1": (16, 1, 3, 3)})}
    net = model(
        """g (float[1,16,8,8] x) => (float[1,4,2,3] padded, float[1,4,4,4] alike, float[1,16,8,8] d) {
        [first] q = Conv(x, w0) [depthwise] d = Conv<group=16, pads=[1,1,1,1]>(q, w1)
        r = Reshape(q, heads) t = Transpose<perm=[0,1,3,2]>(r) k, v = Split<axis=3>(t) kr = Relu(k)
        kt = Transpose<perm=[0,1,3,2]>(kr) p = Pad(v, pads, one) padded = MatMul(kt, p)
        alike = MatMul(r, t) }""",
        heads=np.array([1, 4, 4, 64]),
        pads=np.array([0, 0, 0, 0, 0, 0, 0, 1]),
        one=np.float32(1),
        **arrays,
    )
    # Their range gives a zero point of 128, with which integers need no shift.
    samples = [{"x": rng.uniform(-1, 0.99, (1, 16, 8, 8)).astype(np.float32)} for _ in range(8)]
    result = quantize_all(net, samples, skip=["rounding", "ranges"], activations={"scheme": scheme})
    assert "depthwise" in {refusal.subject for refusal in result.plan.refusals}
    assert min(output.sqnr_db for output in result.report.engines[0].outputs) > 40
