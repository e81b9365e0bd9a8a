"""Operators that compute on integers themselves are listed, not passed over."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.annotate import OperatorInfo, find_operators
from onnxq.graph import GraphIndex, name_nodes
from tests.annotate import models
from tests.cli.kit import read, run
from tests.pipeline.requantized import by_onnxruntime

_FOUND = [
    ("QLinearConv", ""), ("QLinearMatMul", ""), ("MatMulInteger", ""), ("ConvInteger", ""),
    ("DynamicQuantizeLinear", ""),
    ("QGemm", "com.microsoft"), ("QLinearAdd", "com.microsoft"), ("DynamicQuantizeMatMul", "com.microsoft"),
    ("MatMulIntegerToFloat", "com.microsoft"), ("QAttention", "com.microsoft"), ("MatMulNBits", "com.microsoft"),
    ("DynamicQuantizeLSTM", "com.microsoft"), ("QLinearSoftmax", "com.microsoft"),
]  # fmt: skip
_PASSED = [("QuantizeLinear", ""), ("DequantizeLinear", ""), ("Conv", ""), ("MatMul", ""), ("QLinearConv", "other")]


def one_node(op: str, domain: str, **attrs: int) -> onnx.ModelProto:
    """A graph of one node that reads a float and an int8 constant; only ever looked at."""
    node = helper.make_node(op, ["x", "w"], ["y"], name="n", domain=domain, **attrs)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy"]
    weight = numpy_helper.from_array(np.ones((2, 2), np.int8), "w")
    graph = helper.make_graph([node], "g", values[:1], values[1:], [weight])
    domains = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


@pytest.mark.parametrize(("op", "domain"), _FOUND)
def test_operators_on_integers_are_found(op: str, domain: str) -> None:
    found = find_operators(GraphIndex(one_node(op, domain)))
    assert found == (OperatorInfo(node="n", op=op, domain=domain, bits=8, types=("int8",)),)


@pytest.mark.parametrize(("op", "domain"), _PASSED)
def test_others_are_not(op: str, domain: str) -> None:
    assert find_operators(GraphIndex(one_node(op, domain))) == ()


def test_the_bits_are_those_of_the_attribute() -> None:
    (found,) = find_operators(GraphIndex(one_node("MatMulNBits", "com.microsoft", bits=4)))
    assert found.bits == 4


def test_inspect_and_annotate_bits_list_them(tmp_path: Path) -> None:
    path = models.save(tmp_path, by_onnxruntime(tmp_path, "QOperator"))
    names = {node.name for node in name_nodes(onnx.load(path)).graph.node if node.name.endswith("_quant")}
    for command in ("inspect", "annotate-bits"):
        shown = run(command, path).output
        assert "6 operators on integers: 1 QGemm, 1 QLinearAdd, 3 QLinearConv" in " ".join(shown.split())
        found = read(command, path, *["--force"][: command[0] == "a"])["operators"]
        assert {one["node"] for one in found} == names
        assert {one["op"] for one in found} >= {"QLinearConv", "QGemm", "QLinearGlobalAveragePool"}
    assert onnxq.inspect(path).operators[0].types == ("uint8", "int8")
