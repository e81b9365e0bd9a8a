"""Passes that look for the pairs which make the noise, and give these float or other scales.

`sensitive_ops`: one input alone makes most of the noise. Networks of depthwise convolutions often have one
(EfficientNet-Lite0 for TensorRT: the first depthwise reads 127 quantized values of ReLU6 and makes 3 of 4 parts of the
noise; float, 20.0 dB become 24.4 at the outputs, for one operator of 50). The noise of activations adds up, so such a
site is found by halves: whichever half of the network's pairs makes more than half of the noise is cut again.

`dynamic_scales`, in `mode: auto`: a tensor whose range moves with the input has one scale for all inputs in a static
plan, and a scale for each run in a dynamic one. Where the product behind still pays with the dearer quantizer, both are
tried, each pair alone.

`float_ops`, in `mode: auto`: a few convolutions in front of a transformer may spoil what all its products keep (an
audio encoder: 39.4 dB with its three in int8, 52.0 without, in nearly the same time). Those that read the loudest pairs
are taken, as far as the predicted time on each kind of CPU allows, and stay where the outputs gain enough for it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.config import Rule
from onnxq.evaluation.accumulator import noise_to_db
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.metric import FLOAT, has_whole_bytes
from onnxq.evaluation.toggled import Setting, Switch
from onnxq.passes.base import Pass, SampledContext
from onnxq.passes.journal import MEASURED, PassReport, report_changes
from onnxq.passes.judging import THRESHOLDS, Threshold, Trial, ignore_rounding
from onnxq.passes.mixed_precision.candidates import (
    SwitchedPlan,
    Ways,
    calibrate_missing,
    carry_qparams,
    list_quantized_ops,
    replace_problem,
    take_paying,
)
from onnxq.passes.mixed_precision.cross_validation import answer_samples
from onnxq.passes.mixed_precision.float_parts import PLAIN, has_attention_rules
from onnxq.passes.ranges import fix_scales
from onnxq.passes.state import PlacedState, PlacedStep
from onnxq.plan import Plan
from onnxq.planner import OnnxPlacement
from onnxq.planner.choose import choose_ops, compare_times, predict_times
from onnxq.planner.cut import CutProblem
from onnxq.planner.requests import Requests
from onnxq.sites import Lines, Names, NameSet, Role, TensorId
from onnxq.spec import QuantSpec

SENSITIVE = "sensitive_ops"
DYNAMIC = "dynamic_scales"
FLOAT_NAME = "float_ops"
_SENSITIVE_REASON = "its input alone makes most of the noise at the outputs"
_FLOAT_REASON = "it gains little time, and what it reads makes much of the noise at the outputs"
# An input that makes more than half of the noise is alone to blame; other samples, where shares differ by chance, must
# agree: so much of it may be left. A network of fewer operators has none to spare. The noise of activations is much
# alike on all samples.
_MOST_NOISE = 0.5
_MOST_LEFT = 0.6
_ONE_OF = 24
_SAMPLES = 2
# Noise of the pair on scales of each run, beside the calibrated one.
_DYNAMIC_LEFT = 0.5
# A twentieth of the noise that all pairs make, each alone, and so much more time than the planner's choice takes.
_LOUD = 0.05
_MOST_TIME = 1.15
# The spec of activations that may have scales of each run instead.
_STATIC = QuantSpec(signed=False, symmetric=False)
# Decibels that the outputs must gain for each percent of time that `float_ops` adds.
_DB_A_PERCENT = 0.6

MeasureNoises = Callable[[Sequence[Setting]], list[float]]


def exclude_sensitive_ops(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The calibrated plan with such operators float.

    The calibration samples are searched, those for validation confirm. Deterministic. Raises ModelError and DataError
    from the runs.
    """
    lines: Lines = ()
    spare = len(list_quantized_ops(state.problem, state.plan)) // _ONE_OF
    while len(lines) < spare:
        excluded = _exclude_next(ctx, state)
        if excluded is None:
            break
        state, line = excluded
        lines = (*lines, line)
    return state, report_changes(SENSITIVE, lines)


