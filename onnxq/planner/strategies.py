"""Candidate placements that are timed: a handful of named ways to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnxq.planner.balance import find_balance
from onnxq.planner.choose import BY_PERSON, choose_all, decide_sides
from onnxq.planner.cut import CutProblem
from onnxq.planner.operators import KEPT, QuantizableOp, QuantizableOps
from onnxq.planner.problem import PlacementProblem

Test = Callable[[QuantizableOps, QuantizableOp], bool]
# Channels on both sides; below, a 1x1 convolution has little arithmetic beside the elements its pairs pass over.
_LARGE = 64


def _is_large_pointwise(ops: QuantizableOps, op: QuantizableOp) -> bool:
    weight = ops.candidate(op.node).shape(1)
    if op.node.op_type != "Conv":
        return True
    return weight is not None and all(k == 1 for k in weight[2:]) and min(weight[:2]) >= _LARGE


def _is_grouped(_: QuantizableOps, op: QuantizableOp) -> bool:
    return op.node.op_type == "Conv" and int(op.node.attrs.get("group", 1)) > 1


def _has_one_channel(ops: QuantizableOps, op: QuantizableOp) -> bool:
    weight = ops.candidate(op.node).shape(1)
    return op.node.op_type == "Conv" and weight is not None and weight[1] == 1


def _has_tiny_map(ops: QuantizableOps, op: QuantizableOp) -> bool:
    shape = ops.candidate(op.node).output_shape()
    return op.node.op_type == "Conv" and shape is not None and all(dim == 1 for dim in shape[2:])


def _is_behind(count: int) -> Test:
    """True for all but the first operators that compute: those with the largest maps and the fewest channels."""
    return lambda ops, op: op.name not in [other.name for other in ops if other.rule.compute][:count]


# Operators that compute and run in integers, by the name of the candidate; the rest follows by cut. A handful, because
# every candidate is a model that is built and timed.
STRATEGIES: Mapping[str, Test] = {
    "all": lambda _ops, _op: True,
    "all-but-stem": _is_behind(1),
    "all-but-first-two": _is_behind(2),
    "all-but-first-three": _is_behind(3),
    "no-one-channel-input": lambda ops, op: not _has_one_channel(ops, op),
    "no-grouped-no-gates": lambda ops, op: not (_is_grouped(ops, op) or _has_tiny_map(ops, op)),
    "large-pointwise-and-linear": lambda ops, op: _is_large_pointwise(ops, op) and not _has_tiny_map(ops, op),
    "no-recurrent": lambda _ops, op: op.node.op_type != "LSTM",
    "linear-only": lambda _ops, op: op.node.op_type in ("MatMul", "Gemm"),
}


def list_strategies(problem: PlacementProblem) -> Mapping[str, frozenset[str]]:
    """Named candidate placements, without doubles, the deterministic one ("rules") and "none" among them.

    The person's decisions hold in all of them; the exclusion rules do not: there the clock decides.
    """
    if not problem.engine.costs:
        return _list_by_rules(problem)
    ops, refused = problem.ops, problem.refused
    sides, reasons = decide_sides(problem)
    cut = CutProblem(ops, apart=problem.apart)
    rules = find_balance(cut, sides, problem.config.cpu)
    found: dict[str, frozenset[str]] = {"rules": rules.chosen, "none": frozenset()}
    # A person's decisions hold whatever the clock says, and so do the losses of numbers, which it does not see.
    held = {
        name: side
        for name, side in sides.items()
        if name in refused or name not in reasons or reasons[name].rule in (BY_PERSON, "log-front-end", KEPT)
    }
    for name, quantizes in STRATEGIES.items():
        fixed = {op.name: quantizes(ops, op) for op in ops if op.rule.compute}
        chosen = cut.minimum_cut(rules.costs, {**fixed, **held})
        if chosen not in found.values():
            found[name] = chosen
    return found


def _list_by_rules(problem: PlacementProblem) -> Mapping[str, frozenset[str]]:
    """The candidates of an engine whose rules quantize all that computes: with fewer operators, and with attention."""
    ops = problem.ops
    rules = choose_all(problem, attention=False).chosen
    found: dict[str, frozenset[str]] = {"rules": rules, "none": frozenset()}
    wanted = {}
    if problem.config.attention != "float":
        wanted["attention"] = choose_all(problem, attention=True).chosen
    for name, quantizes in STRATEGIES.items():
        left = {op.name for op in ops if not quantizes(ops, op)}
        wanted[name] = choose_all(problem, attention=False, without=left).chosen
    for name, chosen in wanted.items():
        if chosen not in found.values():
            found[name] = chosen
    return found
