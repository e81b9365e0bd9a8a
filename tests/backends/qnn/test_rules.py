"""Placement for Qualcomm's NPU: a pair on every side of every node, in the widths that are asked for."""

from collections import defaultdict
from collections.abc import Container, Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

import onnxq
from onnxq.backends import find_target
from onnxq.backends.base import Candidate
from onnxq.graph import GraphIndex, NodeRef, infer_shapes, name_nodes
from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.numerics import fake_quant
from onnxq.passes.ranges import read_range
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.spec import FIXED, PerChannel
from tests.backends.qnn.graphs import needs_qnn
from tests.backends.qnn.nets import NETS, make_model, make_samples
from tests.passes.kit import Array, parse, read_by
from tests.pipeline.test_random_graphs import graphs

_PAIRS = (Role.ACTIVATION, Role.OUTPUT)
_FOLDED = ("Relu", "Clip")
# Operators of random graphs that no rule is about.
_OTHERS = {"BatchNormalization", "Identity"}
# Not compiled: files alone are looked at here, and test_engine.py of this folder runs the emulator.
_PLANNED = {"latency": False, "verify.emulated": 0}
_QUICK = {**_PLANNED, "effort": "fast"}
_SECOND = "every second in 16"


def widen(*nodes: str) -> dict[str, Any]:
    """A rule that gives the activations of these nodes 16 bits."""
    return {"node": list(nodes), "role": "activation", "set": {"bits": 16}}


@cache
def quantize(widths: str, effort: str = "fast") -> onnxq.Result:
    """All networks. widths: 8, 16, every second operator in 16 and the others in 8, or chosen on the samples."""
    model = make_model()
    wide = [node.name for node in model.graph.node if node.op_type != "Split"][::2]
    rules = {"16": [{"role": "activation", "set": {"bits": 16}}], _SECOND: [widen(*wide)]}.get(widths, [])
    preset = "qnn-mixed" if widths == "chosen" else "qnn-int8"
    overrides = {**_PLANNED, "effort": effort, "rules": rules}
    return onnxq.quantize(model, make_samples(model), preset, overrides=overrides)


def list_words(part: str) -> set[str]:
    return {word for net in NETS.values() for word in getattr(net, part).split()}


def find_gaps(model: onnx.ModelProto, left: Container[str] = ()) -> Iterator[str]:
    """Float tensors without a pair that nodes with a rule read or write. left: those left float."""
    index = GraphIndex(infer_shapes(name_nodes(model)))
    for node in index.nodes:
        if node.op_type in (QUANTIZE, DEQUANTIZE, *_OTHERS) or node.name in left:
            continue
        # The others are attributes to the NPU: bounds, padding, scales.
        edges = node.list_edges()[:1] if node.op_type in ("Clip", "Pad", "Resize") else node.list_edges()
        for tensor in (index.find_input(node, edge.index) for edge in edges):
            maker = index.find_producer(tensor)
            taken_up = node.op_type in _FOLDED and index.find_sole_reader(tensor) is not None
            paired = maker is not None and (maker.op_type == DEQUANTIZE or taken_up)
            if index.find_dtype(tensor) == TensorProto.FLOAT and not paired:
                yield f"{node.name} reads {tensor}"
        readers = index.readers(node.result)
        if not readers or any(reader.op_type not in (QUANTIZE, *_FOLDED) for reader in readers):
            yield f"{node.name} writes {node.result}"


def check_biases(model: onnx.ModelProto) -> int:
    """Count the int32 biases of a model, each of which has the scale of its product."""
    index, count = GraphIndex(name_nodes(model)), 0

    def read_scale(node: NodeRef, k: int) -> Array:
        scale = index.find_constant(index.find_input(index.find_producer(index.find_input(node, k)), 1))
        return scale.astype(np.float64)

    for node in index.nodes:
        bias = index.find_producer(index.find_input(node, 2)) if node.op_type not in (QUANTIZE, DEQUANTIZE) else None
        if bias is not None and index.find_dtype(index.find_input(bias, 0)) == TensorProto.INT32:
            np.testing.assert_allclose(read_scale(node, 2), read_scale(node, 0) * read_scale(node, 1), rtol=1e-6)
            count += 1
    return count