def _exclude_next(ctx: SampledContext, state: PlacedState) -> tuple[PlacedState, str] | None:
    problem = state.problem
    plan = state.plan
    switched = SwitchedPlan(ctx, state, fix_scales(ctx, state, plan))
    pairs = switched.list_pairs(*MEASURED)
    floats = answer_samples(ctx, state, ctx.take_samples(_SAMPLES))

    def measure_noises(settings: Sequence[Setting], floats: FloatOutputs = floats) -> list[float]:
        return [
            errors.noise()
            for errors in switched.measure_settings(settings, floats, "looking for the noise")
        ]

    culprit = _find_loudest(pairs, measure_noises)
    if culprit is None:
        return None
    # Readers that only move values make no noise by themselves.
    keys = frozenset(culprit.readers).intersection(list_quantized_ops(problem, plan))
    ways = Ways(problem, plan, FLOAT, has_attention_rules(ctx, state), _SENSITIVE_REASON)
    # Where several operators read it, none of them alone is to blame.
    if len(keys) != 1:
        return None
    placed = ways.promote_keys(keys)
    # Others that cannot do without it would have to go as well.
    if len(ways.list_promoted(placed)) != 1:
        return None
    rest = ways.choose_switches(switched.toggled, placed).intersection(pairs)
    before, after = measure_noises(
        [frozenset(pairs), rest], ctx.data.judge.float_outputs(state.model)
    )
    if not after <= _MOST_LEFT * before:
        return None
    figures = f"{noise_to_db(before):.1f} -> {noise_to_db(after):.1f} dB in a trial"
    line = f"{min(keys)} stays float: activations alone {figures}"
    return replace(
        state, plan=calibrate_missing(ctx, state, placed), problem=ways.leave_float(keys)
    ), line


def _find_loudest(pairs: Sequence[Switch], measure: MeasureNoises) -> Switch | None:
    """The pair that alone makes more than half of the noise of all."""
    (whole,) = measure([frozenset(pairs)])
    while len(pairs) > 1:
        middle = len(pairs) // 2
        halves = (pairs[:middle], pairs[middle:])
        noises = measure([frozenset(half) for half in halves])
        largest = max(noises)
        # Noise that no half makes alone comes from several, and no single operator mends it.
        if not largest > _MOST_NOISE * whole:
            return None
        pairs = halves[noises.index(largest)]
    return pairs[0] if pairs else None


