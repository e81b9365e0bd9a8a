"""Targets of several engines: what each can take, what any needs, and the costs of all of them."""

from dataclasses import replace
from typing import Any

import pytest

from onnxq.backends import check_limits, check_target, find_backend, find_target, list_costs, load_config
from onnxq.backends.base import Output
from onnxq.backends.joined import join_targets
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.sites import Role
from onnxq.spec import QuantSpec
from tests.engines import kit

BOTH = "ort,openvino"


def test_a_spec_is_taken_where_every_engine_takes_it() -> None:
    both = find_target(BOTH)
    for storage in ("int8", "uint8"):
        for symmetric in (True, False):
            asked = QuantSpec(signed=storage == "int8", symmetric=symmetric)
            for role, op in ((Role.ACTIVATION, "Conv"), (Role.WEIGHT, "MatMul"), (Role.WEIGHT, "LSTM")):
                parts = [part.capability(asked, role, op) is not None for part in both.parts]
                assert (both.capability(asked, role, op) is not None) == all(parts), (asked, role, op)


def test_a_pair_stands_where_any_engine_needs_one_and_operators_are_those_of_all() -> None:
    both, ort = (find_target(name) for name in (BOTH, "ort"))
    rules = {rule.name: rule for rule in both.rules}
    assert rules["conv"].output is Output.PAIR
    assert rules["matmul"].output is Output.FLOAT
    # Where the kernel of one computes no other activation, its pair stands in front of it.
    assert rules["conv"].fuses == ("Relu", "Clip")
    assert {op for rule in both.rules for op in rule.ops} == {
        op for rule in ort.rules for op in rule.ops for other in find_target("openvino").rules if op in other.ops
    }
    assert "LSTM" in both.no_kernel
    assert both.quantizes_alone
    assert set(both.skips) == set(find_target("openvino").skips)


def test_sums_are_kept_in_the_orders_of_every_engine() -> None:
    node = GraphIndex(name_nodes(kit.graph("(float[1,3,8,8] x) => (float[1,4,6,6] y) { y = Conv(x, w) }",
                                           17, w=kit.np.ones((4, 3, 3, 3), kit.np.float32)))).nodes[0]  # fmt: skip
    orders = find_target(BOTH).list_sum_orders(node, (4, 3, 3, 3))
    assert len(orders) == 2
    assert orders == tuple(part.list_sum_orders(node, (4, 3, 3, 3))[0] for part in find_target(BOTH).parts)


def test_costs_of_a_kind_of_cpu_are_those_of_each_engine() -> None:
    assert set(list_costs(find_target(BOTH), "any")) == {"vnni ort", "avx2 ort", "vnni openvino", "avx2 openvino"}
    assert set(list_costs(find_target(BOTH), "avx2")) == {"avx2 ort", "avx2 openvino"}
    assert not find_target(BOTH).weights
    # An engine counts as much as it weighs, however many tables it has.
    assert find_target("ort=3,web").weights == {"vnni ort": 1.5, "avx2 ort": 1.5, "wasm web": 1.0}


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        pytest.param("ort,qnn", "Q325", "takes a whole graph in integers", id="whole graphs"),
        pytest.param("trt,openvino", "Q325", "trt has no costs by which", id="no costs"),
        pytest.param("ort=much,openvino", "Q325", "'much' is no weight", id="a weight in words"),
        pytest.param("ort=0,openvino", "Q325", "'0' is no weight", id="no weight"),
        pytest.param("ort,opnvino", "Q312", "target 'opnvino': there is none", id="an unknown name"),
    ],
)
def test_engines_that_share_no_file_are_an_error_that_says_why(target: str, code: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        find_backend(target)
    assert caught.value.code == code
    if "no weight" not in text and code == "Q325":
        assert "`target='ort'`" in caught.value.fix or "`target='trt'`" in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param({"mode": "dynamic"}, "none of each run", id="a mode that one has not"),
        pytest.param({"placement": "measured"}, "placements are timed on one engine", id="measured"),
        pytest.param({"attention": "auto"}, "slower with attention in int8", id="a limit of one"),
    ],
)
def test_limits_of_each_engine_hold(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_target(check_limits(load_config(None, {"target": BOTH, **settings})))


@pytest.mark.parametrize("written", [["ort", "openvino"], "ort, openvino", ("ort", "openvino")])
def test_a_list_and_a_text_are_one_target(written: object) -> None:
    assert load_config(None, {"target": written}).target == BOTH


def test_without_costs_of_its_own_no_rule_is_made_up() -> None:
    """Rules that differ in more than can be joined give none: a weight at another input."""
    ort = find_target("ort")
    moved = replace(ort, rules=tuple(replace(rule, weight=7) if rule.name == "conv" else rule for rule in ort.rules))
    names = {rule.name for rule in join_targets([ort, moved], {"ort": 0.0}).rules}
    assert "conv" not in names
    assert "gemm" in names


def test_integers_keep_no_room_below_zero_where_one_engine_has_no_use_for_it() -> None:
    rooms = {
        name: {rule.footroom for rule in find_target(name).rules if "Conv" in rule.ops} for name in ("web", "ort,web")
    }
    assert max(rooms["web"]) > 0
    assert rooms["ort,web"] == {0}
