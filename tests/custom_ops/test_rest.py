"""Plugins of TensorRT that ONNX Runtime does not have: what stands in front is quantized, the rest stays as it is."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.graph import get_index, name_nodes
from onnxq.plan import to_json
from onnxq.runtime import Session, find_front
from onnxq.sites import Role, TensorId
from tests.networks import parse_text
from tests.passes.kit import random_weights

FAST = {"effort": "fast", "latency": False}
# As exports of YOLO end.
DETECTOR = """g (float[1,16,8,8] x)
    => (int32[1,1] num, float[1,5,4] box, float[1,5] score, int32[1,5] kind, float[1,16,8,8] r) {
    c = Conv <pads=[1,1,1,1]>(x, w0) r = Relu(c) p = Conv(r, w1) q = Conv(r, w2) b = Reshape(p, to4)
    s = Reshape(q, to5) num, box, score, kind = Neg(b, s)
}"""


def with_plugins(text: str, domain: str, opset: int = 17, **arrays: Any) -> onnx.ModelProto:
    """A model of the text, whose operators Neg are plugins."""
    proto = parse_text(text, opset=opset, **arrays)
    for node in proto.graph.node:
        if node.op_type == "Neg":
            node.op_type, node.domain = "EfficientNMS_TRT", domain
            node.attribute.append(helper.make_attribute("plugin_version", "1"))
    if domain:
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return name_nodes(proto)


def detector(domain: str = "TRT", opset: int = 17) -> onnx.ModelProto:
    weights = random_weights({"w0": (16, 16, 3, 3), "w1": (4, 16, 1, 1), "w2": (5, 16, 1, 1)})
    return with_plugins(DETECTOR, domain, opset, to4=np.array([1, 64, 4]), to5=np.array([1, 64, 5]), **weights)


def images(count: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((1, 16, 8, 8)).astype(np.float32)} for _ in range(count)]


def find_plugin(proto: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.op_type == "EfficientNMS_TRT")


def find_warning(result: onnxq.Result) -> str:
    (text,) = (str(note) for note in result.report.warnings if note.code == "W131")
    return text


def measure_front(proto: onnx.ModelProto, result: onnxq.Result) -> dict[str, float]:
    """SQNR in dB of the tensors that the plugin reads, by ONNX Runtime itself."""
    front, rest = find_front(name_nodes(proto))
    quantized, _ = find_front(name_nodes(result.model))
    assert rest is not None
    before, after = (Session(one, optimize=False).run(images(1)[0]) for one in (front, quantized))
    errors = {name: before[name].astype(np.float64) - after[name] for name in before}
    return {name: 10 * np.log10((before[name] ** 2).sum() / (error**2).sum()) for name, error in errors.items()}


# An old opset is brought up to date on both sides.
@pytest.mark.parametrize(("domain", "opset"), [("", 17), ("TRT", 17), ("trt.plugins", 17), ("TRT", 11)])
def test_a_plugin_at_the_end_keeps_nothing_in_front_from_being_quantized(domain: str, opset: int) -> None:
    proto = detector(domain, opset)
    with pytest.raises(onnxq.OnnxqError, match=r"\[Q113\]") as caught:
        onnxq.quantize(proto, images(), overrides=FAST)
    assert "target='trt'" in caught.value.fix
    plan = onnxq.make_plan(proto, images(), overrides={"target": "trt", "effort": "fast"})
    assert [note.code for note in plan.warnings].count("W131") == 1
    assert "EfficientNMS_TRT" in to_json(plan)
    result = onnxq.quantize(proto, images(), overrides={"target": "trt", **FAST})
    assert find_plugin(result.model) == find_plugin(proto)
    assert list(result.model.graph.output) == list(proto.graph.output)
    assert {str(site.site) for site in result.plan.sites if site.role is Role.WEIGHT} == {"w0", "w1", "w2"}
    assert [check.name for check in result.report.checks] == ["r", "b", "s"]
    assert min(measure_front(proto, result).values()) > 25
    text = find_warning(result)
    assert "Not checked: num, box, score, kind" in text
    assert "'num/Neg'" in text or "EfficientNMS_TRT" in text


@pytest.mark.parametrize("effort", ["default", "fast"])
def test_apply_writes_the_same_bytes(effort: str) -> None:
    overrides = {"target": "trt", "latency": False} | ({"effort": "fast"} if effort == "fast" else {})
    result = onnxq.quantize(detector(), images(), overrides=overrides)
    again = onnxq.apply(detector(), result.plan)
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)
    find_warning(again)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("io", [None, "float16"])
def test_the_plugin_reads_the_types_that_it_read(kind: int, io: str | None) -> None:
    proto = detector("")
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    overrides = {**FAST, **({} if io is None else {"io_types": io})}
    result = onnxq.quantize(proto, images(), "trt-fp16", overrides=overrides)
    front, rest = find_front(name_nodes(result.model))
    index = get_index(front)
    assert rest is not None
    assert [index.find_dtype(TensorId(name)) for name in "bs"] == [kind, kind]
    expected = TensorProto.FLOAT16 if io else kind
    assert {value.name: value.type.tensor_type.elem_type for value in front.graph.input} == {"x": expected}
    assert next(value.type.tensor_type.elem_type for value in front.graph.output if value.name == "r") == expected
    Session(front, optimize=False)


MIDDLE = """g (float[1,16,8,8] x, float[1,16,8,8] z) => (float[1,16,8,8] y, float[1,16,8,8] a) {
    c = Conv <pads=[1,1,1,1]>(x, w0) a = Relu(c) n = Neg(a, z) d = Conv <pads=[1,1,1,1]>(n, w0) y = Add(d, half)
}"""


def test_behind_a_plugin_in_the_middle_all_stays_float_and_is_told() -> None:
    arrays = {**random_weights({"w0": (16, 16, 3, 3)}), "half": np.float32(0.5)}
    proto = with_plugins(MIDDLE, "TRT", **arrays)
    data = [{**feeds, "z": feeds["x"]} for feeds in images()]
    result = onnxq.quantize(proto, data, overrides={"target": "trt", **FAST})
    written = {node.name: node for node in result.model.graph.node}
    for node in proto.graph.node[2:]:
        assert written[node.name] == node
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    np.testing.assert_array_equal(values["w0"], arrays["w0"])
    assert "1 Conv among them" in find_warning(result)
    assert "Not checked: y" in find_warning(result)
    (weight,) = (site for site in result.plan.sites if site.role is Role.WEIGHT)
    assert {edge.node for edge in weight.consumers or ()} == {"c/Conv"}


def test_weights_alone_are_rounded_on_both_sides_and_checked_in_front() -> None:
    proto = with_plugins(MIDDLE, "TRT", **random_weights({"w0": (16, 16, 3, 3)}), half=np.float32(0.5))
    result = onnxq.quantize(proto, config="ort-int8-weights", overrides={"latency": False})
    index = get_index(result.model)
    makers = [index.maker(index.find_node(name), 1) for name in ("c/Conv", "d/Conv")]
    assert [getattr(maker, "op_type", "") for maker in makers] == ["DequantizeLinear"] * 2
    assert [check.name for check in result.report.checks] == ["a"]
    assert "in front of it only, at a" in find_warning(result)


def test_with_nothing_in_front_the_operator_is_named() -> None:
    proto = with_plugins("g (float[1,4] x) => (float[1,4] y) { n = Neg(x) y = Relu(n) }", "TRT")
    with pytest.raises(onnxq.OnnxqError, match=r"EfficientNMS_TRT.*\[Q113\]"):
        onnxq.quantize(proto, [{"x": np.zeros((1, 4), np.float32)}], overrides={"target": "trt", **FAST})
