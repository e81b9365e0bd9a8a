"""Shapes and types of the float model's values, from one run with the user's example."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from onnxq.errors import DataError
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.modules import find_module, run_call
from torch_frontend.tracing.names import is_plain

_SHAPE, _DTYPE = "onnxq_shape", "onnxq_dtype"


class _ShapeRecorder(fx.Interpreter):
    # None as dtype marks values that are no tensors; values without the key were not observed.
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta[_SHAPE], n.meta[_DTYPE] = tuple(result.shape), result.dtype
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
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode without gradients; afterwards every module is in its former mode."""
    with keep_modes(model), torch.no_grad():
        model.eval()
        yield


def as_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a batch: one tensor, a tuple or list of positions, or a mapping of names."""
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def record_shapes(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the model once and store each value's shape and dtype in the graph. Raises DataError if it does not run."""
    with use_eval_mode(model):
        try:
            _ShapeRecorder(model).run(*bind_inputs(model.graph, args, kwargs))
        except Exception as error:
            raise DataError(
                "example_inputs", f"the model does not run on them: {error}", "give one batch", code="Q205"
            ) from error


def compare_outputs(
    model: nn.Module, graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Reason why a captured graph is not the model, or None: both are run in eval mode on the same inputs."""
    found = []
    for one in (model, graph):
        with use_eval_mode(one), torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                found.append([leaf for leaf in pytree.tree_leaves(one(*args, **kwargs)) if isinstance(leaf, Tensor)])
            except Exception as error:  # the captured calls may not fit torch's functions
                return f"its graph does not run ({type(error).__name__}: {error})"
    # One thousandth of the largest value: float32 sums in another order are far below it.
    for plain, made in zip(*found, strict=False):
        if plain.shape != made.shape or not torch.allclose(
            plain.double(),
            made.double(),
            0.0,
            1e-3 * (float(plain.double().abs().max()) if plain.numel() else 0.0) + 1e-6,
            equal_nan=True,
        ):
            return "its graph computes something else"
    return None


def bind_inputs(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The graph's inputs in order, defaults included. Raises DataError for one that is missing or unknown."""
    names = [node for node in graph.nodes if node.op == "placeholder"]
    # As Python binds a call: positions first, then names, then defaults.
    rest = dict(kwargs)
    values: list[Any] = list(args[: len(names)])
    if len(args) > len(names):
        raise DataError(
            "inputs", f"{len(args)} given, the model takes {len(names)}", "give one value an input", code="Q205"
        )
    for node in names[len(args) :]:
        if node.target in rest:
            values.append(rest.pop(str(node.target)))
        elif node.args:
            values.append(node.args[0])
        else:
            raise DataError(f"input {node.target!r}", "is missing", "give it by position or name", code="Q207")
    if rest:
        raise DataError(f"input {next(iter(rest))!r}", "is none of the model's", "see its forward", code="Q208")
    return values


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The value's shape in the example; None if unknown or no tensor."""
    shape: tuple[int, ...] | None = node.meta.get(_SHAPE)
    return shape


def is_float(node: fx.Node) -> bool:
    """False for integers, booleans, sizes and tuples; True for floats and where nothing is known."""
    if is_plain(node):
        return False
    # Not observed: quantized for now; integers are found with the first batch.
    if _DTYPE not in node.meta:
        return True
    dtype: torch.dtype | None = node.meta[_DTYPE]
    return dtype is not None and dtype.is_floating_point


def has_shapes(graph: fx.Graph) -> bool:
    """True if `record_shapes` has run on this graph."""
    return any(_DTYPE in node.meta for node in graph.nodes)


def compute_constant(model: fx.GraphModule, node: Any) -> Any:
    """The value of a node that depends on parameters alone, without quantization."""
    if not isinstance(node, fx.Node):
        return node
    args, kwargs = (fx.map_arg(part, lambda n: compute_constant(model, n)) for part in (node.args, node.kwargs))
    if isinstance(find_module(model, node), Quantizer):
        return args[0]
    with torch.no_grad():
        return run_call(model, node, args, kwargs)
