"""Capture of a forward that symbolic tracing cannot follow: torch.export runs it on an example and records the calls.

The graph that comes out has the layers of the model as calls again, and torch's functions in place of ATen's operators,
so that everything behind it reads one form of graph.
"""

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen
from torch.nn import functional
from torch.utils import _pytree as pytree

from onnxq.config import matches_any
from onnxq.sites import Refusal, Refusals
from torch_frontend.qmodules import copy_shallowly
from torch_frontend.tracing.aten import convert_calls, read_aten_name
from torch_frontend.tracing.leaves import CallsOutside, IsLeaf, LeafCall, insert_leaves, mark_leaves
from torch_frontend.tracing.modules import Args, Inputs, Kwargs, make_unique_path, name_arguments
from torch_frontend.tracing.signature import CHECKS, read_sizes, require_default, restore_signature
from torch_frontend.tracing.simplify import ATTENTION_DROPOUT, DROPOUTS, is_write
from torch_frontend.tracing.tracer import (
    GraphOrigin,
    Traced,
    Tracer,
    Untraceable,
    check_patterns,
    refuse_mode,
    shorten_error,
)
from torch_frontend.tracing.values import keep_buffers, keep_modes

# Functions that take a mode, which a graph follows: their names and numbers decide nothing.
_FOLLOWING = (
    *DROPOUTS,
    functional.scaled_dot_product_attention,
    functional.batch_norm,
)


@dataclass(frozen=True)
class RecordedCall:
    """A call of one of torch's functions. name: with its numbers. dropout: of attention; None for other calls."""

    name: str
    dropout: float | None = None


def list_calls(
    model: nn.Module, inputs: Inputs, is_leaf: IsLeaf, *, training: bool
) -> list[RecordedCall] | None:
    """Calls of the forward in a mode, outside of layers; None if it does not run. The model does not change."""
    calls = []
    watch = CallsOutside(
        model,
        lambda module, path: bool(path) and is_leaf(module, path),
        lambda _, *call: calls.append(_record_call(*call)),
    )
    try:
        # In train mode batch norms move their statistics, and dropout draws numbers.
        with (
            keep_modes(model),
            keep_buffers(model),
            torch.no_grad(),
            torch.random.fork_rng(),
            watch,
        ):
            model.train(training)
            inputs.run_model(model)
    except Exception:  # the user's forward may raise anything
        return None
    return calls


def _record_call(function: Any, args: Any, kwargs: Kwargs) -> RecordedCall:
    name = getattr(function, "__name__", str(function))
    if function is functional.scaled_dot_product_attention:
        # The fifth argument, behind query, key, value and mask.
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return RecordedCall(name, float(dropout))
    if function in _FOLLOWING:
        return RecordedCall(name)
    # Two calls that differ in numbers or words do different things.
    settings = [
        leaf
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, (bool, int, float, str))
    ]
    return RecordedCall(f"{name}{settings}")


class NotCaptured(Exception):
    """torch.export cannot record this forward, or not in a form that trains."""


def capture_model(model: nn.Module, skip: Sequence[str], inputs: Inputs) -> Traced | Untraceable:
    """The graph of the model's forward, in the mode (train or eval) of the model, as torch.export records it.

    skip: patterns of names of modules that stay single calls. inputs: one batch. Untraceable where torch.export fails,
    too. Raises ConfigError for a pattern that matches no module.
    """
    check_patterns(model, skip)
    # Its choice of leaves, so that both ways give the same calls.
    tracer = Tracer(skip)
    try:
        root, graph, lost = _capture_graph(model, inputs, tracer.is_leaf_module)
    except NotCaptured as error:
        return Untraceable(str(error))
    refusals = (*_follow_modes(model, graph, inputs, tracer.is_leaf_module), *lost)
    fixed = tuple(str(node.args[1]) for node in graph.nodes if node.target is require_default)
    return Traced(
        root,
        graph,
        skipped=tuple(tracer.skipped),
        fixed=fixed,
        refusals=refusals,
        origin=GraphOrigin.EXPORTED,
    )


