"""Where pairs for OpenVINO stand: on what its kernels read, and behind the activations that they compute as well."""

from __future__ import annotations

import math

import pytest

import onnxq
from onnxq.backends import find_target
from onnxq.backends.base import OpCase
from onnxq.sites import Role, TensorId
from tests.backends.openvino.graphs import make_net, quantize_net


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
