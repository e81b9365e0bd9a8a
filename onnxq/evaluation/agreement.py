"""Choices that a float model makes and another makes too, and the outputs that look like scores of classes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxq.arrays import Array, ArrayDict, Integers, as_int64
from onnxq.evaluation.selections import Selection, Selections, name_own
from onnxq.graph import GraphIndex, NodeRef
from onnxq.sites import Names, TensorId
from onnxq.spec import FLOAT_TYPES


@dataclass(frozen=True, kw_only=True)
class ChoiceAgreement:
    """One selection of the float model, and how far another model's own choice is the same.

    chosen, shared: the mean numbers of items in one choice, of the model that chose more, and of those that both chose;
    a choice is a row of a TopK, one position of an ArgMax, all that NonMaxSuppression or a comparison leave of a
    sample. values: the names that the values chosen by are judged under. outputs: of the model, behind it; decides:
    those of them that hold nothing but choices, and are not judged.
    """

    node: str
    op: str
    values: Names
    outputs: Names
    decides: Names
    chosen: float
    shared: float

    @property
    def share(self) -> float:
        """Of what is chosen, as much as both models chose; 1 where nothing is."""
        return self.shared / self.chosen if self.chosen else 1.0


ChoiceAgreements = tuple[ChoiceAgreement, ...]


@dataclass
class AgreementSums:
    """Choices counted sample by sample."""

    selections: Selections
    # By node: rows, items chosen, items shared.
    _counts: dict[str, Integers] = field(default_factory=dict)

    def update(self, reference: Mapping[str, object], outputs: ArrayDict) -> None:
        """Add one sample, and take the other model's own choices out of its outputs.

        A choice that it does not make is left out.
        """
        for selection in self.selections.nodes:
            choices = {name: outputs.pop(name_own(name), None) for name, _ in selection.choices}
            choice = reference.get(selection.name)
            other = choices[selection.name]
            if isinstance(choice, np.ndarray) and isinstance(other, np.ndarray):
                rows, mine, theirs = _number_items(selection, choice, other)
                shared = int(np.isin(mine, theirs).sum())
                counts = self._counts.setdefault(selection.node, np.zeros(3, np.int64))
                # Items that the other model alone chooses count against it as those that it misses.
                counts += as_int64([rows, max(mine.size, theirs.size), shared])

    def results(self) -> ChoiceAgreements:
        """The agreement in each selection over the samples so far."""
        agreements = []
        settled = self.selections.settled
        for selection in self.selections.nodes:
            rows, chosen, shared = self._counts.get(selection.node, np.zeros(3, np.int64))
            if rows:
                agreements.append(
                    ChoiceAgreement(
                        node=selection.node,
                        op=selection.op_type,
                        values=tuple(name for name, _ in selection.values),
                        outputs=tuple(name for name in selection.outputs if name not in settled),
                        decides=tuple(name for name in selection.outputs if name in settled),
                        chosen=float(chosen / rows),
                        shared=float(shared / rows),
                    )
                )
        return tuple(agreements)


def _number_items(
    selection: Selection, choice: Array, own: Array
) -> tuple[int, Integers, Integers]:
    """The number of choices, and the items of both sides as numbers that are equal where the items are."""
    if selection.scope and (choice.ndim != own.ndim or not (choice.size or own.size)):
        # A branch that did not run gives an empty vector.
        nothing = np.zeros(0, np.int64)
        return 0, nothing, nothing
    if choice.dtype.kind not in "iu":
        return 1, np.flatnonzero(choice), np.flatnonzero(own)
    if selection.op_type in ("NonMaxSuppression", "NonZero"):
        # An item is a position of several coordinates: a row of the one, a column of the other.
        points, others = (
            array if selection.op_type == "NonMaxSuppression" else array.T
            for array in (choice, own)
        )
        sizes = tuple(np.concatenate([points, others]).max(axis=0, initial=0) + 1)
        return (
            1,
            np.ravel_multi_index(tuple(points.T), sizes),
            np.ravel_multi_index(tuple(others.T), sizes),
        )
    mine, theirs = (_list_rows(selection, array) for array in (choice, own))
    span = max(int(array.max(initial=0)) for array in (mine, theirs)) + 1
    return len(mine), _number_rows(mine, span), _number_rows(theirs, span)


def _list_rows(selection: Selection, array: Array) -> Integers:
    """One choice a row: along its axis a TopK chooses several, and any other integer is a choice of its own."""
    if selection.op_type != "TopK":
        return array.reshape(-1, 1)
    rows = np.moveaxis(array, selection.axis, -1)
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def _number_rows(rows: Integers, span: int) -> Integers:
    # Each row has a range of its own: the same item in two rows is two items.
    return (rows + span * np.arange(len(rows))[:, None]).ravel()


# Scores of one thing, or of one thing at each position; with more axes classes need not lie along the last.
_RANKS = (2, 3)
_NAMES = re.compile(r"logit|prob|score|class|softmax", re.IGNORECASE)
_PASSED = ("Identity", "Cast")
_NORMALIZES = ("Softmax", "LogSoftmax")
_PRODUCTS = ("Gemm", "MatMul")
# Their channels are the classes, and time is along the last axis.
_CHANNELS_FIRST = ("Conv", "ConvTranspose")


def find_class_scores(index: GraphIndex) -> dict[str, bool]:
    """Float outputs of a float model that look like scores of classes along their last axis.

    True: its name says so, or Softmax makes it. False: a matrix product makes it, one row a sample, which may also be
    an embedding or a regression.
    """
    scores = {}
    for value in index.outputs:
        shape = value.dims
        # Seen through the nodes that only pass an output on.
        maker = index.find_producer(index.find_origin(TensorId(value.name), _PASSED))
        if (
            maker is None
            or value.dtype not in FLOAT_TYPES
            or len(shape) not in _RANKS
            or shape[-1] == 1
        ):
            continue
        named = bool(_NAMES.search(value.name))
        if maker.op_type in _NORMALIZES:
            # Up to opset 12 axis 1 was the default, up to the last one.
            named = maker.attrs.get("axis", -1) in (-1, len(shape) - 1)
        elif maker.op_type in _CHANNELS_FIRST:
            named = False
        if named or (len(shape) == 2 and _is_product(index, maker)):
            scores[value.name] = named
    return scores


def _is_product(index: GraphIndex, node: NodeRef) -> bool:
    """A matrix product, with or without its bias."""
    makers = index.makers(node) if node.op_type == "Add" else [node]
    return len(makers) == 1 and makers[0].op_type in _PRODUCTS
