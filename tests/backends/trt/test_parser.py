"""Operators of ONNX Runtime that TensorRT's parser takes and does not take: the table, and the parser asked again."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.backends.trt.rules import refuse_float
from onnxq.graph import get_index
from tests.backends.rtx import needs_rtx
from tests.decoders.layouts import MICROSOFT, Layout, make_decoder

# Parses files one after another; a plugin that is not in this build is another matter than an operator without one.
_PARSE = """
import json, sys, tensorrt_rtx as trt
found = {}
for path in sys.argv[1:]:
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    parser.parse(open(path, "rb").read())
    found[path] = [parser.get_error(k).desc() for k in range(parser.num_errors)]
print(json.dumps(found))
"""


def make_node(op_type: str, *inputs: str, domain: str = MICROSOFT, outputs: int = 1, **attrs: float) -> onnx.ModelProto:
    """A network of one operator; `w`, `row`, `angles`: constants, `at`: positions, all others data."""
    kinds = {"at": (TensorProto.INT64, [1, 3])}
    constants = {"w": (16, 16), "row": (16,), "angles": (32, 4)}
    values = [
        helper.make_tensor_value_info(name, *kinds.get(name, (TensorProto.FLOAT, [1, 3, 16])))
        for name in inputs if name not in constants
    ]  # fmt: skip
    made = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op_type, inputs, made, "node", domain=domain, **attrs)
    stored = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in constants.items() if name in inputs
    ]  # fmt: skip
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", values, results, stored), opset_imports=opsets)


NETS = {
    "norm": make_node("SimplifiedLayerNormalization", "x", "row", domain="", axis=-1, epsilon=1e-5),
    "skip": make_node("SkipSimplifiedLayerNormalization", "x", "z", "row", epsilon=1e-5),
    "rotary": make_node("RotaryEmbedding", "x", "at", "angles", "angles", num_heads=2),
    "heads": make_node("MultiHeadAttention", "x", "z", "v", num_heads=2),
    "gelu": make_node("Gelu", "x"),
    "attention": make_node("Attention", "x", "z", "v", domain="", q_num_heads=2, kv_num_heads=2),
    "skip with mean": make_node("SkipLayerNormalization", "x", "z", "row", "row"),
    "fast": make_node("FastGelu", "x"),
    "quick": make_node("QuickGelu", "x"),
    "bias": make_node("BiasGelu", "x", "row"),
    "fused": make_node("FusedMatMul", "x", "w"),
    "caches": make_node("Attention", "x", "z", "v", domain="", outputs=3, q_num_heads=2, kv_num_heads=2),
}


def is_refused(model: onnx.ModelProto) -> bool:
    return any(refuse_float(node) for node in get_index(model).nodes)


def test_the_table() -> None:
    assert [name for name, model in NETS.items() if is_refused(model)] == [
        "skip with mean", "fast", "quick", "bias", "fused", "caches",
    ]  # fmt: skip
    queries = {"num_heads": 2, "kv_num_heads": 2}
    assert is_refused(make_node("GroupQueryAttention", "x", "z", "v", **queries))
    assert not is_refused(make_node("GroupQueryAttention", "x", "z", "v", scale=0.5, **queries))


@needs_rtx
@pytest.mark.trt
def test_the_parser_agrees_with_the_table(tmp_path: Path) -> None:
    files = {str(tmp_path / f"{name}.onnx"): name for name in NETS}
    for path, name in files.items():
        onnx.save(NETS[name], path)
    done = subprocess.run([sys.executable, "-c", _PARSE, *files], capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert {files[path] for path, found in errors.items() if found} == {n for n, m in NETS.items() if is_refused(m)}


def test_decoders_are_told_what_tensorrt_cannot_read() -> None:
    layouts = (Layout.GENAI, Layout.STANDARD)
    plans = {layout: onnxq.make_plan(make_decoder(layout), None, "trt-int8") for layout in layouts}
    told = {layout: [str(one) for one in plan.warnings if one.code == "W129"] for layout, plan in plans.items()}
    assert [layout for layout, lines in told.items() if lines] == [Layout.STANDARD]
    assert told[Layout.STANDARD][0].startswith("trt cannot read Attention (2, e.g. /model/layers.0/attn/Attention):")
    # Products are placed all the same: ONNX Runtime gives TensorRT those.
    assert len(plans[Layout.GENAI].sites) == 24
