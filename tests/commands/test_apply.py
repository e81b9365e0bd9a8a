"""A plan is the whole decision: edited, stored, and carried out on the same network exported again."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.errors import PlanError
from onnxq.plan import Plan, from_json, to_json
from onnxq.runtime import Session
from tests.interop.marked import renamed, reordered
from tests.passes.kit import parse, random_weights
from tests.pipeline.models import EVERYTHING, images, residual


@pytest.fixture(scope="module")
def done() -> onnxq.Result:
    return onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False})


def outputs(model: onnx.ModelProto) -> np.ndarray:
    return Session(model, optimize=False).run(images(seed=7))["y"]


def different_branches() -> onnx.ModelProto:
    """`residual` with a 1x1 kernel in one branch, so that no two convolutions look alike."""
    proto = residual()
    weight = next(t for t in proto.graph.initializer if t.name == "w2")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:, :, :1, :1].copy(), "w2"))
    node = next(n for n in proto.graph.node if "w2" in n.input)
    del node.attribute[:]
    return proto


def test_export_with_other_names_gets_the_same_numbers() -> None:
    first = onnxq.quantize(different_branches(), images(), EVERYTHING, overrides={"latency": False})
    other = onnxq.apply(renamed(reordered(different_branches())), first.plan)
    assert len(other.plan.sites) == len(first.plan.sites)
    np.testing.assert_array_equal(outputs(other.model), outputs(first.model))


def test_node_order_and_unnamed_nodes_do_not_matter(done: onnxq.Result) -> None:
    proto = reordered(residual())
    for k, node in enumerate(proto.graph.node):
        node.name = f"node_{97 - k}"
    again = onnxq.apply(proto, done.plan)
    np.testing.assert_array_equal(outputs(again.model), outputs(done.model))


def test_a_plan_without_numbers_is_calibrated() -> None:
    plan = onnxq.make_plan(residual(), images(), EVERYTHING)
    assert not plan.calibrated
    with pytest.raises(PlanError, match=r"no scale.*\[Q405\]"):
        onnxq.apply(residual(), plan)
    done = onnxq.apply(residual(), plan, images(), overrides={"latency": False})
    assert done.plan.calibrated
    assert min(done.report.checks[0].sqnr_db) > 28


def test_an_edited_plan_is_obeyed(done: onnxq.Result) -> None:
    raw = json.loads(done.plan_json())
    raw["sites"] = [s for s in raw["sites"] if s["rule"] != "gemm" and s["site"] not in ("m", "f")]
    edited = onnxq.apply(residual(), from_json(json.dumps(raw)))
    assert any(node.op_type == "Gemm" for node in edited.model.graph.node)
    assert not any("w3" in name for node in edited.model.graph.node for name in node.output)


def test_other_weights_need_to_be_said(done: onnxq.Result) -> None:
    trained = residual(seed=5)
    with pytest.raises(PlanError, match="new_weights=True"):
        onnxq.apply(trained, done.plan)
    again = onnxq.apply(trained, done.plan, images(), overrides={"new_weights": True, "latency": False})
    assert min(again.report.checks[0].sqnr_db) > 15


def test_the_plan_in_the_model_is_the_plan(done: onnxq.Result) -> None:
    held = {entry.key: entry.value for entry in done.model.metadata_props}
    stored = from_json(held["onnxq.plan"])
    bare = replace(done.plan, sites=tuple(replace(site, qparams=None) for site in done.plan.sites))
    assert to_json(stored) == to_json(bare)
    assert isinstance(stored, Plan)


def test_a_plan_whose_file_needs_a_newer_opset_finds_the_biases_that_it_corrected() -> None:
    """Opset 18 writes another Split: `s` is told by what is around it in the opset that the model came in."""
    text = """g (float[N,128] x) => (float[N,64] y) {
        a, b = Split <axis=1> (x) m = MatMul (a, w) s = Add (m, c) t = Relu (s) u = MatMul (t, v) y = Add (u, b) }"""
    proto = parse(text, c=np.ones(64, np.float32), **random_weights({"w": (64, 64), "v": (64, 64)}))
    x = np.random.default_rng(0).standard_normal((16, 12, 128)).astype(np.float32)
    result = onnxq.quantize(proto, {"x": x}, "ort-int4-weights", overrides={"latency": False})
    assert [str(bias.edge) for bias in result.plan.biases] == ["s/Add/in1"]
    assert onnxq.apply(proto, result.plan).model == result.model
