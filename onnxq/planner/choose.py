"""Which operators to run in integers: by rules and predicted time, by rules alone, weights alone, or by measurement."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from onnxq.backends.surroundings import SENSITIVE
from onnxq.config import Rule, change_fields
from onnxq.graph.scopes import walk_from
from onnxq.planner.cut import Balance, CutProblem, Sides, find_balance
from onnxq.planner.problem import KEPT, PlacementProblem, QuantizableOp, QuantizableOps
from onnxq.sites import Caution, Cautions, LeftFloat, Names, NameSet, Refusal, Role, Unquantized

# The rule that reasons name where a rule of the configuration decides.
BY_PERSON = "configuration"
_FORCE = "force what it reads as well, or take `quantize: true` from its rule"
# What a rule that keeps noise out may cost. The stem of a ResNet-18 takes 12 to 25 % of the time of a file in which it
# alone is float, and its integers 1 of 34 dB; that of an EfficientNet-Lite0 takes 2 to 6 %.
_MOST_FOR_PRECISION = 1.05
# The rule that keeps a weight in one copy, and its reason.
COPY = "one-copy"
_COPIED = "a loop computes on its weight in float, many times as often: in integers the file would hold it twice"


@dataclass(frozen=True)
class Choice:
    """The operators that run in integers, why the others do not, and the warnings."""

    chosen: NameSet
    reasons: tuple[Unquantized, ...] = ()
    warnings: Cautions = ()


@dataclass(frozen=True)
class Forced:
    """The operators that nothing but rules with `quantize: true` puts into integers.

    slowdown: the predicted time of a run over that without these rules, on the kind of CPU that loses most.
    """

    names: Names
    slowdown: float


def weigh_forced(problem: PlacementProblem) -> Forced | None:
    """The operators that rules force, and their cost; None where there are none, or where no times are predicted."""
    config = problem.config
    if not problem.engine.costs or not any(rule.set.quantize for rule in config.rules):
        return None
    # The same rules without force: what prices alone would choose.
    free = [
        change_fields(rule, set=change_fields(rule.set, quantize=False)) for rule in config.rules
    ]
    config = change_fields(config, rules=tuple(free))
    without = replace(problem, config=config, requests=replace(problem.requests, config=config))
    chosen = choose_ops(problem).chosen
    before = choose_ops(without).chosen
    names = tuple(op.name for op in problem.ops if op.name in chosen - before)
    slowdown = compare_times(predict_times(problem, before), predict_times(problem, chosen))
    return Forced(names, slowdown) if names else None


def predict_times(problem: PlacementProblem, chosen: NameSet) -> list[float]:
    """Microseconds of the network on each kind of CPU, with these operators in integers."""
    cut = CutProblem.of_placement(problem)
    return [cut.time_us(cut.compute_costs(kind), chosen) for kind in problem.costs.values()]


def compare_times(before: list[float], after: list[float]) -> float:
    """The time after over that before, on the kind of CPU that loses most."""
    return max(new / old if old else 1.0 for old, new in zip(before, after, strict=True))


def choose_ops(problem: PlacementProblem, *, attention: bool = False, sized: bool = True) -> Choice:
    """The choice of the deterministic rules.

    attention: with the rules for it, where the target has them. sized: the shapes are those of the deployment; False:
    every operator that computes is worth its integers, whatever its size.
    """
    if problem.config.mode == "float":
        return Choice(frozenset())
    if problem.config.mode == "weight-only":
        return choose_weights(problem)
    if problem.engine.costs:
        return choose_by_cost(problem, sized=sized)
    return choose_all(problem, attention=attention)


def choose_by_cost(problem: PlacementProblem, *, sized: bool) -> Choice:
    """Exclusion rules, then the person's rules, then the minimum cut, on the times of the kinds of CPU asked for."""
    ops = problem.ops
    sides, reasons = decide_sides(problem)
    if not sized:
        # Sizes of made-up inputs say nothing of those that the network will get.
        sides = {**{op.name: True for op in ops if op.rule.compute}, **sides}
    cut = CutProblem.of_placement(problem)
    balance = _balance(problem, cut, sides)
    yielding = {name for name, why in reasons.items() if why.rule in problem.engine.yielding}
    if sized and yielding:
        rest = {name: side for name, side in sides.items() if name not in yielding}
        freed = _balance(problem, cut, rest)
        before, after = (
            [forecast.placed_us for forecast in each.forecasts] for each in (balance, freed)
        )
        if compare_times(before, after) * _MOST_FOR_PRECISION < 1:
            balance = freed
        for name in yielding & balance.chosen:
            del reasons[name]
    # In front of a loop whose body is not worth integers; the person may have a weight twice.
    free = balance.chosen - sides.keys()
    copied = _list_copied(ops, (op for op in ops if op.name in free), balance.chosen)
    if copied:
        balance = _balance(problem, cut, {**sides, **dict.fromkeys(copied, False)})
        reasons |= copied
    for op in ops:
        if op.rule.compute and op.name not in balance.chosen and op.name not in reasons:
            cost = balance.costs.ops[op.name]
            cause = "at this size its int8 kernel is predicted no faster than the float one"
            if cost.int8_us < cost.float_us:
                cause = "quantizing what it reads and dequantizing what it writes costs more than it saves"
            reasons[op.name] = LeftFloat(op.name, f"int8 would not pay: {cause}", "size")
    warnings = balance.make_warnings() + _warn_of_transposes(problem, balance.chosen)
    return Choice(balance.chosen, _sort_reasons(ops, reasons), warnings)


