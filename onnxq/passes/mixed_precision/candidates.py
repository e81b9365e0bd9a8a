"""Candidates for promotion, and the plan that comes of it: operators to float, or activations to uint16.

A pair goes only where the operators on both sides of it leave integers, so promoting a tensor means all operators that
make or read it. Which others no longer pay then (or are left without a partner) is the planner's business: every
promotion is planned anew with its rules, and its cost and gain are read off the plan.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from onnxq.errors import CalibrationError
from onnxq.evaluation.compare import FloatOutputs, ModelErrors
from onnxq.evaluation.metric import FLOAT, UINT16
from onnxq.evaluation.toggled import Setting, Switch, ToggledModel, measure_settings, toggle_model
from onnxq.graph import GraphIndex
from onnxq.passes.assembly import write_pairs
from onnxq.passes.base import SampledContext
from onnxq.passes.mixed_precision.float_parts import PLAIN
from onnxq.passes.state import PlacedState
from onnxq.plan import BiasPlan, PlacementMethod, Plan, SitePlan
from onnxq.planner import Choice, OnnxPlacement, bind_sums, list_weighted
from onnxq.planner.cut import CutProblem, PlacementCosts
from onnxq.sites import Edge, LeftFloat, Names, NameSet, Refusal, Role, Site, Unquantized
from onnxq.spec import QuantSpec

# The cost of all operators beside that of all time: one that gains no time costs something, since int8 was asked for.
LEAST_COST = 0.1
# From here on QuantizeLinear writes 16 bits.
_OPSET_16 = 21
# Names of operators, or for uint16 of sites.
Keys = NameSet


@dataclass(frozen=True, eq=False)
class Ways:
    """How a calibrated plan can be promoted. attention: its rules are on. to: "float" or "uint16".

    reason: why operators that become float do; refusals: of those that have one of their own, by name.
    """

    problem: OnnxPlacement
    plan: Plan
    to: str = FLOAT
    attention: bool = False
    reason: str = "promoted to float: it cost the outputs most"
    refusals: Mapping[str, Unquantized] = field(default_factory=dict)

    def list_groups(self) -> dict[str, Keys]:
        """By name, the keys that are promoted together: operators, or for uint16 sites that share a scale."""
        if self.to == FLOAT:
            return {name: frozenset([name]) for name in self._computing}
        groups: dict[str, Keys] = {}
        for site in self.plan.sites:
            if self._widens(site):
                keys = frozenset(
                    other.name
                    for other in self.plan.sites
                    if other is site or (site.group and other.group == site.group)
                )
                # Named by the first in order, so that the name does not depend on which site came
                # up first.
                groups.setdefault(min(keys), keys)
        return groups

    @cached_property
    def _computing(self) -> Names:
        """Operators that compute in integers now."""
        return list_quantized_ops(self.problem, self.plan)

    def list_operators(self, site: SitePlan) -> list[str]:
        """The operators that would read or write the site's integers."""
        if isinstance(site.site, Edge):
            return [site.site.node]
        ops = self.problem.ops
        tensor = site.quantized_tensor
        makers = filter(None, [ops.by_out.get(tensor)])
        return [op.name for op in (*makers, *ops.list_readers(tensor))]

    def _widens(self, site: SitePlan) -> bool:
        return (
            site.role is Role.ACTIVATION
            and site.spec.bits <= 8
            and not (site.spec.is_float or site.spec.dynamic)
        )

    def promote_keys(self, keys: Keys) -> Plan:
        """The plan with these promoted; sites that are as before keep their qparams."""
        if not keys:
            return self.plan
        if self.to == UINT16:
            return self._widen_sites(keys)
        problem = self.leave_float(keys)
        how = self.plan.placement
        if how is not None and how.method is PlacementMethod.MEASURED:
            # The clock has decided, and no rule decides again.
            chosen = self.problem.candidates()[how.candidate].difference(keys)
            measured = (left for left in self.plan.left_float if left.rule == "measured")
            reasons = (*measured, *(problem.refused[name] for name in sorted(keys)))
            plan = problem.placed(Choice(chosen, reasons), how)
        else:
            plan = problem.default(attention=self.attention)
        return carry_qparams(self.plan, plan, self.problem.index)

    def promote_steadily(self, keys: Keys) -> Plan:
        """`promote_keys`, and no operator that is float now computes in integers: the toggled model could not show it.

        Beside operators that have become float another may pay that did not before.
        """
        plan = self.promote_keys(keys)
        grown = frozenset(list_quantized_ops(self.problem, plan)).difference(self._computing)
        return self.promote_keys(keys | grown) if grown else plan

    def leave_float(self, keys: Keys) -> OnnxPlacement:
        """The placement problem with these operators left float."""
        promoted = {name: LeftFloat(name, self.reason, "promoted", "F106") for name in sorted(keys)}
        # Those that are float already stay so for the reason that they have.
        promoted |= {left.subject: left for left in self.plan.left_float if left.subject in keys}
        refused = {name: self.refusals.get(name, left) for name, left in promoted.items()}
        return replace_problem(self.problem, refused={**self.problem.refused, **refused})

    def _widen_sites(self, keys: Keys) -> Plan:
        moved = {site.site for site in self.plan.sites if self._widens(site) and site.name in keys}
        # Finer inputs make finer biases, which must not overflow: weights that only calibration scaled are scaled anew.
        scaled = self.plan.list_scaled_for(moved)
        changed = {}
        for site in self.plan.sites:
            if site.site in moved:
                # The old spec names a storage of 8 bits.
                spec = QuantSpec(bits=16, signed=site.spec.signed, symmetric=site.spec.symmetric)
                changed[site.site] = replace(site, spec=spec, qparams=None)
            # Integers that rounding chose keep the scale that they were chosen for.
            elif site.site in scaled and site.values is None:
                changed[site.site] = replace(site, qparams=None)
        wider = replace(self.plan.replace_sites(changed), opset=max(self.plan.opset, _OPSET_16))
        return bind_sums(wider, self.problem.index)

    def measure_cost(self, plan: Plan) -> float:
        """The cost of what `plan` promotes: time, bytes of weights and operators, as shares of what there is to lose.

        Time is that predicted for the kinds of CPU; where a target has no such costs, the work that leaves integers.
        """
        lost = self.list_promoted(plan)
        # ONNX Runtime's CPU has no kernels of 16 bits, so every operator loses its own.
        if self.to != FLOAT:
            return len(lost)
        chosen = find_integer_ops(self.problem, plan)
        # As a share of float's time, kinds of CPU weigh the same however fast they are.
        shares = [(clock(chosen) - before) / total for clock, before, total in self._clocks]
        moved = self.plan.by_site.keys() - plan.by_site.keys()
        weights = sum(size for site, size in self._sizes.items() if site in moved) / (
            sum(self._sizes.values()) or 1
        )
        ops = LEAST_COST * len(lost) / max(len(self._computing), 1)
        # A promotion that saves time costs none; below 0 it would outweigh what it does to the
        # file's size.
        return max(statistics.fmean(shares), 0.0) + weights + ops

    @cached_property
    def _clocks(self) -> Sequence[tuple[Callable[[NameSet], float], float, float]]:
        """For each kind of CPU: microseconds by the operators in integers; those of the plan, and of float."""
        problem = self.problem
        clocks = []
        cut = CutProblem.of_placement(problem)
        for kind in problem.costs.values():
            costs = cut.compute_costs(kind)
            clock = partial(cut.time_us if problem.engine.costs else _sum_float_times, costs)
            before = clock(find_integer_ops(problem, self.plan))
            # A network that takes no time at all by the tables must not divide by 0.
            clocks.append((clock, before, cut.time_us(costs, frozenset()) or 1.0))
        return clocks

    @cached_property
    def _sizes(self) -> dict[Site, int]:
        """Elements of each quantized weight."""
        index = self.problem.index
        return {
            site.site: math.prod(index.find_sizes(site.tensor) or ())
            for site in self.plan.sites
            if site.role.is_weight and site.tensor is not None
        }

    def choose_switches(self, toggled: ToggledModel, plan: Plan) -> Setting:
        """The switches that stay on in the toggled model of `self.plan` when `plan` takes its place."""
        specs = {site.site: site.spec for site in self.plan.sites}
        known = set(map(str, specs))
        same = {site.name for site in plan.sites if specs.get(site.site) == site.spec}
        computing = set(list_quantized_ops(self.problem, plan))
        # A corrected bias has no site: it goes with its operator.
        return frozenset(
            switch
            for switch in toggled.switches
            if switch.site in same
            or (switch.site not in known and computing.intersection(switch.readers))
        )

    def list_promoted(self, plan: Plan) -> Names:
        """Operators that compute in integers now and would not with `plan`; for uint16 those that read a wide one."""
        if self.to == FLOAT:
            after = set(list_quantized_ops(self.problem, plan))
            return tuple(name for name in self._computing if name not in after)
        specs = {site.site: site.spec for site in self.plan.sites}
        wide = [site for site in plan.sites if site.spec != specs.get(site.site)]
        readers = {edge.node for site in wide for edge in site.find_readers(self.problem.ops.index)}
        return tuple(name for name in self._computing if name in readers)


