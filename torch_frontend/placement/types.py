"""ONNX's operators for torch's calls, as torch 2.13 exports them at opset 20 and onnxq prepares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from torch_frontend.tracing.values import shape_of

# Functions without an operator of their own here: the planner looks through them, or stops at them.
FUNCTION_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("log", "log10", "log2", "log1p"), "Log"),
    **dict.fromkeys(("pow", "__pow__", "square"), "Pow"),
    **dict.fromkeys(("max", "amax", "topk"), "ReduceMax"),
    "sqrt": "Sqrt",
    "abs": "Abs",
    "neg": "Neg",
    "maximum": "Max",
    "minimum": "Min",
    "norm": "ReduceL2",
    "exp": "Exp",
}
# Operators whose first ONNX name is not the node that reads their input.
PLAIN_TYPES: Mapping[str, str] = {"glu": "torch.glu", "log_softmax": "LogSoftmax"}
_SHUFFLES = {"pixel_shuffle": "DepthToSpace", "pixel_unshuffle": "SpaceToDepth", "roll": "torch.roll", "flip": "Slice"}


def clip_bounds(function: str, module: nn.Module | None, node: fx.Node) -> tuple[Any, Any]:
    """(min, max) of a clamp; None where it has no bound there."""
    if isinstance(module, nn.ReLU6) or function == "relu6":
        return 0.0, 6.0
    ends = {"clamp_min": ("input", "min"), "clamp_max": ("input", "max")}.get(function, ("input", "min", "max"))
    given = dict(zip(ends, node.args, strict=False)) | node.kwargs
    found = [getattr(module, f"{end}_val", given.get(end, given.get(f"{end}_val"))) for end in ("min", "max")]
    return found[0], found[1]


def spatial_mean(op: str, module: nn.Module | None, node: fx.Node, target: str) -> str:
    """The node of an average: over a whole map it is a pooling, which the preparation for ONNX Runtime makes of it."""
    pooled = "GlobalAveragePool" if target == "ort" else "ReduceMean"
    if op == "adaptive_avg_pool":
        size = getattr(module, "output_size", node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size"))
        ones = all(one == 1 for one in size) if isinstance(size, (tuple, list)) else size == 1
        return pooled if ones else "AveragePool"
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    shape = shape_of(node.all_input_nodes[0])
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return "ReduceMean"
    rank = len(dims) + 2 if shape is None else len(shape)
    whole = rank > 2 and sorted(int(str(dim)) % rank for dim in dims) == list(range(2, rank))
    return pooled if whole else "ReduceMean"


def slice_type(function: str, node: fx.Node, default: str) -> str:
    """The type for cutting or turning a tensor: Slice keeps bytes in integers between pairs, Gather does not."""
    if function in ("select", "index_select", "gather"):
        return "Gather"
    if function in ("getitem", "__getitem__"):
        index = node.args[1] if len(node.args) > 1 else None
        parts = index if isinstance(index, tuple) else (index,)
        return "Gather" if any(isinstance(part, (int, fx.Node)) for part in parts) else "Slice"
    return _SHUFFLES.get(function, default)