def choose_scales(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan with scales of each run where they leave less than half of a pair's noise."""
    readers = list_dynamic_candidates(state.problem, state.plan)
    better = []
    if readers:
        static = SwitchedPlan(ctx, state, state.plan).measure_alone()
        dynamic = SwitchedPlan(
            ctx, state, make_dynamic(ctx, state, readers.values()).plan
        ).measure_alone()
        for names in readers.values():
            # A pair in the file serves all readers, one of each run a single reader.
            noise = sum(dynamic.get(name, 0.0) for name in names)
            if noise < _DYNAMIC_LEFT * static.get(names[0], 0.0):
                better.append(names)
    if not better:
        return state, report_changes(DYNAMIC)
    line = f"{len(better)} of {len(readers)} tensors on scales of each run"
    return make_dynamic(ctx, state, better), PassReport(DYNAMIC, (line,))


def list_dynamic_candidates(problem: OnnxPlacement, plan: Plan) -> dict[TensorId, Names]:
    """Tensors that MatMuls alone read in integers, and gain by it on a scale of each run too, with these MatMuls."""
    candidates = {}
    kinds = problem.costs.values()
    costs = [CutProblem(problem.ops, dynamic=True).compute_costs(kind) for kind in kinds]
    for site in plan.sites:
        tensor = site.site
        edges = site.consumers
        if (
            site.role is not Role.ACTIVATION
            or site.spec != _STATIC
            or not isinstance(tensor, TensorId)
            or not edges
        ):
            continue
        ops = [problem.ops.by_name.get(edge.node) for edge in edges]
        names = tuple(
            op.name for op in ops if op is not None and op.node.op_type == "MatMul" and op.weights
        )
        pays = all(
            sum(cost.ops[name].float_us - cost.ops[name].int8_us for name in names)
            > cost.quantize.get(tensor, 0.0)
            for cost in costs
        )
        if len(names) == len(edges) and pays and not site.group:
            candidates[tensor] = names
    return candidates


def make_dynamic(ctx: SampledContext, state: PlacedState, nodes: Iterable[Names]) -> PlacedState:
    """The state with a rule in its problem that makes these nodes dynamic, and a plan with the qparams there were."""
    problem = state.problem
    names = [name for group in nodes for name in group]
    rule = Rule.model_validate({"node": names, "role": "activation", "set": {"dynamic": True}})
    # The first rule that matches wins, so this one stands in front of all others.
    config = problem.config.add_rules(rule)
    again = replace_problem(
        problem, config=config, requests=Requests(config, problem.requests.graph)
    )
    plan = carry_qparams(state.plan, again.default(), problem.index)
    return replace(state, plan=calibrate_missing(ctx, state, plan), problem=again)


def leave_noisy_float(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan without the operators that read the loudest pairs, as far as time allows. Deterministic."""
    problem = state.problem
    noise = SwitchedPlan(ctx, state, state.plan).measure_alone()
    ways = Ways(problem, state.plan, FLOAT, has_attention_rules(ctx, state), _FLOAT_REASON)
    least = _LOUD * sum(noise.values())
    loud = [
        name for name in list_quantized_ops(problem, state.plan) if noise.get(name, 0.0) > least
    ]
    loudest_first = sorted(loud, key=lambda name: -noise[name])
    before = predict_times(problem, choose_ops(problem).chosen)

    def pays(keys: NameSet) -> bool:
        after = predict_times(problem, choose_ops(ways.leave_float(keys)).chosen)
        return compare_times(before, after) <= _MOST_TIME

    def is_forced(name: str) -> bool:
        op = problem.ops.by_name[name]
        reads = [(Role.ACTIVATION, tensor) for _, tensor in op.data]
        return problem.requests.is_forced(op.node, reads)

    keys = take_paying(
        frozenset(), (frozenset([name]) for name in loudest_first if not is_forced(name)), pays
    )
    if not keys:
        return state, report_changes(FLOAT_NAME)
    plan = calibrate_missing(ctx, state, ways.promote_keys(keys))
    line = f"{', '.join(sorted(keys))} stay float: {_FLOAT_REASON}"
    return replace(state, plan=plan, problem=ways.leave_float(keys)), PassReport(
        FLOAT_NAME, (line,)
    )


def _find_threshold(_ctx: SampledContext, before: PlacedState, after: PlacedState) -> Threshold:
    times = (
        predict_times(before.problem, choose_ops(one.problem).chosen) for one in (before, after)
    )
    percent = 100 * (compare_times(*times) - 1)
    return Threshold(gain=max(THRESHOLDS[FLOAT_NAME].gain, _DB_A_PERCENT * percent))


def _may_exclude(ctx: SampledContext, state: PlacedState) -> bool:
    """True for 8-bit plans where float is no exception; attention that is to be tried is noise that may still go."""
    if PLAIN.is_left(state) or ctx.data.synthetic or find_target(state.plan.target).whole:
        return False
    return any(site.role.is_measured for site in state.plan.sites) and has_whole_bytes(state.plan)


def _is_automatic(ctx: SampledContext, state: PlacedState) -> bool:
    return ctx.config.mode == "auto"


def _score(ctx: SampledContext, state: PlacedState) -> float:
    return ctx.data.judge.score(state, ignore_rounding(state.plan), progress=ctx.progress)


SENSITIVE_OPS = Pass(
    SENSITIVE,
    exclude_sensitive_ops,
    "looking for operators to leave float",
    0.2,
    applies=_may_exclude,
)
DYNAMIC_SCALES = Pass(
    DYNAMIC,
    choose_scales,
    "trying scales of each run",
    0.2,
    applies=_is_automatic,
    trial=Trial(_score, THRESHOLDS[DYNAMIC]),
)
FLOAT_OPS = Pass(
    FLOAT_NAME,
    leave_noisy_float,
    "looking for operators that gain little",
    0.2,
    applies=_is_automatic,
    trial=Trial(_score, _find_threshold),
)