def take_graph(model: fx.GraphModule, skip: Sequence[str]) -> Traced:
    """The graph of a GraphModule as it is, with ATen's operators as torch's functions.

    skip: patterns of names of modules that stay float. Raises ConfigError for a pattern that matches no module.
    """
    check_patterns(model, skip)
    skipped = [
        name for name, _ in model.named_modules() if name and skip and matches_any(skip, name)
    ]
    graph = _copy_graph(model.graph)
    # Not the GraphModule itself: that of torch.export cannot change its mode.
    root = nn.Module()
    for table in ("_parameters", "_buffers", "_modules"):
        root.__dict__[table].update(model.__dict__[table])
    root.training = model.training
    operators = {node: read_aten_name(node) for node in graph.nodes}
    modes = ()
    if any(operators.values()):
        # A graph of ATen's operators has no modules that know the mode.
        root.training = any(
            name_arguments(node, *_FLAGS[name]).get(_FLAGS[name][-1])
            for node, name in operators.items()
            if name in _FLAGS
        )
        reason = "its graph was exported, in which batch norms and dropout of attention keep the mode of the export"
        fix = "give the module that was exported, with example_inputs"
        modes = (Refusal(type(model).__name__, reason, fix, "mode", "R108"),)
    _restore_graph(root, graph, model, [], None)
    return Traced(root, graph, skipped=tuple(skipped), refusals=modes, origin=GraphOrigin.GIVEN)


# Operators that know the mode: names of their arguments up to that which tells it.
_FLAGS = {
    "dropout": ("input", "p", "train"),
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var", "training"),
}


def _follow_modes(model: nn.Module, graph: fx.Graph, inputs: Inputs, is_leaf: IsLeaf) -> Refusals:
    """Let the dropout of attention follow the mode; a Refusal if the other mode (train or eval) does other things."""
    inputs = _widen_batch(inputs)
    own = list_calls(model, inputs, is_leaf, training=model.training)
    other = list_calls(model, inputs, is_leaf, training=not model.training)
    if own is None or other is None or [call.name for call in own] != [call.name for call in other]:
        return (refuse_mode(model),)
    dropouts = [
        # In eval mode it is 0.
        max(a.dropout, b.dropout)
        for a, b in zip(own, other, strict=True)
        if a.dropout is not None and b.dropout is not None
    ]
    products = graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention)
    if any(dropouts) and len(dropouts) != len(products):
        return (refuse_mode(model),)
    for node, probability in zip(products, dropouts, strict=False):
        if probability:
            node.meta[ATTENTION_DROPOUT] = probability
    return ()


def _capture_graph(
    model: nn.Module, inputs: Inputs, is_leaf: IsLeaf
) -> tuple[nn.Module, fx.Graph, list[Refusal]]:
    """(root, graph, results that it lacks) of the model's forward in its mode, train or eval; raises NotCaptured.

    root: a shallow copy of the model, with the constants of its forward.
    """
    # torch.export takes a tensor that is given twice for one input.
    inputs = pytree.tree_map_only(Tensor, Tensor.clone, inputs)
    failures: list[Exception] = []
    # Sizes that may differ from call to call first; some models have only fixed ones.
    for batch, dynamic in ((_widen_batch(inputs), True), (inputs, True), (inputs, False)):
        try:
            lost: dict[str, str] = {}
            # Its notes on the person's model.
            silence = silence_torch("torch", logging.CRITICAL, Warning)
            drop = model.register_forward_hook(
                lambda _module, _args, output, lost=lost: _drop_unknown(output, lost)
            )
            with silence, drop, mark_leaves(model, is_leaf) as calls:
                shapes = _free_sizes(batch) if dynamic else None
                program = torch.export.export(model, *batch, dynamic_shapes=shapes, strict=False)
                if any(map(_writes_view, program.graph.nodes)):
                    program = program.run_decompositions({})  # without writes
                module = program.module(check_guards=False)
            _check_widened(module, inputs)
            break
        except Exception as error:  # torch.export may raise anything in the user's forward
            failures.append(error)
    else:
        raise NotCaptured(shorten_error(failures[0])) from failures[0]
    root = copy_shallowly(model)
    graph = _copy_graph(module.graph)
    try:
        _restore_graph(root, graph, module, calls, inspect.signature(model.forward))
    except NotCaptured:
        raise
    except Exception as error:  # forms of graphs that torch.export may yet make
        raise NotCaptured(
            f"its exported graph is of another form ({shorten_error(error)})"
        ) from error
    return root, graph, [_refuse_result(*result) for result in lost.items()]


