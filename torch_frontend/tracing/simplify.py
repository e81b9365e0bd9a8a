"""Rewrites of a new graph that change no value: in-place writes, identities, elements of lists, composed products."""

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torch_frontend.qmodules import copy_shallowly
from torch_frontend.tracing.attention import AttentionDropout
from torch_frontend.tracing.modules import (
    call_module,
    find_module,
    make_unique_path,
    name_arguments,
    read_stack,
)
from torch_frontend.tracing.names import scope_of

DROPOUTS: dict[Any, type[nn.Module]] = {
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
    model.graph.eliminate_dead_code(lambda node: node.is_impure() or is_write(node))
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
            arguments = name_arguments(node, "query", "key", "value", "attn_mask", "dropout_p")
            arguments.pop("dropout_p", None)
            node.args = tuple(map(arguments.pop, ("query", "key", "value")))
            node.kwargs = arguments
            name = "scaled_dot_product_attention"
            dropout = AttentionDropout(node.meta[ATTENTION_DROPOUT])
        elif node.op == "call_function" and node.target in DROPOUTS:
            arguments = name_arguments(node, "input", "p", "training")
            if bool(arguments.get("training", True)) != model.training:
                continue  # the user wrote a constant
            name = "dropout"
            dropout = DROPOUTS[node.target](float(arguments.get("p", 0.5)))
            node.args = (arguments["input"],)
            node.kwargs = {}
        else:
            continue
        path = make_unique_path(model, scope_of(node), name)
        call_module(model, node, path, dropout.train(model.training))


def is_write(node: fx.Node) -> bool:
    """True for torch's methods in place: add_ writes what add returns; __iadd__ and the like are other names."""
    name = str(node.target)
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__")


def _writes_buffer(node: fx.Node) -> bool:
    """True if a method writes into a tensor of the model, also behind others as in `self.mean.mul_(0.9).add_(x)`."""
    while is_write(node):
        node = node.args[0]  # type: ignore[assignment]
    # Norms that are functions become modules, which count by themselves.
    return node.op == "get_attr" and not str(node.target).endswith("num_batches_tracked")


def remove_in_place_writes(model: fx.GraphModule) -> None:
    """Replace writes into a tensor by new tensors, which later readers get; those into buffers stay."""
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
            plain = str(node.target)[:-1]
            written = is_write(node) and hasattr(torch.Tensor, plain) and not _writes_buffer(node)
            node.target = plain if written else node.target
        if written:
            order = {other: k for k, other in enumerate(model.graph.nodes)}
            for reader in list(node.args[0].users):
                if order[reader] > order[node]:
                    reader.replace_input_with(node.args[0], node)


def _replace_in_place_module(model: fx.GraphModule, node: fx.Node) -> bool:
    module = model.get_submodule(str(node.target))
    # `inplace` of the user's own modules may mean anything; torch.nn documents it.
    if not getattr(module, "inplace", False) or type(module).__module__.split(".")[:2] != [
        "torch",
        "nn",
    ]:
        # A module that is called twice was replaced at its first call.
        return getattr(module, "onnxq_was_inplace", False)
    plain = copy_shallowly(module)
    plain.inplace = False  # type: ignore[assignment]
    plain.onnxq_was_inplace = True  # type: ignore[assignment]
    model.set_submodule(str(node.target), plain)
    return True


def replace_unbind(model: fx.GraphModule) -> None:
    """Replace unbind(x, dim)[k] by select(x, dim, k), a call with a name and a site of its own."""
    for node in list(model.graph.nodes):
        # A method's name stands for it in call_method.
        if node.target not in (torch.unbind, "unbind") or not isinstance(node.args[0], fx.Node):
            continue
        dim = name_arguments(node, "input", "dim").get("dim", 0)
        readers = list(node.users)
        if all(
            reader.target is operator.getitem and isinstance(reader.args[1], int)
            for reader in readers
        ):
            for reader in readers:
                reader.target = torch.select
                reader.args = (node.args[0], dim, reader.args[1])


# Function or method -> its product, and the names of the factors.
_SUMS: dict[Any, tuple[Any, str, str]] = {
    **dict.fromkeys((torch.addmm, "addmm"), (torch.mm, "mat1", "mat2")),
    **dict.fromkeys((torch.baddbmm, "baddbmm"), (torch.bmm, "batch1", "batch2")),
    **dict.fromkeys((torch.addmv, "addmv"), (torch.mv, "mat", "vec")),
}


def split_products(graph: fx.Graph) -> None:
    """Write addmm, baddbmm and einsum as matmul or linear, and a sum; what is no plain product stays."""
    for node in list(graph.nodes):
        product = None
        if node.op in ("call_function", "call_method") and node.target in _SUMS:
            product = _split_sum(graph, node)
        elif node.op == "call_function" and node.target is torch.einsum:
            product = _split_einsum(graph, node)
        if product is not None:
            product.meta = {**node.meta, **product.meta}
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def _split_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    function, first, second = _SUMS[node.target]
    arguments = name_arguments(node, "input", first, second)
    if arguments.get("beta", 1) != 1 or arguments.get("alpha", 1) != 1:
        return None
    with graph.inserting_before(node):
        product = graph.call_function(function, (arguments[first], arguments[second]))
        product.meta = dict(node.meta)
        return graph.call_function(torch.add, (product, arguments["input"]))


def _split_einsum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The product of two operands over one index; batch indices stand first in both."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    # One letter for the axes of an ellipsis.
    inputs, _, out = equation.replace(" ", "").replace("...", ".").partition("->")
    first, _, second = inputs.partition(",")
    for terms, factors in (
        ((first, second, out), operands),
        ((second, first, out), reversed(operands)),
    ):
        # Either operand may be the left one: a product has its rows first.
        product = _write_product(graph, node, terms, *factors)
        if product is not None:
            return product
    return None


def _write_product(
    graph: fx.Graph, node: fx.Node, terms: tuple[str, str, str], x: Any, w: Any
) -> fx.Node | None:
    """matmul for [batch, rows, k] and [batch, k, columns]; None where axes stand otherwise."""
    a, b, out = terms
    summed = set(a) & set(b) - set(out)
    columns = set(b) - set(a)
    if any(len(set(term)) != len(term) for term in terms) or len(summed) != 1 or len(columns) != 1:
        return None
    (k,) = summed
    (n,) = columns
    batch = b.replace(k, "").replace(n, "")
    rows = a.replace(k, "").removeprefix(batch)
    if (
        "." in k + n
        or not rows
        or out != f"{batch}{rows}{n}"
        or not (a.startswith(batch) and b.startswith(batch))
    ):
        return None
    # Several indices of rows need a weight without batch: matmul counts axes from the end.
    if batch and len(rows) != 1:
        return None
    if not a.endswith(k) and (len(rows) != 1 or rows == "."):
        return None
    with graph.inserting_before(node):

        def turn(value: Any) -> fx.Node:
            turned = graph.call_method("transpose", (value, -2, -1))
            turned.meta["nn_module_stack"] = read_stack(node)
            return turned

        x = x if a.endswith(k) else turn(x)
        # A parameter keeps its own axes in a linear product.
        if not batch and b.endswith(k) and isinstance(w, fx.Node) and w.op == "get_attr":
            return graph.call_function(functional.linear, (x, w))
        return graph.call_function(torch.matmul, (x, turn(w) if b.endswith(k) else w))