def test_pairs_stand_on_all_sides_and_what_moves_values_shares_one() -> None:
    result = quantize("8")
    assert (*result.report.refusals, *result.report.left_float) == ()
    groups = defaultdict(set)
    for site in result.plan.sites:
        if site.role in _PAIRS:
            groups[site.group or str(site.site)].add(str(site.site))
    assert {frozenset(group) for group in groups.values()} == {frozenset(w.split(",")) for w in list_words("pairs")}
    for role, part in ((Role.WEIGHT, "weights"), (Role.BIAS, "biases")):
        assert {str(site.site) for site in result.plan.sites if site.role is role} == list_words(part)
    assert list(find_gaps(result.model)) == []


@pytest.mark.parametrize(
    ("bits", "wide", "second"), [(8, ("x", "n"), ("gamma",)), (16, (), ("gamma", "a/MatMul/in1", "o/MatMul/in1"))]
)
def test_types_and_scales_are_what_kernels_take(bits: int, wide: tuple[str, ...], second: tuple[str, ...]) -> None:
    sites = {str(site.site): site for site in quantize(str(bits)).plan.sites}
    storage = {name: site.spec.storage for name, site in sites.items() if site.role in _PAIRS}
    # uint16 would be read as 8 bits by what multiplies two activations.
    types = dict.fromkeys(storage, f"uint{bits}") | dict.fromkeys(wide, "uint16") | dict.fromkeys(second, "int16")
    assert storage == types
    assert all(sites[name].spec.symmetric for name in second)
    for site in (sites[name] for name in list_words("weights")):
        assert (site.spec.storage, site.spec.symmetric) == ("int8", True)
        assert isinstance(site.spec.granularity, PerChannel)
    known = {name: site.qparams for name, site in sites.items() if site.qparams and site.qparams.origin == FIXED}
    fixed = {name: (float(qparams.scale), int(qparams.zero_point)) for name, qparams in known.items()}
    signed = {"tt": (2.0**-15, 2**15)} if bits == 16 else {}
    assert fixed == {"ts": (2.0**-bits, 0), "th": (2.0**-bits, 0), **signed}


def test_ranges_in_16_bits_reach_further_than_the_samples() -> None:
    """There are steps enough for data beyond them; in 8 bits they end where the samples do."""
    (narrow, wide) = ({str(site.site): site for site in quantize(bits).plan.sites} for bits in ("8", "16"))
    for name in ("cx", "rx", "tx"):
        np.testing.assert_allclose(read_range(wide[name]), 1.25 * np.array(read_range(narrow[name])), rtol=0.02)


def check_one_partition(result: onnxq.Result) -> None:
    """The NPU takes the whole network, and computes it well."""
    (engine,) = result.report.engines
    assert engine.partitions == 1
    assert not engine.left
    assert engine.outputs[0].sqnr_db > 25


@needs_qnn
@pytest.mark.parametrize("widths", ["8", "16", _SECOND])
def test_the_npu_runs_all_in_one_partition_of_integers(widths: str) -> None:
    overrides = {"engine": "qnn", "require_int": True, "max_partitions": 1}
    proof = onnxq.prove(quantize(widths).model, overrides=overrides)
    assert (proof.placement.partitions, proof.placement.left) == (1, ())
    assert proof.holds
    kinds = {tensor.dtype for kernel in proof.kernels for tensor in (*kernel.inputs, *kernel.outputs)}
    assert not {kind for kind in kinds if "float" in kind}


def test_a_width_of_its_own_is_a_second_pair_behind_the_first() -> None:
    """The answers are those of numpy, for whoever reads one tensor in which width."""
    text = "g (float[1,8] x) => (float[1,8] y, float[1,8] z, float[1,8] n) { n = Neg(x) y = Abs(n) z = Exp(n) }"
    model = name_nodes(parse(text))
    data = make_samples(model)
    result = onnxq.quantize(model, data, "qnn-int8", overrides={**_QUICK, "rules": [widen("y/Abs")]})
    sites = {str(site.site): site for site in result.plan.sites}
    assert {name: site.spec.storage for name, site in sites.items()} == {
        "x": "uint8", "n": "uint8", "y/Abs/in0": "uint16", "y": "uint16", "z": "uint8",
    }  # fmt: skip

    def round_at(name: str, value: Array) -> Array:
        return fake_quant(value, sites[name].qparams, sites[name].spec)

    x = data["x"][:1]
    n = round_at("n", -round_at("x", x))
    expected = {"n": n, "y": round_at("y", np.abs(round_at("y/Abs/in0", n))), "z": round_at("z", np.exp(n))}
    answers = Session(result.model, optimize=False).run({"x": x})
    for name, value in expected.items():
        np.testing.assert_array_equal(answers[name], value)


