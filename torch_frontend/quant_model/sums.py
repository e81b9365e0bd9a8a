"""Which weights of a model share 16-bit sums in the kernels of its target: said to their quantizers by `bind_sums`.

The target's own rule decides, on the ONNX node that a call becomes at export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from onnxq.config import Config
from onnxq.graph import NodeRef
from onnxq.sites import Role
from onnxq.targets import target
from torch_frontend.placement import slots
from torch_frontend.qmodules import Op, WeightQuantized, of_qmodule
from torch_frontend.quant_model.attach import WEIGHT
from torch_frontend.quant_model.eager import INPUTS
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing import named, value_of

# One product: its node, the shape of its weight, the quantizers of weight and data.
Product = tuple[NodeRef, tuple[int, ...], Quantizer, Quantizer]
# Where functional convolutions have their groups.
_GROUPS = 6


def bind_sums(model: nn.Module, config: Config) -> None:
    """Let every weight quantizer of a converted model keep the sums that the target's kernels add in 16 bits.

    Only weights multiplied by activations quantized to 8 bits have such sums. Nothing is bound where the configuration
    allows saturation.
    """
    engine = target(config.target, config.mode)
    if config.saturation == "allow" or not engine.saturates:
        return
    for node, shape, weight, data in _products(model):
        order = engine.sum_order(node, shape)
        if order is not None:
            weight.bind_sums(order, data)


def _products(model: nn.Module) -> Iterator[Product]:
    if isinstance(model, fx.GraphModule):
        for node in model.graph.nodes:
            yield from _traced(model, node)
    for path, module in model.named_modules():
        yield from _untraced(path, module)


def _traced(model: fx.GraphModule, node: fx.Node) -> Iterator[Product]:
    """The product of a call whose data and weight come from quantizers."""
    name = named(node)
    if name is None or name.entry is None:
        return
    op, entry = name.entry.op, name.entry
    read = [value for param in entry.data[:1] for _, value in slots(node, entry, param)]
    data = _quantizer(model, read[0]) if read else None
    if data is None or data.role is Role.WEIGHT:
        return
    layer = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if isinstance(layer, WeightQuantized):
        weight = layer._modules.get(WEIGHT)
        if isinstance(weight, Quantizer):
            yield _node(op, name.path, getattr(layer, "groups", 1)), tuple(layer.weight.shape), weight, data
    elif op.weight is not None or op.name == "matmul":
        for _, value in slots(node, entry, op.weight or entry.params[1]):
            found = _quantizer(model, value)
            if found is not None and found.role is Role.WEIGHT:
                groups = node.args[_GROUPS] if len(node.args) > _GROUPS else node.kwargs.get("groups", 1)
                yield _node(op, name.path, groups), tuple(value_of(model, value).shape), found, data


def _untraced(path: str, module: nn.Module) -> Iterator[Product]:
    """The product of a layer that was converted by itself, with its inputs' quantizers beside it."""
    weight, inputs = module._modules.get(WEIGHT), module._modules.get(INPUTS)
    known = of_qmodule(module)
    if not isinstance(module, WeightQuantized) or not isinstance(weight, Quantizer) or inputs is None or known is None:
        return
    data = next(iter(inputs.children()))
    if isinstance(data, Quantizer):
        yield _node(known.op, path, getattr(module, "groups", 1)), tuple(module.weight.shape), weight, data


def _quantizer(model: fx.GraphModule, value: fx.Node) -> Quantizer | None:
    found = model.get_submodule(str(value.target)) if value.op == "call_module" else None
    return found if isinstance(found, Quantizer) else None


def _node(op: Op, path: str, groups: Any) -> NodeRef:
    """The node a call becomes: a Linear's weight is stored as a Gemm reads it with transB."""
    kind = op.onnx[0] if op.onnx else ""
    attrs = {"Conv": {"group": groups}, "Gemm": {"transB": 1}}.get(kind, {})
    return NodeRef(name=path, op_type=kind, domain="", inputs=(), outputs=(), attrs=attrs, scope="", order=0)
