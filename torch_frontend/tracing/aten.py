"""ATen's operators as the torch functions and tensor methods that call them, which the registry knows."""

import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from torch_frontend.qmodules import find_entry
from torch_frontend.tracing.batch_norms import BATCH_NORM

F: Any = functional
# Of a call, by their names in ATen's schema.
Arguments = dict[str, Any]
Rewrite = Callable[[Arguments], tuple[Any, tuple[Any, ...], Arguments]]


class _Open(Exception):
    """A call has no form here; ATen's own stays."""


def convert_calls(graph: fx.Graph) -> None:
    """Turn calls of ATen's operators into functions and methods; one that has none stays as it is."""
    for node in list(graph.nodes):
        name = read_aten_name(node)
        # contiguous: recorded where the example's tensor was not, which differs from mode to mode.
        # alias: a slice of a whole tensor.
        if name in _CHECKS or name in ("contiguous", "alias"):
            if name not in _CHECKS:
                node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name in _REWRITES:
            _rewrite_call(node, _REWRITES[name])
        elif name:
            _rename_call(node, name)


def read_aten_name(node: fx.Node) -> str:
    """Name of the operator of ATen that a node calls; "" for others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return str(target._schema.name.removeprefix("aten::"))


def _rewrite_call(node: fx.Node, rewrite: Rewrite) -> None:
    """Call what the rewrite makes of the arguments, by their names in ATen's schema; nothing where it is open."""
    target = node.target
    parameters = target._schema.arguments
    arguments = {a.name: a.default_value for a in parameters if a.has_default_value()}
    arguments |= dict(zip((a.name for a in parameters), node.args, strict=False)) | node.kwargs
    if hasattr(node.meta.get("val"), "dim"):
        arguments["rank"] = node.meta["val"].dim()
    with suppress(_Open):
        _call_target(node, *rewrite(arguments))


def _rename_call(node: fx.Node, name: str) -> None:
    """Call the function or method of the same name, if there is one."""
    # Options that were not given.
    kwargs = {key: value for key, value in node.kwargs.items() if value is not None}
    # torch.nn's activations in place, of which there are no methods.
    plain = name.removesuffix("_")
    if plain in _SHORTENED and plain != name and not hasattr(torch.Tensor, name):
        name = plain
        kwargs = {**kwargs, "inplace": True}
    target = _find_function(name)
    if target is not None:
        _call_target(node, target, node.args[: _SHORTENED.get(name)], kwargs)


def _call_target(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Arguments) -> None:
    node.op = "call_method" if isinstance(target, str) else "call_function"
    node.target = target
    node.args = args
    node.kwargs = kwargs


def _find_function(name: str) -> Any:
    """The function or the name of the method that calls an operator, one that is registered where there is one."""
    if name.startswith("__"):
        return getattr(operator, name, None)
    if hasattr(torch.Tensor, name) and name.endswith("_"):
        return name
    name = _SAME.get(name, name)
    places = [getattr(torch, name, None), name if hasattr(torch.Tensor, name) else None]
    # torch.nn.functional has functions in Python, whose arguments may differ.
    if name in _SHORTENED or isinstance(getattr(F, name, None), type(torch.add)):
        places.insert(0, getattr(F, name, None))
    targets = list(filter(None, places))
    return next(filter(find_entry, targets), targets[0] if targets else None)


def _slice(a: Arguments) -> Any:
    dim = a["dim"] or 0
    if dim < 0:
        dim += a["rank"]
    # An open end is the largest int64 in ATen.
    end = None if isinstance(a["end"], int) and a["end"] >= 2**62 else a["end"]
    part = slice(a["start"] or None, end, None if a["step"] == 1 else a["step"])
    return operator.getitem, (a["self"], (*[slice(None)] * dim, part)), {}


def _index(a: Arguments) -> Any:
    # None stands for a whole axis.
    return (
        operator.getitem,
        (a["self"], tuple(slice(None) if k is None else k for k in a["indices"])),
        {},
    )


def _convert_type(a: Arguments) -> Any:
    if a.get("other") is not None:
        return "to", (a["self"], a["other"]), {}
    return (
        "to",
        (a["self"],),
        {key: a[key] for key in ("device", "dtype") if a.get(key) is not None},
    )


def _look_up(a: Arguments) -> Any:
    # ATen has -1 for none.
    padding = {} if a["padding_idx"] < 0 else {"padding_idx": a["padding_idx"]}
    return F.embedding, (a["indices"], a["weight"]), padding


def _resize(mode: str) -> Rewrite:
    def convert(a: Arguments) -> Any:
        aligned = {"align_corners": a["align_corners"]} if "align_corners" in a else {}
        # One of the two is given. By scale torch takes the factors themselves, as the person wrote them.
        size = (
            {"size": a["output_size"]}
            if a.get("output_size") is not None
            else {"scale_factor": a["scale_factors"]}
        )
        # Overloads with a scale for each axis, which F.interpolate has no arguments for.
        if "scale_factors" not in a:
            raise _Open
        return F.interpolate, (a["input"],), {**size, "mode": mode, **aligned}

    return convert


def _activate_elu(a: Arguments) -> Any:
    # ATen computes SELU and CELU by it, with these factors.
    if a["scale"] != 1 or a["input_scale"] != 1:
        raise _Open
    return F.elu, (a["self"], a["alpha"]), {}


# Checks of torch.export: the graph is taken for what the person's example showed.
_CHECKS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
# Functions of torch.nn.functional that take the first so many arguments in the same order.
_SHORTENED: Mapping[str, int] = {
    "layer_norm": 5,
    "group_norm": 5,
    "silu": 1,
    "mish": 1,
    "hardswish": 1,
    "hardsigmoid": 1,
    "hardtanh": 3,
    "leaky_relu": 2,
    "glu": 2,
    "adaptive_avg_pool1d": 2,
    "adaptive_avg_pool2d": 2,
    "adaptive_avg_pool3d": 2,
    "pad": 4,
    "relu6": 1,
    "rms_norm": 4,
    "softplus": 3,
}
# Operators with another name in Python.
# A view needs a layout in memory, which may be another one in the other mode.
_SAME: Mapping[str, str] = {
    "view": "reshape",
    "split_with_sizes": "split",
    "lift_fresh_copy": "clone",
}
_REWRITES: Mapping[str, Rewrite] = {
    "to": _convert_type,
    "slice": _slice,
    "index": _index,
    "embedding": _look_up,
    # Of a graph without writes: x[:2] = y. It has no derivative.
    "copy": lambda a: ("expand_as", (a["src"], a["self"]), {}),
    "batch_norm": lambda a: (F.batch_norm, tuple(a[name] for name in BATCH_NORM), {}),
    "elu": _activate_elu,
    "_to_copy": _convert_type,
    "sym_size": lambda a: ("size", (a["self"], a["dim"]), {}),
    "upsample_nearest1d": _resize("nearest"),
    "upsample_nearest2d": _resize("nearest"),
    "upsample_nearest3d": _resize("nearest"),
    "upsample_linear1d": _resize("linear"),
    "upsample_bilinear2d": _resize("bilinear"),
    "upsample_bicubic2d": _resize("bicubic"),
    "upsample_trilinear3d": _resize("trilinear"),
}