def test_values_that_are_only_moved_have_the_width_of_their_maker_or_of_all_that_read_them() -> None:
    """The input of the model has no maker: 16 bits, since a product that reads it has them, moved or not."""
    text = """g (float[1,4,8] x) => (float[1,8,8] y, float[1,8,4] z) {
        m = Transpose <perm=[0,2,1]> (x) y = MatMul(m, x) e = Exp(m) z = Transpose <perm=[0,1,2]> (e) }"""
    model = name_nodes(parse(text))
    result = onnxq.quantize(model, make_samples(model), "qnn-int8", overrides={**_QUICK, "rules": [widen("y/MatMul")]})
    assert {str(site.site): site.spec.storage for site in result.plan.sites} == {
        "x": "uint16", "m": "uint16", "y/MatMul/in1": "int16", "y": "uint16", "e/Exp/in0": "uint8", "e": "uint8",
        "z": "uint8",
    }  # fmt: skip


def test_what_moves_values_between_operators_in_float_has_no_pairs() -> None:
    """Around a GRU they would round to 8 bits (34.9 dB in the place of 40.4 on random walks), and nothing else."""
    weights = {"w": np.full((1, 12, 8), 0.1, np.float32), "r": np.full((1, 12, 4), 0.1, np.float32)}
    text = """g (float[1,6,8] x) => (float[6,1,4] e) {
        t = Transpose <perm=[1,0,2]> (x) h = GRU <hidden_size=4> (t, w, r)
        s = Transpose <perm=[0,2,1,3]> (h) q = Squeeze (s, axis) e = Exp(q) }"""
    model = name_nodes(parse(text, axis=np.array([1]), **weights))
    result = onnxq.quantize(model, make_samples(model), "qnn-int8", overrides=_QUICK)
    assert {str(site.site) for site in result.plan.sites} == {"h", "s", "q", "e"}
    assert [one.subject for one in result.report.left_float if one.code == "F103"] == ["t/Transpose"]
    assert [refusal.reason for refusal in result.report.refusals] == ["the NPU computes GRU in float16"]


@pytest.mark.parametrize(
    ("widths", "effort"), [("8", "fast"), (_SECOND, "fast"), ("chosen", "fast"), ("chosen", "high")]
)
def test_biases_have_the_scale_of_their_product(widths: str, effort: str) -> None:
    assert check_biases(quantize(widths, effort).model) == len(list_words("biases"))


# Each example is quantized whole.
@settings(max_examples=settings().max_examples // 5)
@given(proto=graphs(), data=st.data())
def test_any_graph_has_pairs_on_all_sides_in_any_widths(proto: onnx.ModelProto, data: st.DataObject) -> None:
    names = sorted(node.name for node in proto.graph.node)
    wide = data.draw(st.lists(st.sampled_from(names), unique=True))
    rules = [widen(*wide)] if wide else []
    result = onnxq.quantize(proto, make_samples(proto, 4), "qnn-int8", overrides={**_QUICK, "rules": rules})
    left = {one.subject for one in (*result.report.refusals, *result.report.left_float)}
    assert list(find_gaps(result.model, left)) == []
    check_biases(result.model)


def test_a_bias_that_is_an_operand_keeps_its_own_levels_when_weights_are_rounded() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (32, 32)), ("b", (32,)))}
    nodes = "p = MatMul (x, w) y = Add (p, b) z = Abs (p)"
    model = parse(f"g (float[1,128,32] x) => (float[1,128,32] y, float[1,128,32] z) {{ {nodes} }}", **weights)
    samples = [{"x": rng.standard_normal((1, 128, 32)).astype(np.float32)} for _ in range(8)]
    result = onnxq.quantize(model, samples, "qnn-int8", overrides=_PLANNED)
    assert any(line.startswith("rounding: 1 MatMul") for line in result.report.accounts)
    # A correction of the float bias would have the Add read another tensor, for which there is no site.
    assert "b" in {str(site.site) for site in result.plan.sites if site.role is Role.ACTIVATION}
    assert result.plan.biases == ()


