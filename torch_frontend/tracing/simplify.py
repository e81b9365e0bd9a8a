"""Rewrites of a fresh graph that change no value: in-place writes, identities, elements of lists, dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torch_frontend.qmodules import shallow
from torch_frontend.tracing.names import fresh, scope_of

_DROPOUTS: dict[Any, type[nn.Module]] = {
    functional.dropout: nn.Dropout,
    torch.dropout: nn.Dropout,
    functional.dropout1d: nn.Dropout1d,
    functional.dropout2d: nn.Dropout2d,
    functional.dropout3d: nn.Dropout3d,
    functional.alpha_dropout: nn.AlphaDropout,
}
_IN_PLACE: dict[Any, Any] = {functional.relu_: functional.relu, torch.relu_: torch.relu}


def simplify(model: fx.GraphModule) -> None:
    """All of them, in order."""
    remove_identities(model)
    dropouts_to_modules(model)
    out_of_place(model)
    unbind_to_select(model)
    remove_dead(model)
    model.graph.lint()


def remove_identities(model: fx.GraphModule) -> None:
    """Drop nn.Identity: what it hands on is its input."""
    for node in list(model.graph.nodes):
        if node.op == "call_module" and type(model.get_submodule(str(node.target))) is nn.Identity and node.args:
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)


def dropouts_to_modules(model: fx.GraphModule) -> None:
    """F.dropout(x, p, self.training) has the mode of the trace written into it; as a module it follows the mode.

    One that was told a mode against the model's own keeps it: `training=True` in a model traced in eval mode.
    """
    for node in list(model.graph.nodes):
        made = _DROPOUTS.get(node.target) if node.op == "call_function" else None
        if made is None:
            continue
        args = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
        if bool(args.get("training", True)) != model.training:
            continue
        path = fresh(model, scope_of(node), "dropout")
        module = made(float(args.get("p", 0.5)))
        module.train(model.training)
        model.add_submodule(path, module)
        node.op, node.target = "call_module", path
        node.args, node.kwargs = (args["input"],), {}


def out_of_place(model: fx.GraphModule) -> None:
    """Writes into a tensor become new tensors, which later readers get: a quantizer may stand between."""
    for node in list(model.graph.nodes):
        if not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.op == "call_module":
            written = _module_out_of_place(model, node)
        elif node.op == "call_function":
            written = bool(node.kwargs.get("inplace")) or node.target in _IN_PLACE
            node.target = _IN_PLACE.get(node.target, node.target)
            if "inplace" in node.kwargs:
                node.kwargs = {**node.kwargs, "inplace": False}
        else:
            name = str(node.target)
            plain = name[:-1] if node.op == "call_method" and name.endswith("_") and not name.endswith("__") else ""
            written = bool(plain) and hasattr(torch.Tensor, plain)
            node.target = plain if written else node.target
        if written:
            _redirect(model.graph, node.args[0], node)


def _module_out_of_place(model: fx.GraphModule, node: fx.Node) -> bool:
    module = model.get_submodule(str(node.target))
    if not getattr(module, "inplace", False) or not type(module).__module__.startswith("torch.nn"):
        return getattr(module, "onnxq_was_inplace", False)
    made = shallow(module)
    made.inplace = False  # type: ignore[assignment]
    made.onnxq_was_inplace = True  # type: ignore[assignment]
    parent, _, leaf = str(node.target).rpartition(".")
    setattr(model.get_submodule(parent), leaf, made)
    return True


def _redirect(graph: fx.Graph, written: fx.Node, result: fx.Node) -> None:
    """Readers of `written` behind `result` read `result`."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    for reader in list(written.users):
        if order[reader] > order[result]:
            reader.replace_input_with(written, result)


def unbind_to_select(model: fx.GraphModule) -> None:
    """unbind(x, dim)[k] -> select(x, dim, k), which is a slice with a name."""
    for node in list(model.graph.nodes):
        if node.target not in (torch.unbind, "unbind") or not isinstance(node.args[0], fx.Node):
            continue
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        readers = list(node.users)
        if not all(r.target is operator.getitem and isinstance(r.args[1], int) for r in readers):
            continue
        for reader in readers:
            index = reader.args[1]
            reader.target, reader.args = torch.select, (node.args[0], dim, index)


def remove_dead(model: fx.GraphModule) -> None:
    """Drop what nothing reads, and modules that nothing calls."""
    model.graph.eliminate_dead_code()
    model.delete_all_unused_submodules()