def replace_problem(problem: OnnxPlacement, **changes: Any) -> OnnxPlacement:
    """The placement problem with some fields changed.

    The model is the same, so its structural ids are; they take longer than planning does.
    """
    changed = replace(problem, **changes)
    vars(changed)["ids"] = problem.ids
    return changed


def list_quantized_ops(problem: OnnxPlacement, plan: Plan) -> Names:
    """Computing operators whose weight, or whose every activation, is quantized, in the order they run."""
    quantized = find_integer_ops(problem, plan)
    # Those that the model came with are not ours to leave float.
    return tuple(
        op.name
        for op in problem.ops
        if op.name in quantized and op.rule.compute and op.name not in problem.ops.complete
    )


def find_integer_ops(problem: OnnxPlacement, plan: Plan) -> NameSet:
    """All operators whose weight, or whose every activation, is quantized."""
    index = problem.ops.index
    measured = (site for site in plan.all_sites if site.role.is_measured)
    read = {edge for site in measured for edge in site.find_readers(index)}
    whole = {
        op.name
        for op in problem.ops
        if op.weight is None and all(edge in read for edge, _ in op.data)
    }
    return frozenset(whole | list_weighted(plan.sites))


def _sum_float_times(costs: PlacementCosts, chosen: NameSet) -> float:
    """Microseconds in float of the operators that are not chosen."""
    return sum(cost.float_us for name, cost in costs.ops.items() if name not in chosen)


