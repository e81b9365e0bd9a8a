"""`annotate-bits --check`: each way in which a note disagrees with a file, and none where all is well."""

import json

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.annotate import Origin, annotate_model, check_notes
from onnxq.plan import from_json
from tests.annotate import models


def note(proto: onnx.ModelProto, **bits: int) -> onnx.ModelProto:
    """The model with notes of bits in its metadata, by node."""
    records = {name.replace("__", "/"): {"bits": number} for name, number in bits.items()}
    proto.metadata_props.add(key="onnxq.bits", value=json.dumps(records))
    return proto


def relabel(proto: onnx.ModelProto, name: str, bits: int) -> onnx.ModelProto:
    """The annotated model with another number on one node."""
    node = next(node for node in proto.graph.node if node.name == name)
    next(entry for entry in node.metadata_props if entry.key == "onnxq.bits").value = str(bits)
    return proto


def attribute(proto: onnx.ModelProto, name: str, bits: int) -> onnx.ModelProto:
    """The annotated model with Sparsebit's attribute on one node."""
    node = next(node for node in proto.graph.node if node.name == name)
    node.attribute.append(onnx.helper.make_attribute("bits", bits))
    return proto


def annotated() -> onnx.ModelProto:
    return annotate_model(models.two_widths()).model


@pytest.mark.parametrize(("make", "site", "noted", "found", "why"), [
    pytest.param(lambda: note(models.two_widths(), in_q=9), "x", "model metadata 9", "uint8", "not 9 bits wide",
                 id="wider than the type"),
    pytest.param(lambda: note(models.two_widths(), w_dq=3), "w", "model metadata 3", "-7..7", "3 bits cannot hold",
                 id="levels of a constant"),
    pytest.param(lambda: note(models.two_widths(), c__DequantizeLinear=6), "c", "model metadata 6", "4 bits",
                 "Clip c/Clip leaves are of 4 bits", id="a Clip of floats"),
    pytest.param(lambda: note(models.qcdq(), xd__DequantizeLinear=3), "x", "model metadata 3", "4 bits",
                 "leaves are of 4 bits", id="a Clip of integers"),
    pytest.param(lambda: note(models.two_widths(), in_dq=4), "x", "model metadata 4", "uint8", "a label alone",
                 id="nothing bounds it"),
    pytest.param(lambda: note(models.relu6(6), dq=4), "c", "model metadata 4", "uint8", "a label alone",
                 id="the network's own Clip"),
    pytest.param(lambda: relabel(annotated(), "w_dq", 5), "w", "model metadata 4", "node metadata 5",
                 "different bits", id="two carriers"),
    pytest.param(lambda: attribute(annotated(), "w_dq", 6), "w", "model metadata 4, node metadata 4", "attribute 6",
                 "different bits", id="the attribute"),
    pytest.param(lambda: note(models.two_widths(), gone=4), "gone", "model metadata 4", "no such node",
                 "its node is gone", id="a node that is gone"),
])  # fmt: skip
def test_each_disagreement_is_found_and_no_other(make, site, noted, found, why):
    (fault,) = check_notes(make()).disagreements
    assert (fault.site, fault.noted, fault.found) == (site, noted, found)
    assert why in fault.why


def quantized(preset: str = "ort-int8", **overrides: object) -> onnxq.Result:
    samples = [{"x": models.rng().normal(size=(1, 4, 8, 8)).astype(np.float32)}]
    chosen = {"latency": False, "effort": "fast", "rules": [{"op": "*", "set": {"quantize": True}}], **overrides}
    return onnxq.quantize(models.float_conv(), samples, preset, overrides=chosen)


@pytest.mark.parametrize("preset", ["ort-int8", "trt-int8", "web-int8", "qnn-a16w8", "ort-int8-weights"])
def test_our_own_files_agree_with_themselves(preset):
    checked = check_notes(quantized(preset).model)
    assert checked.disagreements == ()
    assert {pair.origin for pair in checked.pairs} == {Origin.METADATA}


def test_few_bits_of_ours_agree_and_a_plan_of_other_bits_does_not():
    result = quantized(**{"activations.bits": 4, "weights.bits": 4})
    assert check_notes(result.model).disagreements == ()
    text = onnxq.plan.to_json(result.plan).replace('"bits": 4', '"bits": 5')
    faults = check_notes(result.model, plan=from_json(text)).disagreements
    assert {fault.found for fault in faults} >= {"plan 5", "4 bits"}


def test_a_site_of_the_plan_without_a_pair_is_found():
    faults = check_notes(models.float_conv(), plan=quantized().plan).disagreements
    assert {fault.why for fault in faults} == {"the plan's site has no pair"}
    assert "c1" in {fault.site for fault in faults} or "r1" in {fault.site for fault in faults}
