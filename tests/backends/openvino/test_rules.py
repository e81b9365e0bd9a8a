"""Where pairs for OpenVINO stand: on what its kernels read, and behind the activations that they compute as well."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxq
from onnxq.backends import find_target
from onnxq.backends.base import OpCase
from onnxq.runtime import Session
from onnxq.sites import Role, TensorId
from tests.backends.openvino.graphs import make_net, make_samples, needs_openvino, quantize_net


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


def test_matrices_are_convolutions_of_one_tap_unless_the_file_is_for_vnni_alone() -> None:
    rng = np.random.default_rng(0)
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,N,48] x) => (float[1,N,32] y, float[1,N,32] z) {
            [first] h = MatMul(x, w)
            b = Reshape(h, four)
            [second] p = MatMul(b, v)
            y = Reshape(p, three)
            [third] z = MatMul(x, u)
        }""")
    weights = {"w": (48, 32), "v": (8, 8), "u": (48, 32)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    arrays |= {"four": np.array([1, -1, 4, 8]), "three": np.array([1, -1, 32])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    samples = [{"x": rng.standard_normal((1, 16, 48)).astype(np.float32)} for _ in range(8)]
    rules = [{"node": "*", "set": {"quantize": True}}]

    def quantize(cpu: str) -> tuple[dict[str, str], list[np.ndarray]]:
        overrides = {"effort": "fast", "latency": False, "rules": rules, "cpu": cpu}
        result = onnxq.quantize(model, samples, "openvino-int8", overrides=overrides)
        # Sizes change from run to run, so that OpenVINO transposes.
        assert any("while sizes change" in warning for warning in result.plan.warnings) == (cpu == "any")
        proto = result.model
        answers = Session(proto, optimize=False).run(samples[0])
        products = {node.name: node.op_type for node in proto.graph.node if node.op_type in ("Conv", "MatMul")}
        return products, [np.asarray(answers[name]) for name in ("y", "z")]

    products, answers = quantize("any")
    assert products == dict.fromkeys(("first", "second", "third"), "Conv")
    assert quantize("avx2")[0] == products
    matrices, same = quantize("vnni")
    assert matrices == dict.fromkeys(products, "MatMul")
    for answer, other in zip(answers, same, strict=True):
        np.testing.assert_allclose(answer, other, rtol=1e-5, atol=1e-5)


def test_a_matrix_in_integers_pays_for_avx2_as_a_convolution_alone() -> None:
    costs = find_target("openvino").costs["avx2"]
    case = OpCase(op_type="MatMul", inputs=((1, 96, 384),), output=(1, 96, 384), weight=(384, 384))
    plain, convolution = costs.predict_node(case), costs.predict_node(replace(case, pointwise=True))
    assert convolution.int8_us < plain.float_us == convolution.float_us < plain.int8_us


READ_TWICE = "t = Tanh(c) y = Sub(c, t)"


@needs_openvino
@pytest.mark.parametrize(
    ("behind", "bias", "batch", "refused"),
    [
        (READ_TWICE, "", "N", True),
        (READ_TWICE, ", zeros", "N", True),
        (READ_TWICE, ", b", "N", False),
        (READ_TWICE, "", "1", False),
        ("y = Add(c, c)", "", "N", True),
        ("t = Sigmoid(c) y = Mul(c, t)", "", "N", False),
        ("y = Tanh(a)", "", "N", False),
    ],
)
def test_no_convolution_is_in_integers_whose_scales_openvino_loses(
    behind: str, bias: str, batch: str, refused: bool
) -> None:
    check_scales(behind, bias, batch, refused)


@needs_openvino
@pytest.mark.parametrize(
    ("behind", "bias", "refused"),
    [
        ("y = Gather<axis=2>(a, row)", False, True),
        ("y = Gather<axis=2>(a, rows)", False, True),
        ("y = Gather<axis=2>(a, rows)", True, False),
        ("y = Gather<axis=1>(a, row)", False, False),
        ("y = Gather<axis=2>(a, list)", False, False),
        ("y = Neg(a)", False, True),
        ("y = Mul(a, factors)", False, True),
        ("y = Mul(c, factors)", False, False),
        ("y = Mul(a, factors)", True, False),
    ],
)
def test_no_convolution_is_in_integers_whose_scales_openvino_moves_wrongly(
    behind: str, bias: bool, refused: bool
) -> None:
    check_scales(behind, ", b" if bias else "", "1", refused)


def check_scales(behind: str, bias: str, batch: str, refused: bool) -> None:
    """A convolution stays float where it is to be refused, and OpenVINO computes the network right either way."""
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[{batch},3,16,16] x) => (float[N] y) {{
            [conv] c = Conv(x, w{bias})
            [relu] a = Relu(c)
            [reader] {behind}
        }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(3)
    spread = np.linspace(0.1, 2, 8).reshape(8, 1, 1, 1)
    arrays = {
        "w": (rng.standard_normal((8, 3, 1, 1)) * spread).astype(np.float32),
        "b": rng.standard_normal(8).astype(np.float32),
        "zeros": np.zeros(8, np.float32),
        "factors": np.linspace(-2, 1, 8, dtype=np.float32).reshape(8, 1, 1),
        "row": np.array(3), "rows": np.array([[3], [1]]), "list": np.array([3, 1]),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    rules = [{"node": "*", "set": {"quantize": True}}]
    overrides = {"effort": "fast", "latency": False, "rules": rules, "skip": ["rounding"]}
    result = onnxq.quantize(model, list(make_samples()), "openvino-int8", overrides=overrides)
    assert [refusal.subject for refusal in result.plan.refusals] == ["conv"] * refused
    (output,) = result.report.engines[0].outputs
    assert output.sqnr_db > 25
