"""Shapes and types of the float model's values, from one run with the user's example."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from onnxq.arrays import Shape
from onnxq.errors import DataError
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.modules import Inputs, find_module, run_call
from torch_frontend.tracing.names import is_plain

_SHAPE = "onnxq_shape"
_DTYPE = "onnxq_dtype"


class _ShapeRecorder(fx.Interpreter):
    # None as dtype marks values that are no tensors; values without the key were not observed.
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta[_SHAPE] = tuple(result.shape)
            n.meta[_DTYPE] = result.dtype
        elif n.op != "output":
            n.meta[_DTYPE] = None
        return result


@contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """Run a block; afterwards every module is in its former mode, train or eval."""
    # Module by module: parts of a model may be in other modes than the whole, as frozen batch norms are.
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Run a block, which may run the model or its parts, as a trace does; then restore the values of its buffers."""
    # Batch norms count in train mode, and `self.num_batches_tracked.add_(1)` of a forward is executed by a trace.
    buffers = [
        (table, name, buffer, buffer.clone())
        for table in (module._buffers for module in model.modules())
        for name, buffer in table.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, name, buffer, value in buffers:
                # Also where the forward set another tensor in its place.
                table[name] = buffer.copy_(value)


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode without gradients; afterwards every module is in its former mode."""
    with keep_modes(model), torch.no_grad():
        model.eval()
        yield


def record_shapes(model: fx.GraphModule, inputs: Inputs) -> None:
    """Run the model once and store each value's shape and dtype in the graph. Raises DataError if it does not run."""
    with use_eval_mode(model), keep_buffers(model):
        try:
            _ShapeRecorder(model).run(*bind_inputs(model.graph, inputs))
        except Exception as error:
            raise DataError(
                "example_inputs",
                f"the model does not run on them: {error}",
                "give one batch",
                code="Q205",
            ) from error


def compare_outputs(model: nn.Module, graph: fx.GraphModule, inputs: Inputs) -> str | None:
    """Reason why a captured graph is not the model, or None: both are run in eval mode on the same inputs."""
    outputs = []
    for module in (model, graph):
        with use_eval_mode(module), keep_buffers(module), torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                leaves = pytree.tree_leaves(inputs.run_model(module))
            except Exception as error:  # the captured calls may not fit torch's functions
                # A model that does not run on the example is an error of `record_shapes`.
                return (
                    None
                    if module is model
                    else f"its graph does not run ({type(error).__name__}: {error})"
                )
            outputs.append([leaf.double() for leaf in leaves if isinstance(leaf, Tensor)])
    for wanted, captured in zip(*outputs, strict=False):
        # One thousandth of the largest value: float32 sums in another order are far below it.
        room = 1e-3 * (float(wanted.abs().max()) if wanted.numel() else 0.0) + 1e-6
        if wanted.shape != captured.shape or not torch.allclose(
            wanted, captured, 0.0, room, equal_nan=True
        ):
            return "its graph computes something else"
    return None


def bind_inputs(graph: fx.Graph, inputs: Inputs) -> list[Any]:
    """The graph's inputs in order, defaults included. Raises DataError for one that is missing or unknown."""
    placeholders = graph.find_nodes(op="placeholder")
    # As Python binds a call: positions first, then names, then defaults.
    args = inputs.args
    rest = dict(inputs.kwargs)
    # The last one of a forward with `*args` takes all positions that are left; fx.Interpreter does the same.
    if placeholders and str(placeholders[-1].target).startswith("*"):
        placeholders.pop()
    elif len(args) > len(placeholders):
        cause = f"{len(args)} given, the model takes {len(placeholders)}"
        raise DataError("inputs", cause, "give one value an input", code="Q205")
    values = list(args)
    for node in placeholders[len(args) :]:
        if node.target in rest:
            values.append(rest.pop(str(node.target)))
        elif node.args:
            values.append(node.args[0])
        else:
            raise DataError(
                f"input {node.target!r}", "is missing", "give it by position or name", code="Q207"
            )
    for name in rest:
        if any(node.target == name for node in placeholders):
            cause = "is given by position and by name"
            code = "Q205"
        else:
            cause = "is none of the model's"
            code = "Q208"
        raise DataError(f"input {name!r}", cause, "see its forward", code=code)
    return values


def shape_of(node: fx.Node) -> Shape | None:
    """The value's shape in the example; None if unknown or no tensor."""
    return node.meta.get(_SHAPE)


def is_float(node: fx.Node) -> bool:
    """False for integers, booleans, sizes and tuples; True for floats and where nothing is known."""
    if is_plain(node):
        return False
    # Not observed: quantized for now; integers are found with the first batch.
    if _DTYPE not in node.meta:
        return True
    dtype = node.meta[_DTYPE]
    return dtype is not None and dtype.is_floating_point


def has_shapes(graph: fx.Graph) -> bool:
    """True if `record_shapes` has run on this graph."""
    return any(_DTYPE in node.meta for node in graph.nodes)


def compute_constant(model: fx.GraphModule, node: Any) -> Any:
    """The value of a node that depends on parameters alone, without quantization."""
    if not isinstance(node, fx.Node):
        return node
    parts = (node.args, node.kwargs)
    args, kwargs = fx.map_arg(parts, lambda n: compute_constant(model, n))
    if isinstance(find_module(model, node), Quantizer):
        return args[0]
    with torch.no_grad():
        return run_call(model, node, args, kwargs)
