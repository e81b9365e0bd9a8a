"""Rewrites of a new graph that change no value: in-place writes, identities, elements of lists, dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torch_frontend.qmodules import copy_shallowly
from torch_frontend.tracing.attention import AttentionDropout
from torch_frontend.tracing.modules import find_module, name_arguments
from torch_frontend.tracing.names import make_unique_path, scope_of
from torch_frontend.tracing.products import split_products

_DROPOUTS: dict[Any, type[nn.Module]] = {
    functional.dropout: nn.Dropout,
    torch.dropout: nn.Dropout,
    functional.dropout1d: nn.Dropout1d,
    functional.dropout2d: nn.Dropout2d,
    functional.dropout3d: nn.Dropout3d,
    functional.alpha_dropout: nn.AlphaDropout,
}
# Key of a node's meta: the probability in train mode of a dropout inside attention.
ATTENTION_DROPOUT = "onnxq_dropout"
_IN_PLACE: dict[Any, Any] = {functional.relu_: functional.relu, torch.relu_: torch.relu}


def simplify_graph(model: fx.GraphModule) -> None:
    """Apply all rewrites of this module, in order."""
    # Identities first: the rewrites behind them see the real producers.
    remove_identities(model)
    replace_dropouts(model)
    remove_in_place_writes(model)
    replace_unbind(model)
    split_products(model.graph)
    model.graph.eliminate_dead_code()
    model.delete_all_unused_submodules()
    model.graph.lint()
    model.recompile()


def remove_identities(model: fx.GraphModule) -> None:
    """Remove calls of nn.Identity."""
    for node in list(model.graph.nodes):
        if type(find_module(model, node)) is nn.Identity and node.args:
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)


def replace_dropouts(model: fx.GraphModule) -> None:
    """Replace F.dropout(x, p, self.training), which a trace fixes to the mode of the trace, by modules.

    A call with another mode than the model's keeps it: `training=True` in a model traced in eval mode.
    """
    for node in list(model.graph.nodes):
        if ATTENTION_DROPOUT in node.meta:
            path = make_unique_path(model, scope_of(node), "scaled_dot_product_attention")
            model.add_submodule(path, AttentionDropout(node.meta[ATTENTION_DROPOUT]).train(model.training))
            given = name_arguments(node, "query", "key", "value", "attn_mask", "dropout_p")
            node.op, node.target, node.args = (
                "call_module",
                path,
                tuple(given.pop(k) for k in ("query", "key", "value")),
            )
            node.kwargs = {key: value for key, value in given.items() if key != "dropout_p"}
            continue
        made = find_dropout(node)
        if made is None:
            continue
        args = name_arguments(node, "input", "p", "training")
        if bool(args.get("training", True)) != model.training:
            continue  # the user wrote a constant
        path = make_unique_path(model, scope_of(node), "dropout")
        module = made(float(args.get("p", 0.5)))
        module.train(model.training)
        model.add_submodule(path, module)
        node.op, node.target = "call_module", path
        node.args, node.kwargs = (args["input"],), {}


def find_dropout(node: fx.Node) -> type[nn.Module] | None:
    """The module class of a dropout's function; None for other nodes."""
    return _DROPOUTS.get(node.target) if node.op == "call_function" else None


def remove_in_place_writes(model: fx.GraphModule) -> None:
    """Replace writes into a tensor by new tensors, which later readers get."""
    # A quantizer between writer and reader would otherwise hide the write.
    for node in list(model.graph.nodes):
        if not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.op == "call_module":
            written = _replace_in_place_module(model, node)
        elif node.op == "call_function":
            written = bool(node.kwargs.get("inplace")) or node.target in _IN_PLACE
            node.target = _IN_PLACE.get(node.target, node.target)
            if "inplace" in node.kwargs:
                node.kwargs = {**node.kwargs, "inplace": False}
        else:
            # torch's convention: add_ writes in place what add returns; __iadd__ and the like are other names.
            name = str(node.target)
            plain = name[:-1] if node.op == "call_method" and name.endswith("_") and not name.endswith("__") else ""
            written = bool(plain) and hasattr(torch.Tensor, plain)
            node.target = plain if written else node.target
        if written:
            _redirect_readers(model.graph, node.args[0], node)


def _replace_in_place_module(model: fx.GraphModule, node: fx.Node) -> bool:
    module = model.get_submodule(str(node.target))
    # `inplace` of the user's own modules may mean anything; torch.nn documents it.
    if not getattr(module, "inplace", False) or type(module).__module__.split(".")[:2] != ["torch", "nn"]:
        # A module that is called twice was replaced at its first call.
        return getattr(module, "onnxq_was_inplace", False)
    made = copy_shallowly(module)
    made.inplace = False  # type: ignore[assignment]
    made.onnxq_was_inplace = True  # type: ignore[assignment]
    model.set_submodule(str(node.target), made)
    return True


def _redirect_readers(graph: fx.Graph, written: fx.Node, result: fx.Node) -> None:
    """Let readers of `written` that stand behind `result` read `result`."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    for reader in list(written.users):
        if order[reader] > order[result]:
            reader.replace_input_with(written, result)


def replace_unbind(model: fx.GraphModule) -> None:
    """Replace unbind(x, dim)[k] by select(x, dim, k), a call with a name and a site of its own."""
    for node in list(model.graph.nodes):
        if node.target not in (torch.unbind, "unbind") or not isinstance(node.args[0], fx.Node):
            continue
        dim = name_arguments(node, "input", "dim").get("dim", 0)
        readers = list(node.users)
        if not all(r.target is operator.getitem and isinstance(r.args[1], int) for r in readers):
            continue
        for reader in readers:
            index = reader.args[1]
            reader.target, reader.args = torch.select, (node.args[0], dim, index)