def _warn_of_transposes(problem: PlacementProblem, chosen: NameSet) -> Cautions:
    """A warning where a product of matrices is slower than one of fixed sizes would be."""
    # A file for one kind alone is the best that it can have.
    if problem.config.cpu != "any" or not any(
        op.name in chosen and op.rule.pointwise and problem.ops.index.find_sizes(op.out) is None
        for op in problem.ops
    ):
        return ()
    text = (
        "matrices are multiplied more slowly on some CPUs while sizes change from run to run: set those of the inputs "
        "(`fix`), or name the kind of CPU that the model runs on (`cpu`)"
    )
    return (Caution("W103", text),)


def _balance(problem: PlacementProblem, cut: CutProblem, sides: Sides) -> Balance:
    return find_balance(cut, sides, problem.costs, problem.engine.weights)


def choose_all(
    problem: PlacementProblem, *, attention: bool, without: Collection[str] = frozenset()
) -> Choice:
    """All operators that compute, but those an exclusion rule or the person leaves float; opt-in rules where forced.

    attention: the rules for it are on. without: names of others to leave float, but those the person forces.
    An operator whose kernel needs others goes with them or not at all. Then the followers: those whose rule says so,
    and those that join pairs which are there.
    """
    ops = problem.ops
    sides, reasons = decide_sides(problem)
    # Of engines that take a whole graph: what stands between operators that an exclusion keeps float goes with them.
    kept = (BY_PERSON, *(problem.engine.exclusions if problem.engine.whole else ()))
    for op in ops:
        # A follower goes with the operators around it, so forcing one means nothing; the target and the person may
        # keep it float.
        reason = reasons.get(op.name)
        left_float = op.name in problem.refused or (reason is not None and reason.rule in kept)
        if not (op.rule.compute or left_float or op.name in ops.complete):
            sides.pop(op.name, None)
            reasons.pop(op.name, None)
    chosen = set(ops.complete)
    for op in ops:
        side = sides.get(op.name)
        if op.rule.opt_in and side is None and not (attention and op.rule.attention):
            reasons[op.name] = LeftFloat(op.name, op.rule.opt_in, op.rule.name, "F104")
        elif side is not False and op.rule.compute and (side or op.name not in without):
            chosen.add(op.name)
    _drop_incomplete(ops, chosen, reasons)
    for op in ops:
        free = not (op.rule.compute or op.rule.joins or sides.get(op.name) is False)
        # In the order in which they run: one follower may be why the next one follows.
        if free and op.rule.follow(op.candidate, frozenset(chosen)):
            chosen.add(op.name)
    # Followers with a pair behind them and one in front: their inputs and outputs then have one scale.
    paired = {tensor for op in ops if op.name in chosen for _, tensor in op.data}
    for op in ops:
        between = op.out in paired and any(tensor in paired for _, tensor in op.data)
        if between and op.rule.joins and sides.get(op.name) is not False:
            chosen.add(op.name)
    if problem.engine.whole:
        for name in chosen - _list_between_integers(ops, chosen):
            chosen.remove(name)
            reasons[name] = LeftFloat(
                name, "moves values between operators in float", ops.by_name[name].rule.name, "F103"
            )
    return Choice(frozenset(chosen), _sort_reasons(ops, reasons))


