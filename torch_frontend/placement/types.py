"""ONNX's operators for torch's calls, as torch 2.13 exports them at opset 20 and onnxq prepares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from torch_frontend.placement.slots import TracedCall
from torch_frontend.qmodules import Op
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
_OWN_TYPES: Mapping[str, str] = {"glu": "torch.glu", "embedding": "torch.embedding"}
_SHUFFLES = {"pixel_shuffle": "DepthToSpace", "pixel_unshuffle": "SpaceToDepth", "roll": "torch.roll", "flip": "Slice"}


def find_op_type(op: Op) -> str:
    """The node that reads the input of a call of this operator."""
    return _OWN_TYPES.get(op.name) or (op.onnx[0] if op.onnx else f"torch.{op.name}")


def find_clip_bounds(call: TracedCall) -> tuple[Any, Any]:
    """(min, max) of a clamp; None where it has no bound there."""
    if call.op.name == "relu6":
        return 0.0, 6.0
    ends = {"clamp_min": ("input", "min"), "clamp_max": ("input", "max")}.get(call.function, ("input", "min", "max"))
    # Layers and F.hardtanh call them min_val and max_val.
    found = [call.find_setting(f"{end}_val", *ends, default=call.find_setting(end, *ends)) for end in ("min", "max")]
    return found[0], found[1]


def find_mean_type(call: TracedCall, *, pools: bool) -> str:
    """The node of an average. pools: the preparation for the target makes a pooling of one over a whole map."""
    pooled = "GlobalAveragePool" if pools else "ReduceMean"
    if call.op.name == "adaptive_avg_pool":
        size = call.find_setting("output_size", "input", "output_size")
        ones = all(one == 1 for one in size) if isinstance(size, (tuple, list)) else size == 1
        return pooled if ones else "AveragePool"
    # ONNX Runtime has an integer kernel for pooling a whole map, and none for ReduceMean.
    dims = call.find_setting("dim", "input", "dim", default=())
    shape = shape_of(call.node.all_input_nodes[0])
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return "ReduceMean"
    rank = len(dims) + 2 if shape is None else len(shape)
    whole = rank > 2 and sorted(int(str(dim)) % rank for dim in dims) == list(range(2, rank))
    return pooled if whole else "ReduceMean"


def find_slice_type(call: TracedCall) -> str:
    """The type for cutting or turning a tensor: Slice keeps bytes in integers between pairs, Gather does not."""
    if call.function in ("select", "index_select", "gather"):
        return "Gather"
    if call.function in ("getitem", "__getitem__"):
        index = call.find_setting("index", "input", "index")
        parts = index if isinstance(index, tuple) else (index,)
        return "Gather" if any(isinstance(part, (int, fx.Node)) for part in parts) else "Slice"
    return _SHUFFLES.get(call.function, find_op_type(call.op))