def _restore_graph(
    root: nn.Module,
    graph: fx.Graph,
    module: nn.Module,
    calls: list[LeafCall],
    signature: inspect.Signature | None,
) -> None:
    """Rewrite the graph of an exported module in torch's functions; in place.

    root: gets the tensors that only `module` has. calls: of layers. signature: of the forward; None: the graph's own.
    """
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):  # of torch.export
        graph.erase_node(node)
    _inline_regions(module, graph)
    insert_leaves(graph, calls)
    _follow_device(graph)
    convert_calls(graph)
    _register_constants(root, graph, module)
    if isinstance(graph._codegen, _PyTreeCodeGen):
        restore_signature(root, graph, signature)
    graph.eliminate_dead_code(_is_kept)


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy that no module owns."""
    copy = fx.Graph()
    end = copy.graph_copy(graph, {}, return_output_node=True)
    copy.output(end[0]).meta = dict(end[1].meta)
    # The form of arguments and results; torch warns of copies of it.
    copy.set_codegen(graph._codegen)
    return copy


def _writes_view(node: fx.Node) -> bool:
    """True for a write into a part or a view of a tensor, which every reader of the tensor has to get."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable) and getattr(node.args[0].target, "is_view", False)


def _is_kept(node: fx.Node) -> bool:
    """True for calls that do something besides giving a result."""
    return is_write(node) or node.op in ("placeholder", "output") or node.target in CHECKS


# -- the example -------------------------------------------------------------------------------------------------


def _widen_batch(inputs: Inputs) -> Inputs:
    """The example with a batch of two where it is one: torch.export takes a size of one for a constant."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if _has_batch(leaf)]
    if not tensors or any(tensor.shape[0] != 1 for tensor in tensors):
        return inputs
    return pytree.tree_map(lambda x: torch.cat([x, x]) if _has_batch(x) else x, inputs)


def _has_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _check_widened(module: fx.GraphModule, inputs: Inputs) -> None:
    """Raise NotCaptured if the graph of a widened batch does not take the batch that was given."""
    for node, value in zip(
        module.graph.find_nodes(op="placeholder"), pytree.tree_leaves(inputs), strict=True
    ):
        if isinstance(value, Tensor):
            sizes = zip(read_sizes(node.meta["val"]), value.shape, strict=False)
            if any(size not in (None, wanted) for size, wanted in sizes):
                raise NotCaptured("the size of its batch is a constant")


def _free_sizes(inputs: Inputs) -> Any:
    """Dynamic shapes in which torch.export decides which sizes may differ from call to call."""

    def free(value: Any) -> Any:
        return (
            dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
            if isinstance(value, Tensor)
            else None
        )

    args, kwargs = pytree.tree_map(free, inputs)
    return (*args, *kwargs.values()) or None


@contextmanager
def silence_torch(name: str, level: int, *categories: type[Warning]) -> Iterator[None]:
    """Run a block without what is printed, notes below a level of the logger of this name, and such warnings."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            for category in categories:
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logger.setLevel(before)


def _drop_unknown(output: Any, lost: dict[str, str]) -> Any:
    """The output without results that torch cannot take apart, as caches for the next token.

    lost: gets their classes.
    """
    plain = (Tensor, int, float, bool, str, type(None), torch.SymInt)
    unknown = [
        (path, leaf)
        for path, leaf in pytree.tree_flatten_with_path(output)[0]
        if not isinstance(leaf, plain)
    ]
    if isinstance(output, Mapping):
        keys = {path[0].key: type(leaf).__name__ for path, leaf in unknown}
        lost.update({str(key): name for key, name in keys.items()})
        return (
            type(output)(**{key: value for key, value in output.items() if key not in keys})
            if keys
            else output
        )
    if type(output) in (tuple, list):
        places = {path[0].idx: type(leaf).__name__ for path, leaf in unknown if len(path) == 1}
        lost.update({f"result {k}": name for k, name in places.items()})
        return type(output)(value for k, value in enumerate(output) if k not in places)
    return output