def carry_qparams(old: Plan, new: Plan, index: GraphIndex) -> Plan:
    """`new` with the qparams and values of `old` where a site is the same."""
    before = old.by_site
    sites = []
    for site in new.sites:
        known = before.get(site.site)
        if known is not None and (known.spec, known.role) == (site.spec, site.role):
            # A bias on the scale of another input or weight has other integers.
            known = known if known.derived == site.derived else known.without_numbers()
            site = replace(site, clip=known.clip, qparams=known.qparams, values=known.values)
        sites.append(site)
    biases = keep_corrections(old, new.sites, index)
    # Structural ids of the nodes whose biases are carried, which `new` may not know.
    nodes = {**{bias.edge.node: old.nodes.get(bias.edge.node, "") for bias in biases}, **new.nodes}
    return replace(
        new,
        sites=tuple(sites),
        biases=biases,
        nodes=nodes,
        scalings=old.scalings,
        data=old.data,
        sizes=old.sizes,
        warnings=old.warnings,
        placement=old.placement,
        attention=old.attention,
    )


def keep_corrections(
    plan: Plan, sites: Iterable[SitePlan], index: GraphIndex
) -> tuple[BiasPlan, ...]:
    """The plan's biases of operators whose weights are among these sites.

    A correction makes up for the rounding of a weight; in float it would be an error of its own.
    """
    computing = list_weighted(sites)
    return tuple(
        bias for bias in plan.biases if computing.intersection(find_owners(index, bias.edge))
    )


def find_owners(index: GraphIndex, edge: Edge) -> set[str]:
    """The operators whose bias this may be, by name: the node itself, and the MatMul in front of an Add."""
    node = index.find_node(edge.node)
    makers = index.makers(node) if node.op_type == "Add" else ()
    return {node.name, *(maker.name for maker in makers)}


