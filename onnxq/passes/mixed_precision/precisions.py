"""The precisions that operators may have, as rules of a configuration, and what each costs: noise, bytes, time.

A precision is first given to all operators that the target takes it for: that plan is calibrated, its channels evened
out and its weights rounded as `quantize` does it. Then each weight and each tensor is rounded alone, so that the noise
of a precision is that of corrected numbers. Bytes are those of the numbers in the plan, times those that the planner
places by.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from onnxq.arrays import Array
from onnxq.backends import Target, list_costs
from onnxq.config import Config, Rule, RuleSet
from onnxq.errors import ConfigError
from onnxq.evaluation.compare import FloatOutputs
from onnxq.passes.journal import MEASURED
from onnxq.passes.mixed_precision.candidates import (
    SwitchedPlan,
    find_integer_ops,
    list_quantized_ops,
)
from onnxq.passes.mixed_precision.program import (
    Condition,
    Costs,
    Implication,
    PrecisionProgram,
    SharedCosts,
)
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan, SitePlan
from onnxq.planner import OnnxPlacement
from onnxq.planner.cut import CutProblem, PlacementCosts, add_costs
from onnxq.planner.problem import QuantizableOp
from onnxq.planner.sums import read_constant
from onnxq.sites import JsonObject, NameSet, Role, Settings, Site
from onnxq.spec import name_int

FLOAT = "float"
# Bits of weights that are offered beside the configuration's own, where the target reads them.
_WEIGHT_BITS = (2, 4, 8)
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Precision:
    """A precision by the changes that rules make of the configuration; its own without any."""

    name: str
    weights: Settings = field(default_factory=dict)
    activations: Settings = field(default_factory=dict)

    def make_rules(self, names: Iterable[str]) -> Iterator[Rule]:
        """The rules that give it to operators."""
        nodes = tuple(names)
        if nodes and self.name == FLOAT:
            yield Rule(node=nodes, set=RuleSet(float=True))
        for role, changes in ((Role.WEIGHT, self.weights), (Role.ACTIVATION, self.activations)):
            if nodes and changes:
                yield Rule(node=nodes, role=(role,), set=RuleSet(**changes))


def list_precisions(config: Config) -> tuple[Precision, ...]:
    """The configuration's own precision first, then float, then others that its target may take.

    Raises ConfigError for a name in `search.precisions` that is none of these.
    """
    weights = config.weights
    static = config.mode not in ("weight-only", "dynamic")
    own = Precision(_name_precision(config, weights.bits))
    # In the order of the table that people see.
    found = [own, Precision(FLOAT)]
    for bits in _WEIGHT_BITS:
        if bits != weights.bits:
            changes: JsonObject = {"bits": bits}
            if bits <= 4:
                # Both ends as far from zero: the same scale for both sides.
                changes |= {
                    "storage": name_int(bits, signed=weights.is_signed),
                    "narrow_range": weights.is_signed,
                }
            found.append(Precision(_name_precision(config, bits), weights=changes))
    if static and config.activations.bits < 16:
        found.append(Precision(f"w{weights.bits}a16", activations={"bits": 16}))
    if config.mode == "static":
        found.append(Precision(f"{own.name}-dynamic", activations={"dynamic": True}))
    found = [precision for precision in found if _is_possible(precision, config)]
    wanted = tuple(filter(None, config.search.precisions.split(",")))
    known = [precision.name for precision in found]
    for name in wanted:
        if name not in known:
            fix = f"this configuration and target have: {', '.join(known)}"
            raise ConfigError(
                config.where("search.precisions"), f"{name!r} is none of them", fix, code="Q304"
            )
    # The configuration's own is what others are measured beside.
    return tuple(one for one in found if not wanted or one.name in wanted or one is own)


def _name_precision(config: Config, bits: int) -> str:
    if config.mode == "weight-only":
        return f"w{bits}"
    return f"w{bits}a{config.activations.bits}{'-dynamic' if config.mode == 'dynamic' else ''}"


def _is_possible(precision: Precision, config: Config) -> bool:
    """False where the changes contradict the rest of the configuration: only 8-bit uint8 has scales of each run."""
    requests = {Role.WEIGHT: config.weights, Role.ACTIVATION: config.activations}
    try:
        for rule in precision.make_rules(["node"]):
            for role in rule.role:
                rule.apply(requests[role], role)
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class MeasuredPrecision:
    """A precision in the plan that gives it to all operators that take it, their names among `operators`."""

    precision: Precision
    operators: NameSet
    state: PlacedState
    # Noise at the outputs: of each operator's weights with its bias; of each tensor, by its site as reports call it.
    weights: Mapping[str, float]
    tensors: Mapping[str, float]

    @cached_property
    def sites(self) -> dict[str, list[SitePlan]]:
        """The sites of all that an operator reads, by operator."""
        index = self.state.problem.ops.index
        found: dict[str, list[SitePlan]] = {}
        for site in self.state.plan.sites:
            for name in dict.fromkeys(edge.node for edge in site.find_readers(index)):
                found.setdefault(name, []).append(site)
        return found

    def list_weights(self, name: str) -> list[SitePlan]:
        """The sites of an operator's weights."""
        return [site for site in self.sites.get(name, ()) if site.role.is_weight]


