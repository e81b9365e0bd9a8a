"""The values of nodes that depend on constants alone, computed by graphsurgeon's fold_constants (ONNX Runtime inside).

What is computed is decided by the caller. graphsurgeon only gets that part, as a model of its own: left to choose, it
would fold RandomNormal (no inputs, so "constant"), and keep a failing node from folding all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from onnxq.errors import MissingDependencyError
from onnxq.graph.surgeon import gs


def evaluate(
    like: ModelProto, nodes: Sequence[NodeProto], constants: Mapping[str, TensorProto], wanted: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """The values of the `wanted` tensors; those that ONNX Runtime cannot compute are left out.

    nodes: in topological order, reading `constants` and each other. like: gives opsets and IR version. Raises
    MissingDependencyError without onnxruntime.
    """
    model = ModelProto(ir_version=like.ir_version)
    model.opset_import.extend(like.opset_import)
    model.graph.name = "constants"
    model.graph.node.extend(nodes)
    for name, tensor in constants.items():
        model.graph.initializer.append(tensor)
        model.graph.initializer[-1].name = name
    # graphsurgeon computes only what nothing foldable reads: give every wanted tensor such an end.
    ends = {f"{name} ": name for name in wanted}
    for end, name in ends.items():
        model.graph.node.add(op_type="Identity", input=[name], output=[end], name=end)
        model.graph.output.add(name=end)
    return {ends[end]: value for end, value in _fold(model).items()}


def _fold(model: ModelProto) -> dict[str, NDArray[Any]]:
    options = {
        "fold_shapes": False,
        "recurse_subgraphs": False,
        "flatten_subgraphs": False,
        "recurse_functions": False,
    }
    graph = gs.import_onnx(model)
    try:
        graph.fold_constants(error_ok=False, **options)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("onnxruntime", "is needed to fold constants", "pip install onnxq[cpu]") from error
    except Exception:  # one node that ONNX Runtime cannot run; the others are computed one by one
        graph = gs.import_onnx(model)
        graph.fold_constants(partitioning="basic", **options)
    return {tensor.name: tensor.values for tensor in graph.outputs if isinstance(tensor, gs.Constant)}
