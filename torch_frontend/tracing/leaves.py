"""Layers kept whole in a graph that torch.export makes: markers around them, and a call in their place."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_frontend.tracing.modules import Kwargs, read_key, read_stack

IsLeaf = Callable[[nn.Module, str], bool]


# An operator of its own: torch.export keeps it in the graph, whatever is done to the calls around it.
@torch.library.custom_op("onnxq::boundary", mutates_args=())
def mark_boundary(x: Tensor, call: int, index: int) -> Tensor:
    """A copy of the tensor. call: number of the layer's call. index: of an argument; results count from -1 down."""
    return x.clone()


@mark_boundary.register_fake
def _(x: Tensor, call: int, index: int) -> Tensor:
    return torch.empty_like(x)


@dataclass(eq=False)
class LeafCall:
    """One call of a layer. leaves: its flat arguments, None where a tensor stands. results: paths to its tensors.

    whole: False if an argument or a result has no form in a graph.
    """

    path: str
    leaves: list[Any]
    tensors: list[int]
    spec: Any
    results: list[tuple[Any, ...]]
    whole: bool


class CallsOutside(TorchFunctionMode):
    """Gives the calls of torch's functions outside of layers to `record`, while it is entered, once.

    record: gets the path of the module that calls, the function, and its arguments by position and by name.
    """

    def __init__(
        self,
        model: nn.Module,
        is_leaf: IsLeaf,
        record: Callable[[str, Any, Any, Kwargs], None],
    ) -> None:
        super().__init__()
        self._record = record
        # (path, whether it is inside of a layer) of the modules that run.
        self._stack: list[tuple[str, bool]] = []
        self._hooks = ExitStack()
        for path, module in model.named_modules():
            enter = partial(self._enter_module, path, is_leaf(module, path))
            self._hooks.enter_context(module.register_forward_pre_hook(enter))
            # always_call: the stack must be right after an exception that the user's forward catches.
            self._hooks.enter_context(
                module.register_forward_hook(self._leave_module, always_call=True)
            )

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, then make it."""
        path, inside = self._stack[-1] if self._stack else ("", False)
        if not inside:
            self._record(path, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _enter_module(self, path: str, is_leaf: bool, *_: Any) -> None:
        self._stack.append((path, is_leaf or any(inside for _, inside in self._stack)))

    def _leave_module(self, *_: Any) -> None:
        self._stack.pop()


@contextmanager
def mark_leaves(model: nn.Module, is_leaf: IsLeaf) -> Iterator[list[LeafCall]]:
    """Run a block in which the outermost layers mark their arguments and results; gives their calls, as they come."""
    calls: list[LeafCall] = []
    # Of layers that are running: only the outermost is marked.
    stack: list[int] = []

    def mark_inputs(path: str, _: nn.Module, args: Any, kwargs: Kwargs) -> Any:
        number = len(calls)
        stack.append(number)
        if len(stack) > 1:
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        plain = [None if k in tensors else leaf for k, leaf in enumerate(leaves)]
        whole = all(isinstance(leaf, fx.node.base_types) or leaf is None for leaf in plain)
        calls.append(LeafCall(path, plain, tensors, spec, [], whole))
        for k in tensors:
            leaves[k] = mark_boundary(leaves[k], number, k)
        return pytree.tree_unflatten(leaves, spec)

    def mark_results(_: nn.Module, __: Any, output: Any) -> Any:
        number = stack.pop()
        if stack:
            return None
        results, spec = pytree.tree_flatten_with_path(output)
        leaves = [leaf for _, leaf in results]
        call = calls[number]
        call.results = [tuple(map(read_key, path)) for path, _ in results]
        reachable = all(None not in keys for keys in call.results)
        call.whole = call.whole and reachable and all(isinstance(leaf, Tensor) for leaf in leaves)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # Results count down from -1, inputs up from 0.
                leaves[k] = mark_boundary(leaf, number, -1 - k)
        return pytree.tree_unflatten(leaves, spec)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path and is_leaf(module, path):
                mark = partial(mark_inputs, path)
                hooks.enter_context(module.register_forward_pre_hook(mark, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(mark_results))
        yield calls


def insert_leaves(graph: fx.Graph, calls: list[LeafCall]) -> None:
    """Put one `call_module` in place of what stands between the markers of each call; remove all markers."""
    markers: defaultdict[int, dict[int, fx.Node]] = defaultdict(dict)
    for node in graph.nodes:
        if node.target is torch.ops.onnxq.boundary.default:
            markers[node.args[1]][node.args[2]] = node
    for number, call in enumerate(calls):
        marks = markers[number]
        # A layer that does not read an argument leaves no marker of it.
        if call.whole and all(k in marks for k in call.tensors) and any(k < 0 for k in marks):
            _insert_call(graph, call, marks)
    # A graph without writes has those of the layers into their buffers at its end.
    own = tuple(f"{call.path}." for call in calls)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0].op == "get_attr" and node.args[0].target.startswith(own):
            graph.erase_node(node)
    for marks in markers.values():
        for node in marks.values():
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _insert_call(graph: fx.Graph, call: LeafCall, marks: dict[int, fx.Node]) -> None:
    results = {k: node for k, node in marks.items() if k < 0}
    leaves = [marks[k].args[0] if k in call.tensors else leaf for k, leaf in enumerate(call.leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    order = {node: k for k, node in enumerate(graph.nodes)}
    first = min(results.values(), key=order.__getitem__)
    last = max(order[node] for node in results.values())
    with graph.inserting_before(first):
        layer = graph.create_node("call_module", call.path, args, kwargs)
        layer.meta = {**first.meta}
        for k, node in results.items():
            value = layer
            for key in call.results[-1 - k]:
                value = graph.call_function(operator.getitem, (value, key))
                value.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
            value.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(value)
    # Backward, so that readers go before what they read; writes into buffers are the layer's own business.
    start = min((order[marks[k]] for k in call.tensors), default=order[first])
    for node in reversed(order):
        modules = (module for module, _ in read_stack(node).values())
        inside = start < order[node] <= last and call.path in modules
        if inside and not node.users and node not in marks.values():
            graph.erase_node(node)