def lacks_kernel(engine: Target, sites: Iterable[SitePlan], op_type: str) -> bool:
    """True where the target warns of what these sites cost: it computes in float behind them."""
    rows = (engine.capability(site.spec, site.role, op_type) for site in sites)
    return any(row is not None and bool(row.warning) for row in rows)


def find_takers(problem: OnnxPlacement, before: Plan, after: Plan, precision: Precision) -> NameSet:
    """The operators that compute with the precision in the plan `after`, which asked for it everywhere."""
    if not (precision.weights or precision.activations):
        return frozenset(list_quantized_ops(problem, after))
    # A precision changes either weights or activations.
    role = Role.WEIGHT if precision.weights else Role.ACTIVATION
    old = {site.site: site.spec for site in before.sites}
    changed = set()
    apart = set()
    # More bits than the engine's kernels have make a model slower than float, and are for who asks for them.
    asked = precision.weights or precision.name in problem.config.search.precisions.split(",")
    for site in after.sites:
        readers = (
            {edge.node for edge in site.find_readers(problem.ops.index)}
            if site.role is role
            else set[str]()
        )
        # Bits of weights that do not fill what they are stored in make no file smaller.
        if site.spec != old.get(site.site) and (site.spec.fills_storage or not precision.weights):
            changed |= readers
        # What shares its scale with tensors of other operators cannot have another type alone.
        priced = not asked and lacks_kernel(problem.engine, [site], "")
        if (site.group and precision.activations) or priced:
            apart |= readers
    return frozenset(changed.intersection(list_quantized_ops(problem, after)) - apart)


def measure_precision(
    switched: SwitchedPlan,
    state: PlacedState,
    floats: FloatOutputs,
    precision: Precision,
    operators: Collection[str],
) -> MeasuredPrecision:
    """Round each weight, and each tensor, of a finished plan alone. floats: answers on the samples for that."""
    pairs = [] if precision.weights else switched.list_pairs(*MEASURED)
    # Tensors of a precision with other weights are those of the configuration's own.
    constants: dict[str, list[Any]] = {name: [] for name in sorted(operators)}
    for switch in switched.list_pairs(Role.WEIGHT, Role.BIAS):
        for name in switch.readers:
            if name in constants and not precision.activations:
                constants[name].append(switch)
    settings = [*(frozenset([pair]) for pair in pairs), *map(frozenset, constants.values())]
    errors = switched.measure_settings(settings, floats, f"measuring {precision.name}")
    noises = [error.noise() for error in errors]
    return MeasuredPrecision(
        precision,
        frozenset(operators),
        state,
        weights=dict(zip(constants, noises[len(pairs) :], strict=True)),
        # Those of the pairs come first, as in `settings`.
        tensors={pair.site: noise for pair, noise in zip(pairs, noises, strict=False)},
    )


