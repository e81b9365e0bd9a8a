"""Notes left out of a model: all texts that engines do not read go, wherever they stand, and nothing else does."""

import json
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import helper, parser

from onnxq.emit import BITS_KEY, PLAN_KEY, leave_out_notes
from onnxq.graph.light import attach_weights, strip_weights
from onnxq.runtime import Session
from tests.networks import add_arrays

MODEL = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[1,64] x, bool c) => (float[1,64] y) {
    [scale] s = local.Scale(x) [quantize] q = QuantizeLinear(s, step) [dequantize] d = DequantizeLinear(q, step)
    [choice] b = If (c) <
        then_branch = t () => (float[1,64] u) { [inner] u = MatMul(d, w) },
        else_branch = e () => (float[1,64] v) { v = Identity(d) }
    >
    y = Neg(b)
}
<domain: "local", opset_import: ["" : 21]>
Scale (a) => (o) { [double] o = Add(a, a) }"""
RECORD = {"site": "s", "bits": 7, "scheme": "symmetric", "granularity": "tensor", "role": "activation", "rule": "x"}


def model() -> onnx.ModelProto:
    """A network with texts of an exporter and of onnxq in all places that may hold some."""
    proto = parser.parse_model(MODEL)
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    add_arrays(proto.graph, w=weight, step=0.02)
    proto.graph.value_info.append(helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [1, 64]))
    bits = dict.fromkeys(("quantize", "dequantize"), RECORD)
    helper.set_model_props(proto, {"names": "cat", PLAN_KEY: "{}", BITS_KEY: json.dumps(bits)})
    branch = proto.graph.node[3].attribute[0]
    graphs = (proto.graph, branch.g)
    nodes = (node for graph in (*graphs, *proto.functions) for node in graph.node)
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info, *proto.graph.initializer)
    for noted in (*graphs, *proto.functions, *nodes, *values):
        noted.doc_string = "File train.py, line 3"
        noted.metadata_props.add(key="stack_trace", value="File train.py, line 3")
    proto.doc_string = branch.doc_string = "File train.py, line 3"
    return proto


def list_names(proto: onnx.ModelProto) -> list[str]:
    inner = proto.graph.node[3].attribute[0].g.node
    return [node.name for node in (*proto.graph.node, *inner, *proto.functions[0].node)]


def run(proto: Any) -> np.ndarray:
    feeds = {"x": np.linspace(-1, 1, 64, dtype=np.float32)[None], "c": np.array(True)}
    return Session(proto).run(feeds)["y"]


@pytest.mark.parametrize("level", ["names", "none"])
@pytest.mark.parametrize("light", [False, True])
def test_no_text_is_left_and_the_answers_stay(level: Literal["names", "none"], light: bool) -> None:
    whole = model()
    before = whole.SerializeToString()
    bare = leave_out_notes(strip_weights(whole) if light else whole, level)
    proto = attach_weights(bare)
    assert whole.SerializeToString() == before
    assert b"train.py" not in proto.SerializeToString()
    onnx.checker.check_model(proto)
    np.testing.assert_array_equal(run(bare), run(whole))
    assert [value.name for value in proto.graph.value_info] == ["s"]


def test_names_keep_the_bits_once_for_each_pair() -> None:
    proto = leave_out_notes(model(), "names")
    assert list_names(proto) == list_names(model())
    held = {entry.key: entry.value for entry in proto.metadata_props}
    assert held == {"names": "cat", BITS_KEY: '{"dequantize":{"bits":7}}'}


def test_none_keeps_what_is_not_onnxqs() -> None:
    proto = leave_out_notes(model(), "none")
    assert set(list_names(proto)) == {""}
    assert {entry.key: entry.value for entry in proto.metadata_props} == {"names": "cat"}


@pytest.mark.parametrize("text", ["{}", '{"dequantize": {"site": "s"}}'])
def test_records_without_bits_leave_none(text: str) -> None:
    proto = model()
    helper.set_model_props(proto, {BITS_KEY: text})
    assert not leave_out_notes(proto, "names").metadata_props