def test_a_logarithm_stays_float_which_the_npu_gets_wrong_in_16_bits() -> None:
    result = onnxq.quantize(
        parse("g (float[1,4,8] x) => (float[1,4,8] y) { a = Abs (x) b = Exp (a) c = Log (b) y = Neg (c) }"),
        [{"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(1, 4, 8)}] * 4,
        "qnn-a16w8",
        overrides=_QUICK,
    )
    (refusal,) = result.plan.refusals
    assert "Log answers wrongly in 16 bits" in refusal.reason
    assert refusal.code == "R101"


def quantize_rows(nodes: str, scale: float, config: str, opset: int = 17, **arrays: np.ndarray) -> onnxq.Result:
    """A network of rows of 64 values, quantized, and emulated on two samples."""
    model = parse(f"g (float[1,64,64] x) => (float[1,64,64] y) {{ {nodes} }}", opset=opset, **arrays)
    rng = np.random.default_rng(5)
    samples = [{"x": (rng.standard_normal((1, 64, 64)) * scale).astype(np.float32)} for _ in range(8)]
    overrides = {"latency": False, "effort": "fast", "skip": ["promotion"]}
    return onnxq.quantize(model, samples, config, overrides=overrides)


@needs_qnn
@pytest.mark.parametrize("config", ["qnn", "qnn-a16w8"])
def test_a_spectrogram_is_float_up_to_its_logarithm(config: str) -> None:
    """Steps of its powers, 1/65535 of the loudest, are all that a logarithm would see of quiet frames."""
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * np.outer(np.arange(64), np.arange(64)) / 64
    weights = {"dft": np.cos(angles) / 8, "mel": rng.uniform(0, 0.05, (64, 64)), "w": rng.standard_normal((64, 64)) / 8}
    weights |= {"loud": np.logspace(-2, 1.5, 64)[:, None], "tiny": np.float32(1e-4)}
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    nodes = "f = Mul(x, loud) d = MatMul(f, dft) p = Mul(d, d) e = MatMul(p, mel) s = Add(e, tiny) l = Log(s)"
    result = quantize_rows(f"{nodes} y = MatMul(l, w)", 1.0, config, **arrays)
    left = [left.subject[0] for left in result.plan.left_float if left.rule == "log-front-end"]
    assert left == [*"fdpes"]
    assert result.report.checks[0].sqnr_db[0] > 30
    assert result.report.engines[0].outputs[0].sqnr_db > 30


@needs_qnn
def test_norms_of_small_values_are_divisions_which_the_npu_computes_right() -> None:
    nodes = "s = Mul(x, x) m = ReduceMean<axes=[-1]>(s) e = Add(m, epsilon) d = Sqrt(e) r = Reciprocal(d) y = Mul(x, r)"
    result = quantize_rows(nodes, 0.02, "qnn-a16w8", epsilon=np.float32(1e-6))
    assert "Reciprocal" not in {node.op_type for node in result.model.graph.node}
    (output,) = result.report.engines[0].outputs
    assert output.sqnr_db > 50


@needs_qnn
def test_a_softmax_of_like_values_is_wide_since_its_8_bit_kernel_has_larger_steps() -> None:
    for scale, bits in ((0.3, 16), (8.0, 8)):
        result = quantize_rows("a = Mul(x, half) s = Softmax(a) y = Neg(s)", scale, "qnn-mixed", half=np.float32(0.5))
        (softmax,) = (site for site in result.plan.sites if str(site.site) == "s")
        assert softmax.spec.bits == bits
        (output,) = result.report.engines[0].outputs
        assert output.sqnr_db > 30


@needs_qnn
@pytest.mark.parametrize("config", ["qnn-int8", "qnn-mixed"])
def test_running_sums_are_wide_since_the_npu_computes_them_wrongly_in_8_bits(config: str) -> None:
    result = quantize_rows(
        "a = Tanh(x) c = CumSum(a, last) y = Mul(c, small)", 1.0, config, last=np.array(2), small=np.float32(0.1)
    )
    assert [site.spec.bits for site in result.plan.sites if str(site.site) == "c"] == [16]
    (output,) = result.report.engines[0].outputs
    assert output.sqnr_db > 30


@needs_qnn
@pytest.mark.parametrize(
    "nodes",
    [
        "q = Abs(a) t = Add(q, one) [left] s = Log(t)",
        'b = MatMul(a, w) [left] s = ScatterElements<axis=1, reduction="add">(a, rows, b)',
        "p = Slice(a, zero, three, second) b = MatMul(p, small) [left] s = ScatterElements<axis=1>(a, odd, b)",
    ],
)
def test_what_the_npu_computes_wrongly_in_integers_is_kept_from_them(nodes: str) -> None:
    """With pairs around it, it is an operator on integers to the NPU, whoever left it float."""
    rng = np.random.default_rng(0)
    weight = (0.5 * rng.standard_normal((8, 8))).astype(np.float32)
    rows = np.array([0, 0, 1, 1, 2, 2]).reshape(1, 6, 1).repeat(8, 2)
    text = f"g (float[1,6,8] x) => (float[1,6,8] y) {{ a = MatMul(x, w) {nodes} y = MatMul(s, w) }}"
    arrays = {
        "w": weight, "small": weight / 8, "one": np.float32(1), "rows": rows, "odd": rows[:, ::2] * 2 + 1,
        "zero": np.array([0]), "three": np.array([3]), "second": np.array([1]),
    }  # fmt: skip
    net = name_nodes(parse(text, **arrays))
    samples = [{"x": rng.standard_normal((1, 6, 8)).astype(np.float32)} for _ in range(8)]
    result = onnxq.quantize(net, samples, "qnn-a16w8", overrides={"effort": "fast", "latency": False})
    assert result.plan.float_nodes == ("left",)
    (output,) = result.report.engines[0].outputs
    assert output.agreement_db > 50


@needs_qnn
def test_inputs_that_are_compared_are_compared_as_integers() -> None:
    """The compiler gives up where one node reads an input's floats and another its integers."""
    nodes = """
        s = Sigmoid(x) a = Greater(x, threshold) b = Less(x, masked) c = Equal(x, threshold)
        d = Where(a, s, masked) e = Where(b, s, d) y = Where(c, s, e)
    """
    check_one_partition(quantize_rows(nodes, 1.0, "qnn-a16w8", threshold=np.float32(0.1), masked=np.float32(-5)))


@needs_qnn
@pytest.mark.parametrize("node", [
    "GatherND(x, pairs)", "GatherElements<axis=1>(x, rows)", "Round(x)", "ScatterND(x, pairs, zeros)",
    "ScatterElements<axis=1>(x, rows, twos)",
])  # fmt: skip
def test_inputs_that_are_gathered_from_are_read_behind_their_pair(node: str) -> None:
    """The compiler gives up where such a node reads an input's floats and another its integers."""
    values = {"pairs": np.array([[0, 0], [0, 5]]), "rows": np.array([[[0, 1, 2]]])}
    values |= {"zeros": np.zeros((2, 3), np.float32), "twos": np.full((1, 1, 3), 2, np.float32)}
    text = f"g (float[1,16,3] x) => (float[1,16,3] y, float z) {{ v = {node} z = Neg(v) n = Neg(x) y = Mul(n, x) }}"
    net = name_nodes(parse(text, opset=18, **read_by(text, values)))
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((1, 16, 3)).astype(np.float32)} for _ in range(8)]
    check_one_partition(onnxq.quantize(net, samples, "qnn-int8", overrides={"effort": "fast", "latency": False}))