@dataclass(frozen=True, eq=False)
class ProgramBuilder:
    """Makes the programme of measured precisions, of which the first is the configuration's own.

    floats: float is one of the choices. cpu: the kind of CPU, or "any", that times are those of.
    """

    measured: Sequence[MeasuredPrecision]
    floats: bool = True
    cpu: str = "any"

    @cached_property
    def own(self) -> MeasuredPrecision:
        """The configuration's own."""
        return self.measured[0]

    @cached_property
    def problem(self) -> OnnxPlacement:
        """The placement problem of the configuration."""
        return self.own.state.problem

    @cached_property
    def _operators(self) -> dict[str, QuantizableOp]:
        """Those that compute and have a choice, then those that go with them."""
        integers = find_integer_ops(self.problem, self.own.state.plan)
        return {
            op.name: op
            for op in self.problem.ops
            if op.name in self.own.operators or (op.name in integers and not op.rule.compute)
        }

    @cached_property
    def _static(self) -> NameSet:
        """The precisions whose operators read and write the integers of the configuration's own pairs."""
        if self.problem.engine.dynamic or self.problem.config.mode == "weight-only":
            return frozenset()
        return frozenset(
            one.precision.name for one in self.measured if not one.precision.activations
        )

    def build_program(self) -> PrecisionProgram:
        """The programme. The configuration's own precision is a choice of every operator."""
        operators = {
            name: dict(self._list_choices(op)) if op.rule.compute else self._follow(op)
            for name, op in self._operators.items()
        }
        shared = [*self._share_noise(), *self._share_conversions()]
        return PrecisionProgram(operators, tuple(shared), tuple(self._list_ties(operators)))

    def _follow(self, op: QuantizableOp) -> dict[str, Costs]:
        cost = self._costs.ops[op.name]
        return {FLOAT: Costs(time=cost.float_us), self.own.precision.name: Costs(time=cost.int8_us)}

    def _list_choices(self, op: QuantizableOp) -> Iterator[tuple[str, Costs]]:
        """The precisions that an operator may have, with what it alone costs there."""
        cost = self._costs.ops[op.name]
        if self.floats:
            size = sum(value.nbytes for value in self._read_weights(op).values())
            yield FLOAT, Costs(size=size, time=cost.float_us)
        for one in self.measured:
            if op.name not in one.operators:
                continue
            # With other activations weights keep their numbers, and every reader rounds what it reads by itself.
            weights = self.own if one.precision.activations else one
            # No figure: the constant is the float one, rounded to itself.
            noise = weights.weights.get(op.name, 0.0)
            time = cost.int8_us
            if one.precision.activations or self.problem.engine.dynamic:
                noise += self._read_noise(op, one)
            if one.precision.activations.get("dynamic"):
                time = self._dynamic_costs.ops[op.name].int8_us
            elif lacks_kernel(self.problem.engine, one.sites.get(op.name, ()), op.node.op_type):
                time = cost.float_us + sum(
                    self._costs.quantize.get(t, 0) + self._costs.dequantize.get(t, 0)
                    for _, t in op.data
                )
            yield one.precision.name, Costs(noise, self._count_bytes(op, weights), time)

    def _read_noise(self, op: QuantizableOp, one: MeasuredPrecision) -> float:
        """Noise of what the operator reads, where that is its own."""
        sites = one.sites.get(op.name, ())
        return sum(
            one.tensors.get(site.name, 0.0) for site in sites if site.role is Role.ACTIVATION
        )

    @cached_property
    def _costs(self) -> PlacementCosts:
        return self._predict_costs(self.problem.apart)

    @cached_property
    def _dynamic_costs(self) -> PlacementCosts:
        return self._predict_costs(self.own.operators)

    def _predict_costs(self, apart: NameSet) -> PlacementCosts:
        """The mean of kinds of CPU, and of engines, where there are several."""
        cut = CutProblem(self.problem.ops, self.problem.engine.dynamic, apart)
        tables = list_costs(self.problem.engine, self.cpu)
        return add_costs([(cut.compute_costs(table), 1 / len(tables)) for table in tables.values()])

    def _count_bytes(self, op: QuantizableOp, one: MeasuredPrecision) -> float:
        """Bytes of the weights that are counted with this operator, with their scales."""
        total = 0.0
        weights = self._read_weights(op)
        for site in one.list_weights(op.name):
            if site.site in weights:
                scales = 0 if site.qparams is None else np.size(site.qparams.scale)
                bits = weights[site.site].size * site.spec.storage_bits
                total += math.ceil(bits / 8) + scales * _SCALE_BYTES
        return total

    def _read_weights(self, op: QuantizableOp) -> dict[Site, Array]:
        """The weights of an operator by their sites, but those that are counted with an earlier one."""
        weights = {}
        for site in self.own.list_weights(op.name):
            value = read_constant(self.problem.index, site.site)
            first = next((edge.node for edge in site.named_consumers), "")
            if value is not None and first == op.name:
                weights[site.site] = value
        return weights

    def _share_noise(self) -> Iterator[SharedCosts]:
        """The noise of each tensor on a scale of its own."""
        ops = self.problem.ops
        for site in self.own.state.plan.sites:
            noise = self.own.tensors.get(site.name, 0.0)
            # On scales of each run every reader rounds for itself.
            if not site.role.is_measured or not noise or not self._static:
                continue
            touching = [edge.node for edge in site.find_readers(ops.index)]
            maker = ops.find_integer_maker(site.quantized_tensor)
            if maker is not None and maker.writes_integers:
                touching.append(maker.name)
            conditions = tuple(
                Condition(name, self._static)
                for name in dict.fromkeys(touching)
                if name in self._operators
            )
            if conditions:
                yield SharedCosts(Costs(noise=noise), conditions)

    def _share_conversions(self) -> Iterator[SharedCosts]:
        """The time of the pairs between integers and float, as `CutProblem.time_us` counts it."""
        if not self._static:
            return
        costs = self._costs
        # As the minimum cut of the planner sees them, with more than two sides.
        for use in CutProblem.of_placement(self.problem).uses:
            readers = [name for name in use.readers if name in self._operators]
            maker = use.maker if use.maker in self._operators else None
            integers = tuple(Condition(name, self._static) for name in readers)
            quantize = Costs(time=costs.quantize[use.tensor])
            dequantize = Costs(time=costs.dequantize[use.tensor])
            if integers and quantize.time:
                yield SharedCosts(
                    quantize, integers, None if maker is None else self._leave_static(maker)
                )
            if maker is None or not use.dequantizes or not dequantize.time:
                continue
            made = Condition(maker, self._static)
            # Something reads it in float, whatever is chosen.
            if use.read_float or len(readers) < len(use.readers):
                yield SharedCosts(dequantize, (made,))
            elif readers:
                yield SharedCosts(dequantize, tuple(map(self._leave_static, readers)), made)

    def _leave_static(self, name: str) -> Condition:
        """The operator reads and writes float."""
        return Condition(
            name, frozenset((FLOAT, *(one.precision.name for one in self.measured))) - self._static
        )

    def _list_ties(self, operators: Mapping[str, Mapping[str, Costs]]) -> Iterator[Implication]:
        """Operators with a weight or a kernel in common have one precision; followers go with their makers."""
        integers = frozenset(one.precision.name for one in self.measured)
        # In the order in which they run, so that the programme is the same every time.
        for op in self._operators.values():
            if not op.rule.compute:
                yield from self._tie_follower(op)
                continue
            for other in op.rule.together(op.candidate):
                if other in operators:
                    yield Implication((Condition(op.name, integers),), Condition(other, integers))
            for site in self.own.list_weights(op.name):
                for edge in site.named_consumers:
                    if edge.node != op.name and edge.node in operators:
                        for one in operators[op.name]:
                            same = frozenset([one])
                            yield Implication(
                                (Condition(op.name, same),), Condition(edge.node, same)
                            )

    def _tie_follower(self, op: QuantizableOp) -> Iterator[Implication]:
        ops = self.problem.ops
        # Where nothing makes its inputs in integers, it goes with a reader of the same tensor.
        makers = (ops.find_integer_maker(tensor) for _, tensor in op.data)
        around = [
            maker.name for maker in makers if maker is not None and maker.name in self._operators
        ]
        if not around:
            readers = (reader for _, tensor in op.data for reader in ops.list_readers(tensor))
            around = [
                one.name for one in readers if one.rule.compute and one.name in self._operators
            ][:1]
        own = Condition(op.name, frozenset([self.own.precision.name]))
        conditions = tuple(Condition(name, self._static) for name in dict.fromkeys(around))
        if conditions:
            yield Implication(conditions, own)
        for condition in conditions:
            yield Implication((own,), condition)
