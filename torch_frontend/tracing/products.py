"""Functions that multiply and do something besides, as the products that the registry knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from torch_frontend.tracing.modules import name_arguments

_SUMS: dict[Any, Any] = {
    torch.addmm: torch.mm, "addmm": torch.mm, torch.baddbmm: torch.bmm, "baddbmm": torch.bmm, torch.addmv: torch.mv,
    "addmv": torch.mv,
}  # fmt: skip


def split_products(graph: fx.Graph) -> None:
    """Write addmm, baddbmm and einsum as matmul or linear, and a sum; what is no plain product stays."""
    for node in list(graph.nodes):
        made = None
        if node.op in ("call_function", "call_method") and node.target in _SUMS:
            made = _split_sum(graph, node)
        elif node.op == "call_function" and node.target is torch.einsum:
            made = _split_einsum(graph, node)
        if made is not None:
            made.meta = {**node.meta, **made.meta}
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _split_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    second = "batch" if node.target in (torch.baddbmm, "baddbmm") else "mat"
    names = ("input", "mat", "vec") if node.target in (torch.addmv, "addmv") else ("input", f"{second}1", f"{second}2")
    given = name_arguments(node, *names)
    if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
        return None
    with graph.inserting_before(node):
        product = graph.call_function(_SUMS[node.target], (given[names[1]], given[names[2]]))
        product.meta = dict(node.meta)
        return graph.call_function(torch.add, (product, given["input"]))


def _split_einsum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The product of two operands over one index; batch indices stand first in both."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    a, _, b = inputs.partition(",")
    for first, second, x, w in ((a, b, *operands), (b, a, *reversed(operands))):
        made = _write_product(
            graph, node, (first.replace("...", "."), second.replace("...", "."), out.replace("...", ".")), x, w
        )
        if made is not None:
            return made
    return None


def _write_product(graph: fx.Graph, node: fx.Node, terms: tuple[str, str, str], x: Any, w: Any) -> fx.Node | None:
    """matmul for [batch, rows, k] and [batch, k, columns]; None where axes stand otherwise."""
    a, b, out = terms
    summed, columns = set(a) & set(b) - set(out), set(b) - set(a)
    if (
        any(len(set(term)) != len(term) for term in terms)
        or len(summed) != 1
        or len(columns) != 1
        or "." in columns | summed
    ):
        return None
    (k,), (n,) = summed, columns
    batch = b.replace(k, "").replace(n, "")
    rows = a.replace(k, "").removeprefix(batch)
    # Several indices of rows need a weight without batch: matmul counts axes from the end.
    if (
        not a.startswith(batch)
        or b[: len(batch)] != batch
        or (batch and len(rows) != 1)
        or not rows
        or out != f"{batch}{rows}{n}"
    ):
        return None
    if not a.endswith(k) and (len(rows) != 1 or rows == "."):
        return None
    with graph.inserting_before(node):

        def turn(value: Any) -> fx.Node:
            made = graph.call_method("transpose", (value, -2, -1))
            made.meta["nn_module_stack"] = node.meta.get("nn_module_stack") or {}
            return made

        x = x if a.endswith(k) else turn(x)
        # A parameter keeps its own axes in a linear product.
        if not batch and b.endswith(k) and isinstance(w, fx.Node) and w.op == "get_attr":
            return graph.call_function(functional.linear, (x, w))
        return graph.call_function(torch.matmul, (x, turn(w) if b.endswith(k) else w))
