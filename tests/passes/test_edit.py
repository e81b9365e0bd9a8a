"""The edits that passes share: names that stay, constants in place or copied, chains taken out."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.errors import PlanError
from onnxq.graph import ModelLike, infer_shapes
from onnxq.passes.edit import Edit
from onnxq.passes.view import View
from onnxq.sites import Refusal
from tests.passes.kit import infer, make_state, parse

HEAD = "(float[2,4] x) => (float[2,4] y)"


def model(nodes: str, **arrays: Any) -> onnx.ModelProto:
    return infer_shapes(parse(f"g {HEAD} {{ {nodes} }}", **arrays))


def lines(proto: ModelLike) -> list[str]:
    """The nodes as text, in their order."""
    return [f"{node.output[0]} = {node.op_type}({', '.join(node.input)})" for node in proto.graph.node]


def start(proto: onnx.ModelProto) -> tuple[View, Edit, dict[str, Any]]:
    """The nodes by what they make."""
    view = View(proto)
    return view, Edit(proto), {node.result.name: node for node in view.index.nodes}


def test_a_node_becomes_another_operation_with_its_own_inputs_and_attributes():
    proto = model("y = Clip(x, low, high)", low=-1.0, high=1.0)
    _, edit, nodes = start(proto)
    edit.replace_node(nodes["y"], "LeakyRelu", ["x"], {"alpha": 0.5})
    done = edit.export()
    assert lines(done) == ["y = LeakyRelu(x)"]
    assert done.graph.node[0].name == nodes["y"].name
    assert [(one.name, one.f) for one in done.graph.node[0].attribute] == [("alpha", 0.5)]
    # The bounds went with their only reader.
    assert not done.graph.initializer
    assert lines(proto) == ["y = Clip(x, low, high)"]


def test_old_attributes_go_and_inputs_may_be_more():
    proto = model("y = LeakyRelu<alpha=0.5>(x)", slope=0.25)
    _, edit, nodes = start(proto)
    edit.replace_node(nodes["y"], "PRelu", ["x", "slope"], {})
    done = edit.export()
    assert lines(done) == ["y = PRelu(x, slope)"]
    assert not done.graph.node[0].attribute
    x = np.array([[-4, 4, 0, 1]] * 2, np.float32)
    np.testing.assert_array_equal(infer(done, {"x": x})[0], np.where(x < 0, x / 4, x))


def test_an_attribute_is_set_or_taken_away():
    proto = model("y = Gemm<alpha=2.0, transB=1>(x, w)", w=np.eye(4, dtype=np.float32))
    _, edit, nodes = start(proto)
    edit.set_attrs(nodes["y"], {"alpha": None, "beta": 0.5})
    held = {one.name: onnx.helper.get_attribute_value(one) for one in edit.export().graph.node[0].attribute}
    assert held == {"transB": 1, "beta": 0.5}


def test_a_chain_behind_a_node_goes_and_the_last_name_stays():
    proto = model("a = Relu(x) b = Identity(a) c = Identity(b) d = Neg(c) y = Add(d, c)")
    _, edit, nodes = start(proto)
    edit.absorb_chain(nodes["a"], [nodes["b"], nodes["c"]])
    assert lines(edit.export()) == ["c = Relu(x)", "d = Neg(c)", "y = Add(d, c)"]


def test_a_chain_up_to_an_output_keeps_the_output():
    proto = model("a = Relu(x) y = Identity(a)")
    _, edit, nodes = start(proto)
    edit.absorb_chain(nodes["a"], [nodes["y"]])
    assert lines(edit.export()) == ["y = Relu(x)"]


def test_a_bypassed_node_is_read_past():
    proto = model("a = Relu(x) b = Identity(a) c = Neg(b) y = Add(b, c)")
    view, edit, nodes = start(proto)
    source = view.tensor(nodes["b"], 0)
    assert source is not None
    edit.bypass_node(nodes["b"], source)
    assert lines(edit.export()) == ["a = Relu(x)", "c = Neg(a)", "y = Add(a, c)"]


def test_one_input_reads_another_tensor():
    proto = model("a = Relu(x) y = Sub(a, a)")
    view, edit, nodes = start(proto)
    edit.read(view.edge(nodes["y"], 1), "x")
    assert lines(edit.export()) == ["a = Relu(x)", "y = Sub(a, x)"]


def test_a_new_node_stands_in_front_of_its_reader_with_fresh_names():
    proto = model("a = Relu(x) y = Neg(a)")
    view, edit, nodes = start(proto)
    # "a" is taken.
    made = edit.insert_before(nodes["y"], "LeakyRelu", ["a"], {"alpha": 0.5}, "a")
    edit.read(view.edge(nodes["y"], 0), made)
    done = edit.export()
    assert made != "a"
    assert lines(done) == ["a = Relu(x)", f"{made} = LeakyRelu(a)", f"y = Neg({made})"]
    assert len({node.name for node in done.graph.node}) == 3
    onnx.checker.check_model(done)


@pytest.mark.parametrize(
    ("nodes", "own"),
    [
        pytest.param("y = Add(x, k)", True, id="alone"),
        pytest.param("a = Add(x, k) y = Mul(a, k)", False, id="shared"),
    ],
)
def test_a_constant_is_changed_in_place_or_copied_for_one_reader(nodes, own):
    proto = model(nodes, k=1.0)
    view, edit, by_out = start(proto)
    reader = by_out["y" if own else "a"]
    edit.set_constant(view, view.edge(reader, 1), np.float32(5))
    done = edit.export()
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(infer(done, {"x": x})[0], x + 5)
    names = {one.name for one in done.graph.initializer}
    # A plan knows the tensor by its name: it stays where it may.
    assert names == {"k"} if own else len(names) == 2


def test_a_constant_may_be_given_where_there_was_none():
    proto = model("y = Gemm(x, w)", w=np.eye(4, dtype=np.float32))
    view, edit, nodes = start(proto)
    edit.set_constant(view, view.edge(nodes["y"], 2), np.ones(4, np.float32))
    done = edit.export()
    assert done.graph.node[0].input[2] == f"{nodes['y'].name}/bias"
    np.testing.assert_array_equal(infer(done, {"x": np.zeros((2, 4), np.float32)})[0], np.ones((2, 4)))


def test_a_value_is_rounded_to_the_type_and_refused_where_it_overflows():
    half = parse("g (float16[2,4] x) => (float16[2,4] y) { y = Add(x, k) }", k=np.float16(1))
    view, edit, nodes = start(infer_shapes(half))
    edge = view.edge(nodes["y"], 1)
    edit.set_rounded(view, edge, np.asarray(1 / 3), np.dtype(np.float16))
    (held,) = edit.export().graph.initializer
    assert onnx.numpy_helper.to_array(held) == np.float16(1 / 3)
    with pytest.raises(PlanError, match="overflow float16") as caught:
        Edit(half).set_rounded(view, edge, np.asarray(1e6), np.dtype(np.float16))
    assert (caught.value.code, caught.value.fix) == ("Q404", "plan the model again")


def test_without_changes_the_model_itself_is_handed_on():
    proto = model("y = Relu(x)")
    refusal = Refusal("y", "not today")
    after, report = Edit(proto).finish_pass(make_state(proto), "made up", [], [refusal])
    assert after.model is proto
    assert (report.name, report.changed, report.skipped) == ("made up", (), (refusal,))


def test_with_changes_it_is_the_edited_one_without_what_nothing_needs():
    proto = model("a = Relu(x) b = Neg(a) y = Identity(x)", unused=2.0)
    _, edit, nodes = start(proto)
    edit.remove_node(nodes["b"])
    state, report = edit.finish_pass(make_state(proto), "made up", ["b: gone"])
    after = state.model
    assert lines(after) == ["y = Identity(x)"]
    assert not after.graph.initializer
    assert report.changed == ("b: gone",)
