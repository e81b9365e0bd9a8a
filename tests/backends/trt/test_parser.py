"""Operators of ONNX Runtime that TensorRT's parser takes and does not take: the table, and the parser asked again."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends.trt.rules import refuse_float
from onnxq.graph import get_index
from tests.backends.rtx import needs_rtx
from tests.decoders.layouts import MICROSOFT, Layout, make_decoder
from tests.networks import parse_text

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
CONSTANTS = {"w": (16, 16), "row": (16,), "angles": (32, 4)}


def make_net(call: str, results: str = "y") -> onnx.ModelProto:
    """A network of one operator; `w`, `row`, `angles`: constants, `at`: positions, `x`, `z` and `v`: data."""
    kinds = {"x": "float[1,3,16]", "z": "float[1,3,16]", "v": "float[1,3,16]", "at": "int64[1,3]"}
    names = re.findall(r"\w+", call.rpartition("(")[2])
    inputs = ", ".join(f"{kind} {name}" for name, kind in kinds.items() if name in names)
    outputs = ", ".join(f"float[A,B,C] {name}" for name in results.split(", "))
    stored = {name: np.ones(shape, np.float32) for name, shape in CONSTANTS.items() if name in names}
    text = f"g ({inputs}) => ({outputs}) {{ [node] {results} = {call} }}"
    return parse_text(text, MICROSOFT, opset=23, ir=10, **stored)


NETS = {
    "norm": make_net("SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, row)"),
    "skip": make_net("com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.00001> (x, z, row)"),
    "rotary": make_net("com.microsoft.RotaryEmbedding <num_heads = 2> (x, at, angles, angles)"),
    "heads": make_net("com.microsoft.MultiHeadAttention <num_heads = 2> (x, z, v)"),
    "gelu": make_net("com.microsoft.Gelu (x)"),
    "attention": make_net("Attention <q_num_heads = 2, kv_num_heads = 2> (x, z, v)"),
    "skip with mean": make_net("com.microsoft.SkipLayerNormalization (x, z, row, row)"),
    "fast": make_net("com.microsoft.FastGelu (x)"),
    "quick": make_net("com.microsoft.QuickGelu (x)"),
    "bias": make_net("com.microsoft.BiasGelu (x, row)"),
    "fused": make_net("com.microsoft.FusedMatMul (x, w)"),
    "caches": make_net("Attention <q_num_heads = 2, kv_num_heads = 2> (x, z, v)", "y0, y1, y2"),
}


def is_refused(model: onnx.ModelProto) -> bool:
    return any(refuse_float(node) for node in get_index(model).nodes)


def test_the_table() -> None:
    assert [name for name, model in NETS.items() if is_refused(model)] == [
        "skip with mean", "fast", "quick", "bias", "fused", "caches",
    ]  # fmt: skip
    assert is_refused(make_net("com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (x, z, v)"))
    assert not is_refused(
        make_net("com.microsoft.GroupQueryAttention <scale = 0.5, num_heads = 2, kv_num_heads = 2> (x, z, v)")
    )


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