@needs_qnn
@pytest.mark.parametrize(("config", "least"), [("qnn-int8", 30), ("qnn-a16w8", 50)])
def test_a_soft_tanh_has_its_own_steps_in_8_bits_and_those_of_the_kernel_in_16(config: str, least: float) -> None:
    """As a vocoder ends: of 256 steps from -1 to 1 few are left for it."""
    result = quantize_rows("a = Mul(x, soft) t = Tanh(a) y = Neg(t)", 1.0, config, soft=np.float32(0.02))
    (output,) = result.report.engines[0].outputs
    assert output.sqnr_db > least


@needs_qnn
def test_windows_beyond_the_end_are_pads_which_the_npu_computes_right() -> None:
    """As ResNet-D pools maps of odd sizes: 3 to 6 dB. The one pool counts its pads, the other does not."""
    pool = "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1"
    nodes = f"""
        m = Reshape(x, map) p = {pool}>(m) q = {pool}, count_include_pad=1>(m) s = Add(p, q)
        r = Resize(s, , scales) f = Reshape(r, rows) y = Neg(f)
    """
    scales = np.array([1, 1, 2, 2], np.float32)
    arrays = {"map": np.array([1, 4, 32, 32]), "scales": scales, "rows": np.array([1, 64, 64])}
    (output,) = quantize_rows(nodes, 1.0, "qnn-int8", 19, **arrays).report.engines[0].outputs
    assert output.sqnr_db > 30


