"""Outputs that are no plain tensors: what numbers they hold is compared, and of the rest it is said that it was not."""

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

import onnxq
from onnxq.backends import load_config
from tests.graph.kit import model

_X = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
# So small a network stays float unless it is asked for.
_CONFIG = load_config("ort-int8", {"rules": [{"op": "MatMul", "set": {"quantize": True}}]})
_FAST = {"effort": "fast", "latency": False}


TAILS = {
    # Which of the outputs is the largest, by name.
    "names": "[largest] k = ArgMax <axis=1, keepdims=0>(q) [named] out = Gather(names, k)",
    "words": f"[last] out = Cast <to={TensorProto.STRING}>(q)",
    "SequenceConstruct": "[last] out = SequenceConstruct(q, q)",
    "Optional": "[last] out = Optional(q)",
}


def network(tail: str, kind: onnx.TypeProto) -> ModelProto:
    """Two layers, and their result through `tail` as the model's only output."""
    layers = "[first] p = MatMul(x, a) [relu] r = Relu(p) [second] q = MatMul(r, b)"
    rng = np.random.default_rng(1)
    weights = {"a": rng.standard_normal((16, 32)), "b": rng.standard_normal((32, 8))}
    text = f"g (float[N,16] x) => (float[N,8] out) {{ {layers} {TAILS[tail]} }}"
    proto = model(text, **{name: value.astype(np.float32) for name, value in weights.items()})
    proto.graph.initializer.append(helper.make_tensor("names", TensorProto.STRING, [8], [b"n%d" % k for k in range(8)]))
    proto.graph.output[0].type.CopyFrom(kind)
    return proto


_TENSOR = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
_SEQUENCE = helper.make_sequence_type_proto(_TENSOR)
_WORDS = helper.make_tensor_type_proto(TensorProto.STRING, ["N", 8])


@pytest.mark.parametrize(
    ("op", "kind"), [("SequenceConstruct", _SEQUENCE), ("Optional", helper.make_optional_type_proto(_TENSOR))]
)
def test_the_numbers_inside_are_compared(op: str, kind: onnx.TypeProto) -> None:
    result = onnxq.quantize(network(op, kind), {"x": _X}, _CONFIG, overrides=_FAST)
    assert result.report.pairs > 0
    (check,) = result.report.checks
    assert check.name == "out"
    assert 15 < check.sqnr_db[0] < 80
    assert not any("was not checked" in warning for warning in result.report.warnings)


def test_what_cannot_be_compared_is_said() -> None:
    result = onnxq.quantize(network("words", _WORDS), {"x": _X}, _CONFIG, overrides=_FAST)
    assert result.report.pairs > 0
    assert result.report.checks == ()
    (told,) = [warning for warning in result.report.warnings if warning.code == "W120"]
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
    assert not result.report.promotion.met
