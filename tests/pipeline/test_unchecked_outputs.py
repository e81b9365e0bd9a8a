"""Outputs that are no plain tensors: what numbers they hold is compared, and of the rest it is said that it was not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxq
from onnxq.config import load_config

_X = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
# So small a network stays float unless it is asked for.
_CONFIG = load_config("ort-int8", {"rules": [{"op": "MatMul", "set": {"quantize": True}}]})
_FAST = {"effort": "fast", "latency": False}


def network(op: str, kind: onnx.TypeProto, *more: str) -> ModelProto:
    """Two layers, and their result through `op` as the model's only output."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((16, 32)).astype(np.float32), rng.standard_normal((32, 8)).astype(np.float32)]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"], name="first"),
        helper.make_node("Relu", ["p"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "b"], ["q"], name="second"),
    ]
    if op == "names":
        # Which of the outputs is the largest, by name.
        nodes += [
            helper.make_node("ArgMax", ["q"], ["k"], name="largest", axis=1, keepdims=0),
            helper.make_node("Gather", ["names", "k"], ["out"], name="named"),
        ]
    elif op == "words":
        nodes.append(helper.make_node("Cast", ["q"], ["out"], name="last", to=TensorProto.STRING))
    else:
        nodes.append(helper.make_node(op, ["q", *more], ["out"], name="last"))
    names = helper.make_tensor("names", TensorProto.STRING, [8], [b"n%d" % k for k in range(8)])
    stored = [*(numpy_helper.from_array(array, name) for name, array in zip("ab", weights, strict=True)), names]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 16])],
        [helper.make_value_info("out", kind)],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


_TENSOR = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
_SEQUENCE = helper.make_sequence_type_proto(_TENSOR)
_WORDS = helper.make_tensor_type_proto(TensorProto.STRING, ["N", 8])


@pytest.mark.parametrize(
    ("op", "kind"), [("SequenceConstruct", _SEQUENCE), ("Optional", helper.make_optional_type_proto(_TENSOR))]
)
def test_the_numbers_inside_are_compared(op: str, kind: onnx.TypeProto) -> None:
    more = ("q",) if op == "SequenceConstruct" else ()
    result = onnxq.quantize(network(op, kind, *more), {"x": _X}, _CONFIG, overrides=_FAST)
    assert result.report.pairs > 0
    (check,) = result.report.checks
    assert check.name == "out"
    assert 15 < check.sqnr_db[0] < 80
    assert not any("was not checked" in warning for warning in result.report.warnings)


def test_what_cannot_be_compared_is_said() -> None:
    result = onnxq.quantize(network("words", _WORDS), {"x": _X}, _CONFIG, overrides=_FAST)
    assert result.report.pairs > 0
    assert result.report.checks == ()
    (told,) = [warning for warning in result.report.warnings if "was not checked" in warning]
    assert told.startswith("output 'out', tensor(string), was not checked")


def test_names_are_judged_by_the_numbers_that_choose_them() -> None:
    kind = helper.make_tensor_type_proto(TensorProto.STRING, ["N"])
    result = onnxq.quantize(network("names", kind), {"x": _X}, _CONFIG, overrides=_FAST)
    (check,) = result.report.checks
    assert check.name == "q in front of largest"
    assert 15 < check.sqnr_db[0] < 80
    assert [choice.decides for choice in result.report.choices] == [("out",)]
    assert not any("was not checked" in warning for warning in result.report.warnings)


def test_a_wish_that_nothing_can_be_said_of_is_not_met() -> None:
    result = onnxq.quantize(network("words", _WORDS), {"x": _X}, _CONFIG, overrides={"min_sqnr": 10, "latency": False})
    assert result.report.promotion is not None
    assert not result.report.promotion.met