@needs_qnn
def test_x_by_its_sigmoid_is_computed_on_one_row_which_the_npu_computes_right() -> None:
    """Of maps of 9 to 12 rows it is wrong in 16 bits behind a convolution or a pool (4 to 8 dB)."""
    rng = np.random.default_rng(0)
    text = """g (float[1,8,20,7] x) => (float[1,8,10,7] y) {
        p = MaxPool<kernel_shape=[2,1], strides=[2,1]>(x) s = Sigmoid(p) a = Mul(p, s)
        c = Conv(a, w) t = Sigmoid(c) b = Mul(t, c) y = Add(a, b) }"""
    net = name_nodes(parse(text, w=rng.standard_normal((8, 8, 1, 1)).astype(np.float32)))
    samples = [{"x": 3 * rng.standard_normal((1, 8, 20, 7)).astype(np.float32)} for _ in range(8)]
    result = onnxq.quantize(net, samples, "qnn-a16w8", overrides={"effort": "fast", "latency": False})
    check_one_partition(result)
    (output,) = result.report.engines[0].outputs
    assert output.agreement_db > 60


@needs_qnn
def test_values_of_six_axes_are_moved_on_fewer_which_the_npu_has_kernels_for() -> None:
    """As query, key and value are cut in windows (Nest, which was 13 partitions)."""
    nodes = """
        m = MatMul(x, w) r = Reshape(m, six) t = Transpose<perm=[3,0,4,1,2,5]>(r) a, b, c = Split<axis=0>(t, ones)
        q = Squeeze(a, first) k = Squeeze(b, first) v = Squeeze(c, first) s = Add(q, k) d = Add(s, v)
        f = Reshape(d, rows) y = Neg(f)
    """
    arrays = {"six": np.array([1, 8, 8, 3, 4, 16]), "ones": np.array([1, 1, 1]), "first": np.array([0])}
    arrays |= {"w": np.random.default_rng(3).standard_normal((64, 192)).astype(np.float32) / 8}
    check_one_partition(quantize_rows(nodes, 1.0, "qnn-int8", 17, rows=np.array([1, 64, 64]), **arrays))


@needs_qnn
def test_an_unfolding_of_two_samples_is_gathered_on_fewer_axes_which_the_npu_computes_right() -> None:
    """As in ConvBERT, which had 4 dB at its first."""
    nodes = """
        r = Reshape(x, four) g = Gather<axis=2>(r, places) d = Reshape(g, rows) m = MatMul(mean, d) y = Neg(m)
    """
    arrays = {"four": np.array([2, 32, 32, 2]), "rows": np.array([1, -1, 64])}
    arrays |= {"places": np.arange(9)[:, None] + np.arange(20), "mean": np.full((1, 64, 360), 0.125, np.float32)}
    (output,) = quantize_rows(nodes, 1.0, "qnn-int8", 17, **arrays).report.engines[0].outputs
    assert output.agreement_db > 30


@needs_qnn
def test_values_of_five_axes_are_normed_and_multiplied_on_fewer() -> None:
    """As in a Swin for video (14 partitions) and in a U-Net of volumes."""
    nodes = """
        r = Reshape(x, five) n = LayerNormalization<axis=-1, epsilon=0.01>(r, gamma, beta) g = Gelu(n) m = MatMul(g, w)
        i = InstanceNormalization(m, factors, shifts) d = Reshape(i, rows) y = Neg(d)
    """
    rng = np.random.default_rng(3)
    arrays = {"w": rng.standard_normal((16, 16)).astype(np.float32) / 4, "five": np.array([1, 8, 8, 4, 16])}
    arrays |= {name: rng.uniform(0.5, 1.5, 16).astype(np.float32) for name in ("gamma", "beta")}
    arrays |= {name: rng.uniform(0.5, 1.5, 8).astype(np.float32) for name in ("factors", "shifts")}
    check_one_partition(quantize_rows(nodes, 1.0, "qnn-int8", 20, rows=np.array([1, 64, 64]), **arrays))


