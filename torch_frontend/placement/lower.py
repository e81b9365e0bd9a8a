"""ONNX's operators for torch's calls, as torch 2.13 exports them at opset 20 and onnxq prepares them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from onnxq.backends import find_target
from onnxq.config import Config, matches_any
from onnxq.graph import ValueInfo
from onnxq.sites import LeftFloat, Refusal, TensorId
from torch_frontend.placement.graph import Argument, CallGraph, CallWeight, Slot, TracedCall
from torch_frontend.qmodules import UNKNOWN, Op, WeightQuantized, explain_unconvertible, find_layer
from torch_frontend.qmodules.registry import FUNCTION_NODES
from torch_frontend.tracing.modules import find_module
from torch_frontend.tracing.names import (
    CallName,
    add_layer_call,
    element_of,
    is_constant,
    is_plain,
    list_readers,
    read_name,
    read_op,
    site_of,
)
from torch_frontend.tracing.signature import PackOutputs
from torch_frontend.tracing.values import compute_constant, is_float, shape_of

# Operators whose first ONNX name is not the node that reads their input.
_OWN_TYPES: Mapping[str, str] = {"glu": "torch.glu", "embedding": "torch.embedding"}
_KEPT_WHOLE = "its mask, dropout or shared keys keep it from being taken apart, and engines quantize it whole or not"
_CLAMPS = {"clamp_min": ("input", "min"), "clamp_max": ("input", "max")}
_SHUFFLES = {
    "pixel_shuffle": "DepthToSpace",
    "pixel_unshuffle": "SpaceToDepth",
    "roll": "torch.roll",
    "flip": "Slice",
}


def find_op_type(op: Op) -> str:
    """The node that reads the input of a call of this operator."""
    return _OWN_TYPES.get(op.name) or (op.onnx[0] if op.onnx else f"torch.{op.name}")


def find_clip_bounds(call: TracedCall) -> tuple[Any, Any]:
    """(min, max) of a clamp; None where it has no bound there."""
    if call.op.name == "relu6":
        return 0.0, 6.0
    ends = _CLAMPS.get(call.function, ("input", "min", "max"))
    # Layers and F.hardtanh call them min_val and max_val.
    low = call.find_setting("min_val", *ends, default=call.find_setting("min", *ends))
    return low, call.find_setting("max_val", *ends, default=call.find_setting("max", *ends))


def find_mean_type(call: TracedCall, *, pools: bool) -> str:
    """The node of an average. pools: the preparation for the target makes a pooling of one over a whole map."""
    pooled = "GlobalAveragePool" if pools else "ReduceMean"
    if call.op.name == "adaptive_avg_pool":
        size = call.find_setting("output_size", "input", "output_size")
        ones = all(edge == 1 for edge in size) if isinstance(size, (tuple, list)) else size == 1
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


# Operators without a weight that people use as modules where a model cannot be traced. The others (activations,
# norms) stay float there: what stands before them is not known, and a pair there may round twice.
_BY_HAND = ("add", "mul", "matmul", "cat")


@dataclass(frozen=True)
class _Read:
    """A tensor that a node reads, and the argument that gives it; None for constants and inside a call."""

    tensor: str
    argument: Argument | None = None


def lower_model(model: fx.GraphModule, config: Config, skipped: Collection[str]) -> CallGraph:
    """The graph of a traced module with named calls. skipped: modules that the person asked to leave alone."""
    lowering = _Lowering(model, config, skipped)
    for node in model.graph.nodes:
        lowering.lower_node(node)
    return lowering.graph


def lower_layers(model: nn.Module, config: Config, prefix: str = "") -> CallGraph:
    """The graph of the known layers of a module that cannot be traced, each alone, on inputs of its own.

    prefix: the module's own qualified name, with which sites begin.
    """
    calls = fx.Graph()
    done = set()
    # A module under several names is one layer; the first name that is not skipped counts.
    for path, module in model.named_modules(remove_duplicate=False):
        full = f"{prefix}.{path}" if prefix else path
        entry = find_layer(module) if path else None
        if entry is not None and module not in done and not _is_skipped(config, full):
            done.add(module)
            add_layer_call(calls, path, CallName(full, entry=entry))
    lowering = _Lowering(model, config, alone=True)
    for node in calls.nodes:
        lowering.lower_node(node)
    return lowering.graph


def _is_skipped(config: Config, path: str) -> bool:
    patterns = config.torch.skip_trace
    modules = accumulate(path.split("."), "{}.{}".format)
    return bool(patterns) and any(matches_any(patterns, module) for module in modules)


class _Lowering:
    """The nodes of a graph's values, one by one. alone: of layers that nothing connects."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        skipped: Collection[str] = (),
        *,
        alone: bool = False,
    ) -> None:
        self.model, self.config, self.skipped, self.alone = model, config, skipped, alone
        self.engine = find_target(config.target)
        self.graph = CallGraph()
        self.tensors: dict[fx.Node, str] = {}
        # Calls that hand a value on as it is -> their own argument.
        self.aliases: dict[fx.Node, Argument] = {}
        self.kinds: Mapping[str, Callable[[TracedCall], None]] = {
            **dict.fromkeys(("conv", "conv_transpose"), self._lower_conv),
            **dict.fromkeys(("add", "sub", "mul", "div"), self._lower_binary),
            **dict.fromkeys(("matmul", "bilinear", "embedding"), self._lower_weighted),
            **dict.fromkeys(("identity", "cast"), self._lower_identity),
            "linear": self._lower_linear,
            "attention": self._lower_attention,
            "silu": self._lower_silu,
            "pad": self._lower_pad,
        }

    def lower_node(self, node: fx.Node) -> None:
        """Add the nodes of one value; those before it are there."""
        name = read_name(node)
        if node.op == "output":
            for value in node.all_input_nodes:
                packed = isinstance(find_module(self.model, value), PackOutputs)
                for part in value.all_input_nodes if packed else [value]:
                    self.graph.outputs.add(self._read_value(node, Slot(0), part).tensor)
        elif node.op == "placeholder":
            tensor = self._name_tensor(node)
            if not self.alone:
                info = ValueInfo(tensor, self.graph.find_dtype(TensorId(tensor)), None)
                self.graph.inputs = (*self.graph.inputs, info)
        elif is_constant(node) or is_plain(node) or node in self.tensors:
            return
        elif name is None:
            self._name_tensor(node)
            if element_of(node) is None:  # x.T
                call = TracedCall(node, CallName(node.name))
                self._add_node(call, "Transpose", self._list_reads(call), closed=True)
        else:
            policy = self.config.torch.policy(name.entry.op.name)
            call = TracedCall(node, name, find_module(self.model, node), policy)
            if name.entry is UNKNOWN or name.path in self.skipped or call.op.refused is not None:
                self._leave_float(call)
            elif self.alone and call.op.weight is None and call.op.name not in _BY_HAND:
                self._add_node(call, find_op_type(call.op), self._list_reads(call), closed=True)
            else:
                self.kinds.get(call.op.name, self._lower_plain)(call)

    # -- values ------------------------------------------------------------------------------------------------

    def _name_tensor(self, value: fx.Node, behind: fx.Node | None = None) -> str:
        """Name the tensor of a value. behind: the value whose quantizer stands for it."""
        at = behind or value
        site = site_of(at)
        tensor = site or at.name
        self.tensors[value] = self.tensors[at] = tensor
        # What reads the result of a layer alone is not known, so it has no pair.
        if site is not None and (not self.alone or at.op == "placeholder"):
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

    def _read_value(self, node: fx.Node, slot: Slot, value: fx.Node) -> _Read:
        if is_constant(value) or is_plain(value):
            return _Read(self._add_computed(value, site_of(value) or value.name))
        argument = (node, slot)
        while value in self.aliases:
            argument = self.aliases[value]
            value = argument[0].all_input_nodes[0]
        return _Read(self.tensors.get(value) or self._name_tensor(value), argument)

    def _add_computed(self, value: fx.Node, tensor: str, *, transposed: bool = False) -> str:
        """The name of a constant. transposed: as its reader has it."""
        constant = None if is_plain(value) else compute_constant(self.model, value)
        numbers = constant if isinstance(constant, Tensor) else None
        return self._add_constant(tensor, numbers, transposed=transposed)

    def _add_constant(
        self, tensor: str, value: Tensor | None = None, *, transposed: bool = False
    ) -> str:
        """The name of a constant. value: None for numbers, on whose values nothing depends."""
        if value is None:
            value = torch.zeros(())
        elif transposed:
            value = value.mT
        self.graph.constants[tensor] = value
        return tensor

    def _list_reads(self, call: TracedCall) -> list[_Read]:
        """The inputs of a call, its data arguments first; numbers in their places are constants."""
        reads: list[_Read] = []
        for param in call.name.entry.data:
            values = [self._read_value(call.node, *operand) for operand in call.find_slots(param)]
            reads += values or [_Read(self._add_constant(f"{call.name.name}/{param}"))]
        known = {read.tensor for read in reads}
        rest = [value for value in call.node.all_input_nodes if not is_plain(value)]
        more = [self._read_value(call.node, Slot(-1), value).tensor for value in rest]
        return reads + [_Read(tensor) for tensor in dict.fromkeys(more) if tensor not in known]

    # -- nodes -------------------------------------------------------------------------------------------------

    def _add_node(
        self,
        call: TracedCall,
        op_type: str,
        reads: list[_Read],
        *,
        part: str = "",
        out: str = "",
        closed: bool = False,
        **attrs: Any,
    ) -> None:
        """One node. part: which of the call's nodes. out: a tensor inside the call; else the call's results."""
        node = call.node
        name = f"{call.name.name}{part}"
        unnamed = [user for user in node.users if read_name(user) is None]
        elements = [user for user in unnamed if element_of(user) is not None]
        if out:
            outputs = [out]
            self._note_shape(out, node)
        elif elements:
            # Readers of a tuple read its elements, each a tensor of the node.
            outputs = [self._name_tensor(element) for element in elements]
        else:
            # A product in front of a batch norm is named already, after the norm.
            outputs = [self.tensors.get(node) or self._name_tensor(node)]
        inputs = [read.tensor for read in reads]
        self.graph.add_node(call, name, op_type, inputs, outputs, **attrs)
        for k, read in enumerate(reads):
            if read.argument is not None:
                self.graph.arguments[name, k] = read.argument
        # What has no site can have no pair.
        if closed or set(inputs) - self.graph.constants.keys() - self.graph.values.keys():
            self.graph.closed.add(name)

    def _leave_float(self, call: TracedCall) -> None:
        """A call that stays float, whose reason the person is told unless they asked for it."""
        path = call.name.path
        op_type = FUNCTION_NODES.get(call.function, f"torch.{path}")
        self._add_node(call, op_type, self._list_reads(call), closed=True)
        if path in self.skipped:
            return
        if call.op.refused is not None:
            self.graph.reasons.append(Refusal(path, *call.op.refused, "no-kernel", "R101"))
            return
        if call.module is not None:
            what = type(call.module).__name__
            fix = "register it with @register_qmodule, or take it out of torch.skip_trace if it stands there"
        else:
            what = call.node.target if isinstance(call.node.target, str) else path
            fix = "register it, or leave it"
        reason = f"nothing is known of {what}: it stays float"
        self.graph.reasons.append(Refusal(path, reason, fix, "registry", "R109"))

    def _lower_plain(self, call: TracedCall) -> None:
        """A call that is one node."""
        op = call.op.name
        op_type = find_op_type(call.op)
        attrs = {}
        closed = not call.reads_floats or (op == "stack" and call.policy is None)
        if op in ("relu6", "clamp"):
            attrs["min"], attrs["max"] = find_clip_bounds(call)
        elif op == "float":
            op_type = FUNCTION_NODES.get(call.function, op_type)
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
        self._add_node(call, op_type, self._list_reads(call), closed=closed, **attrs)

    def _lower_binary(self, call: TracedCall) -> None:
        reads = self._list_reads(call)[:2]
        tensors = {read.tensor for read in reads}
        alone = len(tensors) == 1 or bool(tensors & self.graph.constants.keys())
        op_type = find_op_type(call.op)
        # onnxq writes the sum in front of a layer norm so that ONNX Runtime fuses nothing with it.
        norms = [user for user in call.node.users if read_op(user) == "layer_norm"]
        normed = any(norm.args[:1] == (call.node,) for norm in norms)
        if op_type == "Add" and normed and not alone and "residual" not in self.engine.skips:
            op_type = "Sum"
        closed = not call.reads_floats or (alone and call.policy is None)
        self._add_node(call, op_type, reads, closed=closed)

    def _lower_conv(self, call: TracedCall) -> None:
        # Transposed convolutions have output_padding in place of dilation, and the groups in the same position.
        names = ("input", "weight", "bias", "stride", "padding", "", "groups")
        groups, stride = (call.find_setting(key, *names, default=1) for key in ("groups", "stride"))
        strides = tuple(stride) if isinstance(stride, (tuple, list)) else ()
        self._close_with_norm(call.node)
        self._lower_weighted(call, group=groups, strides=strides)

    def _lower_linear(self, call: TracedCall) -> None:
        shape = shape_of(call.node.all_input_nodes[0])
        # torch exports a Gemm for matrices, and for other ranks a MatMul with the weight transposed. Alone it is taken
        # for a Gemm but in language models, whose data have three axes.
        matrices = self.alone and self.config.mode != "weight-only"
        if shape is not None:
            matrices = len(shape) == 2
        if call.op.weight_axis == 1:  # the weight stands as a MatMul reads it
            self._lower_weighted(call, product=True)
        elif matrices:
            self._close_with_norm(call.node)
            self._lower_weighted(call, transB=1)
        else:
            self._lower_weighted(call, product=True, transposed=True)

    def _lower_weighted(
        self, call: TracedCall, *, product: bool = False, transposed: bool = False, **attrs: Any
    ) -> None:
        """A product: data, weight and bias. product: a MatMul, and the bias behind it. transposed: of the weight."""
        name = call.name.name
        count = len(call.name.entry.data) if call.op.weight is not None else 1
        reads = self._list_reads(call)[:count]
        why = None
        if call.module is not None and _holds_weight(call):
            why = explain_unconvertible(call.module)
        if why is None:
            weight, read = self._find_weight(call, transposed=transposed)
        else:
            weight, read = None, None
            fix = "give it a plain weight"
            self.graph.reasons.append(Refusal(call.name.path, why, fix, "weight", "R110"))
        bias = self._find_bias(call)
        inside = f"{name}.out/product" if product and bias is not None else ""
        left = weight is None and call.policy is not None and call.policy.policy == "none"
        closed = why is not None or not call.reads_floats or left
        operands = [*reads, *filter(None, (read, None if inside else bias))]
        op_type = "MatMul" if product else find_op_type(call.op)
        self._add_node(call, op_type, operands, out=inside, closed=closed, **attrs)
        if weight is not None:
            self.graph.weights[name] = weight
        if inside and bias is not None:
            self._add_node(call, "Add", [_Read(inside), bias], part="/Add", closed=True)

    def _lower_attention(self, call: TracedCall) -> None:
        name = call.name.name
        reads = self._list_reads(call)
        if self.engine.ideal or call.policy is not None:
            self._add_node(call, "Attention", reads[:3], closed=not call.reads_floats)
            return
        scores, weights = (f"{name}.out/{part}" for part in ("scores", "weights"))
        self._add_node(call, "MatMul", reads[:2], out=scores, closed=True)
        self._add_node(call, "Softmax", [_Read(scores)], part="/Softmax", out=weights)
        self._add_node(call, "MatMul", [_Read(weights), *reads[2:3]], part="/MatMul")
        if self.engine.attention_rules:
            reason = "attention stays float unless asked for: quantized it may cost accuracy"
            if self.config.attention == "quantized":
                reason = _KEPT_WHOLE
            self.graph.reasons.append(LeftFloat(call.name.path, reason, "attention", "F104"))

    def _lower_silu(self, call: TracedCall) -> None:
        reads = self._list_reads(call)[:1]
        gate = f"{call.name.name}.out/gate"
        self._add_node(call, "Sigmoid", reads, out=gate, closed=not call.reads_floats)
        self._add_node(call, "Mul", [*reads, _Read(gate)], part="/Mul")

    def _lower_identity(self, call: TracedCall) -> None:
        source = call.node.all_input_nodes[0]
        casts = is_float(call.node) != is_float(source)
        if not casts and self.tensors.get(source) in self.graph.values:
            self._hand_on(call)
        else:
            self._add_node(call, "Cast" if casts else "Identity", self._list_reads(call))

    def _lower_pad(self, call: TracedCall) -> None:
        """Zeros in front of convolutions become their own padding."""
        names = ("input", "pad", "mode", "value")
        reflected = "Reflection" in type(call.module).__name__
        constant = call.find_setting("mode", *names, default="constant") == "constant"
        zeros = constant and not reflected and not call.find_setting("value", *names)
        if zeros and call.node.users and all(read_op(user) == "conv" for user in call.node.users):
            self._hand_on(call)
        else:
            self._lower_plain(call)

    # -- questions ---------------------------------------------------------------------------------------------

    def _close_with_norm(self, node: fx.Node) -> None:
        """Where a batch norm alone reads the product, the two are one kernel, and the pair stands behind the norm."""
        readers = list_readers(node)
        reader = readers[0] if len(readers) == 1 else None
        if reader is not None and read_op(reader) == "batch_norm" and reader.args[:1] == (node,):
            self._name_tensor(node, behind=reader)

    def _find_weight(
        self, call: TracedCall, *, transposed: bool
    ) -> tuple[CallWeight | None, _Read | None]:
        """The weight, and how the node reads it; a product of computed tensors has none."""
        if _holds_weight(call):
            weight = getattr(call.module, str(call.op.weight))
            name = f"{call.name.path}.{call.op.weight}"
            tensor = self._add_constant(name, weight, transposed=transposed)
            return CallWeight(tensor, transposed, module=str(call.node.target)), _Read(tensor)
        for slot, value in call.find_slots(call.op.weight or call.name.entry.params[1]):
            if not is_constant(value):
                return None, self._read_value(call.node, slot, value)
            return self._find_parameter(call, slot, value, transposed=transposed)
        return None, None

    def _find_parameter(
        self, call: TracedCall, slot: Slot, value: fx.Node, *, transposed: bool
    ) -> tuple[CallWeight | None, _Read]:
        """The parameter behind a constant operand; of rows cut out of one, the whole parameter, at the cut."""
        argument = (call.node, slot)
        whole = value
        # Rows are output channels, so that the parameter's scales are those of its parts.
        if read_op(value) == "slice" and call.op.weight_axis == 0:
            index = value.args[1] if len(value.args) > 1 else None
            source = value.args[0]
            if isinstance(index, slice) and isinstance(source, fx.Node) and source.op == "get_attr":
                argument = (value, Slot(0))
                whole = source
        site = site_of(whole)
        tensor = site or site_of(value) or value.name
        read = _Read(self._add_computed(value, tensor, transposed=transposed))
        if site is None:
            return None, read
        return CallWeight(site, transposed, value=whole, argument=argument), read

    def _find_bias(self, call: TracedCall) -> _Read | None:
        bias = getattr(call.module, "bias", None)
        if isinstance(bias, Tensor):
            return _Read(self._add_constant(f"{call.name.path}.bias", bias))
        operands = call.find_slots("bias")
        return next((self._read_value(call.node, *operand) for operand in operands), None)


def _holds_weight(call: TracedCall) -> bool:
    """True for a layer whose class has one with a quantized weight."""
    qmodule = call.name.entry.qmodule
    layer = call.module is not None and call.op.weight is not None
    return layer and qmodule is not None and issubclass(qmodule, WeightQuantized)
