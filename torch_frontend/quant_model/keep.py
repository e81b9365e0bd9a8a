"""Calls that stay float whatever they would gain, and results that need a pair: the engine's measured rules, here too.

The same as onnxq.planner.exclusions and onnxq.targets.surroundings, so that training quantizes what the engine would. What
the engine leaves float because int8 would not pay at that size is quantized here: sizes are the deployment's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from torch import fx

from onnxq.config import Config
from onnxq.sites import LeftFloat
from torch_frontend.quant_model.residual import op_of
from torch_frontend.quant_model.units import Found, Unit
from torch_frontend.tracing import is_constant, shape_of

_PREPROCESSING = frozenset(("cast", "add", "sub", "mul", "div", "transpose", "reshape", "pad", "slice", "identity"))
_STEM_CHANNELS = 4
_STEM_DEPTHWISE_PIXELS = 112 * 112
_MOVES = frozenset(("reshape", "transpose", "identity", "cast", "expand"))
_CUTS = frozenset(("split", "slice"))
_SCALING = frozenset(("mul", "div"))
_REACH = 64

Keep = Callable[[Found, Unit, Mapping[str, tuple[int, ...]]], str | None]


def _stem(found: Found, unit: Unit, weights: Mapping[str, tuple[int, ...]]) -> str | None:
    shape = _weight_shape(unit, weights)
    if unit.op != "conv" or len(shape) != 4 or shape[1] > _STEM_CHANNELS or _groups(unit) != 1:
        return None
    at = unit.data[0][1]
    for _ in range(16):
        if at.op == "placeholder":
            return "the first convolution: slower in int8, and its noise reaches everything behind it"
        sources = [source for source in at.all_input_nodes if not is_constant(source)]
        if op_of(at) not in _PREPROCESSING or len(sources) != 1:
            return None
        at = sources[0]
    return None


def _stem_depthwise(found: Found, unit: Unit, weights: Mapping[str, tuple[int, ...]]) -> str | None:
    shape, data = _weight_shape(unit, weights), unit.data[0][1] if unit.data else None
    maker = found.by_out.get(data) if data is not None else None
    if maker is None or data is None or len(shape) != 4 or shape[1] != 1 or _groups(unit) == 1:
        return None
    size = shape_of(data)
    if _stem(found, maker, weights) is None or size is None or math.prod(size[2:]) < _STEM_DEPTHWISE_PIXELS:
        return None
    return "depthwise right behind a float stem, on a large map: int8 gains nothing and amplifies the noise"


KEEP_FLOAT: Mapping[str, tuple[tuple[str, Keep], ...]] = {
    "ort": (("stem", _stem), ("stem-depthwise", _stem_depthwise)),
}


def kept_float(found: Found, unit: Unit, target: str, weights: Mapping[str, tuple[int, ...]]) -> LeftFloat | None:
    """The reason of the first rule that keeps this call float, or None. weights: site -> shape."""
    for rule, test in KEEP_FLOAT.get(target, ()):
        reason = test(found, unit, weights)
        if reason is not None:
            return LeftFloat(unit.name.path, reason, rule, "F103")
    return None


def _weight_shape(unit: Unit, weights: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return weights.get(unit.weight.site, ()) if unit.weight is not None and unit.data else ()


def _groups(unit: Unit) -> int:
    module = unit.node.graph.owning_module
    if unit.node.op == "call_module" and module is not None:
        layer = module.get_submodule(str(unit.node.target))
        return int(getattr(layer, "groups", unit.node.kwargs.get("groups", 1)))
    return 1


def cut_for_attention(node: fx.Node) -> bool:
    """True for a product whose result is cut into operands of attention: one weight for query, key and value.

    Without a pair on the result TensorRT cuts up the weight instead, and multiplies in float.
    """
    at = node
    for _ in range(_REACH):
        readers = list(at.users)
        if any(op_of(reader) in _CUTS for reader in readers):
            return any(_reaches_attention(reader) for reader in readers)
        if len(readers) != 1 or op_of(readers[0]) not in _MOVES:
            return False
        at = readers[0]
    return False


def _reaches_attention(node: fx.Node) -> bool:
    pending, seen = deque([node]), {node}
    while pending and len(seen) < _REACH:
        for reader in pending.popleft().users:
            op = op_of(reader)
            if op == "attention" or (op == "matmul" and _scores_or_values(reader)):
                return True
            plain = op == "" and reader.op == "call_function"  # an element of several results
            if reader not in seen and (plain or op in _MOVES | _CUTS | _SCALING):
                seen.add(reader)
                pending.append(reader)
    return False


def opt_in(unit: Unit, config: Config) -> LeftFloat | None:
    """Why a product of two activations stays float unless it is asked for, or None."""
    inside = unit.op == "attention" or _scores_or_values(unit.node)
    if not inside:
        reason = "a product of two activations stays float: int8 costs it accuracy"
        return LeftFloat(unit.name.path, reason, "product", "F104")
    if config.attention != "quantized":
        reason = "attention stays float unless asked for: quantized it may cost accuracy"
        return LeftFloat(unit.name.path, reason, "attention", "F104")
    if unit.op == "attention":
        reason = "its mask, dropout or shared keys keep it from being taken apart, and engines quantize it whole or not"
        return LeftFloat(unit.name.path, reason, "attention", "F104")
    return None


def weighs_values(node: fx.Node) -> bool:
    """True for the product of attention's weights and values, whose fused kernel needs a pair behind it too."""
    at = node.args[0] if op_of(node) == "matmul" and node.args else None
    for _ in range(_REACH):
        if not isinstance(at, fx.Node):
            return False
        if op_of(at) == "softmax":
            return True
        at = at.args[0] if op_of(at) in _MOVES and at.args else None
    return False


def _scores_or_values(node: fx.Node) -> bool:
    """A product of two activations beside a softmax."""
    operands = [source for source in node.all_input_nodes if not is_constant(source)]
    if len(operands) != 2:
        return False
    near, pending = set(operands), deque([*operands, node])
    while pending and len(near) < _REACH:
        at = pending.popleft()
        if op_of(at) == "softmax":
            return True
        for other in at.users if at is node or at not in operands else at.all_input_nodes:
            if other not in near and op_of(other) in (*_MOVES, *_SCALING, "add", "float", "softmax", "where"):
                near.add(other)
                pending.append(other)
    return False
