"""DynamicQuantizeLSTM against numpy, without and with optimizations, and the features of LSTM that it keeps."""

from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxq
from onnxq.annotate import find_saturating
from onnxq.graph import GraphIndex, name_nodes
from tests.cpus.kernels import Array, cpu_saturates
from tests.cpus.lstm import run_lstm
from tests.cpus.nets import agreement, answers
from tests.numerics.reference import multiply_saturating

NAMES = ("y", "last_h", "last_c")
OTHERS = ["HardSigmoid", "Softsign", "Relu"]


def lstm(direction: str, given: str, features: int = 9, hidden: int = 7, **attrs: Any) -> onnx.ModelProto:
    """An LSTM whose weights are spread evenly, so that many are large.

    given: the inputs behind the weights, b(ias), l(engths), h, c (first states), p(eepholes).
    """
    rng, two = np.random.default_rng(0), 1 + (direction == "bidirectional")
    shapes = {"w": (two, 4 * hidden, features), "r": (two, 4 * hidden, hidden), "b": (two, 8 * hidden)}
    shapes["p"] = (two, 3 * hidden)
    constants = {name: rng.uniform(-1, 1, shape) / 2 for name, shape in shapes.items() if name in f"wr{given}"}
    kinds = {
        "x": (1, ["T", "N", features]),
        "l": (6, ["N"]),
        "h": (1, [two, "N", hidden]),
        "c": (1, [two, "N", hidden]),
    }
    inputs = [helper.make_tensor_value_info(name, *kinds[name]) for name in kinds if name in f"x{given}"]
    names = [name if name in f"xwr{given}" else "" for name in "xwrblhcp"]
    node = helper.make_node("LSTM", names, NAMES, "lstm", hidden_size=hidden, direction=direction, **attrs)
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in NAMES]
    graph = helper.make_graph([node], "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples(model: onnx.ModelProto) -> dict[str, Array]:
    """Three sequences of up to seven steps, mostly large and positive."""
    rng, found = np.random.default_rng(1), {}
    for value in model.graph.input:
        dims = [dim.dim_value or {"T": 7, "N": 3}[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        data = rng.uniform(-0.3, 1, dims).astype(np.float32)
        found[value.name] = np.int32([5, 7, 2]) if value.name == "l" else data
    return found


@cache
def quantized(direction: str, given: str, saturation: str = "avoid", **attrs: Any) -> onnx.ModelProto:
    rules = [{"op": "LSTM", "set": {"quantize": True}}]
    wanted = {"latency": False, "effort": "fast", "saturation": saturation, "rules": rules}
    return onnxq.quantize(lstm(direction, given, **attrs), None, "ort-int8", overrides=wanted).model


@pytest.mark.parametrize(
    ("direction", "given", "attrs"),
    [("forward", "", {}), ("reverse", "bp", {"input_forget": 1}), ("bidirectional", "blhcp", {})],
)
def test_the_kernel_computes_what_the_reference_says(direction: str, given: str, attrs: dict[str, Any]) -> None:
    model = quantized(direction, given, **attrs)
    assert [node.op_type for node in model.graph.node] == ["DynamicQuantizeLSTM"]
    feeds = samples(model)
    wanted = dict(zip(NAMES, run_lstm(model, model.graph.node[0], feeds), strict=True))
    for optimize in (False, True):
        assert agreement(wanted, answers(model, feeds, optimize=optimize)) > 100
    assert agreement(answers(lstm(direction, given, **attrs), feeds, optimize=True), wanted) > 30


def test_activations_and_clip_are_kept() -> None:
    for attrs in ({"clip": 0.5}, {"activations": OTHERS}):
        float_model = lstm("forward", "b", **attrs)
        rules = [{"op": "LSTM", "set": {"quantize": True}}]
        model = onnxq.quantize(float_model, None, "ort-int8", overrides={"latency": False, "rules": rules}).model
        assert [node.op_type for node in model.graph.node] == ["DynamicQuantizeLSTM"]
        feeds = samples(model)
        wanted = answers(float_model, feeds, optimize=True)
        assert agreement(wanted, answers(model, feeds, optimize=True)) > 30
        assert agreement(wanted, answers(lstm("forward", "b"), feeds, optimize=True)) < 25


def test_weights_keep_their_sums_in_both_directions() -> None:
    kept, allowed = (quantized("bidirectional", "b", saturation=word) for word in ("avoid", "allow"))
    assert not any(one.saturates for one in find_saturating(GraphIndex(name_nodes(kept))))
    assert any(one.saturates for one in find_saturating(GraphIndex(name_nodes(allowed))))
    feeds, node = samples(kept), allowed.graph.node[0]
    exact, short = (run_lstm(allowed, node, feeds, *way) for way in ((), (multiply_saturating,)))
    wanted = dict(zip(NAMES, short if cpu_saturates() else exact, strict=True))
    assert agreement(wanted, answers(allowed, feeds, optimize=True)) > 100
    assert agreement(dict(zip(NAMES, exact, strict=True)), dict(zip(NAMES, short, strict=True))) < 60