def leave_missing_float(ctx: SampledContext, state: PlacedState) -> PlacedState:
    """The state with float in place of the operators at sites that calibration left without numbers.

    Their sites may move to other tensors then, so it is repeated. Raises CalibrationError for a site that no operator
    of the planner's stands at.
    """
    problem = state.problem
    plan = state.plan
    known = NameSet()
    left = problem
    reasons = dict[str, Refusal]()
    while missing := [site for site in plan.sites if not site.complete]:
        causes = {refusal.subject: refusal for refusal in plan.refusals}
        # A bias goes with the operator whose input has no scale.
        for site in missing:
            if site.derived is not None:
                continue
            cause = causes.get(site.name, Refusal(site.name, "no sample reached it"))
            text = f"its tensor {site.quantized_tensor} {cause.reason}"
            for name in Ways(problem, plan).list_operators(site):
                reasons.setdefault(name, Refusal(name, text, cause.fix, "calibrate", "R106"))
        # Another round would leave the same operators float, for ever.
        if reasons.keys() <= known:
            subject = str(missing[0].site)
            cause = causes.get(
                subject, Refusal(subject, "no sample of the calibration data reached it")
            )
            fix = "give samples that reach it, or leave it float with a rule"
            raise CalibrationError(subject, cause.reason, fix, code="Q502")
        known = frozenset(reasons)
        ways = Ways(problem, plan, attention=ctx.config.attention != FLOAT, refusals=reasons)
        left = ways.leave_float(known)
        plan = calibrate_missing(ctx, state, ways.promote_keys(known))
    after = replace(state, plan=plan, problem=left)
    if not PLAIN.is_left(state):
        return after
    plain = left.default()
    same = plain.by_site.keys() == plan.by_site.keys()
    return PLAIN.erase(after) if same else PLAIN.write(after, plain)


def calibrate_missing(ctx: SampledContext, state: PlacedState, plan: Plan) -> Plan:
    """The plan with numbers at every site that a promotion left without."""
    if plan.calibrated:
        return plan
    return ctx.calibrate(state.model, plan, ctx.data.calibration)


def may_choose_widths(ctx: SampledContext, state: PlacedState) -> bool:
    """True where operators have several widths to choose from, and samples say which they need."""
    return len(ctx.config.activation_bits) > 1 and bool(state.plan.sites) and not ctx.data.synthetic


def may_widen(ctx: SampledContext, state: PlacedState) -> bool:
    """True where samples gave ranges, for an engine that takes whole graphs."""
    return state.problem.engine.whole and bool(state.plan.sites) and not ctx.data.synthetic


# The search that all choices between float, more bits and other scales share: predict, try, keep what pays.
#
# A pass lists candidates, and predicts by switched pairs what each gains and by the planner what it costs. Its limits
# say which are worth a trial; `take_paying` keeps those that pay together. The plan that comes of it is judged by the
# runner (`judging.THRESHOLDS`), or, where somebody asked for an accuracy, by that.


def take_paying(
    start: Keys,
    candidates: Iterable[Keys],
    pays: Callable[[Keys], bool],
    change: Callable[[Keys, Keys], Keys] = frozenset.union,
) -> Keys:
    """The keys after each candidate in order has been taken, by `change`, where the result pays."""
    for candidate in candidates:
        changed = change(start, candidate)
        if pays(changed):
            start = changed
    return start


class SwitchedPlan:
    """A calibrated plan whose pairs and rounded constants can be switched off, to see what each costs the outputs."""

    def __init__(self, ctx: SampledContext, state: PlacedState, plan: Plan) -> None:
        self._ctx = ctx
        self._model = state.model
        with ctx.progress("putting every pair behind a switch"):
            self.toggled = toggle_model(
                state.model, write_pairs(state, plan), threads=ctx.config.verify.threads
            )

    def list_pairs(self, *roles: Role) -> list[Switch]:
        """The switches of these roles, in the order the model runs."""
        return [switch for switch in self.toggled.switches if switch.role in roles]

    def measure_settings(
        self, settings: Sequence[Setting], floats: FloatOutputs, title: str
    ) -> list[ModelErrors]:
        """The errors with these switches on and all others off, by setting."""
        ctx = self._ctx
        return measure_settings(
            self.toggled, floats, settings, progress=ctx.progress, title=title, crew=ctx.crew
        )

    def measure_alone(self) -> dict[str, float]:
        """Noise at the outputs of each pair of an activation alone, by the nodes that read it."""
        pairs = self.list_pairs(Role.ACTIVATION)
        floats = self._ctx.data.judge.float_outputs(self._model)
        settings = [frozenset([pair]) for pair in pairs]
        errors = self.measure_settings(settings, floats, "trying scales of each run")
        return {
            name: error.noise()
            for pair, error in zip(pairs, errors, strict=True)
            for name in pair.readers
        }
