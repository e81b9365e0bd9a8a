"""The account of a model's products: each is quantized, or stays float for a reason that is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxq.planner.place import Placement
from onnxq.sites import LeftFloat, Refusal, Role, Unquantized
from torch_frontend.placement.graph import CallGraph, CallNode

# Operators that multiply tensors; functions that do and are in no registry.
PRODUCTS = frozenset(
    ("conv", "conv_transpose", "linear", "bilinear", "matmul", "attention", "lstm", "gru", "rnn", "multihead_attention")
)
PRODUCT_FUNCTIONS = frozenset(
    ("addmm", "baddbmm", "addbmm", "addmv", "einsum", "tensordot", "inner", "outer", "dot", "vdot", "chain_matmul",
     "conv_tbc", "multi_head_attention_forward", "multi_dot", "cdist", "kron", "addr", "ger")
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One product. subject: its call. op: torch's operator or function. weight: the site of its weight; "" without one.

    reason: why it stays float; None where it is quantized.
    """

    subject: str
    op: str
    weight: str = ""
    reason: Unquantized | None = None


def list_products(graph: CallGraph, placement: Placement, reasons: Iterable[Unquantized]) -> list[Product]:
    """Every product of a graph in its order. reasons: by the paths of calls."""
    told: dict[str, Unquantized] = {}
    for one in reasons:
        told.setdefault(one.subject, one)
    weights, data = set(), set()
    for site in placement.sites:
        found = weights if site.role is Role.WEIGHT else data
        found |= {edge.node for edge in site.consumers or graph.consumers(site.quantized_tensor)}
    calls: dict[str, list[CallNode]] = {}
    for node in graph.nodes:
        if node.op.name in PRODUCTS or node.function in PRODUCT_FUNCTIONS:
            calls.setdefault(node.call, []).append(node)
    products = []
    for call, nodes in calls.items():
        weight = next((graph.weights[node.name].site for node in nodes if node.name in graph.weights), "")
        kept = any(node.name in (weights if weight else data) for node in nodes)
        path = nodes[0].path
        reason = None if kept else told.get(path) or told.get(call) or _explain_closed(graph, nodes, path)
        products.append(Product(call, nodes[0].op.name or nodes[0].function, weight, reason))
    return products


def _explain_closed(graph: CallGraph, nodes: Iterable[CallNode], path: str) -> Unquantized:
    """The reason of a product for which the planner has none, as nothing can be placed at it."""
    if all(tensor in graph.integers or tensor in graph.constants for node in nodes for tensor in node.inputs):
        return LeftFloat(path, "it reads no floats that are computed", "integers", "F103")
    return Refusal(path, "what it reads has no place for a pair", "", "closed", "R105")