@needs_qnn
def test_transposed_convolutions_of_groups_stay_float_which_the_npu_computes_wrongly() -> None:
    """With pairs 16 groups of 16 channels had -15 dB, and the HTP refused the network with 4."""
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((16, size, 2, 2)).astype(np.float32) for name, size in (("v", 4), ("w", 1))}
    nodes = """
        m = Reshape(x, map) [four] t = ConvTranspose<group=4, strides=[2,2]>(m, v)
        p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(t) [sixteen] u = ConvTranspose<group=16, strides=[2,2]>(p, w)
        q = MaxPool<kernel_shape=[2,2], strides=[2,2]>(u) d = Reshape(q, rows) y = Neg(d)
    """
    shapes = {"map": np.array([1, 16, 16, 16]), "rows": np.array([1, 64, 64])}
    result = quantize_rows(nodes, 1.0, "qnn-int8", **shapes, **arrays)
    assert {"four", "sixteen"} <= {refusal.subject for refusal in result.plan.refusals}
    assert result.report.engines[0].outputs[0].sqnr_db > 25


@needs_qnn
def test_an_empty_name_in_the_place_of_a_bias_is_taken_out() -> None:
    """As calls of functions leave it, where the provider refused the whole network."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    model = parse("g (float[1,3,8,8] x) => (float[1,4,6,6] y) { [c] n = Conv(x, w) y = Neg(n) }", opset=17, w=weight)
    model.graph.node[0].input.append("")
    samples = [{"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(8)]
    result = onnxq.quantize(model, samples, "qnn-int8", overrides={"latency": False, "effort": "fast"})
    assert [len(node.input) for node in result.model.graph.node if node.name == "c"] == [2]
    assert result.report.engines[0].outputs[0].sqnr_db > 25


@needs_qnn
def test_the_work_of_a_transposed_convolution_is_counted_where_it_reads() -> None:
    weight = np.ones((8, 16, 2, 2), np.float32)
    text = "g (float[1,8,4,4] x) => (float[1,16,8,8] y) { y = ConvTranspose<strides=[2,2]>(x, w) }"
    index = GraphIndex(infer_shapes(name_nodes(parse(text, w=weight))))
    written, products = 16 * 8 * 8, 8 * 4 * 4 * 16 * 2 * 2
    assert find_target("qnn").estimate_work(Candidate(index.nodes[0], index, {})) == written + products / 32


@pytest.mark.recent_ort
def test_single_nodes_of_newer_opsets_are_one_partition_of_integers() -> None:
    nodes = """
        n = RMSNormalization(x, gamma) q = MatMul(n, wq) k = MatMul(n, wk)
        a = Attention<q_num_heads=4, kv_num_heads=4>(q, k, n) y = Neg(a)
    """
    rng = np.random.default_rng(3)
    arrays = {name: (rng.standard_normal((64, 64)) / 4).astype(np.float32) for name in ("wq", "wk")}
    gamma = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    result = quantize_rows(nodes, 0.05, "qnn-mixed", 23, gamma=gamma, **arrays)
    assert "Attention" not in {node.op_type for node in result.model.graph.node}
    assert not result.plan.refusals
    check_one_partition(result)


@pytest.mark.parametrize(("config", "alarms"), [("qnn-int8", ["W108"]), ("qnn-mixed", [])])
def test_scores_beside_boxes_need_more_than_8_bits_and_the_warning_says_where(config: str, alarms: list[str]) -> None:
    """As in YOLO, whose Concat has one pair for values up to hundreds and for those of a Sigmoid."""
    nodes = "b = Mul(x, large) s = Sigmoid(x) j = Concat<axis=1>(b, s) t, y = Split<axis=1, num_outputs=2>(j)"
    report = quantize_rows(nodes, 1.0, config, 18, large=np.float32(300)).report
    assert [alarm.code for alarm in report.alarms()] == alarms
    assert all("qnn-mixed" in alarm for alarm in report.alarms())
