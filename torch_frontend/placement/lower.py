"""Lowers a traced module to the nodes that torch exports and onnxq prepares, so that the planner sees that graph.

One call becomes one node, or several where the export has several; the tensors between those have no site, and nothing
is placed there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from onnxq.backends import find_target
from onnxq.config import Config
from onnxq.graph import ValueInfo
from onnxq.sites import LeftFloat, Refusal, TensorId
from torch_frontend.placement.graph import Argument, CallGraph, Weight
from torch_frontend.placement.slots import Slot, TracedCall
from torch_frontend.placement.types import (
    FUNCTION_TYPES,
    find_clip_bounds,
    find_mean_type,
    find_op_type,
    find_slice_type,
)
from torch_frontend.qmodules import UNKNOWN, WeightQuantized, explain_unconvertible
from torch_frontend.tracing.arguments import PackOutputs
from torch_frontend.tracing.modules import find_module
from torch_frontend.tracing.names import (
    CallName,
    element_of,
    is_constant,
    is_plain,
    list_readers,
    read_name,
    read_op,
    site_of,
)
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
        self.engine = find_target(config.target)
        self.graph = CallGraph()
        self.tensors: dict[fx.Node, str] = {}
        # Calls that hand a value on as it is -> their own argument.
        self.aliases: dict[fx.Node, Argument] = {}
        self.kinds: Mapping[str, Callable[[TracedCall], None]] = {
            **dict.fromkeys(("conv", "conv_transpose"), self._conv),
            **dict.fromkeys(("add", "sub", "mul", "div"), self._binary),
            **dict.fromkeys(("matmul", "bilinear", "embedding"), self._weighted),
            **dict.fromkeys(("identity", "cast"), self._identity),
            "linear": self._linear,
            "attention": self._attention,
            "silu": self._silu,
            "pad": self._pad,
        }

    def lower(self, node: fx.Node) -> None:
        """Add the nodes of one value; those before it are there."""
        name = read_name(node)
        if node.op == "output":
            for value in node.all_input_nodes:
                parts = value.all_input_nodes if isinstance(find_module(self.model, value), PackOutputs) else [value]
                self.graph.outputs.update(self._read(node, Slot(0), part).tensor for part in parts)
        elif node.op == "placeholder":
            tensor = self._make(node)
            info = ValueInfo(tensor, self.graph.dtype(TensorId(tensor)), None)
            self.graph.inputs = (*self.graph.inputs, info)
        elif is_constant(node) or is_plain(node) or node in self.tensors:
            return
        elif name is None:
            self._make(node)
            if element_of(node) is None:  # x.T
                call = TracedCall(node, CallName(node.name))
                self._emit(call, "Transpose", self._list_reads(call), closed=True)
        else:
            policy = self.config.torch.policy(name.entry.op.name)
            call = TracedCall(node, name, find_module(self.model, node), policy)
            if name.entry is UNKNOWN or name.path in self.skipped or call.op.refused is not None:
                self._leave(call)
            else:
                self.kinds.get(call.op.name, self._plain)(call)

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
        self._note_shape(tensor, value)
        return tensor

    def _note_shape(self, tensor: str, value: fx.Node) -> None:
        if (shape := shape_of(value)) is not None:
            self.graph.shapes[TensorId(tensor)] = shape

    def _hand_on(self, call: TracedCall) -> None:
        """The call's value is that of its source: readers of the one read the other."""
        self.aliases[call.node] = (call.node, Slot(0))
        self.tensors[call.node] = self.tensors[call.node.all_input_nodes[0]]

    def _read(self, node: fx.Node, slot: Slot, value: fx.Node) -> _Read:
        if is_constant(value) or is_plain(value):
            return _Read(self._hold_constant(value, site_of(value) or value.name))
        argument = (node, slot)
        while value in self.aliases:
            argument = self.aliases[value]
            value = argument[0].all_input_nodes[0]
        return _Read(self.tensors[value] if value in self.tensors else self._make(value), argument)

    def _hold_constant(self, value: fx.Node, tensor: str, *, transposed: bool = False) -> str:
        """The name of a constant. transposed: as its reader has it."""
        held = None if is_plain(value) else compute_constant(self.model, value)
        return self._hold(tensor, held, transposed=transposed) if isinstance(held, Tensor) else self._hold(tensor)

    def _hold(self, tensor: str, value: Tensor | None = None, *, transposed: bool = False) -> str:
        """The name of a constant. value: None for numbers, on whose values nothing depends."""
        value = torch.zeros(()) if value is None else value
        self.graph.constants[tensor] = value.mT if transposed else value
        return tensor

    def _list_reads(self, call: TracedCall) -> list[_Read]:
        """The inputs of a call, its data arguments first; numbers in their places are constants."""
        reads: list[_Read] = []
        for param in call.name.entry.data:
            found = [self._read(call.node, slot, value) for slot, value in call.find_slots(param)]
            reads += found or [_Read(self._hold(f"{call.name.name}/{param}"))]
        known = {read.tensor for read in reads}
        rest = [value for value in call.node.all_input_nodes if not is_plain(value)]
        more = [self._read(call.node, Slot(-1), value).tensor for value in rest]
        return reads + [_Read(tensor) for tensor in dict.fromkeys(more) if tensor not in known]

    # -- nodes -------------------------------------------------------------------------------------------------

    def _emit(
        self, call: TracedCall, op_type: str, reads: list[_Read], *, part: str = "", out: str = "",
        closed: bool = False, **attrs: Any,
    ) -> None:  # fmt: skip
        """One node. part: which of the call's nodes. out: a tensor inside the call; else the call's results."""
        node, name = call.node, f"{call.name.name}{part}"
        elements = [user for user in node.users if read_name(user) is None and element_of(user) is not None]
        if out:
            outputs = [out]
            self._note_shape(out, node)
        elif elements:
            # Readers of a tuple read its elements, each a tensor of the node.
            outputs = [self._make(element) for element in elements]
        else:
            # A product in front of a batch norm is named already, after the norm.
            outputs = [self.tensors[node] if node in self.tensors else self._make(node)]
        inputs = [read.tensor for read in reads]
        self.graph.add(
            name, op_type, inputs, outputs, path=call.name.path, op=call.op, call=call.name.name,
            function=call.function, **attrs,
        )  # fmt: skip
        self.graph.arguments |= {(name, k): read.argument for k, read in enumerate(reads) if read.argument is not None}
        # What has no site can have no pair.
        if closed or set(inputs) - self.graph.constants.keys() - self.graph.values.keys():
            self.graph.closed.add(name)

    def _leave(self, call: TracedCall) -> None:
        """A call that stays float, whose reason the person is told unless they asked for it."""
        path = call.name.path
        self._emit(call, FUNCTION_TYPES.get(call.function, f"torch.{path}"), self._list_reads(call), closed=True)
        if path in self.skipped:
            return
        if call.op.refused is not None:
            self.graph.reasons.append(Refusal(path, *call.op.refused, "no-kernel", "R101"))
            return
        if call.module is not None:
            what = type(call.module).__name__
            fix = "register it with @register_qmodule, or take it out of torch.skip_trace if it stands there"
        else:
            what, fix = f"{call.node.target if isinstance(call.node.target, str) else path}", "register it, or leave it"
        self.graph.reasons.append(Refusal(path, f"nothing is known of {what}: it stays float", fix, "registry", "R109"))

    def _plain(self, call: TracedCall) -> None:
        """A call that is one node."""
        op, op_type = call.op.name, find_op_type(call.op)
        attrs: dict[str, Any] = {}
        closed = not call.reads_floats or (op == "stack" and call.policy is None)
        if op in ("relu6", "clamp"):
            attrs["min"], attrs["max"] = find_clip_bounds(call)
        elif op == "float":
            op_type = FUNCTION_TYPES.get(call.function, op_type)
        elif op in ("mean", "adaptive_avg_pool"):
            op_type = find_mean_type(call, pools="pool" not in self.engine.skips)
        elif op in ("slice", "transpose"):
            op_type = find_slice_type(call)
        elif op == "interpolate":
            mode = str(call.find_setting("mode", default="nearest"))
            op_type = "AveragePool" if mode == "area" else op_type
            attrs["mode"] = "nearest" if mode.startswith("nearest") else mode
            # Nearest values stay on the quantization grid.
            closed = closed or (attrs["mode"] == "nearest" and self.engine.ideal)
        elif op == "max_pool":
            size = call.find_setting("kernel_size", "input", "kernel_size", default=2)
            attrs["kernel_shape"] = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        self._emit(call, op_type, self._list_reads(call), closed=closed, **attrs)

    def _binary(self, call: TracedCall) -> None:
        reads = self._list_reads(call)[:2]
        tensors = {read.tensor for read in reads}
        alone = len(tensors) == 1 or bool(tensors & self.graph.constants.keys())
        op_type = find_op_type(call.op)
        # onnxq writes the sum in front of a layer norm so that ONNX Runtime fuses nothing with it.
        normed = any(read_op(user) == "layer_norm" and user.args[:1] == (call.node,) for user in call.node.users)
        if op_type == "Add" and normed and not alone and "residual" not in self.engine.skips:
            op_type = "Sum"
        self._emit(call, op_type, reads, closed=not call.reads_floats or (alone and call.policy is None))

    def _conv(self, call: TracedCall) -> None:
        # Transposed convolutions have output_padding in place of dilation, and the groups in the same position.
        names = ("input", "weight", "bias", "stride", "padding", "", "groups")
        groups, stride = (call.find_setting(key, *names, default=1) for key in ("groups", "stride"))
        strides = tuple(stride) if isinstance(stride, (tuple, list)) else ()
        self._close_with_norm(call.node)
        self._weighted(call, group=groups, strides=strides)

    def _linear(self, call: TracedCall) -> None:
        shape = shape_of(call.node.all_input_nodes[0])
        # torch exports a Gemm for matrices, and for other ranks a MatMul with the weight transposed.
        if shape is not None and len(shape) == 2:
            self._close_with_norm(call.node)
            self._weighted(call, transB=1)
        else:
            self._weighted(call, transposed=True)

    def _weighted(self, call: TracedCall, *, transposed: bool = False, **attrs: Any) -> None:
        """A product: data, weight and bias. transposed: a MatMul of its transpose, and the bias behind it."""
        name = call.name.name
        reads = self._list_reads(call)[: len(call.name.entry.data) if call.op.weight is not None else 1]
        weight, read, reason = self._find_weight(call, transposed=transposed)
        self.graph.reasons += [] if reason is None else [reason]
        bias = self._find_bias(call)
        inside = f"{name}.out/product" if transposed and bias is not None else ""
        left = weight is None and call.policy is not None and call.policy.policy == "none"
        operands = [one for one in (*reads, read, None if inside else bias) if one is not None]
        self._emit(
            call, "MatMul" if transposed else find_op_type(call.op), operands, out=inside,
            closed=reason is not None or not call.reads_floats or left, **attrs,
        )  # fmt: skip
        if weight is not None:
            self.graph.weights[name] = weight
        if inside and bias is not None:
            self._emit(call, "Add", [_Read(inside), bias], part="/Add", closed=True)

    def _attention(self, call: TracedCall) -> None:
        name, reads = call.name.name, self._list_reads(call)
        if self.engine.ideal or call.policy is not None:
            self._emit(call, "Attention", reads[:3], closed=not call.reads_floats)
            return
        scores, weights = (f"{name}.out/{part}" for part in ("scores", "weights"))
        self._emit(call, "MatMul", reads[:2], out=scores, closed=True)
        self._emit(call, "Softmax", [_Read(scores)], part="/Softmax", out=weights)
        self._emit(call, "MatMul", [_Read(weights), *reads[2:3]], part="/MatMul")
        if self.engine.attention_rules:
            reason = "attention stays float unless asked for: quantized it may cost accuracy"
            if self.config.attention == "quantized":
                reason = (
                    "its mask, dropout or shared keys keep it from being taken apart, and engines quantize it whole or "
                    "not"
                )
            self.graph.reasons.append(LeftFloat(call.name.path, reason, "attention", "F104"))

    def _silu(self, call: TracedCall) -> None:
        reads, gate = self._list_reads(call)[:1], f"{call.name.name}.out/gate"
        self._emit(call, "Sigmoid", reads, out=gate, closed=not call.reads_floats)
        self._emit(call, "Mul", [*reads, _Read(gate)], part="/Mul")

    def _identity(self, call: TracedCall) -> None:
        source = call.node.all_input_nodes[0]
        casts = is_float(call.node) != is_float(source)
        if not casts and self.tensors.get(source) in self.graph.values:
            self._hand_on(call)
        else:
            self._emit(call, "Cast" if casts else "Identity", self._list_reads(call))

    def _pad(self, call: TracedCall) -> None:
        """Zeros in front of convolutions become their own padding."""
        names = ("input", "pad", "mode", "value")
        zeros = call.find_setting("mode", *names, default="constant") == "constant"
        zeros = zeros and not call.find_setting("value", *names) and "Reflection" not in type(call.module).__name__
        if zeros and call.node.users and all(read_op(user) == "conv" for user in call.node.users):
            self._hand_on(call)
        else:
            self._plain(call)

    # -- questions ---------------------------------------------------------------------------------------------

    def _close_with_norm(self, node: fx.Node) -> None:
        """Where a batch norm alone reads the product, the two are one kernel, and the pair stands behind the norm."""
        readers = list_readers(node)
        reader = readers[0] if len(readers) == 1 else None
        if reader is not None and read_op(reader) == "batch_norm" and reader.args[:1] == (node,):
            self._make(node, behind=reader)

    def _find_weight(self, call: TracedCall, *, transposed: bool) -> tuple[Weight | None, _Read | None, Refusal | None]:
        """The weight, and how the node reads it; or why it cannot have one."""
        op, qmodule, module, path = call.op, call.name.entry.qmodule, call.module, call.name.path
        if module is not None and op.weight is not None and qmodule and issubclass(qmodule, WeightQuantized):
            why = explain_unconvertible(module)
            if why is not None:
                return None, None, Refusal(path, why, "give it a plain weight", "weight", "R110")
            tensor = self._hold(f"{path}.{op.weight}", getattr(module, op.weight), transposed=transposed)
            return Weight(tensor, transposed, module=path), _Read(tensor), None
        for slot, value in call.find_slots(op.weight or call.name.entry.params[1]):
            if not is_constant(value):
                return None, self._read(call.node, slot, value), None
            return *self._find_parameter(call, slot, value, transposed=transposed), None
        return None, None, None

    def _find_parameter(
        self, call: TracedCall, slot: Slot, value: fx.Node, *, transposed: bool
    ) -> tuple[Weight | None, _Read]:
        """The parameter behind a constant operand; of rows cut out of one, the whole parameter, at the cut."""
        argument, whole = (call.node, slot), value
        # Rows are output channels, so that the parameter's scales are those of its parts.
        if read_op(value) == "slice" and call.op.weight_axis == 0:
            index = value.args[1] if len(value.args) > 1 else None
            source = value.args[0]
            if isinstance(index, slice) and isinstance(source, fx.Node) and source.op == "get_attr":
                argument, whole = (value, Slot(0)), source
        site = site_of(whole)
        read = _Read(self._hold_constant(value, site or site_of(value) or value.name, transposed=transposed))
        return None if site is None else Weight(site, transposed, value=whole, argument=argument), read

    def _find_bias(self, call: TracedCall) -> _Read | None:
        bias = getattr(call.module, "bias", None)
        if isinstance(bias, Tensor):
            return _Read(self._hold(f"{call.name.path}.bias", bias))
        return next((self._read(call.node, *found) for found in call.find_slots("bias")), None)