def _list_between_integers(ops: QuantizableOps, chosen: Collection[str]) -> set[str]:
    """The operators but those that move values between float ones: pairs around these would only round."""

    def list_moves(name: str) -> Iterable[str]:
        op = ops.by_name[name]
        makers = (ops.by_out.get(tensor) for _, tensor in op.data)
        around = (*filter(None, makers), *ops.list_readers(op.out))
        moves = (other for other in around if other.rule.shares)
        return [move.name for move in moves if move.name in chosen]

    return walk_from((name for name in chosen if not ops.by_name[name].rule.shares), list_moves)


def _sort_reasons(
    ops: QuantizableOps, reasons: Mapping[str, Unquantized]
) -> tuple[Unquantized, ...]:
    """The reasons in the order in which the operators run."""
    return tuple(reasons[op.name] for op in ops if op.name in reasons)


def choose_weights(problem: PlacementProblem) -> Choice:
    """Weight-only mode: every weight the target can read packed, but those a rule leaves float."""
    ops = problem.ops
    reasons = []
    chosen = set()
    copied = _list_copied(ops, ops, ops.by_name)
    for op in ops:
        weights = [(role, tensor) for role, tensor in op.roles if role.is_weight]
        if not weights or op.name in ops.complete | ops.existing.weighted:
            continue
        rule = problem.requests.find_float_rule(op.node, weights)
        if op.name in problem.refused:
            reasons.append(problem.refused[op.name])
        elif rule is not None:
            reasons.append(leave_by_rule(op.name, rule))
        elif op.name in copied:
            reasons.append(copied[op.name])
        else:
            chosen.add(op.name)
    return Choice(frozenset(chosen), tuple(reasons))


def decide_sides(problem: PlacementProblem) -> tuple[dict[str, bool], dict[str, Unquantized]]:
    """Operators whose side is given: those that rules and the person keep float, those that the person forces."""
    reasons: dict[str, Unquantized] = {**_find_excluded(problem)}
    sides = dict.fromkeys(reasons, False)
    for op in problem.ops:
        decided = _decide_side(problem, op, sides)
        if decided is not None:
            sides[op.name], reason = decided
            reasons.pop(op.name, None)
            reasons |= {} if reason is None else {op.name: reason}
    return sides, reasons


def _find_excluded(problem: PlacementProblem) -> dict[str, LeftFloat]:
    """Operator name -> the reason of the first rule of the target that keeps it float."""
    ops = problem.ops
    excluded = _list_copied(ops, ops, ops.by_name)
    for op in ops:
        # The operator whose closing pair stands on the data, with an activation between.
        maker = ops.by_out.get(op.data[0][1]) if op.data else None
        made = None if maker is None else maker.candidate
        for name, explain in problem.engine.exclusions.items():
            if reason := explain(op.candidate, made):
                excluded[op.name] = LeftFloat(op.name, reason, name, "F103")
                break
    return excluded


