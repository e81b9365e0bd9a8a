"""Which outputs look like scores of classes, of which people read the largest."""

from __future__ import annotations

import re

from onnxq.graph import GraphIndex, NodeRef, ValueInfo
from onnxq.sites import TensorId
from onnxq.spec import FLOAT_TYPES

# Scores of one thing, or of one thing at each position; with more axes classes need not lie along the last.
_RANKS = (2, 3)
_NAMES = re.compile(r"logit|prob|score|class|softmax", re.IGNORECASE)
_PASSED = ("Identity", "Cast")
_NORMALIZES = ("Softmax", "LogSoftmax")
_PRODUCTS = ("Gemm", "MatMul")


def find_class_scores(index: GraphIndex) -> dict[str, bool]:
    """Float outputs of a float model that look like scores of classes along their last axis.

    True: its name says so, or Softmax makes it. False: a matrix product makes it, one row a sample, which may also be
    an embedding or a regression.
    """
    scores = {}
    for value in index.outputs:
        shape = value.shape or ()
        if value.dtype not in FLOAT_TYPES or len(shape) not in _RANKS or shape[-1] == 1:
            continue
        maker = _find_maker(index, value)
        named = bool(_NAMES.search(value.name)) or (maker is not None and _is_softmax(maker, len(shape)))
        if named or (len(shape) == min(_RANKS) and maker is not None and _is_product(index, maker)):
            scores[value.name] = named
    return scores


def _find_maker(index: GraphIndex, value: ValueInfo) -> NodeRef | None:
    """The node that computes an output, seen through those that only pass it on."""
    maker = index.producer(TensorId(value.name))
    while maker is not None and maker.op_type in _PASSED:
        maker = index.maker(maker)
    return maker


def _is_softmax(node: NodeRef, rank: int) -> bool:
    # Up to opset 12 axis 1 was the default, up to the last one.
    return node.op_type in _NORMALIZES and node.attrs.get("axis", -1) in (-1, rank - 1)


def _is_product(index: GraphIndex, node: NodeRef) -> bool:
    """A matrix product, with or without its bias."""
    if node.op_type == "Add":
        makers = [maker for k in (0, 1) if (maker := index.maker(node, k)) is not None]
        return len(makers) == 1 and makers[0].op_type in _PRODUCTS
    return node.op_type in _PRODUCTS
