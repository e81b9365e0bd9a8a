"""SmoothQuant in the graph: X/s before the linear layers that read X, s·W in them.

X is divided where that costs nothing, in the scale and bias of a LayerNormalization or in the weights of a linear
operator in front, if all that reads X is smoothed; else by one Mul on the branch that feeds the layers, where the
error of their outputs falls enough to pay for it. (A Gelu cannot take the factors in: unfolded, with a vector in place
of its constants, ORT runs it as five nodes instead of one.) Where only weights are quantized, s is AWQ's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import PlanError
from onnxq.graph import ModelLike, NodeRef
from onnxq.graph.stored import release_pages
from onnxq.passes.edit import Edit
from onnxq.passes.equalization import awq_core
from onnxq.passes.equalization.smoothquant_core import Reader, Seen, along_outputs, search_alpha
from onnxq.passes.linear import Linear, find_linear
from onnxq.passes.view import View
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Role, TensorId
from onnxq.spec import PerBlock, PerTensor, QuantSpec

Factors = Mapping[TensorId, NDArray[np.float32]]
# Most that may be left of the noise of the layers' outputs, where smoothing is free and where it costs a Mul.
FREE, MUL = 0.9, 0.4


@dataclass(frozen=True, eq=False)
class Group:
    """Linear layers that read one tensor along its last axis. home: the node that can take 1/s in, None for a Mul."""

    tensor: TensorId
    readers: tuple[Linear, ...]
    channels: int
    home: NodeRef | Linear | None


def find_groups(view: View) -> tuple[Group, ...]:
    """Every tensor whose readers are MatMul or Gemm with weights of their own, in the order the model runs in."""
    layers: dict[TensorId, list[Linear]] = {}
    for node in view.index.nodes:
        op = find_linear(view, node) if node.op_type in ("MatMul", "Gemm") and not node.attrs.get("transA", 0) else None
        x, w = view.tensor(node, 0), view.tensor(node, 1)
        if op is not None and x is not None and w is not None and view.owned(w) and x.scope == node.scope:
            layers.setdefault(x, []).append(op)
    groups = []
    for tensor, ops in layers.items():
        sizes = {op.weight.shape[1 - op.axis] for op in ops}
        if len(sizes) == 1 and all(op.weight.dtype == np.float32 for op in ops):
            groups.append(Group(tensor, tuple(ops), sizes.pop(), _home(view, tensor, ops)))
    return tuple(groups)


def _home(view: View, tensor: TensorId, ops: Sequence[Linear]) -> NodeRef | Linear | None:
    """The node that writes the tensor, if it can write it divided: nobody but these layers reads it."""
    node = view.producer(tensor)
    if node is None or node.scope != tensor.scope or not view.private([tensor], {op.node.name for op in ops}):
        return None
    if node.op_type == "LayerNormalization":
        held = [view.tensor(node, k) for k in (1, 2)]
        axis, rank = int(node.attrs.get("axis", -1)), view.rank(tensor)
        last = axis == -1 or (rank is not None and axis == rank - 1)
        mine = all(t is None or (view.index.is_constant(t) and view.owned(t)) for t in held)
        # Without a scale of its own it could not give the tensor out divided.
        return node if last and mine and held[0] is not None else None
    if node.op_type == "Reshape":
        return _values(view, node, ops[0].weight.shape[1 - ops[0].axis])
    return _writer(view, node)


def _writer(view: View, node: NodeRef) -> Linear | None:
    """The linear operator that a node is, or that a node gives the bias of, with weights of its own."""
    makers = [view.producer(view.tensor(node, k), "MatMul") for k in range(2)] if node.op_type == "Add" else []
    maker = next((one for one in makers if one is not None), node)
    op = find_linear(view, maker) if maker.op_type in ("MatMul", "Gemm") else None
    return op if op is not None and op.last.name == node.name and op.owns_constants(view) else None


# [batch, heads, tokens, size] to [batch, tokens, heads, size], and back.
_HEADS = (0, 2, 1, 3)


def _values(view: View, joined: NodeRef, channels: int) -> Linear | None:
    """Attention's value projection, whose channels come out of Reshape(Transpose(P · V)) in the order they went in.

    The heads are often known by their size alone; then the split must leave the other axes as they are.
    """
    tensor, path = view.tensor(joined, 0), (("Transpose", 0), ("MatMul", 1), ("Transpose", 0), ("Reshape", 0))
    split: tuple[int | str | None, ...] = ()
    for op_type, k in path:
        node = view.producer(tensor, op_type)
        if tensor is None or node is None or view.sole_reader(tensor) is None or node.scope != joined.scope:
            return None
        if op_type == "Transpose" and tuple(node.attrs.get("perm", ())) != _HEADS:
            return None
        split = view.index.shape(tensor) or ()
        tensor = view.tensor(node, k)
    if tensor is None or view.sole_reader(tensor) is None:
        return None
    whole, source = view.index.shape(tensor) or (), view.producer(tensor, "MatMul", "Gemm", "Add")
    op = None if source is None else _writer(view, source)
    size = split[-1] if len(split) == 4 else None
    known = len(whole) == 3 and whole[:2] == split[:2] and None not in whole
    fits = op is not None and op.channels == channels and isinstance(size, int) and size and channels % size == 0
    return op if known and fits else None


def find_quantized_groups(proto: ModelLike, plan: Plan) -> tuple[Group, ...]:
    """The groups whose activation and weights the plan quantizes, all of them, where 1/s has a place to go."""
    return tuple(group for group, *_ in _find_specs(View(proto), plan))


def _find_specs(view: View, plan: Plan) -> Iterator[tuple[Group, QuantSpec | None, tuple[SitePlan, ...]]]:
    """Each such group, the spec of its activation, None where it stays float, and the sites of its weights."""
    paired = frozenset(site.site for site in plan.sites if isinstance(site.site, TensorId))
    made = frozenset(site.site for site in plan.sites if site.role is Role.OUTPUT)
    by_edge = {(site.role, edge): site for site in plan.sites for edge in site.find_readers(view.index)}
    for group in find_groups(view):
        # A Mul behind a pair, or behind integers that are merely moved, would be a float kernel between two that are
        # not.
        if group.home is None and (group.tensor in made or _from_integers(view, group.tensor, paired)):
            continue
        edges = [view.edge(op.node, 0) for op in group.readers]
        read = [by_edge.get((Role.ACTIVATION, edge)) or by_edge.get((Role.OUTPUT, edge)) for edge in edges]
        weights = [by_edge.get((Role.WEIGHT, view.edge(op.node, 1))) for op in group.readers]
        held = tuple(site for site in weights if site is not None and not site.spec.is_float)
        specs = {None if site is None else site.spec for site in read}
        spec = next(iter(specs))
        if spec is not None:
            # One scale meets all channels of the activation; blocks of a weight have scales of their own already.
            held = tuple(site for site in held if not isinstance(site.spec.granularity, PerBlock))
        plain = spec is None or (isinstance(spec.granularity, PerTensor) and not spec.is_float)
        if len(specs) == 1 and plain and len(held) == len(weights):
            yield group, spec, held


def smoothing_factors(proto: ModelLike, plan: Plan, seen: Mapping[TensorId, Seen]) -> tuple[Factors, tuple[str, ...]]:
    """s by tensor for those of the plan's groups whose outputs gain by it, and the choices and reasons of all.

    plan: without numbers; it says which tensors are quantized and how. seen: of each group's tensor.
    """
    factors: dict[TensorId, NDArray[np.float32]] = {}
    lines = []
    for group, spec, sites in _find_specs(View(proto), plan):
        values = seen.get(group.tensor)
        if values is None:
            continue
        # Weights are turned to [inputs, outputs], and the order of their sums with them.
        readers = tuple(
            Reader(
                op.weight if op.axis == 1 else op.weight.T,
                along_outputs(site.spec),
                ((1, 0),) if site.sum_orders else (),
            )
            for op, site in zip(group.readers, sites, strict=True)
        )
        if spec is None:
            s, alpha, error, plain = awq_core.search_exponent(values.rows, readers)
        else:
            s, alpha, error, plain = search_alpha(values, readers, spec)
        gain = 10.0 * np.log10(max(plain, 1e-30) / max(error, 1e-30))
        kept = error < plain * (MUL if group.home is None else FREE)
        home = group.home.node if isinstance(group.home, Linear) else group.home
        how = "one Mul" if home is None else f"in {home.name}"
        verdict = f"smoothed, {how}" if kept else f"left, {how} does not pay"
        lines.append(f"{group.tensor.name}: {verdict} (alpha {alpha}: {gain:+.1f} dB at the layer)")
        if kept:
            factors[group.tensor] = s
        release_pages(*(op.weight for op in group.readers))
    return factors, tuple(lines)


# Integers pass through these.
_MOVING = ("Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "MaxPool")


def _from_integers(view: View, tensor: TensorId, paired: frozenset[object]) -> bool:
    """True when the tensor merely rearranges one that has a pair of its own."""
    node = view.producer(tensor, *_MOVING)
    while node is not None:
        source = view.tensor(node, 0)
        if source in paired:
            return True
        node = view.producer(source, *_MOVING)
    return False


def write_smoothing(proto: ModelLike, factors: Factors) -> ModelLike:
    """The model with these tensors divided by their factors on the way to the layers, whose weights are multiplied.

    Raises PlanError for a tensor that no layer reads so, or with another number of channels.
    """
    if not factors:
        return proto
    view = View(proto)
    groups = {group.tensor: group for group in find_groups(view)}
    for tensor, s in factors.items():
        if tensor not in groups or groups[tensor].channels != s.size:
            raise PlanError(
                str(tensor), "feeds no layers that could be smoothed this way", "plan the model again", code="Q404"
            )
    # A linear operator in front of one group may itself be a layer of another: both factors meet in its weight.
    # Factors, not products: weights are multiplied one after another, so that one of them is in memory.
    weights: dict[str, tuple[Linear, list[NDArray[np.float64]]]] = {}
    edit = Edit(proto)
    for tensor, s in factors.items():
        group, wide = groups[tensor], s.astype(np.float64)
        _divide(view, edit, group, wide, weights)
        for op in group.readers:
            weights.setdefault(op.node.name, (op, []))[1].append(wide[:, None] if op.axis == 1 else wide[None, :])
    for op, turns in weights.values():
        value = op.weight.astype(np.float64)
        for turned in turns:
            value *= turned
        edit.set_rounded(view, view.edge(op.node, 1), value, op.weight.dtype)
        release_pages(op.weight)
    return edit.export()


def _divide(
    view: View,
    edit: Edit,
    group: Group,
    s: NDArray[np.float64],
    weights: dict[str, tuple[Linear, list[NDArray[np.float64]]]],
) -> None:
    """X/s: in the node that writes X, or behind it."""
    home = group.home
    if home is None:
        first = group.readers[0].node
        inverse = edit.constant(first.scope, f"{group.tensor.name}/smoothing", (1.0 / s).astype(np.float32))
        made = edit.insert_before(first, "Mul", (group.tensor.name, inverse), {}, f"{group.tensor.name}/smoothed")
        for op in group.readers:
            edit.read(view.edge(op.node, 0), made)
        return
    if isinstance(home, Linear):
        turned = 1.0 / s[None, :] if home.axis == 1 else 1.0 / s[:, None]
        weights.setdefault(home.node.name, (home, []))[1].append(turned)
        spots = [home.bias_at] if home.bias_at is not None else []
    else:
        spots = [(home, 1), (home, 2)]
    for node, k in spots:
        value = view.constant(node, k)
        if value is not None:
            edit.set_constant(view, view.edge(node, k), (value.astype(np.float64) / s).astype(value.dtype))
