"""The tables of inspect and annotate-bits."""

import json
import math
from dataclasses import replace
from typing import Any

from onnx import ModelProto

from onnxq.annotate import Inspection, OperatorInfo, Origin, PairInfo
from onnxq.commands.results import show, write_json
from onnxq.sites import Caution, Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor
from tests.report.kit import shown, warned


def found(**values: Any) -> Inspection:
    return Inspection(**{"model": ModelProto(), "pairs": (), "source": "m.onnx", **values})


X = PairInfo(
    site=TensorId("x"),
    role=Role.ACTIVATION,
    quantize="x/QuantizeLinear",
    dequantize="x/DequantizeLinear",
    ops=("Conv", "Add"),
    bits=8,
    origin=Origin.TYPE,
    storage="uint8",
    symmetric=False,
    granularity=PerTensor(),
    scales=1,
    scale_min=0.02,
    scale_max=0.02,
)
W = replace(
    X,
    site=TensorId("layers.0.weight"),
    role=Role.WEIGHT,
    quantize="",
    dequantize="w/DequantizeLinear",
    ops=("Conv",),
    bits=5,
    origin=Origin.VALUES,
    storage="int8",
    symmetric=True,
    granularity=PerChannel(0),
    scales=16,
    scale_min=1e-3,
    scale_max=2.5e-2,
)
B = replace(W, site=Edge("MatMul_3", 1), bits=4, origin=Origin.TYPE, granularity=PerBlock(0, 32), storage="int4")
BRANCH = "If_0.then_branch"
DYNAMIC = replace(X, site=TensorId("h", BRANCH), scope=BRANCH, scales=0, scale_min=math.nan, scale_max=math.nan)
FOUND = found(
    pairs=(X, W, B, DYNAMIC),
    warnings=(Caution("W106", "a note of bits was damaged"),),
    operators=(OperatorInfo(node="QLinearConv_0", op="QLinearConv", bits=8, types=("uint8", "int8", "uint8")),),
)

TABLE = """\
site
  op        bits  scheme      granularity  scale         origin
x
  Conv,Add     8  asymmetric  tensor       0.02          type
layers.0.weight
  Conv         5  symmetric   channel 0    0.001..0.025  values
MatMul_3/in1
  Conv         4  symmetric   block 32@0   0.001..0.025  type
If_0.then_branch::h
  Conv,Add     8  asymmetric  tensor       at run time   type

4 pairs: 1 of 4 bits, 1 of 5 bits, 2 of 8 bits

node           operator     bits  types
QLinearConv_0  QLinearConv  8     uint8, int8, uint8

1 operator on integers: 1 QLinearConv
warning[W106]: a note of bits was damaged
"""


def test_the_tables_at_80_columns_and_with_all_names() -> None:
    assert shown(show, FOUND) == TABLE
    text = shown(show, FOUND, width=None, verbose=True)
    for word in ("weight", "int4", "x/QuantizeLinear x/DequantizeLinear", "w/DequantizeLinear"):
        assert word in text


def test_a_model_without_pairs_says_so() -> None:
    assert shown(show, found()) == "m.onnx holds no quantize/dequantize pair\n"
    assert shown(show, found(source="")).startswith("the model holds no")


def test_top_and_the_written_file() -> None:
    text = shown(show, replace(FOUND, output="m.bits.onnx"), top=1)
    assert "and 3 more; a larger `top=…` shows them" in text
    assert "4 pairs: 1 of 4 bits, 1 of 5 bits, 2 of 8 bits" in text
    assert "written: m.bits.onnx" in text


def test_quiet_and_json_leave_warnings_on_the_other_stream() -> None:
    assert warned(show, FOUND, quiet=True) == ("", "warning[W106]: a note of bits was damaged\n")
    out, err = warned(show, FOUND, as_json=True)
    assert (out, err) == (write_json(FOUND), "warning[W106]: a note of bits was damaged\n")


def test_json_says_where_scales_lie() -> None:
    found = json.loads(write_json(FOUND))["pairs"]
    assert [one["granularity"] for one in found] == ["tensor", "channel", "block", "tensor"]
    assert ("axis" in found[0], found[1]["axis"], found[2]["axis"], found[2]["block_size"]) == (False, 0, 0, 32)
    assert [one["site"] for one in found] == ["x", "layers.0.weight", "MatMul_3/in1", "If_0.then_branch::h"]
    assert (found[3]["scale_min"], found[3]["scales"]) == (None, 0)
