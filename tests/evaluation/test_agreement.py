"""Choices of two models counted: rows of a TopK, labels, boxes that are kept, positions of a mask."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.selections import Selection, Selections, name_own


def count(op: str, choice: object, own: object, axis: int = -1) -> tuple[float, float]:
    """(chosen, shared) of one sample."""
    one = Selection(
        "node", op, (("v", 1), ("i", 7)) if op == "TopK" else (("i", 7),), (("x in front of node", 0),), axis
    )
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
