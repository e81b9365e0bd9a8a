"""The plan of a marked model, on its float network as others write it; and markers that say nothing one could plan."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest
from onnx import helper, numpy_helper

import onnxq
from onnxq.errors import ModelError, PlanError
from onnxq.graph import fold_constants, name_nodes
from onnxq.interop import strip_markers
from onnxq.plan import from_json, to_json
from onnxq.sites import TensorId
from tests.interop.marked import ACT, DOMAIN, Net, computed, redundant_net, renamed, reordered, residual_net, run


@pytest.mark.parametrize("change", [reordered, renamed, fold_constants, onnxslim.slim])
@pytest.mark.parametrize("target", ["virtual", "ort"])
@pytest.mark.parametrize("make", [residual_net, redundant_net])
def test_the_plan_fits_the_network_written_otherwise(make: Any, target: str, change: Any, tmp_path: Path) -> None:
    net = make()
    marked = strip_markers(net.model("y"), target=target)
    path = tmp_path / "plan.json"
    path.write_text(to_json(marked.plan))
    assert from_json(path.read_text()) == marked.plan
    assert marked.plan.lasting
    first, again = (onnxq.apply(model, path).model for model in (marked.model, change(name_nodes(marked.model))))
    feeds = net.feeds(n=3)
    wanted = run(first, feeds)[0]
    np.testing.assert_array_equal(run(again, feeds)[0], wanted)
    np.testing.assert_array_equal(computed(net.model("y"), feeds)[0], wanted)


def test_a_changed_weight_is_not_taken_for_the_trained_one() -> None:
    marked = strip_markers(residual_net().model("y"), target="virtual")
    other = onnx.ModelProto.FromString(onnxslim.slim(marked.model).SerializeToString())
    tensor = next(t for t in other.graph.initializer if t.name == "c1.weight")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, tensor.name))
    with pytest.raises(PlanError, match="other weights"):
        onnxq.apply(other, marked.plan)


def test_a_site_that_is_gone_is_named() -> None:
    marked = strip_markers(residual_net().model("y"), target="virtual")
    other = onnx.ModelProto.FromString(marked.model.SerializeToString())
    next(node for node in other.graph.node if "relu.out" in node.output).op_type = "Abs"
    with pytest.raises(PlanError, match=r"relu\.out: is in the plan but not in this model"):
        onnxq.apply(other, marked.plan)


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
    del marker.attribute[:]
    marker.attribute.extend(kept)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": None}, "has no site"),
        ({"site": ""}, "has no site"),
        ({"bits": None}, r"input:x: its marker has no bits.*\[Q119\]"),
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


def test_a_marker_that_reaches_no_output() -> None:
    model = broken()
    model.graph.node[1].output[0] = "unused"
    model.graph.node.append(helper.make_node("Neg", ["x"], ["y"]))
    with pytest.raises(ModelError, match="reaches no output"):
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
    with pytest.raises(ModelError, match=r"same: two of its markers have different numbers.*\[Q120\]"):
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
