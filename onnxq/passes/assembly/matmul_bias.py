"""A MatMul's bias written so that ORT does not turn MatMul + Add into a float Gemm.

ORT's MatMulAddFusion makes Gemm of MatMul + Add([N]) when the input is 2-D, or of higher rank with only static
dimensions, before it looks for quantized groups; without a pair behind it that Gemm stays float (0.36x on a
transformer of fixed shape). An Add of [1, .., 1, N] as long as the input's rank escapes it for rank 3 and up; for 2-D
inputs Sub(x, -b) does, to the same bits: x - (-b) = x + b.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxq.graph import ModelLike, NodeRef, infer_shapes
from onnxq.passes.edit import Edit
from onnxq.passes.view import View, is_float


def unfuse_matmul_bias(proto: ModelLike, nodes: Sequence[str]) -> ModelLike:
    """A copy in which ORT keeps these MatMuls as MatMuls: their bias [N] becomes [1, .., N], or is subtracted negated.

    For MatMuls that will be quantized without a pair on their output; left float or with a pair behind, Gemm is fine.
    The bias is a copy of its own, so other readers of it see no change. Nodes that ORT fuses nothing of stay: other
    operators, and MatMuls without an Add of a constant, or whose bias has the form already.

    Raises ModelError for a node that is not there.
    """
    # Types inferred on the way help to see ranks; the finished model has only those it declared.
    view, edit = View(infer_shapes(proto)), Edit(proto)
    changed = [name for name in dict.fromkeys(nodes) if _rewrite_bias(view, edit, view.index.node(name))]
    return edit.export() if changed else proto


def _rewrite_bias(view: View, edit: Edit, node: NodeRef) -> bool:
    """Give the Add behind a MatMul another form; False where ORT makes no Gemm of it."""
    reader = view.sole_reader(node.result) if node.op_type == "MatMul" and not node.domain else None
    if reader is None or reader[0].op_type != "Add" or reader[0].domain:
        return False
    add, k = reader[0], 1 - reader[1]
    bias, rank = view.constant(add, k), view.rank(node.result)
    if bias is None or not is_float(bias) or (rank is not None and rank >= 3 and bias.ndim >= 3):
        return False
    if rank is not None and rank >= 3:
        shaped = bias.reshape((1,) * (rank - bias.ndim) + bias.shape)
        edit.read(view.edge(add, k), edit.constant(add.scope, f"{add.inputs[k]}/rank{rank}", shaped))
    else:
        negated = edit.constant(add.scope, f"{add.inputs[k]}/negated", -bias)
        edit.become(add, "Sub", (node.outputs[0], negated), {})
    return True
