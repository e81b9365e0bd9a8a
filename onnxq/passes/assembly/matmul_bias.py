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
from onnxq.passes.journal import PassReport
from onnxq.passes.view import View, is_float
from onnxq.sites import Refusal


def unfuse_matmul_bias(proto: ModelLike, nodes: Sequence[str]) -> tuple[ModelLike, PassReport]:
    """A copy in which ORT keeps these MatMuls as MatMuls: their bias [N] becomes [1, .., N], or is subtracted negated.

    For MatMuls that will be quantized without a pair on their output; left float or with a pair behind, Gemm is fine.
    The bias is a copy of its own, so other readers of it see no change.

    Raises ModelError for a node that is not there.
    """
    view = View(infer_shapes(proto))
    edit, changed, skipped = Edit(proto), [], []
    for name in dict.fromkeys(nodes):
        node = view.index.node(name)
        found = _bias_add(view, node)
        if isinstance(found, str):
            skipped.append(Refusal(name, found, "", "matmul_bias", "R112"))
            continue
        add, k = found
        changed.append(f"{add.name}: {_rewrite(view, edit, node, add, k)}")
    return (edit.export() if changed else proto), PassReport("matmul_bias", tuple(changed), tuple(skipped))


def _bias_add(view: View, node: NodeRef) -> tuple[NodeRef, int] | str:
    """(Add, its bias input), or why there is nothing to do."""
    if node.op_type != "MatMul" or node.domain:
        return "not a MatMul"
    reader = view.sole_reader(view.output(node))
    if reader is None or reader[0].op_type != "Add" or reader[0].domain:
        return "no Add alone reads its output, ORT fuses nothing there"
    add, k = reader
    bias = view.constant(add, 1 - k)
    if bias is None or not is_float(bias):
        return "what is added is computed at run time, ORT fuses nothing there"
    rank = view.rank(view.output(node))
    if rank is not None and rank >= 3 and bias.ndim >= 3:
        return "its bias has the form already"
    return add, 1 - k


def _rewrite(view: View, edit: Edit, node: NodeRef, add: NodeRef, k: int) -> str:
    bias = view.constant(add, k)
    rank = view.rank(view.output(node))
    if bias is None:  # pragma: no cover - _bias_add looked
        return ""
    if rank is not None and rank >= 3:
        shaped = bias.reshape((1,) * (rank - bias.ndim) + bias.shape)
        edit.read(view.edge(add, k), edit.constant(add.scope, f"{add.inputs[k]}/rank{rank}", shaped))
        return f"bias of rank {rank}"
    negated = edit.constant(add.scope, f"{add.inputs[k]}/negated", -bias)
    edit.become(add, "Sub", (node.outputs[0], negated), {})
    return "Sub of the negated bias"
