"""Editor: nonsense is refused by name, before anything changes or at export."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onnxq.errors import ModelError
from onnxq.graph import Editor
from onnxq.sites import Edge, TensorId
from tests.graph.kit import branches

REFUSED = {
    "no such node": lambda e: e.remove_node("upp"),
    "no such scope": lambda e: e.add_initializer("if.then", "n", np.ones(1)),
    "no such tensor": lambda e: e.rename_tensor(TensorId("aa"), "n"),
    "an input renamed": lambda e: e.rename_tensor(TensorId("x"), "n"),
    "an output rewired": lambda e: e.rewire(TensorId("y"), "a", outputs=True),
    "a name taken": lambda e: e.insert_node("", "Neg", ["a"], ["i"], name="n"),
    "a name taken inside": lambda e: e.insert_node("", "Neg", ["a"], ["k"], name="n"),
    "a name taken outside": lambda e: e.insert_node("if.then_branch", "Neg", ["a"], ["a"], name="n"),
    "a node name taken": lambda e: e.insert_node("", "Neg", ["a"], ["new"], name="n3"),
    "an anchor elsewhere": lambda e: e.insert_node("", "Neg", ["a"], ["new"], name="n", before="n3"),
    "an input not visible": lambda e: e.insert_node("if.else_branch", "Neg", ["i2"], ["new"], name="n"),
    "a strange edge": lambda e: e.rewire(TensorId("a"), "z", consumers=[Edge("n4", 0, "if.else_branch")]),
    "an index too high": lambda e: e.replace_input(Edge("end", 3), "a"),
    "not an initializer": lambda e: e.replace_initializer(TensorId("a"), np.ones(1)),
    "an initializer in use": lambda e: e.remove_initializer(TensorId("w")),
    "a body": lambda e: e.set_attr("end", "g", helper.make_attribute("g", branches().graph)),
    "a tensor without a name": lambda e: e.add_initializer("", "", np.ones(1)),
}


@pytest.mark.parametrize("edit", REFUSED.values(), ids=REFUSED.keys())
def test_nonsense_is_refused_and_changes_nothing(edit: object) -> None:
    editor = Editor(branches())
    with pytest.raises(ModelError):
        edit(editor)  # type: ignore[operator]
    assert editor.export() == branches()


def test_a_cycle_is_refused_at_export() -> None:
    editor = Editor(branches())
    editor.replace_input(Edge("up", 0), "y")
    with pytest.raises(ModelError, match="own output"):
        editor.export()


def test_an_if_that_reads_itself_through_a_body_is_refused() -> None:
    editor = Editor(branches())
    editor.replace_input(Edge("n4", 1, "if.else_branch"), "y")
    with pytest.raises(ModelError, match="own output"):
        editor.export()
