"""What is learned together: a part of the model that can be run alone on inputs caught where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as tree

from onnxq.errors import ModelError
from onnxq.sites import Role
from torch_frontend.quantizers import Quantizer, quantizers_of
from torch_frontend.tracing import bound

Caught = list[tuple[tuple[Any, ...], Tensor]]


@dataclass(eq=False)
class Unit:
    """A layer or block. run: its output for caught inputs. catch: model, batch -> inputs and output of every call.

    quantizers: all inside. owned: those that nothing outside reads, whose scales may be learned here.
    """

    name: str
    run: Callable[..., Tensor]
    catch: Callable[[tuple[Any, ...], dict[str, Any]], Caught]
    module: nn.Module
    owned: list[Quantizer] = field(default_factory=list)

    @property
    def quantizers(self) -> list[Quantizer]:
        """All inside."""
        return quantizers_of(self.module)

    @property
    def weights(self) -> list[Quantizer]:
        """Those of weights that are switched on."""
        return [found for found in self.quantizers if found.role is Role.WEIGHT and found.disabled_reason is None]


@contextmanager
def quantizing(quantizers: list[Quantizer], on: bool) -> Iterator[None]:
    """All of them on or off; what a pass disabled stays off. Afterwards as before."""
    before = [(found, found.enabled, found.observing) for found in quantizers]
    for found in quantizers:
        found.enabled, found.observing = on, False
    try:
        yield
    finally:
        for found, enabled, observing in before:
            found.enabled, found.observing = enabled, observing


class _Caught(Exception):
    """Raised to stop a forward pass once all that is wanted was seen."""


def module_unit(model: nn.Module, name: str) -> Unit:
    """A submodule as a unit; hooks catch the inputs of every call. Raises ModelError if there is none so called."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(
            name, "is no module of the model", "name one that named_modules() lists", code="Q124"
        ) from error
    layouts: list[Any] = []

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
            pending.append(tuple(_copied(value) for value in flat))

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
    """Nodes of a graph as a unit. region: in topological order, `exit_` among them, closed but for what it reads."""
    part, entries = _extracted(model, set(region), exit_)
    wanted = {*entries, exit_}

    class Tap(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n in wanted:
                seen[n] = _copied(result)
                if len(seen) == len(wanted):
                    raise _Caught
            return result

    seen: dict[fx.Node, Any] = {}

    def catch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Caught:
        seen.clear()
        with suppress(_Caught):
            Tap(model).run(*bound(model.graph, args, kwargs))
        if not isinstance(seen.get(exit_), Tensor):
            raise ModelError(name, "gives no tensor", "name another block", code="Q124")
        found = [(tuple(seen[node] for node in entries), seen[exit_])]
        seen.clear()
        return found

    return Unit(name, part, catch, part, _owned(model, part, set(region)))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def constants(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, buffers, and what is computed from them alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr" or (sources and all(source in found for source in sources)):
            found.add(node)
    return found


def _extracted(model: fx.GraphModule, region: set[fx.Node], exit_: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The region as a module of its own that shares the model's modules, and the values it reads from outside."""
    fixed = constants(model.graph)
    inside = [node for node in model.graph.nodes if node in region]
    entries: list[fx.Node] = []
    for node in inside:
        for source in node.all_input_nodes:
            if source not in region and source not in fixed and source not in entries:
                entries.append(source)
    part, made = fx.Graph(), {}
    for k, entry in enumerate(entries):
        made[entry] = part.placeholder(f"value_{k}")

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:
            for source in node.all_input_nodes:
                copied(source)
            made[node] = part.node_copy(node, lambda source: made[source])
        return made[node]

    for node in inside:
        copied(node)
    part.output(made[exit_])
    return fx.GraphModule(model, part), entries


def _owned(model: fx.GraphModule, part: fx.GraphModule, region: set[fx.Node]) -> list[Quantizer]:
    """Quantizers inside whose every reader is inside, and which nothing outside calls or follows."""
    shared = {id(leader) for found in quantizers_of(model) if (leader := getattr(found, "leader", None)) is not None}
    for node in model.graph.nodes:
        if node.op == "call_module" and not (node in region and all(user in region for user in node.users)):
            shared.update(id(found) for found in quantizers_of(model.get_submodule(str(node.target))))
    return [found for found in quantizers_of(part) if id(found) not in shared and not hasattr(found, "leader")]
