"""Lists of names become rules that hold for these names and no others."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxq
from onnxq.compat.selection import Selection, make_rules
from onnxq.config import Rule, matches_any

BODY = """g (float[1,32] x) => (float[1,32] y) {
    a = Gemm(x, w)
    b = Relu(a)
    c = Gemm(b, v)
    y = Add(c, x)
}"""
NAMES = ("/l.0/Gemm", "act[1]", "l.1*", "/end/")


@pytest.fixture
def proto() -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{BODY}')
    for name in "wv":
        model.graph.initializer.append(numpy_helper.from_array(np.eye(32, dtype=np.float32), name))
    for node, name in zip(model.graph.node, NAMES, strict=True):
        node.name = name
    return model


def chosen(rules: list[dict], key: str, names: tuple[str, ...]) -> set[str]:
    assert [Rule.model_validate(rule).set.float for rule in rules] == [True]
    return {name for name in names if matches_any(rules[0][key], name)}


@pytest.mark.parametrize("name", NAMES)
def test_an_excluded_node_is_that_node_alone(proto, name: str) -> None:
    rules, cautions = make_rules(proto, Selection(excluded=[name]))
    assert (chosen(rules, "node", (*NAMES, "act1", "l.1x", "end")), cautions) == ({name}, [])


def test_all_but_the_wanted_nodes_stay_float(proto) -> None:
    rules, _ = make_rules(proto, Selection(nodes=["act[1]", "l.1*"]))
    assert chosen(rules, "node", NAMES) == {"/l.0/Gemm", "/end/"}


def test_all_but_the_wanted_operators_stay_float(proto) -> None:
    rules, _ = make_rules(proto, Selection(op_types=["Gemm", "Conv"]))
    assert chosen(rules, "op", ("Gemm", "Relu", "Add", "Gelu")) == {"Relu", "Add", "Gelu"}


@pytest.mark.parametrize(
    "selection",
    [Selection(), Selection(nodes=NAMES), Selection(op_types=("Gemm", "Relu", "Add")), Selection(excluded=())],
)
def test_who_wants_everything_gets_no_rule(proto, selection: Selection) -> None:
    assert make_rules(proto, selection) == ([], [])


@pytest.mark.parametrize(
    ("tensor", "override", "spec"),
    [
        ("x", {"quant_type": "QUInt16"}, "uint16"),
        ("x", {"quant_type": "QInt8", "symmetric": True}, "int8"),
        ("w", {"quant_type": "QInt4", "axis": 1}, "int8"),
    ],
)
def test_an_override_of_a_tensor_is_its_spec(proto, tensor: str, override, spec: str) -> None:
    rules, cautions = make_rules(proto, Selection(tensors={tensor: [override]}))
    assert cautions == []
    force = {"op": "*", "set": {"quantize": True}}
    plan = onnxq.make_plan(proto, overrides={"rules": [*rules, force]})
    assert [site.spec.storage for site in plan.sites if str(site.site) == tensor] in ([spec], [])
    assert rules


def test_numbers_and_unknown_tensors_are_said(proto) -> None:
    tensors = {"x": [{"scale": 0.1, "zero_point": 3}], "z": [{"symmetric": True}]}
    rules, cautions = make_rules(proto, Selection(tensors=tensors))
    assert rules == []
    assert [str(one).split(" means")[0] for one in cautions] == [
        "TensorQuantOverrides: 'z'",
        "TensorQuantOverrides: 'scale' of 'x'",
        "TensorQuantOverrides: 'zero_point' of 'x'",
    ]
