"""Bits are written under every carrier asked for, and read back, from onnxq's own files and from the graph alone."""

import json
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxq
from onnxq.annotate import BITS_ATTRIBUTE_WARNING, Origin, annotate_model, find_pairs, inspect_model
from onnxq.annotate.write import assign_bits, write_named_bits
from onnxq.errors import ConfigError, PlanError
from onnxq.plan import Plan, SitePlan
from onnxq.runtime import Session
from onnxq.sites import Edge, Role, Site, TensorId
from onnxq.spec import QuantSpec
from tests.annotate import models


def answers(proto: onnx.ModelProto) -> np.ndarray:
    return Session(proto).run({"x": np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float32)})["y"]


@pytest.mark.parametrize("make", models.RUNNING)
@pytest.mark.parametrize("rename", [False, True])
def test_written_bits_are_read_back_from_metadata_and_nothing_else_changes(make, rename):
    source = make()
    found = annotate_model(source, rename=rename)
    onnx.checker.check_model(found.model)
    again = find_pairs(found.model)
    assert models.bare(again) == models.bare(found.pairs)
    assert {pair.origin for pair in again} == {Origin.METADATA}
    assert [(p.site, p.bits, p.storage) for p in again] == [(p.site, p.bits, p.storage) for p in find_pairs(source)]
    np.testing.assert_array_equal(answers(found.model), answers(source))


@pytest.mark.parametrize("make", models.RUNNING)
def test_writing_twice_gives_the_same_bytes(make):
    once = annotate_model(make()).model
    twice = annotate_model(once).model
    assert twice.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


def test_carriers_hold_what_they_should():
    found = annotate_model(models.two_widths()).model
    record = json.loads({entry.key: entry.value for entry in found.metadata_props}["onnxq.bits"])
    assert record["c/QuantizeLinear"] == record["c/Clip"] == record["c/DequantizeLinear"]
    assert record["w_dq"] == {
        "site": "w", "bits": 4, "scheme": "symmetric", "granularity": "channel", "role": "weight"
    }  # fmt: skip
    node = next(node for node in found.graph.node if node.name == "w_dq")
    assert {entry.key: entry.value for entry in node.metadata_props} == {
        "onnxq.site": "w", "onnxq.bits": "4", "onnxq.scheme": "symmetric", "onnxq.granularity": "channel",
        "onnxq.role": "weight",
    }  # fmt: skip
    assert not any(attribute.name == "bits" for node in found.graph.node for attribute in node.attribute)


def test_metadata_survives_what_it_is_meant_to_survive(tmp_path):
    found = annotate_model(models.two_widths(), given=[("c", 4)])
    path = tmp_path / "optimized.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(found.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kept = {str(pair.site): (pair.bits, pair.origin) for pair in inspect_model(path).pairs}
    assert kept["c"] == (4, Origin.METADATA)
    converted = onnx.version_converter.convert_version(found.model, 18)
    assert {str(p.site): p.bits for p in find_pairs(converted)} == {str(p.site): p.bits for p in found.pairs}


def test_sparsebits_attribute_on_request_and_who_refuses_it():
    found = annotate_model(models.two_widths(), bits_attribute=True)
    assert {n.name: a.i for n in found.model.graph.node for a in n.attribute if a.name == "bits"} == {
        "in_q": 8, "in_dq": 8, "w_dq": 4, "b_DequantizeLinear": 32, "c/QuantizeLinear": 4, "c/DequantizeLinear": 4,
        "out_q": 8, "out_dq": 8,
    }  # fmt: skip
    assert found.warnings[-1] == BITS_ATTRIBUTE_WARNING
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(found.model)
    with pytest.raises(Exception, match="bits"):
        answers(found.model)


def test_attributes_become_metadata_that_every_engine_takes():
    found = annotate_model(models.forget(annotate_model(models.two_widths(), bits_attribute=True).model))
    assert {pair.origin for pair in found.pairs} == {Origin.ATTRIBUTE}
    assert "became metadata" in found.warnings[-1]
    np.testing.assert_array_equal(answers(found.model), answers(models.two_widths()))