def _list_copied(
    ops: QuantizableOps, among: Iterable[QuantizableOp], quantized: Collection[str]
) -> dict[str, LeftFloat]:
    """Operators of which a loop reads a weight too, in a node that is not one of those quantized, with the reason.

    An exporter that takes the first step out of a loop leaves its operators behind: they run once beside the many
    times of the body, and a second, integer copy of their weights makes the file larger than the float model's.
    """
    return {
        op.name: LeftFloat(op.name, _COPIED, COPY, "F103")
        for op in among
        for role, tensor in op.roles
        if role.is_weight
        for node in ops.index.readers(tensor)
        if node.name not in quantized
        if ops.index.is_looped(node.scope) or node.op_type in ("Loop", "Scan")
    }


def _decide_side(
    problem: PlacementProblem, op: QuantizableOp, sides: Sides
) -> tuple[bool, Unquantized | None] | None:
    """The side of one operator, and the reason for people; None where neither pairs nor the person decide.

    sides: of the operators before it. In the order of precedence: pairs that the model came with, the target's
    refusals, rules for float, rules that force.
    """
    name = op.name
    ops = problem.ops
    requests = problem.requests
    roles = op.roles
    closing = [(Role.ACTIVATION, op.out)] if op.closes_with_pair(problem.config.bias) else []
    rule = requests.find_float_rule(op.node, roles + closing)
    if name in ops.complete:
        if rule is None:
            return True, None
        reason = (
            f"already quantized in the model, and kept so, though {rule.describe()} leaves it float"
        )
        return True, Refusal(name, reason, "quantize the float model", KEPT, "R115")
    reason = ""
    if name in ops.partial:
        reason = f"its weight is already quantized in the model, {ops.partial[name]}: kept as it is"
    elif op.out in ops.existing.by_tensor and ops.index.is_output(op.out):
        reason = "the model gives its result out in float beside a pair that is kept"
    if reason:
        return False, LeftFloat(name, reason, KEPT, "F107")
    if name in problem.refused:
        return False, problem.refused[name]
    if rule is not None:
        return False, leave_by_rule(op.name, rule)
    if not requests.is_forced(op.node, roles):
        return None
    # Who names an operator gets pairs for its sake. Moving bytes makes none: it would be nothing but their noise.
    alone = op.rule.compute or (
        not op.rule.shares and requests.is_forced(op.node, roles, named=True)
    )
    if alone or _is_fed(ops, op, sides):
        return True, None
    reason = f"a {op.node.op_type} is quantized only between quantized nodes, and what it reads stays float"
    return False, Refusal(name, reason, _FORCE, op.rule.name, "R105")


def leave_by_rule(name: str, rule: Rule) -> LeftFloat:
    """The entry of a node that a rule of the configuration leaves float."""
    return LeftFloat(name, f"left float by {rule.describe()}", BY_PERSON, "F101")


def _is_fed(ops: QuantizableOps, op: QuantizableOp, sides: Sides) -> bool:
    """Every tensor it reads can have a pair that is not there for its sake."""
    for _, tensor in op.data:
        beside = [
            ops.find_integer_maker(tensor),
            *(reader for reader in ops.list_readers(tensor) if reader.rule.compute),
        ]
        if all(other is None or sides.get(other.name) is False for other in beside):
            return False
    return True


def _drop_incomplete(
    ops: QuantizableOps, chosen: set[str], reasons: dict[str, Unquantized]
) -> None:
    """Drop operators that need others which are not chosen, until nothing changes."""
    while True:
        # All of a round at once: partners need each other, and the first to go would be the other's reason.
        broken = {}
        for op in ops:
            missing = [name for name in op.rule.together(op.candidate) if name not in chosen]
            if op.name in chosen - ops.complete and missing:
                reason = f"its kernel exists only together with {missing[0]}, which stays float"
                broken[op.name] = Refusal(
                    op.name, reason, f"force {missing[0]} as well", op.rule.name, "R105"
                )
        if not broken:
            return
        reasons.update(broken)
        chosen.difference_update(broken)


Test = Callable[[QuantizableOps, QuantizableOp], bool]
# Channels on both sides; below, a 1x1 convolution has little arithmetic beside the elements its pairs pass over.
_LARGE = 64


