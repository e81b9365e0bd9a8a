"""Choices of two models counted, and outputs of which people read the largest."""

import numpy as np
import pytest

from onnxq.evaluation.agreement import AgreementSums, find_class_scores
from onnxq.evaluation.selections import Selection, Selections, name_own
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from tests.networks import parse_text


def count(op: str, choice: object, own: object, axis: int = -1) -> tuple[float, float]:
    """(chosen, shared) of one sample."""
    inputs = (("v", 1), ("i", 7)) if op == "TopK" else (("i", 7),)
    one = Selection("node", op, inputs, (("x in front of node", 0),), axis)
    sums = AgreementSums(Selections((one,)))
    outputs = {name_own("i"): np.array(own), "y": np.zeros(1)}
    sums.update({"i": np.array(choice)}, outputs)
    # Nothing else compares a choice.
    assert outputs.keys() == {"y"}
    (found,) = sums.results()
    assert (found.node, found.op, found.values) == ("node", op, ("x in front of node",))
    return found.chosen, found.shared


@pytest.mark.parametrize(
    ("op", "choice", "own", "axis", "figures"),
    [
        ("TopK", [[3, 1, 2], [0, 1, 2]], [[1, 3, 5], [2, 1, 0]], -1, (3, 2.5)),
        # Along another axis, columns are the choices.
        ("TopK", [[3, 0], [1, 1]], [[1, 0], [3, 2]], 0, (2, 1.5)),
        ("ArgMax", [[1, 2], [0, 0]], [[1, 2], [0, 3]], 1, (1, 0.75)),
        ("NonMaxSuppression", [[0, 1, 5], [0, 0, 5]], [[0, 0, 5], [0, 0, 6], [0, 2, 5]], -1, (2, 1)),
        ("NonZero", [[0, 1], [4, 5]], [[0, 0, 1], [4, 5, 5]], -1, (2, 2)),
        ("Greater", [[True, False], [True, True]], [[True, True], [False, True]], -1, (3, 2)),
        ("Hardmax", [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], -1, (2, 1)),
        ("Cast", 3, 4, -1, (1, 0)),
        ("NonMaxSuppression", np.zeros((0, 3), np.int64), [[0, 0, 6]], -1, (0, 0)),
        ("TopK", np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int64), -1, (0, 0)),
    ],
)
def test_items_of_a_choice(op: str, choice: object, own: object, axis: int, figures: tuple[float, float]) -> None:
    assert count(op, choice, own, axis) == figures


def test_samples_are_added_up_and_a_choice_without_counterpart_is_left_out() -> None:
    one, other = (Selection(name, "ArgMax", ((name, 7),), ()) for name in "ab")
    sums = AgreementSums(Selections((one, other), frozenset({"y"})))
    for own in (1, 1, 1, 2):
        sums.update({"a": np.array([1]), "b": np.array([1])}, {name_own("a"): np.array([own])})
    assert [(found.node, found.chosen, found.shared) for found in sums.results()] == [("a", 1, 0.75)]


# ---- Outputs that look like scores of classes: by name, by Softmax, and perhaps where a product makes them.


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
    assert find_class_scores(GraphIndex(infer_shapes(name_nodes(parse_text(f"g {body}"))))) == found
