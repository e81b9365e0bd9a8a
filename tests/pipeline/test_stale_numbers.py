"""A plan that a person edited: what no longer holds is computed again and told, or asked for."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.emit import unpack_plan
from onnxq.errors import PlanError
from onnxq.plan import Plan, drop_stale, from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.interop.marked import renamed, reordered
from tests.passes.kit import parse, random_weights
from tests.pipeline.models import BALANCED, EVERYTHING, images, quantize, residual, to_bytes

Edit = Callable[[dict[str, Any]], object]
BARE = {"role": "activation", "spec": {"bits": 8, "type": "uint8", "scheme": "asymmetric", "granularity": "tensor"}}


@pytest.fixture(scope="module")
def done() -> onnxq.Result:
    return quantize(residual(), images())


@pytest.fixture(scope="module")
def held(done: onnxq.Result) -> dict[str, Any]:
    return json.loads(done.plan_json())


def edited(held: dict[str, Any], edit: Edit) -> Plan:
    raw = copy.deepcopy(held)
    edit(raw)
    return from_json(json.dumps(raw), source="plan.json")


def apply(held: dict[str, Any], edit: Edit) -> onnxq.Result:
    """The edited plan carried out with samples."""
    return onnxq.apply(residual(), edited(held, edit), images(), overrides={"latency": False})


def site(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in raw["sites"] if one["site"] == name)


def change(name: str, **fields: Any) -> Edit:
    """An edit of fields of a site."""
    return lambda raw: site(raw, name).update(fields)


def respec(name: str, **fields: Any) -> Edit:
    """An edit of fields of a site's spec."""
    return lambda raw: site(raw, name)["spec"].update(fields)


def drop(name: str, *keys: str) -> Edit:
    """An edit that takes fields out of a site, or the site itself."""
    return lambda raw: [site(raw, name).pop(key) for key in keys] if keys else raw["sites"].remove(site(raw, name))


def add(where: Any, like: str = "", **fields: Any) -> Edit:
    """An edit that adds a site. like: of the fields of another one."""
    return lambda raw: raw["sites"].append(
        {**(copy.deepcopy(site(raw, like)) if like else BARE), "site": where, **fields}
    )


def worst(result: onnxq.Result) -> float:
    return min(result.report.checks[0].sqnr_db)


SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "bits": ("w0", {"bits": 4}),
    "sign": ("w0", {"type": "uint8", "scheme": "asymmetric"}),
    "narrow range": ("w0", {"narrow_range": True}),
    "granularity": ("w0", {"granularity": "tensor", "axis": None}),
    "activation bits": ("x", {"bits": 5}),
    "activation sign": ("x", {"type": "int8"}),
    "activation scheme": ("x", {"scheme": "symmetric"}),
}


@pytest.mark.recent_ort
@pytest.mark.parametrize(("name", "spec"), SPECS.values(), ids=SPECS)
def test_another_spec_gets_numbers_of_its_own(held: dict[str, Any], name: str, spec: dict[str, Any]) -> None:
    again = apply(held, respec(name, **spec))
    told = [line for line in again.report.warnings if line.startswith(f"{name}: its scale was computed for 8 bits")]
    assert len(told) == 1
    assert "computed again from the" in told[0]
    assert worst(again) > 25
    assert all(not one.qparams.computed_for or one.qparams.computed_for == one.spec.levels for one in again.plan.sites)


def test_fewer_bits_of_a_weight_need_no_samples(held: dict[str, Any]) -> None:
    narrow = respec("w0", bits=4)
    without = onnxq.apply(residual(), edited(held, narrow))
    assert without.model == apply(held, narrow).model
    assert any(line.startswith("w0: ") for line in without.report.warnings)


def test_an_activation_asks_for_samples(done: onnxq.Result, held: dict[str, Any]) -> None:
    """Edited in the file or in Python, carried out or profiled."""
    plan = edited(held, respec("x", bits=4))
    with pytest.raises(PlanError) as caught:
        onnxq.apply(residual(), plan)
    assert caught.value.subject == "x"
    assert "computed for 8 bits unsigned asymmetric, and the plan says 4 bits" in caught.value.cause
    assert "samples" in caught.value.fix
    first = done.plan.sites[0]
    changed = done.plan.with_sites((replace(first, spec=replace(first.spec, bits=4)), *done.plan.sites[1:]))
    with pytest.raises(PlanError, match="computed for 8 bits"):
        onnxq.apply(residual(), changed)
    with pytest.raises(PlanError, match="computed for 8 bits"):
        onnxq.profile_model(residual(), None, images(), plan=plan)


def test_numbers_written_beside_the_new_spec_are_obeyed(held: dict[str, Any]) -> None:
    def edit(raw: dict[str, Any]) -> None:
        site(raw, "x")["spec"].update(bits=4)
        site(raw, "x").update(scale=0.5, zero_point=8)

    again = apply(held, edit)
    (found,) = (one.qparams for one in again.plan.sites if str(one.site) == "x")
    assert (float(found.scale), int(found.zero_point)) == (0.5, 8)
    assert not any(line.startswith("x: ") for line in again.report.warnings)