def _is_large_pointwise(op: QuantizableOp) -> bool:
    weight = op.candidate.shape(1)
    if op.node.op_type != "Conv":
        return True
    return weight is not None and all(k == 1 for k in weight[2:]) and min(weight[:2]) >= _LARGE


def _has_one_channel(op: QuantizableOp) -> bool:
    weight = op.candidate.shape(1)
    return op.node.op_type == "Conv" and weight is not None and weight[1] == 1


def _has_tiny_map(op: QuantizableOp) -> bool:
    shape = op.candidate.output_shape()
    return op.node.op_type == "Conv" and shape is not None and all(dim == 1 for dim in shape[2:])


def _is_behind(count: float) -> Test:
    """True for all but the first operators that compute: those with the largest maps and the fewest channels.

    count: of them; below 1 their share.
    """

    def is_behind(ops: QuantizableOps, op: QuantizableOp) -> bool:
        names = [other.name for other in ops if other.rule.compute]
        return op.name not in names[: int(count if count >= 1 else count * len(names))]

    return is_behind


# Operators that compute and run in integers, by the name of the candidate; the rest follows by cut. A handful, because
# every candidate is a model that is built and timed.
STRATEGIES: Mapping[str, Test] = {
    "all": lambda _ops, _op: True,
    "all-but-stem": _is_behind(1),
    "all-but-first-two": _is_behind(2),
    "all-but-first-three": _is_behind(3),
    # Kernels whose integers pay on small maps alone.
    "last-two-thirds": _is_behind(1 / 3),
    "last-half": _is_behind(1 / 2),
    "no-one-channel-input": lambda _ops, op: not _has_one_channel(op),
    "no-grouped-no-gates": lambda _ops, op: (
        not ((op.node.op_type == "Conv" and op.node.groups > 1) or _has_tiny_map(op))
    ),
    "large-pointwise-and-linear": lambda _ops, op: (
        _is_large_pointwise(op) and not _has_tiny_map(op)
    ),
    "no-recurrent": lambda _ops, op: op.node.op_type != "LSTM",
    "linear-only": lambda _ops, op: op.node.op_type in ("MatMul", "Gemm"),
}


def list_strategies(problem: PlacementProblem) -> Mapping[str, NameSet]:
    """Named candidate placements, without doubles, the deterministic one ("rules") and "none" among them.

    The person's decisions hold in all of them; the exclusion rules do not: there the clock decides.
    """
    ops = problem.ops
    wanted = {}
    if not problem.engine.costs:
        # All that computes is quantized by the rules: with fewer operators, and with attention.
        rules = choose_all(problem, attention=False).chosen
        if problem.config.attention != "float":
            wanted["attention"] = choose_all(problem, attention=True).chosen
        for name, quantizes in STRATEGIES.items():
            without = {op.name for op in ops if not quantizes(ops, op)}
            wanted[name] = choose_all(problem, attention=False, without=without).chosen
        return _drop_doubles(rules, wanted)
    sides, reasons = decide_sides(problem)
    cut = CutProblem(ops, apart=problem.apart)
    balance = _balance(problem, cut, sides)
    # A person's decisions hold whatever the clock says, and so do the losses of numbers, which it does not see.
    lasting = (BY_PERSON, *SENSITIVE, KEPT)
    decided = {
        name: side
        for name, side in sides.items()
        if name in problem.refused or name not in reasons or reasons[name].rule in lasting
    }
    for name, quantizes in STRATEGIES.items():
        fixed = {op.name: quantizes(ops, op) for op in ops if op.rule.compute}
        wanted[name] = cut.minimum_cut(balance.costs, fixed | decided)
    return _drop_doubles(balance.chosen, wanted)


def _drop_doubles(rules: NameSet, wanted: Mapping[str, NameSet]) -> dict[str, NameSet]:
    placements = {"rules": rules, "none": frozenset()}
    for name, chosen in wanted.items():
        # What is placed alike would be timed twice.
        if chosen not in placements.values():
            placements[name] = chosen
    return placements
