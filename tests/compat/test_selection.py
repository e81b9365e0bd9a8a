"""Lists of names become rules that hold for these names and no others."""

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_target
from onnxq.compat.options import UnaskedTypes
from onnxq.compat.overrides import TensorOverrides
from onnxq.compat.selection import CallLists, read_selection
from onnxq.config import Rule, matches_any
from onnxq.sites import Caution
from tests.networks import parse_text

BODY = "g (float[1,32] x) => (float[1,32] y) { a = Gemm(x, w) b = Relu(a) c = Gemm(b, v) y = Add(c, x) }"
NAMES = ("/l.0/Gemm", "act[1]", "l.1*", "/end/")


@pytest.fixture
def proto() -> onnx.ModelProto:
    model = parse_text(BODY, w=np.eye(32, dtype=np.float32), v=np.eye(32, dtype=np.float32))
    for node, name in zip(model.graph.node, NAMES, strict=True):
        node.name = name
    return model


def chosen(rules: list[dict], key: str, names: tuple[str, ...], word: str = "float") -> set[str]:
    """The names that the one rule with this word selects."""
    (rule,) = [one for one in rules if getattr(Rule.model_validate(one).set, word)]
    return {name for name in names if matches_any(rule[key], name)}


def make(proto: onnx.ModelProto, **lists) -> tuple[list[dict], list[Caution]]:
    if "tensors" in lists:
        lists["tensors"] = TensorOverrides(lists["tensors"], find_target("ort"), "QUInt8")
    wish = read_selection(proto, CallLists(**lists))
    return list(wish.rules), list(wish.cautions)


@pytest.mark.parametrize("name", NAMES)
def test_an_excluded_node_is_that_node_alone(proto, name: str) -> None:
    rules, cautions = make(proto, excluded=[name])
    assert (chosen(rules, "node", (*NAMES, "act1", "l.1x", "end")), cautions) == ({name}, [])


def test_the_wanted_nodes_are_forced_and_all_others_stay_float(proto) -> None:
    rules, cautions = make(proto, nodes=["act[1]", "l.1*", "gone"])
    assert chosen(rules, "node", NAMES) == {"/l.0/Gemm", "/end/"}
    assert chosen(rules, "node", (*NAMES, "l.1x"), "quantize") == {"act[1]", "l.1*"}
    assert [str(one).split(";")[0] for one in cautions] == [
        "nodes_to_quantize: 'gone' means nothing here: the model has no 'gone'"
    ]


def test_the_wanted_operators_are_forced_and_all_others_stay_float(proto) -> None:
    rules, cautions = make(proto, op_types=["Gemm", "Conv"])
    ops = ("Gemm", "Relu", "Add", "Gelu")
    assert (chosen(rules, "op", ops), chosen(rules, "op", ops, "quantize")) == ({"Relu", "Add", "Gelu"}, {"Gemm"})
    assert cautions == []


def test_both_lists_hold_together(proto) -> None:
    rules, _ = make(proto, nodes=["/l.0/Gemm", "act[1]"], op_types=["Gemm"], excluded=["l.1*"])
    assert chosen(rules, "node", NAMES, "quantize") == {"/l.0/Gemm"}
    assert make(proto, nodes=["act[1]"], op_types=["Gemm"])[0][-1]["set"] == {"float": True}


@pytest.mark.parametrize("lists", [{}, {"excluded": ()}, {"nodes": ()}])
def test_who_wants_everything_gets_no_rule(proto, lists) -> None:
    assert make(proto, **lists) == ([], [])


def test_types_that_nobody_asked_for_force_nothing(proto) -> None:
    every = UnaskedTypes(sorted({node.op_type for node in proto.graph.node}))
    assert make(proto, op_types=every) == ([], [])
    # Those of excluded nodes alone are none that were taken out.
    adds = [node.name for node in proto.graph.node if node.op_type == "Add"]
    without = UnaskedTypes(op for op in every if op != "Add")
    assert [rule["set"] for rule in make(proto, op_types=without, excluded=adds)[0]] == [{"float": True}]
    rules, _ = make(proto, op_types=without)
    assert (len(rules), chosen(rules, "op", every)) == (1, {"Add"})


@pytest.mark.parametrize("lists", [{"nodes": NAMES}, {"op_types": ("Gemm", "Relu", "Add")}])
def test_who_names_everything_forces_it(proto, lists) -> None:
    assert [rule["set"] for rule in make(proto, **lists)[0]] == [{"quantize": True}]


def test_an_override_of_a_tensor_does_not_end_the_force(proto) -> None:
    tensors = {name: [{"quant_type": "QUInt8"}] for name in "xw"}
    rules, _ = make(proto, nodes=["/l.0/Gemm"], tensors=tensors)
    assert {str(site.site) for site in onnxq.make_plan(proto, overrides={"rules": rules}).sites} >= {"x", "w"}
    assert not onnxq.make_plan(proto, overrides={"rules": make(proto, tensors=tensors)[0]}).sites


@pytest.mark.parametrize(
    ("tensor", "override", "spec"),
    [
        ("x", {"quant_type": "QUInt16"}, "uint16"),
        ("x", {"quant_type": "QInt8", "symmetric": True}, "int8"),
        ("w", {"quant_type": "QInt4", "axis": 1}, "int8"),
    ],
)
def test_an_override_of_a_tensor_is_its_spec(proto, tensor: str, override, spec: str) -> None:
    rules, cautions = make(proto, tensors={tensor: [override]})
    assert cautions == []
    force = {"op": "*", "set": {"quantize": True}}
    plan = onnxq.make_plan(proto, overrides={"rules": [*rules, force]})
    assert [site.spec.storage for site in plan.sites if str(site.site) == tensor] in ([spec], [])
    assert rules


def test_numbers_of_activations_are_their_range(proto) -> None:
    overrides = {"x": [{"scale": 0.1, "zero_point": 3}], "b": [{"rmin": 0.0, "rmax": 2.0}]}
    rules, cautions = make(proto, tensors=overrides)
    assert cautions == []
    force = {"op": "*", "set": {"quantize": True}}
    plan = onnxq.make_plan(proto, overrides={"rules": [*rules, force]})
    numbers = {str(site.site): site.qparams for site in plan.sites}
    assert (float(numbers["x"].scale), int(numbers["x"].zero_point)) == (pytest.approx(0.1), 3)
    assert (float(numbers["b"].scale), int(numbers["b"].zero_point)) == (pytest.approx(2 / 255), 0)


def test_numbers_of_weights_and_unknown_tensors_are_said(proto) -> None:
    tensors = {
        "x": [{"scale": 0.1, "convert": {"quant_type": "QUInt16"}}],
        "w": [{"rmin": -1.0, "rmax": 1.0}],
        "z": [{"symmetric": True}],
    }
    rules, cautions = make(proto, tensors=tensors)
    assert rules == []
    assert [str(one).split(" means")[0] for one in cautions] == [
        "TensorQuantOverrides: 'z'",
        "TensorQuantOverrides: 'scale' of 'x'",
        "TensorQuantOverrides: 'convert' of 'x'",
        "TensorQuantOverrides: 'rmin' of 'w'",
        "TensorQuantOverrides: 'rmax' of 'w'",
    ]
