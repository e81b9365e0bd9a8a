"""Operators that stay float in several engines, whatever they would gain."""

from __future__ import annotations

from onnxq.backends.base import Candidate
from onnxq.sites import TensorId

# What adds no function of its own between two convolutions of one front end (a filter, then a decimated transform).
_LINEAR = frozenset(
    ("Cast", "Identity", "Neg", "Concat", "Split", "Slice", "Pad", "Squeeze", "Unsqueeze", "Reshape", "Transpose")
)
# What may stand between a convolution and the Log behind it.
_SPECTRAL = _LINEAR | {
    *("Pow", "Mul", "Add", "Sub", "Div", "Sqrt", "Abs", "Clip", "Max", "Relu"),
    *("ReduceSum", "ReduceMean", "ReduceL2", "MatMul"),
}
# Tensors behind a convolution after which the search for a logarithm ends.
_FRONT_END = 200


def explain_log_front_end(candidate: Candidate, _: Candidate | None) -> str | None:
    """A spectrogram front end: a convolution (STFT, CQT) whose output reaches a Log, or a filter in front of one.

    An audio net: 9 dB quantized, 36 dB with its front end float. The loss is in the numbers, not in the kernel.
    """
    if candidate.node.op_type != "Conv":
        return None
    # Not the tensor behind the activation that goes with it.
    made = candidate.node.result
    # Whether a linear path reaches the tensor: only such a path may go on through another convolution, so a tensor
    # that another path reached first is looked at again.
    seen = {made: True}
    index, pending = candidate.index, [made]
    while pending:
        tensor = pending.pop()
        linear = seen[tensor]
        for edge in index.consumers(tensor):
            node = index.node(edge.node)
            if node.op_type == "Log":
                return f"its output reaches the logarithm {node.name}, which magnifies small errors"
            filtered = linear and node.op_type == "Conv" and edge.index == 0
            if not (filtered or node.op_type in _SPECTRAL) or len(seen) > _FRONT_END:
                continue
            for out in (TensorId(name, node.scope) for name in node.outputs if name):
                reached = filtered or (linear and node.op_type in _LINEAR)
                if out not in seen or (reached and not seen[out]):
                    seen[out] = reached
                    pending.append(out)
    return None
