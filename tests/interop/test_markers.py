"""Markers of quantizers in a model: a float model and a plan out of it, which together say what the markers said."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxq
from onnxq.errors import ModelError, PlanError
from onnxq.interop import Marked, strip_markers
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec
from tests.interop.marked import ACT, DOMAIN, WEIGHT, Net, computed, residual_net, run


def check(net: Net, *outputs: str, target: str = "virtual", opset: int = 17, rank: int = 2, **sizes: int) -> Marked:
    """Strip, apply, and compare with what the marked model computes, bit for bit."""
    model = net.model(*outputs, opset=opset, rank=rank)
    marked = strip_markers(model, target=target, quantizers=net.sites)
    assert not any(node.domain == DOMAIN for node in marked.model.graph.node)
    assert DOMAIN not in {entry.domain for entry in marked.model.opset_import}
    assert set(marked.sites) == set(net.sites)
    quantized = onnxq.apply(marked.model, marked.plan).model
    feeds = net.feeds(**sizes)
    for wanted, found in zip(computed(model, feeds), run(quantized, feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)
    return marked


def by_site(marked: Marked) -> dict[str, Any]:
    plans = {site.site: site for site in marked.plan.sites}
    return {name: plans[sites[0]] for name, sites in marked.sites.items()}


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("grain", [PerTensor(), PerChannel(0), PerBlock(1, 2)], ids=["tensor", "channel", "block"])
def test_a_residual_network_computes_what_was_marked(bits: int, grain: Any) -> None:
    net = residual_net(QuantSpec(bits=bits, granularity=grain), QuantSpec(bits=bits, signed=False, symmetric=False))
    marked = check(net, "y", n=2)
    sites = by_site(marked)
    assert sites["c1.weight"].role is Role.WEIGHT
    assert sites["c1.weight"].spec.storage == ("int4" if bits <= 4 else "int8")
    assert sites["relu.out"].site == TensorId("relu.out")
    assert sites["input:x"].site == TensorId("x")
    assert marked.plan.opset == (21 if bits <= 4 or isinstance(grain, PerBlock) else 13)


@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
def test_every_target_takes_eight_bits(target: str) -> None:
    assert check(residual_net(activations=QuantSpec(bits=8)), "y", target=target, n=2).plan.target == target


def test_a_target_that_cannot_hold_a_spec_names_the_site() -> None:
    marked = strip_markers(residual_net(QuantSpec(bits=4, granularity=PerChannel(0))).model("y"), target="trt")
    with pytest.raises(PlanError, match=r"(?s)x: trt has no kernel for|c1.weight"):
        onnxq.apply(marked.model, marked.plan)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_activations_per_channel_are_clipped_on_their_levels(net: Net, bits: int, signed: bool) -> None:
    spec = QuantSpec(
        bits=bits, signed=signed, symmetric=signed, granularity=PerChannel(-1), narrow_range=signed and bits < 16
    )
    x = net.mark(net.input("x", "n", 6), "input:x", spec, net.channels(6))
    net.op("Add", x, net.weight("b", 6), out="y")
    check(net, "y", opset=21, n=40)


def test_two_quantizers_of_one_tensor(net: Net) -> None:
    r = net.op("Relu", net.input("x", "n", 4))
    a, b = net.mark(r, "left.in", ACT, 0.5, 0), net.mark(r, "right.in", ACT, 0.25, 3)
    net.op("Sum", net.op("Mul", a, a), net.op("Mul", b, r), out="y")
    plans = check(net, "y", n=9).plan.sites
    assert plans[0].site == TensorId("left.in")
    assert [edge.index for edge in plans[0].consumers or ()] == [0, 1]
    assert isinstance(plans[1].site, Edge)


def test_quantizers_with_the_same_numbers_are_one_pair(net: Net) -> None:
    r = net.op("Relu", net.input("x", "n", 4))
    net.op("Mul", net.mark(r, "a"), net.mark(r, "b"), out="y")
    marked = check(net, "y", n=9)
    assert len(marked.plan.sites) == 1
    assert marked.sites["a"] == marked.sites["b"] == (TensorId("a"),)
    assert marked.plan.sites[0].reason == "quantizer a, b"


def test_a_quantizer_behind_another(net: Net) -> None:
    """With the same numbers it changes nothing; with others it needs a place of its own."""
    x = net.mark(net.mark(net.input("x", "n", 4), "first"), "second")
    x = net.mark(net.mark(net.op("Relu", x), "third", ACT, 1.0, 0), "fourth", ACT, 0.75, 0)
    net.op("Neg", x, out="y")
    marked = check(net, "y", n=50)
    assert marked.sites["first"] == marked.sites["second"]
    assert marked.sites["third"] != marked.sites["fourth"]


@pytest.mark.parametrize("others", ["none", "raw", "other numbers", "also given out", "twice"])
def test_a_quantized_output_keeps_its_name(others: str) -> None:
    net = Net()
    r = net.op("Relu", net.input("x", "n", 4))
    net.mark(r, "out", out="y")
    outputs = ["y"]
    if others == "raw":
        net.op("Neg", r, out="z")
    elif others == "other numbers":
        net.op("Neg", net.mark(r, "more", ACT, 0.5), out="z")
    elif others == "also given out":
        outputs.append(r)
    elif others == "twice":
        net.mark(r, "again", out="z")
    if others in ("raw", "other numbers", "twice"):
        outputs.append("z")
    marked = check(net, *outputs, n=50)
    assert [value.name for value in marked.model.graph.output] == outputs
    plan = by_site(marked)["out"]
    assert (plan.site, plan.role) == (TensorId("y"), Role.OUTPUT)


def test_an_input_that_is_only_quantized(net: Net) -> None:
    net.mark(net.input("x", "n", 4), "input:x", out="y")
    assert by_site(check(net, "y", n=50))["input:x"].site == TensorId("y")


def test_a_weight_read_through_a_transpose_is_stored_turned(net: Net) -> None:
    w = net.mark(net.weight("fc.weight", 6, 4), "fc.weight", WEIGHT, net.channels(6), role="weight")
    net.op("MatMul", net.mark(net.input("x", "n", 3, 4), "input:x"), net.op("Transpose", w, perm=[1, 0]), out="y")
    marked = check(net, "y", rank=3, n=2)
    plan = by_site(marked)["fc.weight"]
    assert plan.site == TensorId("fc.weight")
    assert plan.spec.granularity == PerChannel(1)
    assert [node.op_type for node in marked.model.graph.node] == ["MatMul"]
    assert {t.name: list(t.dims) for t in marked.model.graph.initializer} == {"fc.weight": [4, 6]}


def test_transposes_that_cancel_leave_a_weight_as_it_is(net: Net) -> None:
    w = net.mark(
        net.weight("w", 4, 6), "w", QuantSpec(bits=8, granularity=PerChannel(1)), net.channels(6), role="weight"
    )
    there = net.op("Transpose", net.op("Transpose", w, perm=[1, 0]), perm=[1, 0])
    same = net.op("Transpose", net.op("Gather", there, net.constant("which", np.array([2, 0, 1, 3]))), perm=[0, 1])
    net.op("MatMul", net.input("x", "n", 4), same, out="y")
    plan = by_site(check(net, "y", n=2))["w"]
    assert plan.spec.granularity == PerChannel(1)
    assert [edge.node for edge in plan.consumers] == ["n_t3"]


def test_blocks_turn_with_their_weight(net: Net) -> None:
    spec = QuantSpec(bits=4, granularity=PerBlock(1, 2))
    w = net.mark(net.weight("w", 6, 4), "w", spec, net.channels(12).reshape(6, 2), role="weight")
    net.op("MatMul", net.input("x", "n", 4), net.op("Transpose", w), out="y")
    plan = by_site(check(net, "y", opset=21, n=2))["w"]
    assert plan.spec.granularity == PerBlock(0, 2)
    assert plan.qparams.scale.shape == (2, 6)


def test_one_weight_in_two_layers(net: Net) -> None:
    """A tied table: looked up by rows as it is, multiplied with turned, each with its own quantizer."""
    table = net.weight("embed.weight", 6, 4)
    rows = net.mark(table, "embed.weight", WEIGHT, net.channels(6), role="weight")
    tied = net.mark(table, "head.weight", QuantSpec(bits=8), 1 / 16, role="weight")
    looked = net.op("Gather", rows, net.constant("which", np.array([0, 5, 3])), axis=0)
    net.op("MatMul", net.op("Add", looked, net.input("x", "n", 3, 4)), net.op("Transpose", tied), out="y")
    marked = check(net, "y", rank=3, n=2)
    assert [s.spec.granularity for s in marked.plan.sites] == [PerChannel(0), PerTensor()]
    assert marked.sites["embed.weight"] != marked.sites["head.weight"]


def test_one_quantizer_called_twice(net: Net) -> None:
    """A reused module: its weight is one site, its input quantizer stands on two tensors and shares its numbers."""
    w = net.weight("conv.weight", 3, 3, 1, 1)
    scales = net.channels(3)
    x = net.input("x", "n", 3, 4, 4)
    for _ in range(2):
        x = net.op("Conv", net.mark(x, "conv.in", ACT, 16.0), net.mark(w, "conv.weight", WEIGHT, scales, role="weight"))
    net.op("Relu", x, out="y")
    marked = check(net, "y", rank=4, n=1)
    assert marked.sites["conv.weight"] == (TensorId("conv.weight"),)
    groups = [site.group for site in marked.plan.sites if site.role is not Role.WEIGHT]
    assert groups == ["conv.in", "conv.in"]


def test_equal_weights_that_an_exporter_merged_stay_two_sites(net: Net) -> None:
    w = net.weight("c1.weight", 3, 3, 1, 1)
    x = net.input("x", "n", 3, 4, 4)
    for name, scale in (("c1.weight", 1 / 16), ("c2.weight", 1 / 8)):
        x = net.op("Conv", x, net.mark(w, name, QuantSpec(bits=8), scale, role="weight"))
    net.op("Relu", x, out="y")
    marked = check(net, "y", rank=4, n=1)
    assert marked.sites["c1.weight"] == (TensorId("c1.weight"),)
    assert isinstance(marked.sites["c2.weight"][0], Edge)


def test_a_weight_that_is_computed_with_after_its_marker(net: Net) -> None:
    """Folding would lose the site, so the float model is left as it is."""
    w = net.mark(net.weight("w", 4, 4), "w", WEIGHT, net.channels(4), role="weight")
    net.op("MatMul", net.input("x", "n", 4), net.op("Mul", w, net.weight("alpha", 4, 1)), out="y")
    assert check(net, "y", n=3).plan.prepare == ()


def test_a_quantized_constant_that_is_no_weight(net: Net) -> None:
    net.op("Add", net.input("x", "n", 4), net.mark(net.weight("position", 1, 4), "add.in1"), out="y")
    assert by_site(check(net, "y", n=3))["add.in1"].role is Role.ACTIVATION


@pytest.mark.recent_ort
def test_half_precision(net: Net) -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    x = net.mark(net.input("x", "n", 4, dtype=onnx.TensorProto.FLOAT16), "input:x", spec, 0.3)
    w = net.mark(net.weight("w", 4, 5, dtype=np.float16), "w", QuantSpec(bits=8, granularity=PerChannel(1)),
                 np.linspace(0.01, 0.02, 5), role="weight")  # fmt: skip
    net.op("Concat", x, w, axis=1, out="y")
    model = net.model("y", opset=17, dtype=onnx.TensorProto.FLOAT16)
    marked = strip_markers(model, target="virtual")
    assert marked.plan.opset == 19
    feeds = {"x": net.feeds(n=4)["x"] / 16}
    found = run(onnxq.apply(marked.model, marked.plan).model, feeds)
    np.testing.assert_array_equal(found[0], computed(model, feeds)[0])
    assert found[0].dtype == np.float16


def test_markers_inside_a_branch() -> None:
    inner = Net()
    inner.mark(inner.op("Relu", "shared", out="inner_relu"), "then.relu", ACT, 0.5, 0, out="a")
    outer = Net()
    shared = outer.mark(outer.op("Neg", outer.input("x", "n", 4)), "neg.out", ACT, 0.25)
    inner.nodes[0].input[0] = shared
    branch = helper.make_graph(
        inner.nodes, "then", [], [helper.make_tensor_value_info("a", 1, [None, None])],
        [numpy_helper.from_array(v, k) for k, v in inner.initializers.items()],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Abs", [shared], ["b"], name="n_b")], "else", [],
        [helper.make_tensor_value_info("b", 1, [None, None])],
    )  # fmt: skip
    outer.inputs.append(helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, []))
    outer.nodes.append(helper.make_node("If", ["flag"], ["y"], name="if", then_branch=branch, else_branch=other))
    model = outer.model("y")
    marked = strip_markers(model, target="virtual", quantizers=["neg.out", "then.relu"])
    assert marked.sites["then.relu"] == (TensorId("a", "if.then_branch"),)
    quantized = onnxq.apply(marked.model, marked.plan).model
    for flag in (True, False):
        feeds = {"x": (np.arange(12, dtype=np.float32) - 6).reshape(3, 4) / 3, "flag": np.array(flag)}
        np.testing.assert_array_equal(run(quantized, feeds)[0], computed(model, feeds)[0])


@pytest.mark.parametrize(("attr", "value"), [
    ("bits", "eight"), ("bits", -3), ("bits", 2**40), ("qmin", 1.5), ("qmax", [1, 2]), ("axis", "x"),
    ("axis", 10**6), ("block_size", -1), ("scheme", 3), ("role", 7), ("role", b"\xff"), ("storage", [1]),
])  # fmt: skip
def test_attributes_of_another_kind_name_the_site(attr: str, value: Any) -> None:
    model = residual_net().model("y", rank=2)
    marker = next(node for node in model.graph.node if node.op_type == "FakeQuantize")
    site = next(one.s.decode() for one in marker.attribute if one.name == "site")
    kept = [one for one in marker.attribute if one.name != attr]
    del marker.attribute[:]
    marker.attribute.extend([*kept, onnx.helper.make_attribute(attr, value)])
    with pytest.raises(ModelError) as caught:
        strip_markers(model)
    assert caught.value.subject.startswith(site)