def test_given_bits_first_match_wins_and_biases_keep_theirs():
    found = annotate_model(models.two_widths(), given=[("/^c$/", 3), ("in_q", 7), ("*", 8)])
    seen = {str(pair.site): (pair.bits, str(pair.origin)) for pair in found.pairs}
    assert seen == {"x": (7, "given"), "w": (8, "given"), "b": (32, "type"), "c": (3, "given"), "y": (8, "given")}
    assert {str(pair.site): pair.bits for pair in find_pairs(found.model)} == {
        name: bits for name, (bits, _) in seen.items()
    }


def test_a_width_nothing_enforces_is_told():
    found = annotate_model(models.two_widths(), given=[("x", 4), ("w", 5), ("c", 4)])
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("noted narrower")
    assert found.warnings[0].endswith("(1: x)")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("convv*", 8)], "matches no pair"),
        ([("c/Clp", 4)], "did you mean 'c/Clip'"),
        ([("*", 8), ("x", 4)], "put the narrower pattern first"),
        ([("w", 3)], "uses the levels -7 to 7, which 3 bits cannot hold"),
        ([("x", 16)], "stored as uint8"),
        ([("x", 0)], "stored as uint8"),
    ],
)
def test_given_bits_that_cannot_be_are_errors(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        annotate_model(models.two_widths(), given=given)
    assert caught.value.subject == f"bits: {given[-1][0]}={given[-1][1]}"
    assert caught.value.fix


def plan(*sites: tuple[Site, int]) -> Plan:
    specs = [(site, QuantSpec(bits=bits, signed=False, symmetric=False)) for site, bits in sites]
    planned = tuple(SitePlan(site=site, role=Role.ACTIVATION, spec=spec) for site, spec in specs)
    return Plan(target="ort", model="m.onnx", topology="", weights="", sites=planned)


def test_bits_from_a_plan_come_after_given_ones_and_before_the_files():
    wanted = plan((TensorId("x"), 7), (TensorId("y"), 6), (TensorId("gone"), 8))
    found = annotate_model(models.two_widths(), plan=wanted, given=[("y", 5)])
    seen = {str(pair.site): (pair.bits, str(pair.origin), pair.scheme) for pair in found.pairs}
    assert seen["x"] == (7, "plan", "asymmetric")
    assert seen["y"][:2] == (5, "given")
    assert seen["c"][:2] == (4, "clip")


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(PlanError, match=r"none of its 1 sites(.|\n)*did you mean 'x'"):
        annotate_model(models.two_widths(), plan=plan((TensorId("xx"), 8)))
    with pytest.raises(PlanError, match="stored as uint8"):
        annotate_model(models.two_widths(), plan=plan((TensorId("x"), 16)))


def test_edges_of_a_plan_are_found():
    found = annotate_model(models.dedicated(), plan=plan((Edge("add", 1), 8)))
    assert [(p.bits, p.origin) for p in found.pairs] == [(16, Origin.TYPE), (8, Origin.PLAN)]


def test_rename_follows_the_sites_and_meets_no_other_name():
    proto = models.two_widths()
    proto.graph.node[-3].name = "x/QuantizeLinear"  # the Relu bears the name that the input's pair wants
    found = annotate_model(proto, rename=True)
    names = {str(p.site): p.nodes for p in found.pairs}
    assert names["x"] == ("x/QuantizeLinear_1", "x/DequantizeLinear")
    assert names["w"] == ("w/DequantizeLinear",)
    assert names["c"] == ("c/Clip", "c/QuantizeLinear", "c/DequantizeLinear")
    used = [node.name for node in found.model.graph.node]
    assert len(set(used)) == len(used)


def test_rename_of_a_quantize_node_with_two_readers_names_it_once():
    proto = models.relu6(6.0)
    proto.graph.node.append(onnx.helper.make_node("DequantizeLinear", ["cd_q", "s", "z"], ["cd2"], name="dq2"))
    proto.graph.node.append(onnx.helper.make_node("Abs", ["cd2"], ["z2"], name="abs"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z2", 1, list("abcd")))
    assert [pair.nodes for pair in annotate_model(proto, rename=True).pairs] == [
        ("c/QuantizeLinear", "c/DequantizeLinear"),
        ("c/QuantizeLinear", "c/DequantizeLinear_1"),
    ]


def test_unnamed_nodes_keep_their_keys_when_the_order_changes():
    found = annotate_model(models.dedicated(), given=[("*", 12)])
    turned = onnx.ModelProto.FromString(found.model.SerializeToString())
    del turned.graph.node[:]
    turned.graph.node.extend(found.model.graph.node[k] for k in (2, 3, 0, 1, 4, 5))
    assert {p.site: p.bits for p in find_pairs(turned)} == {p.site: p.bits for p in found.pairs}


def test_the_source_is_never_changed():
    proto = models.two_widths()
    before = proto.SerializeToString(deterministic=True)
    pairs = assign_bits(find_pairs(proto), given=[("x", 4)])
    write_named_bits(proto, pairs, rename=True, bits_attribute=True)
    assert proto.SerializeToString(deterministic=True) == before


def test_foreign_metadata_stays():
    proto = models.two_widths()
    proto.metadata_props.add(key="author", value="me")
    proto.graph.node[0].metadata_props.add(key="onnxq.rule", value="ort.conv")
    proto.graph.node[0].metadata_props.add(key="mine", value="1")
    found = annotate_model(proto).model
    assert found.metadata_props[0].value == "me"
    kept = {entry.key: entry.value for entry in found.graph.node[0].metadata_props}
    assert (kept["mine"], kept["onnxq.rule"], kept["onnxq.bits"]) == ("1", "ort.conv", "8")
    assert json.loads(found.metadata_props[1].value)["in_q"]["rule"] == "ort.conv"


@cache
def quantized(bits: int, weights: int, storage: str = "int8") -> onnxq.Result:
    rules = [
        {"role": "activation", "op": "*", "set": {"bits": bits, "quantize": True}},
        {"role": "weight", "op": "*", "set": {"bits": weights, "storage": storage, "quantize": True}},
    ]
    samples = [{"x": np.random.default_rng(k).normal(size=(1, 4, 8, 8)).astype(np.float32)} for k in range(4)]
    return onnxq.quantize(models.float_conv(), samples, overrides={"rules": rules, "latency": False})


@pytest.mark.parametrize(("bits", "weights"), [(8, 8), (4, 8), (8, 4), (5, 3)])
def test_sites_bits_and_schemes_are_those_of_the_plan_and_the_graph_alone_says_nearly_as_much(bits, weights):
    made = quantized(bits, weights)
    assert made.plan.sites
    found, bare = ({pair.site: pair for pair in find_pairs(one)} for one in (made.model, models.forget(made.model)))
    assert set(found) == set(bare) == {site.site for site in made.plan.sites}
    for site in made.plan.sites:
        pair = found[site.site]
        seen = (pair.bits, pair.symmetric, pair.storage, pair.granularity, pair.role)
        assert seen == (site.spec.bits, site.spec.symmetric, site.spec.storage, site.spec.granularity, site.role)
        assert pair.origin is Origin.METADATA
        assert bare[site.site].bits == site.spec.bits, site.site
    origins = {str(pair.role): pair.origin for pair in bare.values()}
    assert origins["activation"] is (Origin.TYPE if bits == 8 else Origin.CLIP)
    assert origins["weight"] is (Origin.TYPE if weights == 8 else Origin.VALUES)


def test_the_plan_alone_is_enough():
    made = quantized(4, 8)
    bare = models.forget(made.model)
    bare.metadata_props.extend(entry for entry in made.model.metadata_props if entry.key == "onnxq.plan")
    found = find_pairs(bare)
    assert {pair.origin for pair in found} == {Origin.PLAN}
    assert {pair.site: pair.bits for pair in found} == {site.site: site.spec.bits for site in made.plan.sites}


def test_packed_weights_are_read_as_what_the_file_holds():
    made = quantized(8, 4, "int4")
    for model, origin in ((made.model, Origin.METADATA), (models.forget(made.model), Origin.TYPE)):
        weights = [pair for pair in find_pairs(model) if pair.role is Role.WEIGHT]
        assert [(p.bits, p.storage, p.origin, p.clip) for p in weights] == [(4, "int4", origin, "")] * len(weights)
        assert {pair.site for pair in weights} == {site.site for site in made.plan.sites if site.role is Role.WEIGHT}
