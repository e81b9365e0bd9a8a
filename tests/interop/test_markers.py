"""Markers of quantizers in a model: a float model and a plan out of it, which together say what the markers said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import onnxq
from onnxq.errors import ModelError, PlanError
from onnxq.graph import fold_constants, name_nodes
from onnxq.interop import Marked, strip_markers
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec
from tests.interop.marked import ACT, DOMAIN, WEIGHT, Net, computed, residual_net


def run(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]], *, optimize: bool = False) -> list[NDArray[Any]]:
    return list(Session(model, optimize=optimize).run(feeds).values())


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


GRAINS = [PerTensor(), PerChannel(0), PerBlock(1, 2)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("grain", GRAINS, ids=["tensor", "channel", "block"])
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
    marked = check(residual_net(activations=QuantSpec(bits=8)), "y", target=target, n=2)
    assert marked.plan.target == target


def test_a_target_that_cannot_hold_a_spec_names_the_site() -> None:
    marked = strip_markers(residual_net(QuantSpec(bits=4, granularity=PerChannel(0))).model("y"), target="trt")
    with pytest.raises(PlanError, match=r"(?s)x: trt has no kernel for|c1.weight"):
        onnxq.apply(marked.model, marked.plan)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_activations_per_channel_are_clipped_on_their_levels(bits: int, signed: bool) -> None:
    net = Net()
    spec = QuantSpec(
        bits=bits, signed=signed, symmetric=signed, granularity=PerChannel(-1), narrow_range=signed and bits < 16
    )
    x = net.mark(net.input("x", "n", 6), "input:x", spec, net.channels(6))
    net.op("Add", x, net.weight("b", 6), out="y")
    check(net, "y", opset=21, n=40)


def test_two_quantizers_of_one_tensor() -> None:
    net = Net()
    r = net.op("Relu", net.input("x", "n", 4))
    a, b = net.mark(r, "left.in", ACT, 0.5, 0), net.mark(r, "right.in", ACT, 0.25, 3)
    net.op("Sum", net.op("Mul", a, a), net.op("Mul", b, r), out="y")
    marked = check(net, "y", n=9)
    plans = marked.plan.sites
    assert plans[0].site == TensorId("left.in")
    assert [edge.index for edge in plans[0].consumers or ()] == [0, 1]
    assert isinstance(plans[1].site, Edge)


def test_quantizers_with_the_same_numbers_are_one_pair() -> None:
    net = Net()
    r = net.op("Relu", net.input("x", "n", 4))
    net.op("Mul", net.mark(r, "a"), net.mark(r, "b"), out="y")
    marked = check(net, "y", n=9)
    assert len(marked.plan.sites) == 1
    assert marked.sites["a"] == marked.sites["b"] == (TensorId("a"),)
    assert marked.plan.sites[0].reason == "quantizer a, b"


def test_a_quantizer_behind_another() -> None:
    """With the same numbers it changes nothing; with others it needs a place of its own."""
    net = Net()
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


def test_an_input_that_is_only_quantized() -> None:
    net = Net()
    net.mark(net.input("x", "n", 4), "input:x", out="y")
    assert by_site(check(net, "y", n=50))["input:x"].site == TensorId("y")


def test_a_weight_read_through_a_transpose_is_stored_turned() -> None:
    net = Net()
    w = net.mark(net.weight("fc.weight", 6, 4), "fc.weight", WEIGHT, net.channels(6), role="weight")
    net.op("MatMul", net.mark(net.input("x", "n", 3, 4), "input:x"), net.op("Transpose", w, perm=[1, 0]), out="y")
    marked = check(net, "y", rank=3, n=2)
    plan = by_site(marked)["fc.weight"]
    assert plan.site == TensorId("fc.weight")
    assert plan.spec.granularity == PerChannel(1)
    assert [node.op_type for node in marked.model.graph.node] == ["MatMul"]
    assert {t.name: list(t.dims) for t in marked.model.graph.initializer} == {"fc.weight": [4, 6]}


def test_transposes_that_cancel_leave_a_weight_as_it_is() -> None:
    net = Net()
    w = net.mark(
        net.weight("w", 4, 6), "w", QuantSpec(bits=8, granularity=PerChannel(1)), net.channels(6), role="weight"
    )
    there = net.op("Transpose", net.op("Transpose", w, perm=[1, 0]), perm=[1, 0])
    same = net.op("Transpose", net.op("Gather", there, net.constant("which", np.array([2, 0, 1, 3]))), perm=[0, 1])
    net.op("MatMul", net.input("x", "n", 4), same, out="y")
    plan = by_site(check(net, "y", n=2))["w"]
    assert plan.spec.granularity == PerChannel(1)
    assert [edge.node for edge in plan.consumers] == ["n_t3"]


def test_blocks_turn_with_their_weight() -> None:
    net = Net()
    spec = QuantSpec(bits=4, granularity=PerBlock(1, 2))
    w = net.mark(net.weight("w", 6, 4), "w", spec, net.channels(12).reshape(6, 2), role="weight")
    net.op("MatMul", net.input("x", "n", 4), net.op("Transpose", w), out="y")
    plan = by_site(check(net, "y", opset=21, n=2))["w"]
    assert plan.spec.granularity == PerBlock(0, 2)
    assert plan.qparams.scale.shape == (2, 6)


def test_one_weight_in_two_layers() -> None:
    """A tied table: looked up by rows as it is, multiplied with turned, each with its own quantizer."""
    net = Net()
    table = net.weight("embed.weight", 6, 4)
    rows = net.mark(table, "embed.weight", WEIGHT, net.channels(6), role="weight")
    tied = net.mark(table, "head.weight", QuantSpec(bits=8), 1 / 16, role="weight")
    looked = net.op("Gather", rows, net.constant("which", np.array([0, 5, 3])), axis=0)
    net.op("MatMul", net.op("Add", looked, net.input("x", "n", 3, 4)), net.op("Transpose", tied), out="y")
    marked = check(net, "y", rank=3, n=2)
    assert [s.spec.granularity for s in marked.plan.sites] == [PerChannel(0), PerTensor()]
    assert marked.sites["embed.weight"] != marked.sites["head.weight"]


def test_one_quantizer_called_twice() -> None:
    """A reused module: its weight is one site, its input quantizer stands on two tensors and shares its numbers."""
    net = Net()
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


def test_equal_weights_that_an_exporter_merged_stay_two_sites() -> None:
    net = Net()
    w = net.weight("c1.weight", 3, 3, 1, 1)
    x = net.input("x", "n", 3, 4, 4)
    for name, scale in (("c1.weight", 1 / 16), ("c2.weight", 1 / 8)):
        x = net.op("Conv", x, net.mark(w, name, QuantSpec(bits=8), scale, role="weight"))
    net.op("Relu", x, out="y")
    marked = check(net, "y", rank=4, n=1)
    assert marked.sites["c1.weight"] == (TensorId("c1.weight"),)
    assert isinstance(marked.sites["c2.weight"][0], Edge)


def test_a_weight_that_is_computed_with_after_its_marker() -> None:
    """Folding would lose the site, so the float model is left as it is."""
    net = Net()
    w = net.mark(net.weight("w", 4, 4), "w", WEIGHT, net.channels(4), role="weight")
    net.op("MatMul", net.input("x", "n", 4), net.op("Mul", w, net.weight("alpha", 4, 1)), out="y")
    assert check(net, "y", n=3).plan.prepare == ()


def test_a_quantized_constant_that_is_no_weight() -> None:
    net = Net()
    net.op("Add", net.input("x", "n", 4), net.mark(net.weight("position", 1, 4), "add.in1"), out="y")
    assert by_site(check(net, "y", n=3))["add.in1"].role is Role.ACTIVATION


def test_half_precision() -> None:
    net = Net()
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


# -- the same plan on the same network, written otherwise --------------------------------------------------------


def reordered(model: onnx.ModelProto) -> onnx.ModelProto:
    """As late as their inputs allow it, and the initializers backwards."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    waiting = dict.fromkeys((v.name for v in out.graph.input), 0) | {t.name: 0 for t in out.graph.initializer}
    left = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(out.graph.node)]
    done: list[onnx.NodeProto] = []
    while left:
        node = next(n for n in left if all(name in waiting or not name for name in n.input))
        left.remove(node)
        waiting.update(dict.fromkeys(node.output, 0))
        done.append(node)
    tensors = [onnx.TensorProto.FromString(t.SerializeToString()) for t in reversed(out.graph.initializer)]
    del out.graph.node[:], out.graph.initializer[:]
    out.graph.node.extend(done)
    out.graph.initializer.extend(tensors)
    return out


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """All inner names others, as another export has them."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    fixed = {value.name for value in (*out.graph.input, *out.graph.output)}
    for k, node in enumerate(out.graph.node):
        node.name = f"node_{97 - k}"
        for names in (node.input, node.output):
            names[:] = [name if not name or name in fixed else f"z_{name[::-1]}" for name in names]
    for tensor in out.graph.initializer:
        tensor.name = f"z_{tensor.name[::-1]}"
    return out


def slimmed(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnxslim.slim(model)  # type: ignore[no-any-return]


def redundant_net() -> Net:
    """With what optimizers take away: an Identity, two Transposes in a row, shape arithmetic, equal constants."""
    net = Net()
    x = net.mark(net.input("x", "n", 4, 6), "input:x")
    t = net.op("Transpose", net.op("Transpose", x, perm=[0, 2, 1]), perm=[0, 2, 1])
    size = net.op("Shape", t)
    batch = net.op("Gather", size, net.constant("zero", np.array([0])), axis=0)
    rest = net.constant("rest", np.array([24]))
    flat = net.op("Reshape", net.op("Identity", t), net.op("Concat", batch, rest, axis=0))
    w = net.mark(
        net.weight("fc.weight", 24, 8),
        "fc.weight",
        QuantSpec(bits=4, granularity=PerChannel(1)),
        net.channels(8),
        role="weight",
    )
    h = net.mark(net.op("Relu", net.op("MatMul", flat, w)), "relu.out", replace(ACT, bits=4), 64.0, 0)
    a = net.op("Mul", h, net.constant("two", np.float32([2])))
    b = net.op("Mul", h, net.constant("also two", np.float32([2])))
    net.op("Add", net.mark(a, "mul.out", ACT, 128.0, 0), net.op("Neg", b), out="y")
    return net


@pytest.mark.parametrize("change", [reordered, renamed, fold_constants, slimmed])
@pytest.mark.parametrize("target", ["virtual", "ort"])
@pytest.mark.parametrize("make", [residual_net, redundant_net])
def test_the_plan_fits_the_network_written_otherwise(make: Any, target: str, change: Any, tmp_path: Path) -> None:
    net = make()
    marked = strip_markers(net.model("y"), target=target)
    path = tmp_path / "plan.json"
    path.write_text(to_json(marked.plan))
    first, again = (onnxq.apply(model, path).model for model in (marked.model, change(name_nodes(marked.model))))
    feeds = net.feeds(n=3)
    wanted = run(first, feeds)[0]
    np.testing.assert_array_equal(run(again, feeds)[0], wanted)
    np.testing.assert_array_equal(computed(net.model("y"), feeds)[0], wanted)


def test_a_changed_weight_is_not_taken_for_the_trained_one() -> None:
    marked = strip_markers(residual_net().model("y"), target="virtual")
    other = onnx.ModelProto()
    other.CopyFrom(slimmed(marked.model))
    tensor = next(t for t in other.graph.initializer if t.name == "c1.weight")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, tensor.name))
    with pytest.raises(PlanError, match="other weights"):
        onnxq.apply(other, marked.plan)


def test_a_site_that_is_gone_is_named() -> None:
    marked = strip_markers(residual_net().model("y"), target="virtual")
    other = onnx.ModelProto()
    other.CopyFrom(marked.model)
    for node in other.graph.node:
        node.input[:] = ["elsewhere" if name == "relu.out" else name for name in node.input]
        node.output[:] = ["elsewhere" if name == "relu.out" else name for name in node.output]
    other.graph.node.append(helper.make_node("Neg", ["elsewhere"], ["extra"], name="n_extra"))
    other.graph.output.append(helper.make_tensor_value_info("extra", 1, [None] * 4))
    with pytest.raises(PlanError, match=r"relu\.out: is in the plan but not in this model"):
        onnxq.apply(other, marked.plan)


def test_the_plan_survives_its_file() -> None:
    plan = strip_markers(residual_net().model("y"), target="ort").plan
    assert from_json(to_json(plan)) == plan
    assert plan.lasting


def test_optimized_ort_agrees_within_a_step() -> None:
    net = residual_net()
    marked = strip_markers(net.model("y"), target="ort")
    quantized = onnxq.apply(marked.model, marked.plan).model
    feeds = net.feeds(n=4)
    plain, fast = (run(quantized, feeds, optimize=optimize)[0] for optimize in (False, True))
    np.testing.assert_allclose(fast, plain, atol=4.0)


# -- what cannot be a marker -------------------------------------------------------------------------------------


def broken(**changes: Any) -> onnx.ModelProto:
    """One marked input; `changes`: attributes of its marker, None takes one away."""
    net = Net()
    net.op("Relu", net.mark(net.input("x", "n", 4), "input:x"), out="y")
    model = net.model("y")
    marker = model.graph.node[0]
    kept = [a for a in marker.attribute if a.name not in changes]
    kept += [helper.make_attribute(name, value) for name, value in changes.items() if value is not None]
    fresh = helper.make_node(marker.op_type, marker.input, marker.output, name=marker.name, domain=DOMAIN)
    fresh.attribute.extend(kept)
    marker.CopyFrom(fresh)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": None}, "has no site"),
        ({"site": ""}, "has no site"),
        ({"bits": None}, "input:x: its marker has no bits"),
        ({"blocksize": 4}, "input:x: its marker has an unknown 'blocksize'"),
        ({"role": "bias"}, "input:x: role 'bias'"),
        ({"role": "guess"}, "input:x: role 'guess'"),
        ({"scheme": "affine"}, "input:x: scheme 'affine'"),
        ({"qmax": 200}, "input:x: levels 0…200 are not those of 8 bits"),
        ({"bits": 9}, "input:x: bits=9"),
        ({"axis": 1}, r"input:x: scale of shape \(\) for a tensor of shape \['n', 4\] on axis 1"),
        ({"axis": 3}, "input:x: axis 3 of a tensor of shape"),
    ],
)
def test_a_marker_that_says_too_little_or_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        strip_markers(broken(**changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", 0.0, "not a positive, finite number"),
        ("scale", np.nan, "not a positive, finite number"),
        ("scale", [0.5, 0.25], "scale of shape"),
        ("zero", 300.0, "zero point is outside 0…255"),
        ("zero", np.inf, "zero point is outside 0…255"),
    ],
)
def test_numbers_that_are_none(name: str, value: Any, message: str) -> None:
    model = broken()
    tensor = next(t for t in model.graph.initializer if t.name.endswith(name))
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, np.float32), tensor.name))
    with pytest.raises(ModelError, match=f"input:x: .*{message}"):
        strip_markers(model)


def test_numbers_computed_at_run_time() -> None:
    model = broken()
    model.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["live"], name="live", keepdims=0))
    model.graph.node[1].input[1] = "live"
    with pytest.raises(ModelError, match="input:x: its scale is computed at run time"):
        strip_markers(model)


def test_the_set_of_sites_must_be_that_of_the_quantizers() -> None:
    model = broken()
    with pytest.raises(ModelError, match=r"lost.out: quantizes nothing .*the same holds for lost.in"):
        strip_markers(model, quantizers=["input:x", "lost.out", "lost.in"])
    with pytest.raises(ModelError, match="input:x: is marked in the graph, and the model has no such quantizer"):
        strip_markers(model, quantizers=[])
    assert strip_markers(model, quantizers=["input:x"]).sites == {"input:x": (TensorId("x"),)}


def test_a_marker_that_nothing_reads_is_lost() -> None:
    net = Net()
    x = net.input("x", "n", 4)
    net.mark(x, "dead")
    net.op("Relu", net.mark(x, "input:x", ACT, 0.5), out="y")
    with pytest.raises(ModelError, match="dead: quantizes nothing"):
        strip_markers(net.model("y"))


def test_one_site_with_two_sets_of_numbers() -> None:
    net = Net()
    x = net.input("x", "n", 4)
    net.op("Add", net.mark(x, "same", ACT, 0.5), net.mark(x, "same", ACT, 0.25), out="y")
    with pytest.raises(ModelError, match="same: two of its markers have different numbers"):
        strip_markers(net.model("y"))


def test_a_model_without_markers(tmp_path: Path) -> None:
    net = Net()
    net.op("Relu", net.input("x", "n", 4), out="y")
    path = tmp_path / "plain.onnx"
    onnx.save(net.model("y"), path)
    with pytest.raises(ModelError, match=re.escape(f"has no {DOMAIN} markers")):
        strip_markers(path)


def test_another_operator_of_the_domain() -> None:
    model = broken()
    model.graph.node[0].op_type = "Fakequantize"
    with pytest.raises(ModelError, match="no operator Fakequantize"):
        strip_markers(model)
