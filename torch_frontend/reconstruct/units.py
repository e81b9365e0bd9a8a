"""Units of learning: parts of a model that run alone, on inputs caught in runs of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as tree

from onnxq.errors import ModelError
from torch_frontend.quant_model import Follower
from torch_frontend.quantizers import AdaRound, Quantizer, quantizers_of
from torch_frontend.tracing.modules import find_module
from torch_frontend.tracing.names import find_constants
from torch_frontend.tracing.values import bind_inputs

Caught = list[tuple[tuple[Any, ...], Tensor]]


@dataclass(eq=False)
class Unit:
    """A layer or block. run: its output for caught inputs. catch: a batch -> inputs and output of every call.

    owned: quantizers whose results nothing outside reads, so that their scales may be learned here.
    """

    name: str
    run: Callable[..., Tensor]
    catch: Callable[[tuple[Any, ...], dict[str, Any]], Caught]
    module: nn.Module
    owned: list[Quantizer] = field(default_factory=list)

    @property
    def weights(self) -> list[AdaRound]:
        """Quantizers of weights that learn to round and are not disabled."""
        return [q for q in quantizers_of(self.module) if isinstance(q, AdaRound) and q.disabled_reason is None]


class _Caught(Exception):
    """Raised to stop a forward pass once all values are caught."""


def module_unit(model: nn.Module, name: str) -> Unit:
    """A submodule as a unit; hooks catch the inputs of every call. Raises ModelError for an unknown name."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(
            name, "is no module of the model", "name one that named_modules() lists", code="Q124"
        ) from error
    layouts: list[Any] = []  # structure of the arguments, which `run` restores from the flat values

    def catch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Caught:
        caught: Caught = []

        def seen(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            flat, layout = tree.tree_flatten((given, named))
            if not layouts:
                layouts.append(layout)
            if layout != layouts[0]:
                raise ModelError(
                    name, "is called with different arguments at different times", "name another block", code="Q124"
                )
            # A stack: the module may call itself, and then inner calls end first.
            pending.append(tuple(_copy_value(value) for value in flat))  # copies: the model may write into them

        def done(_: nn.Module, __: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise ModelError(
                    name, f"gives a {type(output).__name__}, not a tensor", "name another block", code="Q124"
                )
            caught.append((pending.pop(), output.detach().clone()))

        pending: list[tuple[Any, ...]] = []
        handles = [module.register_forward_pre_hook(seen, with_kwargs=True), module.register_forward_hook(done)]
        try:
            model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return caught

    def run(*flat: Any) -> Tensor:
        given, named = tree.tree_unflatten(list(flat), layouts[0])
        result: Tensor = module(*given, **named)
        return result

    return Unit(name, run, catch, module, owned=quantizers_of(module))


def graph_unit(model: fx.GraphModule, name: str, region: list[fx.Node], exit_: fx.Node) -> Unit:
    """Nodes of a graph as a unit. region: in topological order, with `exit_`; values read from outside are inputs."""
    part, entries = _extract_part(model, set(region), exit_)
    wanted = {*entries, exit_}

    class Tap(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n in wanted:
                seen[n] = _copy_value(result)
                # The rest of the model is not needed.
                if len(seen) == len(wanted):
                    raise _Caught
            return result

    seen: dict[fx.Node, Any] = {}

    def catch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Caught:
        seen.clear()
        with suppress(_Caught):
            Tap(model).run(*bind_inputs(model.graph, args, kwargs))
        if not isinstance(seen.get(exit_), Tensor):
            raise ModelError(name, "gives no tensor", "name another block", code="Q124")
        found = [(tuple(seen[node] for node in entries), seen[exit_])]
        seen.clear()
        return found

    return Unit(name, part, catch, part, _find_owned(model, part, set(region)))


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _extract_part(model: fx.GraphModule, region: set[fx.Node], exit_: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """(the region as a module that shares the model's modules, the nodes outside that it reads)."""
    fixed = find_constants(model.graph)
    inside = [node for node in model.graph.nodes if node in region]
    entries: list[fx.Node] = []
    for node in inside:
        for source in node.all_input_nodes:
            if source not in region and source not in fixed and source not in entries:
                entries.append(source)
    part, made = fx.Graph(), {}
    for k, entry in enumerate(entries):
        made[entry] = part.placeholder(f"value_{k}")

    # Constants are copy_node along with their readers, although they are not in the region.
    def copy_node(node: fx.Node) -> fx.Node:
        if node not in made:
            for source in node.all_input_nodes:
                copy_node(source)
            made[node] = part.node_copy(node, lambda source: made[source])
        return made[node]

    for node in inside:
        copy_node(node)
    part.output(made[exit_])
    return fx.GraphModule(model, part), entries


def _find_owned(model: fx.GraphModule, part: fx.GraphModule, region: set[fx.Node]) -> list[Quantizer]:
    """Quantizers inside whose readers are all inside, and that nothing outside calls or follows."""
    # A leader's qparams are also its followers'; learning them here would change other units.
    shared = {id(found.leader) for found in quantizers_of(model) if isinstance(found, Follower)}
    for node in model.graph.nodes:
        module = find_module(model, node)
        if module is not None and not (node in region and all(user in region for user in node.users)):
            shared.update(id(found) for found in quantizers_of(module))
    return [found for found in quantizers_of(part) if id(found) not in shared and not isinstance(found, Follower)]
