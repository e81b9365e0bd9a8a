"""Outputs of which people read the largest: by name, by Softmax, and perhaps where a product makes them."""

from __future__ import annotations

import pytest
from onnx import parser

from onnxq.evaluation.agreement import find_class_scores
from onnxq.graph import GraphIndex, infer_shapes, name_nodes


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("(float[N,8] x, float[8,4] w) => (float[N,4] logits) { logits = MatMul(x, w) }", {"logits": True}),
        ("(float[N,8] x, float[8,4] w) => (float[N,4] y) { y = MatMul(x, w) }", {"y": False}),
        ("(float[N,8] x, float[8,4] w, float[4] b) => (float[N,4] y) { h = MatMul(x, w) y = Add(h, b) }", {"y": False}),
        ("(float[N,8] x, float[8,4] w) => (float[N,4] y) { h = MatMul(x, w) s = Softmax(h) y = Identity(s) }",
         {"y": True}),
        ("(float[N,8,4] x) => (float[N,8,4] y) { y = Softmax <axis=1>(x) }", {}),
        ("(float[N,5,8] x, float[8,4] w) => (float[N,5,4] Logits) { Logits = MatMul(x, w) }", {"Logits": True}),
        # Hidden states, a picture, one number, a label.
        ("(float[N,5,8] x, float[8,4] w) => (float[N,5,4] y) { y = MatMul(x, w) }", {}),
        ("(float[N,4,8,8] x) => (float[N,4,8,8] logits) { logits = Relu(x) }", {}),
        ("(float[N,8] x, float[8,1] w) => (float[N,1] score) { score = MatMul(x, w) }", {}),
        ("(float[N,8] x) => (int64[N] classes) { classes = ArgMax <axis=1, keepdims=0>(x) }", {}),
        ("(float[N,8] x, float[N,8] z) => (float[N,8] y) { y = Add(x, z) }", {}),
    ],
)  # fmt: skip
def test_outputs_that_look_like_scores_of_classes(body: str, found: dict[str, bool]) -> None:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {body}')
    assert find_class_scores(GraphIndex(infer_shapes(name_nodes(proto)))) == found
