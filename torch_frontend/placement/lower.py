"""Lowers a traced module to the nodes that torch exports and onnxq prepares, so that the planner sees that graph.

One call becomes one node, or several where the export has several; the tensors between those have no site, and nothing
is placed there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from onnxq.config import Config, MultiInput
from onnxq.graph import ValueInfo
from onnxq.sites import LeftFloat, Refusal, TensorId, Unquantized
from torch_frontend.placement.graph import Argument, CallGraph, CallNode, Weight
from torch_frontend.placement.slots import Slot, find_slots
from torch_frontend.placement.types import FUNCTION_TYPES, PLAIN_TYPES, clip_bounds, slice_type, spatial_mean
from torch_frontend.qmodules import WeightQuantized, explain_unconvertible
from torch_frontend.tracing.names import CallName, element_of, is_constant, is_plain, read_name, site_of
from torch_frontend.tracing.values import compute_constant, is_float, shape_of


@dataclass(frozen=True)
class _Read:
    """A tensor that a node reads, and the argument that gives it; None for constants and inside a call."""

    tensor: str
    argument: Argument | None = None


def lower_model(model: fx.GraphModule, config: Config, skipped: Collection[str] = ()) -> CallGraph:
    """The graph of a traced module with named calls. skipped: modules that the person asked to leave alone."""
    lowering = _Lowering(model, config, skipped)
    for node in model.graph.nodes:
        lowering.lower(node)
    return lowering.graph


class _Lowering:
    def __init__(self, model: fx.GraphModule, config: Config, skipped: Collection[str]) -> None:
        self.model, self.config, self.skipped = model, config, skipped
        self.graph = CallGraph()
        self.tensors: dict[fx.Node, str] = {}
        # What hands a value on as it is: its own argument.
        self.handed: dict[fx.Node, Argument] = {}
        self.kinds: Mapping[str, Callable[[fx.Node, CallName], None]] = {
            **dict.fromkeys(("conv", "conv_transpose"), self._conv),
            **dict.fromkeys(("add", "sub", "mul", "div"), self._binary),
            "linear": self._linear,
            "matmul": partial(self._weighted, op_type="MatMul"),
            "bilinear": partial(self._weighted, op_type="Einsum"),
            "embedding": partial(self._weighted, op_type="torch.embedding"),
            "attention": self._attention,
            "silu": self._silu,
            "identity": self._identity,
            "cast": self._identity,
            "pad": self._pad,
        }

    def lower(self, node: fx.Node) -> None:
        """Add the nodes of one value; those before it are there."""
        name = read_name(node)
        if node.op == "output":
            self.graph.outputs.update(self._read(node, Slot(0), value).tensor for value in node.all_input_nodes)
        elif node.op == "placeholder":
            self._make(node)
            info = ValueInfo(self.tensors[node], self.graph.dtype(TensorId(self.tensors[node])), None)
            self.graph.inputs = (*self.graph.inputs, info)
        elif is_constant(node) or is_plain(node) or node in self.tensors:
            return
        elif name is None:
            self._make(node)
            if element_of(node) is None:  # x.T
                self._emit(node, CallName(node.name), "Transpose", self._list_reads(node), closed=True)
        elif name.entry is None or name.path in self.skipped or name.entry.op.refused is not None:
            self._leave(node, name)
        else:
            self.kinds.get(name.entry.op.name, self._plain)(node, name)

    # -- values ------------------------------------------------------------------------------------------------

    def _make(self, value: fx.Node, behind: fx.Node | None = None) -> str:
        """Name the tensor of a value. behind: the value whose quantizer stands for it."""
        at = behind or value
        site = site_of(at)
        tensor = site or at.name
        self.tensors[value] = self.tensors[at] = tensor
        if site is not None:
            self.graph.values[tensor] = at
        if not is_float(at):
            self.graph.integers.add(tensor)
        shape = shape_of(value)
        if shape is not None:
            self.graph.shapes[TensorId(tensor)] = shape
        return tensor

    def _hand_on(self, node: fx.Node, slot: Slot, source: fx.Node) -> None:
        """The node's value is that of its source: readers of the one read the other."""
        self.handed[node] = (node, slot)
        self.tensors[node] = self.tensors[source]

    def _read(self, node: fx.Node, slot: Slot, value: fx.Node) -> _Read:
        if is_constant(value) or is_plain(value):
            return _Read(self._constant(value))
        argument = (node, slot)
        while value in self.handed:
            argument = self.handed[value]
            value = argument[0].all_input_nodes[0]
        return _Read(self.tensors[value] if value in self.tensors else self._make(value), argument)

    def _constant(self, value: fx.Node, site: str = "", *, turned: bool = False) -> str:
        """The name of a constant. turned: its reader has it transposed."""
        tensor = site or site_of(value) or value.name
        held = None if is_plain(value) else compute_constant(self.model, value)
        return self._hold(tensor, held, turned=turned) if isinstance(held, Tensor) else self._number(tensor)

    def _number(self, name: str) -> str:
        """The name of a number, whose value nothing depends on."""
        return self._hold(name, torch.zeros(()))

    def _parameter(self, path: str, leaf: str, *, turned: bool = False) -> str:
        """The name of a layer's own parameter."""
        return self._hold(f"{path}.{leaf}", getattr(self.model.get_submodule(path), leaf), turned=turned)

    def _hold(self, tensor: str, value: Tensor, *, turned: bool = False) -> str:
        self.graph.constants[tensor] = value.mT if turned else value
        return tensor

    def _list_reads(self, node: fx.Node) -> list[_Read]:
        """The inputs of a call, its data arguments first; numbers in their places are constants."""
        name = read_name(node)
        reads: list[_Read] = []
        entry = None if name is None else name.entry
        for param in () if entry is None else entry.data:
            found = [self._read(node, slot, value) for slot, value in find_slots(node, entry, param)]  # type: ignore[arg-type]
            assert name is not None
            reads += found or [_Read(self._number(f"{name.name}/{param}"))]
        known = {read.tensor for read in reads}
        rest = [value for value in node.all_input_nodes if not is_plain(value)]
        more = [self._read(node, Slot(-1), value).tensor for value in rest]
        return reads + [_Read(tensor) for tensor in dict.fromkeys(more) if tensor not in known]

    # -- nodes -------------------------------------------------------------------------------------------------

    def _emit(
        self, node: fx.Node, name: CallName, op_type: str, reads: list[_Read], *, part: str = "", out: str = "",
        closed: bool = False, **attrs: Any,
    ) -> None:  # fmt: skip
        """One node. part: which of the call's nodes. out: a tensor inside the call; else the call's results."""
        elements = [user for user in node.users if read_name(user) is None and element_of(user) is not None]
        if out:
            outputs: tuple[str, ...] = (out,)
            shape = shape_of(node)
            if shape is not None:
                self.graph.shapes[TensorId(out)] = shape
        elif elements:
            outputs = tuple(self._make(element) for element in elements)
        else:
            outputs = (self.tensors[node] if node in self.tensors else self._make(node),)
        made = CallNode(
            name=f"{name.name}{part}", op_type=op_type, domain="", inputs=tuple(read.tensor for read in reads),
            outputs=outputs, attrs=attrs, scope="", order=self.graph.count, path=name.path,
            op=None if name.entry is None else name.entry.op,
        )  # fmt: skip
        self.graph.add(made)
        for k, read in enumerate(reads):
            if read.argument is not None:
                self.graph.arguments[made.name, k] = read.argument
        computed = {read.tensor for read in reads} - self.graph.constants.keys()
        # What has no site can have no pair.
        if closed or computed - self.graph.values.keys():
            self.graph.closed.add(made.name)

    def _leave(self, node: fx.Node, name: CallName) -> None:
        """A call that stays float, whose reason the person is told unless they asked for it."""
        op_type = FUNCTION_TYPES.get(self._function(node), f"torch.{name.path}")
        self._emit(node, name, op_type, self._list_reads(node), closed=True)
        if name.path in self.skipped:
            return
        if name.entry is not None and name.entry.op.refused is not None:
            self.graph.reasons.append(Refusal(name.path, *name.entry.op.refused, "no-kernel", "R101"))
            return
        if node.op == "call_module":
            what = type(self.model.get_submodule(str(node.target))).__name__
            fix = "register it with @register_qmodule, or take it out of torch.skip_trace if it stands there"
        else:
            what, fix = f"{node.target if isinstance(node.target, str) else name.path}", "register it, or leave it"
        reason = f"nothing is known of {what}: it stays float"
        self.graph.reasons.append(Refusal(name.path, reason, fix, "registry", "R109"))

    def _plain(self, node: fx.Node, name: CallName) -> None:
        """A call that is one node."""
        assert name.entry is not None
        op, module = name.entry.op, self._module(node)
        op_type = PLAIN_TYPES.get(op.name) or (op.onnx[0] if op.onnx else f"torch.{op.name}")
        attrs: dict[str, Any] = {}
        closed = not self._reads_floats(node, name) or (op.name == "stack" and self._policy(name) is None)
        if op.name in ("relu6", "clamp"):
            attrs = dict(zip(("min", "max"), clip_bounds(self._function(node), module, node), strict=True))
        elif op.name == "float":
            op_type = FUNCTION_TYPES.get(self._function(node), op_type)
        elif op.name in ("mean", "adaptive_avg_pool"):
            op_type = spatial_mean(op.name, module, node, self.config.target)
        elif op.name in ("slice", "transpose"):
            op_type = slice_type(self._function(node), node, op_type)
        elif op.name == "interpolate":
            mode = str(getattr(module, "mode", None) or node.kwargs.get("mode", "nearest"))
            op_type = "AveragePool" if mode == "area" else op_type
            attrs["mode"] = "nearest" if mode.startswith("nearest") else mode
            # Nearest values stay on the quantization grid.
            closed = closed or (attrs["mode"] == "nearest" and self.config.target == "virtual")
        elif op.name == "max_pool":
            size = getattr(module, "kernel_size", node.args[1] if len(node.args) > 1 else 2)
            attrs["kernel_shape"] = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        self._emit(node, name, op_type, self._list_reads(node), closed=closed, **attrs)

    def _binary(self, node: fx.Node, name: CallName) -> None:
        assert name.entry is not None
        reads = self._list_reads(node)[:2]
        tensors = {read.tensor for read in reads}
        alone = len(tensors) == 1 or bool(tensors & self.graph.constants.keys())
        op_type = name.entry.op.onnx[0]
        # onnxq writes the sum in front of a layer norm so that ONNX Runtime fuses nothing with it.
        normed = any(self._op(user) == "layer_norm" and user.args[:1] == (node,) for user in node.users)
        if op_type == "Add" and normed and not alone and self.config.target == "ort":
            op_type = "Sum"
        closed = not self._reads_floats(node, name) or (alone and self._policy(name) is None)
        self._emit(node, name, op_type, reads, closed=closed)

    def _conv(self, node: fx.Node, name: CallName) -> None:
        assert name.entry is not None
        module = self._module(node)
        layer = module if isinstance(module, nn.modules.conv._ConvNd) else None
        named_args = dict(zip(("", "", "", "stride", "", "", "groups"), node.args, strict=False)) | node.kwargs
        groups = layer.groups if layer is not None else named_args.get("groups", 1)
        stride = layer.stride if layer is not None else named_args.get("stride", 1)
        strides = tuple(stride) if isinstance(stride, (tuple, list)) else ()
        self._close_with_norm(node)
        self._weighted(node, name, op_type=name.entry.op.onnx[0], group=groups, strides=strides)

    def _linear(self, node: fx.Node, name: CallName) -> None:
        data = next(iter(node.all_input_nodes))
        shape = shape_of(data)
        if shape is not None and len(shape) == 2:
            self._close_with_norm(node)
            self._weighted(node, name, op_type="Gemm", transB=1)
        else:
            self._weighted(node, name, op_type="MatMul", turned=True)

    def _weighted(self, node: fx.Node, name: CallName, *, op_type: str, turned: bool = False, **attrs: Any) -> None:
        """A product: data, weight and bias. turned: the export has the weight transposed and adds the bias behind."""
        assert name.entry is not None
        count = len(name.entry.data) if name.entry.op.weight is not None else 1
        reads = self._list_reads(node)[:count]
        weight, read, reason = self._find_weight(node, name, turned=turned)
        closed = reason is not None or not self._reads_floats(node, name)
        self.graph.reasons += [] if reason is None else [reason]
        bias = self._find_bias(node, name)
        inside = f"{name.name}.out/product" if turned and bias is not None else ""
        policy = self._policy(name)
        closed = closed or (weight is None and policy is not None and policy.policy == "none")
        operands = [*reads, *([read] if read is not None else [])]
        self._emit(
            node, name, op_type, operands + ([bias] if bias is not None and not inside else []), out=inside,
            closed=closed, **attrs,
        )  # fmt: skip
        if weight is not None:
            self.graph.weights[name.name] = weight
        if inside and bias is not None:
            self._emit(node, name, "Add", [_Read(inside), bias], part="/Add", closed=True)

    def _attention(self, node: fx.Node, name: CallName) -> None:
        reads = self._list_reads(node)
        if self.config.target == "virtual" or self._policy(name) is not None:
            self._emit(node, name, "Attention", reads[:3], closed=not self._reads_floats(node, name))
            return
        scores, weights = (f"{name.name}.out/{part}" for part in ("scores", "weights"))
        self._emit(node, name, "MatMul", reads[:2], out=scores, closed=True)
        self._emit(node, name, "Softmax", [_Read(scores)], part="/Softmax", out=weights)
        self._emit(node, name, "MatMul", [_Read(weights), *reads[2:3]], part="/MatMul")
        if self.config.target == "trt":
            reason = "attention stays float unless asked for: quantized it may cost accuracy"
            if self.config.attention == "quantized":
                reason = (
                    "its mask, dropout or shared keys keep it from being taken apart, and engines quantize it whole or "
                    "not"
                )
            self.graph.reasons.append(LeftFloat(name.path, reason, "attention", "F104"))

    def _silu(self, node: fx.Node, name: CallName) -> None:
        reads, gate = self._list_reads(node)[:1], f"{name.name}.out/gate"
        self._emit(node, name, "Sigmoid", reads, out=gate, closed=not self._reads_floats(node, name))
        self._emit(node, name, "Mul", [*reads, _Read(gate)], part="/Mul")

    def _identity(self, node: fx.Node, name: CallName) -> None:
        source = next(iter(node.all_input_nodes))
        if is_float(node) == is_float(source) and self.tensors.get(source) in self.graph.values:
            self._hand_on(node, Slot(0), source)
        else:
            self._emit(node, name, "Cast" if is_float(node) != is_float(source) else "Identity", self._list_reads(node))

    def _pad(self, node: fx.Node, name: CallName) -> None:
        """Zeros in front of convolutions become their own padding."""
        module = self._module(node)
        given = dict(zip(("", "", "mode", "value"), node.args, strict=False)) | node.kwargs
        zeros = given.get("mode", "constant") == "constant" and not (getattr(module, "value", 0) or given.get("value"))
        zeros = zeros and (module is None or "Reflection" not in type(module).__name__)
        convs = bool(node.users) and all(self._op(user) == "conv" for user in node.users)
        if zeros and convs:
            self._hand_on(node, Slot(0), next(iter(node.all_input_nodes)))
        else:
            self._plain(node, name)

    # -- questions ---------------------------------------------------------------------------------------------

    def _close_with_norm(self, node: fx.Node) -> None:
        """Where a batch norm alone reads the product, the two are one kernel, and the pair stands behind the norm."""
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        if reader is not None and self._op(reader) == "batch_norm" and reader.args[:1] == (node,):
            self._make(node, behind=reader)

    def _find_weight(
        self, node: fx.Node, name: CallName, *, turned: bool = False
    ) -> tuple[Weight | None, _Read | None, Unquantized | None]:
        """The weight, and how the node reads it; or why it cannot have one."""
        assert name.entry is not None
        op, qmodule = name.entry.op, name.entry.qmodule
        if node.op == "call_module" and op.weight is not None and qmodule and issubclass(qmodule, WeightQuantized):
            why = explain_unconvertible(self.model.get_submodule(name.path))
            if why is not None:
                return None, None, Refusal(name.path, why, "give it a plain weight", "weight", "R110")
            tensor = self._parameter(name.path, op.weight, turned=turned)
            return Weight(tensor, turned, module=name.path), _Read(tensor), None
        for slot, value in find_slots(node, name.entry, op.weight or name.entry.params[1]):
            if not is_constant(value):
                return None, self._read(node, slot, value), None
            return *self._held_weight(node, name, slot, value, turned=turned), None
        return None, None, None

    def _held_weight(
        self, node: fx.Node, name: CallName, slot: Slot, value: fx.Node, *, turned: bool
    ) -> tuple[Weight | None, _Read]:
        """The parameter behind a constant operand; of rows cut out of one, the whole parameter, at the cut."""
        assert name.entry is not None
        op, argument, whole = name.entry.op, (node, slot), value
        above = read_name(value)
        if above is not None and above.entry is not None and above.entry.op.name == "slice" and op.weight_axis == 0:
            index = value.args[1] if len(value.args) > 1 else None
            source = value.args[0]
            if isinstance(index, slice) and isinstance(source, fx.Node) and source.op == "get_attr":
                argument, whole = (value, Slot(0)), source
        site = site_of(whole)
        read = _Read(self._constant(value, site or "", turned=turned))
        if site is None:
            return None, read
        return Weight(site, turned, value=whole, argument=argument), read

    def _find_bias(self, node: fx.Node, name: CallName) -> _Read | None:
        assert name.entry is not None
        layer = self.model.get_submodule(name.path) if node.op == "call_module" else None
        if layer is not None and isinstance(getattr(layer, "bias", None), Tensor):
            return _Read(self._parameter(name.path, "bias"))
        return next((self._read(node, *found) for found in find_slots(node, name.entry, "bias")), None)

    def _reads_floats(self, node: fx.Node, name: CallName) -> bool:
        assert name.entry is not None
        return all(is_float(value) for param in name.entry.data for _, value in find_slots(node, name.entry, param)
                   if not is_plain(value) and not is_constant(value))  # fmt: skip

    def _policy(self, name: CallName) -> MultiInput | None:
        return None if name.entry is None else self.config.torch.policy(name.entry.op.name)

    def _op(self, node: fx.Node) -> str:
        name = read_name(node)
        return "" if name is None or name.entry is None else name.entry.op.name

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _function(self, node: fx.Node) -> str:
        """The name of the function or method that is called; "" for layers."""
        target = getattr(self._module(node), "target", node.target if node.op != "call_module" else "")
        return target if isinstance(target, str) else str(getattr(target, "__name__", ""))