def test_untouched_plans_are_carried_out_as_they_are(done: onnxq.Result, held: dict[str, Any]) -> None:
    again = onnxq.apply(residual(), edited(held, lambda raw: None))
    assert to_bytes(again) == to_bytes(done)
    assert drop_stale(done.plan) == (done.plan, {})
    # Without samples the summary says that nothing was checked.
    assert "nothing was checked against the float model" in again.report.unchecked
    assert done.report.unchecked == ""


def test_swept_weights_and_corrected_biases_go_with_their_scale() -> None:
    swept = quantize(residual(), images(40), BALANCED)
    weight = next(one for one in swept.plan.sites if one.role is Role.WEIGHT and one.values is not None)
    raw = json.loads(swept.plan_json())
    site(raw, str(weight.site))["spec"]["bits"] = 5
    again = onnxq.apply(residual(), from_json(json.dumps(raw)), images(40), overrides={"latency": False})
    (found,) = (one for one in again.plan.sites if one.site == weight.site)
    assert found.values is None
    assert worst(again) > 20


def test_an_inconsistent_bias_follows_its_input(held: dict[str, Any]) -> None:
    again = apply(held, change("x", scale=0.05))
    assert any(line.startswith("b0: its scale was not that of its input times") for line in again.report.warnings)
    assert worst(again) > 30


WEIGHT = {"role": "weight", "spec": {**BARE["spec"], "type": "int8", "scheme": "symmetric"}}  # type: ignore[dict-item]
GOES: dict[str, Sequence[Edit]] = {
    "a weight taken out": [drop("w0")],
    "an activation taken out": [drop("x")],
    "a bias taken out": [drop("b0")],
    "a weight renamed": [change("w0", site="other")],
    "an activation renamed": [change("x", site="other")],
    "a weight without anchor": [drop("w0", "anchor")],
    "an anchor of nothing": [change("w0", anchor="nothing")],
    "a weight without readers": [drop("w0", "consumers", "anchor")],
    "numbers taken out": [drop("w0", "scale", "zero_point")],
    "an activation added": [add("a")],
    "one added with numbers": [add("a", scale=0.05, zero_point=128)],
    "a weight put back by hand": [drop("w0"), add("w0", **WEIGHT)],
}


@pytest.mark.parametrize("name", GOES)
def test_sites_changed_by_hand_give_a_result(held: dict[str, Any], name: str) -> None:
    again = apply(held, lambda raw: [edit(raw) for edit in GOES[name]])
    assert worst(again) > 25
    orphan = "b0: left float, its scale follows from w0, which is not in the plan"
    assert (orphan in again.report.warnings) == (name == "a weight taken out")


FAULTS: dict[str, tuple[Edit, str, tuple[str, ...]]] = {
    "a site twice": (add("x", like="x"), "x", ("stands twice in the plan [Q403]", "take one of the two sites out")),
    "one site under two names": (
        add("other", like="w0"), "other", ("stands twice in the plan, once as w0 [Q403]", "take one"),
    ),
    "a tensor nobody has": (add("rr"), "rr", ("is in the plan but not in this model [Q404]", "'r'")),
    "a node nobody has": (add(["aa/Conv", 0]), "aa/Conv/in0", ("not in this model [Q404]", "'a/Conv'")),
    "a weight whose reader is another": (change("w0", anchor="other/1"), "w0", ("[Q404]", "fix: 'a/Conv' is there")),
    "an input that the node has not": (add(["a/Conv", 5]), "a/Conv/in5", ("not connected", "[Q404]")),
    "a reader that does not read it": (
        lambda raw: site(raw, "w0")["consumers"].append({"site": ["a/Conv", 2]}), "w0",
        ("is not read by a/Conv/in2", "[Q403]"),
    ),
    "no reader": (change("w0", consumers=[]), "w0", ("has no reader", "[Q403]", "take `consumers` out")),
    "a weight that is computed": (
        change("r", role="weight"), "r", ("is not a constant in this model, as a weight is [Q404]",),
    ),
    "a bias of 8 bits": (respec("b0", bits=8, type="int8"), "b0", ("a bias is 32 bits",)),
    "an axis too many": (respec("w0", axis=9), "w0", ("axis 9 is outside its shape", "[Q403]")),
    "a scale too many": (change("x", scale=[0.1, 0.2], zero_point=[1, 2]), "x", ("shape [2]",)),
    "a zero point out of range": (change("x", zero_point=999), "x", ("outside 0…255",)),
    "a scale of 0": (change("x", scale=0), "x", ("its scale is 0",)),
    "one of two in a group": (
        lambda raw: [site(raw, name).update(group="g") for name in "xr"], "r", ("their numbers differ",),
    ),
    "values of another shape": (
        change("w0", values=[1, 2]), "w0", ("of shape [2] do not fit a tensor of shape", "[Q408]"),
    ),
    "a pass nobody has": (lambda raw: raw.update(prepare=["constant"]), "prepare: 'constant'", ("is no pass",)),
    "a node without a name": (lambda raw: raw["float_nodes"].append(""), "a node without a name", ("not in this",)),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "subject", "said"), FAULTS.values(), ids=FAULTS)
