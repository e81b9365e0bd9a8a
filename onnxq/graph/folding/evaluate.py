"""The values of nodes that depend on constants alone, computed by graphsurgeon's fold_constants (ONNX Runtime inside).

The caller decides which nodes are computed. graphsurgeon only gets that part, as a model of its own: left to choose, it
would fold RandomNormal (no inputs, so "constant"). One node that ONNX Runtime cannot run keeps it from folding any
other, and its own remedy (partitioning) then tries the same part again until the stack is full; so the parts are made
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxq.errors import MissingDependencyError
from onnxq.graph.editing.surgeon import gs
from onnxq.graph.subgraph import assemble_model, remove_unneeded


def evaluate_nodes(
    like: ModelProto, nodes: Sequence[NodeProto], constants: Mapping[str, TensorProto], wanted: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """The values of the `wanted` tensors; those that ONNX Runtime cannot compute are left out.

    nodes: in topological order, reading `constants` and each other. like: gives opsets and IR version. Raises
    MissingDependencyError without onnxruntime.
    """
    values = _run_part(_make_part(like, nodes, constants, wanted)) if wanted else {}
    if values is None:
        # One node that cannot run keeps the others from running; alone, each of the rest has its chance.
        alone = [_run_part(_make_part(like, nodes, constants, [name])) for name in wanted] if len(wanted) > 1 else []
        values = {end: value for found in alone if found for end, value in found.items()}
    return {end[: -len(_END)]: value for end, value in values.items()}


# graphsurgeon computes only what nothing foldable reads: every wanted tensor gets an Identity of this name behind it.
_END = " "


def _make_part(
    like: ModelProto, nodes: Sequence[NodeProto], constants: Mapping[str, TensorProto], wanted: Sequence[str]
) -> ModelProto:
    """A model of the nodes and constants that `wanted` needs."""
    ends = [helper.make_node("Identity", [name], [name + _END], name=name + _END) for name in wanted]
    outputs = [ValueInfoProto(name=name + _END) for name in wanted]
    model = assemble_model(like, [*nodes, *ends], (), outputs, constants)
    remove_unneeded(model.graph)
    return model


def _run_part(model: ModelProto) -> dict[str, NDArray[Any]] | None:
    """The model's outputs by name, None when ONNX Runtime cannot compute them."""
    graph = gs.import_onnx(model)
    try:
        # Folded as it is: without error_ok=False graphsurgeon would print the fault and go on.
        graph.fold_constants(
            fold_shapes=False, recurse_subgraphs=False, flatten_subgraphs=False, recurse_functions=False, error_ok=False
        )
    except ModuleNotFoundError as error:
        cause = "is needed to fold constants"
        raise MissingDependencyError("onnxruntime", cause, "pip install onnxq[cpu]", code="Q801") from error
    except Exception:  # whatever ONNX Runtime makes of a model it cannot run
        return None
    return {tensor.name: tensor.values for tensor in graph.outputs if isinstance(tensor, gs.Constant)}