def _refuse_result(name: str, kind: str) -> Refusal:
    """A Refusal for a result that the captured graph does not return. kind: its class."""
    reason = (
        f"is a {kind}, which torch.export cannot take apart: the captured model does not return it"
    )
    fix = "return tensors in its place, or leave it out of the forward (use_cache=False for caches of transformers)"
    return Refusal(name, reason, fix, "results", "R108")


# -- the graph ---------------------------------------------------------------------------------------------------


def _inline_regions(module: Any, graph: fx.Graph) -> None:
    """Put the calls of regions without gradients, or with autocast off, in place of the regions."""
    ops = torch.ops.higher_order
    for node in list(graph.nodes):
        if node.target is ops.wrap_with_set_grad_enabled:
            # Its arguments: (gradients enabled, body, *inputs).
            enabled = node.args[0]
            body = node.args[1]
            inputs = node.args[2:]
        elif node.target is ops.wrap_with_autocast:
            # (device, dtype, autocast enabled, cache, body, *inputs); gradients pass.
            enabled = True
            body = node.args[4]
            inputs = node.args[5:]
            if node.args[2]:
                raise NotCaptured("its forward switches autocast on")
        else:
            continue
        _inline_body(module, graph, node, body, inputs, detached=not enabled)


def _inline_body(
    module: Any,
    graph: fx.Graph,
    node: fx.Node,
    body: fx.Node,
    inputs: Args,
    *,
    detached: bool,
) -> None:
    region = module.get_submodule(str(body.target))
    _inline_regions(region, region.graph)
    copies: dict[fx.Node, Any] = dict(
        zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True)
    )
    with graph.inserting_before(node):
        for inner in region.graph.nodes:
            if inner.op == "output":
                results = fx.map_arg(inner.args[0], copies.__getitem__)
            elif inner.op != "placeholder":
                copies[inner] = copy = graph.node_copy(inner, copies.__getitem__)
                # Paths inside count from the region.
                if inner.op == "get_attr":
                    copy.target = f"{body.target}.{inner.target}"
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        # Gradients must stop where they did.
        results = [_detach_value(graph, value) for value in results] if detached else results
    # A region gives a tuple, of which each reader takes one element.
    for reader in list(node.users):
        reader.replace_all_uses_with(results[reader.args[1]])
        graph.erase_node(reader)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)


def _detach_value(graph: fx.Graph, value: Any) -> Any:
    example = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(example, Tensor) or not example.is_floating_point():
        return value
    detached = graph.call_function(torch.detach, (value,))
    detached.meta = dict(value.meta)
    return detached


def _follow_device(graph: fx.Graph) -> None:
    """Make tensors that the forward creates on the device of its first input, as it moves with the model."""
    inputs = graph.find_nodes(op="placeholder")
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    if not tensors:
        return
    device = tensors[0].meta["val"].device
    with graph.inserting_after(inputs[-1]):
        follow = graph.call_function(getattr, (tensors[0], "device"))
    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device,
            lambda value: follow if value == device else value,
            (node.args, node.kwargs),
        )


def _register_constants(root: nn.Module, graph: fx.Graph, module: Any) -> None:
    """Give the copy of the model the tensors that only the exported module has."""
    for node in graph.find_nodes(op="get_attr"):
        path = str(node.target)
        value = operator.attrgetter(path)(module)
        try:
            known = operator.attrgetter(path)(root)
        except AttributeError:
            known = None
        if isinstance(known, Tensor) and known.shape == value.shape:
            continue
        node.target = name = make_unique_path(root, "", path.replace(".", "_"))
        root.register_buffer(
            name, value.detach() if isinstance(value, Tensor) else value, persistent=False
        )
