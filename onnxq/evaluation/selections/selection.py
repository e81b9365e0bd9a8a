"""One choice of a float model."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto


@dataclass(frozen=True)
class Selection:
    """One node that chooses.

    choices: the tensors of the choice, with their ONNX types; of one in a body, as the text of their identity. values:
    by the names that they are judged under, the inputs that were computed, as positions. axis: that it chooses along,
    in the tensor of all iterations. outputs: of the model, behind it. scope: that it lies in. obstacle: the reason why
    it is not followed; "" where it is.
    """

    node: str
    op_type: str
    choices: tuple[tuple[str, int], ...]
    values: tuple[tuple[str, int], ...]
    axis: int = -1
    outputs: tuple[str, ...] = ()
    scope: str = ""
    obstacle: str = ""

    @property
    def name(self) -> str:
        """The tensor of the choice."""
        return self.choices[-1 if self.op_type == "TopK" else 0][0]

    def name_inside(self, choice: str) -> str:
        """The name that one of the choices has in the graph that makes it."""
        return choice.removeprefix(f"{self.scope}::")


def explain_missing(selection: Selection) -> str:
    """The reason why a choice is not taken from the float model, for a message."""
    maker, behind = f"{selection.node} ({selection.op_type})", ", ".join(selection.outputs) or "nothing"
    cause = f"the quantized model has no tensor {selection.name!r}, which {maker} of the float model makes"
    if selection.obstacle:
        cause = f"the choice of {maker} is not taken from the float model, {selection.obstacle}"
    rest = "it is compared on its own choices, whose rows need not be the float model's"
    return f"{cause}: behind it ({behind}) {rest}"


def name_own(choice: str) -> str:
    """The output that holds a model's own choice, where the float model's is given."""
    return f"{choice}/own"


def find_axis(node: NodeProto) -> int:
    """The axis that a node chooses along, as it is written."""
    return next((attr.i for attr in node.attribute if attr.name == "axis"), -1)