def test_sites_that_cannot_be_are_named(held: dict[str, Any], edit: Edit, subject: str, said: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        apply(held, edit)
    assert caught.value.subject == subject
    assert [part for part in said if part not in str(caught.value)] == []
    assert caught.value.fix


def test_more_bits_than_the_opset_has_raise_it(held: dict[str, Any]) -> None:
    again = apply(held, respec("x", bits=16, type="uint16"))
    assert again.model.opset_import[0].version >= 21


def test_weights_alone_are_checked_without_samples() -> None:
    first = onnxq.quantize(residual(), None, "ort-int8-weights", overrides={"latency": False})
    # As the plan of a large model.
    again = onnxq.apply(residual(), replace(first.plan, contents=None))
    assert again.model.graph == first.model.graph
    report = onnxq.apply(residual(), first.plan).report
    assert (report.unchecked, report.synthetic, report.latency) == ("", True, None)
    assert min(report.checks[0].sqnr_db) > 30


def test_a_plan_computes_no_ranges_and_warns_of_none() -> None:
    plan = onnxq.make_plan(residual(), None, EVERYTHING)
    assert not any("SYNTHETIC" in line for line in plan.warnings)


# ---- A plan is the whole decision: edited, stored, and carried out on the same network exported again.


def answers(model: onnx.ModelProto) -> np.ndarray:
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
    first = quantize(different_branches(), images())
    other = onnxq.apply(renamed(reordered(different_branches())), first.plan)
    assert len(other.plan.sites) == len(first.plan.sites)
    np.testing.assert_array_equal(answers(other.model), answers(first.model))


def test_node_order_and_unnamed_nodes_do_not_matter(done: onnxq.Result) -> None:
    proto = reordered(residual())
    for k, node in enumerate(proto.graph.node):
        node.name = f"node_{97 - k}"
    again = onnxq.apply(proto, done.plan)
    np.testing.assert_array_equal(answers(again.model), answers(done.model))


def test_a_plan_without_numbers_is_calibrated() -> None:
    plan = onnxq.make_plan(residual(), images(), EVERYTHING)
    assert not plan.calibrated
    with pytest.raises(PlanError, match=r"no scale.*\[Q405\]"):
        onnxq.apply(residual(), plan)
    again = onnxq.apply(residual(), plan, images(), overrides={"latency": False})
    assert again.plan.calibrated
    assert worst(again) > 28


def test_an_edited_plan_is_obeyed(done: onnxq.Result) -> None:
    raw = json.loads(done.plan_json())
    raw["sites"] = [s for s in raw["sites"] if s["rule"] != "gemm" and s["site"] not in ("m", "f")]
    again = onnxq.apply(residual(), from_json(json.dumps(raw)))
    assert any(node.op_type == "Gemm" for node in again.model.graph.node)
    assert not any("w3" in name for node in again.model.graph.node for name in node.output)


def test_other_weights_need_to_be_said(done: onnxq.Result) -> None:
    trained = residual(seed=5)
    with pytest.raises(PlanError, match="new_weights=True"):
        onnxq.apply(trained, done.plan)
    again = onnxq.apply(trained, done.plan, images(), overrides={"new_weights": True, "latency": False})
    assert worst(again) > 15


def test_the_plan_in_the_model_is_the_plan(done: onnxq.Result) -> None:
    held = {entry.key: entry.value for entry in done.model.metadata_props}
    stored = unpack_plan(held["onnxq.plan"])
    bare = replace(done.plan, sites=tuple(replace(site, qparams=None) for site in done.plan.sites))
    assert to_json(stored) == to_json(bare)
    assert isinstance(stored, Plan)


def test_a_plan_whose_file_needs_a_newer_opset_finds_the_biases_that_it_corrected() -> None:
    """Opset 18 writes another Split: `s` is told by what is around it in the opset that the model came in."""
    text = """g (float[N,128] x) => (float[N,64] y) {
        a, b = Split <axis=1> (x) m = MatMul (a, w) s = Add (m, c) t = Relu (s) u = MatMul (t, v) y = Add (u, b) }"""
    proto = parse(text, c=np.ones(64, np.float32), **random_weights({"w": (64, 64), "v": (64, 64)}))
    x = np.random.default_rng(0).standard_normal((16, 12, 128)).astype(np.float32)
    result = quantize(proto, {"x": x}, "ort-int4-weights")
    assert [str(bias.edge) for bias in result.plan.biases] == ["s/Add/in1"]
    assert onnxq.apply(proto, result.plan).model == result.model
