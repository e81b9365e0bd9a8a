"""Patterns that become one node: with a finder made up here, which replaces every Neg of a Neg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxq.graph import find_opset, infer_shapes, name_nodes
from onnxq.passes.edit import NEWEST, Replacement, apply_replacements
from onnxq.passes.journal import PassReport
from onnxq.passes.view import View
from tests.passes.kit import make_state, ops

TWICE = "g (float[N,4] x) => (float[N,4] y) { a = Neg(x) b = Neg(a) c = Abs(b) d = Neg(c) y = Neg(d) }"


def model(text: str = TWICE, opset: int = 17) -> onnx.ModelProto:
    return infer_shapes(name_nodes(parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')))


def negations(op_type: str = "Identity", **changes: Any) -> Callable[[View], list[Replacement]]:
    def find(view: View) -> list[Replacement]:
        found = []
        for node in view.index.nodes:
            front = view.producer(view.tensor(node, 0), "Neg") if node.op_type == "Neg" else None
            source = None if front is None else view.tensor(front, 0)
            if front is not None and source is not None and view.sole_reader(front.result) is not None:
                made = {"attrs": {}, "inputs": (source,), **changes}
                found.append(Replacement(last=node, nodes=frozenset({front.name, node.name}), op_type=op_type, **made))
        return found

    return find


def replace_patterns(
    proto: onnx.ModelProto, name: str, find: Callable[[View], list[Replacement]]
) -> tuple[onnx.ModelProto, PassReport]:
    after, report = apply_replacements(make_state(proto), name, find)
    return after.model, report


def test_every_match_becomes_one_node_and_the_rest_goes():
    before = model()
    text = before.SerializeToString()
    after, report = replace_patterns(before, "twice", negations())
    assert ops(after) == {"Identity": 2, "Abs": 1}
    assert report.name == "twice"
    # The node that wrote the result keeps its name, and so does the tensor.
    names = {node.output[0]: node.name for node in before.graph.node}
    assert report.changed == tuple(f"{names[one]}: Identity instead of 2 nodes" for one in ("b", "y"))
    assert {node.output[0]: node.name for node in after.graph.node} == {one: names[one] for one in ("b", "c", "y")}
    assert before.SerializeToString() == text


def test_without_a_match_the_model_is_handed_back():
    before = model("g (float[N,4] x) => (float[N,4] y) { y = Neg(x) }", 13)
    after, report = replace_patterns(before, "twice", negations(opset=17))
    assert after is before
    assert (report.changed, report.skipped) == ((), ())


def test_new_constants_follow_the_inputs():
    finder = negations("Clip", constants={"low": np.float32(-1), "high": np.float32(1)})
    after, _ = replace_patterns(model(), "twice", finder)
    clip = next(node for node in after.graph.node if node.output[0] == "y")
    held = {one.name: onnx.numpy_helper.to_array(one) for one in after.graph.initializer}
    assert clip.input[0] == "c"
    assert [float(held[name]) for name in clip.input[1:]] == [-1.0, 1.0]
    onnx.checker.check_model(after)


def test_attributes_of_the_new_node_are_those_given_alone():
    text = "g (float[N,4] x) => (float[N,4] y) { a = Neg(x) y = LeakyRelu<alpha=0.5>(a) }"

    def find(view: View) -> list[Replacement]:
        return [
            Replacement(last=node, nodes=frozenset({node.name}), op_type="HardSigmoid",
                        inputs=(view.output(front),), attrs={"beta": 0.25})
            for front, node in zip(view.index.nodes, view.index.nodes[1:], strict=False)
            if node.op_type == "LeakyRelu"
        ]  # fmt: skip

    after, _ = replace_patterns(model(text), "hard", find)
    (node,) = (node for node in after.graph.node if node.op_type == "HardSigmoid")
    assert [(one.name, one.f) for one in node.attribute] == [("beta", 0.25)]


@pytest.mark.parametrize(
    ("domain", "needs", "raised"),
    [
        pytest.param("", 13, 15, id="old enough already"),
        pytest.param("", 17, 17, id="a newer one"),
        pytest.param("", NEWEST, NEWEST, id="the newest that is used"),
        pytest.param("com.microsoft", 1, 15, id="an operator of another domain"),
    ],
)
def test_the_opset_rises_as_far_as_the_operation_needs(domain, needs, raised):
    after, report = replace_patterns(model(opset=15), "twice", negations("Identity", domain=domain, opset=needs))
    assert find_opset(after) == raised
    assert len(report.changed) == 2
    assert report.skipped == ()


def test_an_operation_newer_than_any_opset_used_is_left_and_reported():
    before = model(opset=15)
    after, report = replace_patterns(before, "twice", negations("Gelu", opset=NEWEST + 1))
    assert after is before
    assert report.changed == ()
    assert [(one.subject, one.code) for one in report.skipped] == [(before.graph.node[k].name, "R112") for k in (1, 4)]
    assert all("Gelu needs opset 21" in one.reason for one in report.skipped)


def test_nothing_is_matched_but_what_is_left_after_the_opset_was_raised():
    seen = []

    def find(view: View) -> list[Replacement]:
        seen.append(view)
        return negations(opset=18)(view) if len(seen) == 1 else []

    after, report = replace_patterns(model(opset=17), "twice", find)
    assert ops(after) == {"Neg": 4, "Abs": 1}
    assert (report.changed, report.skipped) == ((), ())
    assert len(seen) == 2
