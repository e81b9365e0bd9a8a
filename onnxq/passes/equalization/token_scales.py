"""A scale for each token in the graph: X/s in front of the linear layers that read X, times s behind them.

s = max|X| / steps along the last axis, at each run, as int8 checkpoints of language models have it. X/s lies between
-steps and steps whatever X is, so that its pair has the constant scale 1, and integer kernels run between the two.
"""

from collections.abc import Iterable

import numpy as np

from onnxq.arrays import Floats
from onnxq.graph import GraphIndex, ModelLike, NodeRef, NodeRefs
from onnxq.passes.equalization.smoothquant import Factors
from onnxq.passes.patterns import Edit, Step, unfit_plan
from onnxq.sites import TensorId

# Tokens without values get a scale, too: the smallest normal number of float16, over the steps.
_LEAST = np.array(2.0**-14, np.float32)


def write_token_scales(proto: ModelLike, steps: Factors) -> ModelLike:
    """The model with tokens of these tensors divided by their scales for layers, whose results are multiplied.

    steps: of each tensor, one number. Raises PlanError for a tensor that no layer reads so.
    """
    edit = Edit(proto)
    for tensor, count in steps.items():
        layers = tuple(find_token_layers(edit.index, tensor))
        if not layers or count.size != 1:
            cause = "feeds no layers whose tokens could be scaled"
            raise unfit_plan(tensor, cause)
        _scale_tokens(edit, tensor, layers, count.reshape(()))
    return edit.export()


def find_token_layers(index: GraphIndex, tensor: TensorId) -> Iterable[NodeRef]:
    """The MatMul and Gemm nodes that multiply rows of this tensor by a constant."""
    for edge in index.list_consumers(tensor):
        node = index.find_node(edge.node)
        plain = not node.transposes_data and node.read_float("beta", 1.0) == 1.0
        # In a body the tokens of a tensor from outside would be scaled in each run of it.
        data = edge.index == 0 and edge.scope == tensor.scope
        if plain and data and node.is_onnx("MatMul", "Gemm") and index.has_constant(node, 1):
            yield node


def _scale_tokens(edit: Edit, tensor: TensorId, layers: NodeRefs, steps: Floats) -> None:
    first = layers[0]
    name = tensor.name
    scope = tensor.scope
    least = edit.add_constant(scope, f"{name}/least", _LEAST)
    count = edit.add_constant(scope, f"{name}/steps", steps)
    sizes = edit.insert_before(first, "Abs", [name], f"{name}/magnitudes")
    largest = edit.insert_largest(first, sizes, -1, f"{name}/largest")
    above = edit.insert_before(first, "Max", [largest, least], f"{name}/above")
    scale = edit.insert_before(first, "Div", [above, count], f"{name}/token_scale")
    # Not times 1 / s: checkpoints divide, and the last bit decides some codes.
    scaled = edit.insert_before(first, "Div", [name, scale], f"{name}/scaled")
    for node in layers:
        edit.read(node.make_edge(0), scaled)
        steps_behind: list[Step] = [("Mul", [scale], {})]
        if node.name_input(2):
            # A bias is not to be multiplied.
            edit.read(node.make_edge(2), "")
            steps_behind.append(("Add", [node.inputs[2]], {}))
        edit.append(node, steps_behind)
