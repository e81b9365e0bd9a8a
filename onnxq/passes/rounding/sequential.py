"""Sequential rounding: weights and biases of a calibrated plan, node by node, on the inputs in the quantized model.

For each Conv, Gemm and MatMul with a quantized constant weight, in the order the model runs: second moments of its
input in the float model (x) and in the quantized one (y), everything before it already rounded; weights re-fitted to y,
rounded by the strategy for them, the mean error put into the bias. The maths: `second_moments`, `gptq_core`. Activation
ranges stay as calibrated. Measured on EfficientNet-Lite0: 18.8 dB with one-shot bias correction, 23.0 so; 8 samples do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from onnxq.arrays import Array, as_float32, hash_parts
from onnxq.calibrate.constants import dequantize_constant
from onnxq.emit import emit_pairs
from onnxq.evaluation.compare import add_own_choices
from onnxq.evaluation.selections import find_selections
from onnxq.graph import GraphIndex, ModelLike, NodeRef, ensure_opset, get_index, is_large_model
from onnxq.graph.identity import compute_structural_ids
from onnxq.graph.storage import Spool, release_pages
from onnxq.numerics import bias_qparams, dequantize, quantize
from onnxq.numerics.machine import count_cores, use_blas_threads
from onnxq.passes.journal import MEASURED
from onnxq.passes.rounding.gptq_core import (
    DAMPING,
    FEWEST_POSITIONS,
    RoundedWeight,
    choose_ridge,
    correct_bias,
    refit_weight,
)
from onnxq.passes.rounding.layerwise import Changes, MomentsRequest, PairedRunner, make_runners
from onnxq.passes.rounding.low_bit_core import NARROW_BITS
from onnxq.passes.rounding.operators import (
    POINTWISE,
    POOLED_DAMPING,
    Operator,
    find_pooling,
    list_operators,
)
from onnxq.passes.rounding.shared_work import SharedWork
from onnxq.passes.rounding.statistics import OperatorStatistics, gather_statistics
from onnxq.passes.rounding.strategies import PosedWeight, pose_weight, searches_scales
from onnxq.plan import BiasPlan, Plan, SitePlan, to_json
from onnxq.planner.sums import read_constant
from onnxq.progress import Progress
from onnxq.runtime import Feeds
from onnxq.runtime.crew import Crew, hash_feeds, hash_model, hash_run
from onnxq.sites import Edge, Names, NameSet, Role, TensorId
from onnxq.spec import QParams
from onnxq.workers import Journal, register_packed

# Weights of so many elements are worth the threads of matrix products, which wait for each other in smaller ones: on
# more cores than these, below which blocks of rows and samples fill them (two: 36 s with threads of products, 29 so).
_MANY_THREADS = 1 << 22
_FEW_CORES = 4


@dataclass(frozen=True)
class RoundingOptions:
    """nodes: only these operators (None: all). biases: correct them. thorough: a longer search for values of few bits.

    alone: each operator for itself, in the float model, to learn its cost.
    """

    nodes: NameSet | None = None
    biases: bool = True
    thorough: bool = False
    alone: bool = False


@dataclass(frozen=True)
class OperatorRounding:
    """The changes to one operator."""

    node: str
    kind: str
    rounded: bool
    refitted: bool
    bias: bool


@dataclass(frozen=True, eq=False)
class SequentialRounding:
    """The plan with better numbers, and the changes, in order. skipped: nodes that no sample reached.

    thin: nodes left as they were, because the samples show them fewer than `FEWEST_POSITIONS` positions; weights of few
    bits gain more by any second moments than they can lose.
    """

    plan: Plan
    done: tuple[OperatorRounding, ...]
    skipped: Names
    thin: Names

    def describe(self) -> Names:
        """For people: operators by kind."""
        by_kind = defaultdict(list)
        for entry in self.done:
            by_kind[entry.kind].append(entry)
        lines = []
        for kind, entries in by_kind.items():
            rounded = sum(entry.rounded for entry in entries)
            refitted = sum(entry.refitted for entry in entries)
            biases = sum(entry.bias for entry in entries)
            lines.append(
                f"{len(entries)} {kind}: {rounded} rounded by moments, {refitted} re-fitted, {biases} with a new bias"
            )
        if self.thin:
            lines.append(
                f"{len(self.thin)} left: samples show fewer than {FEWEST_POSITIONS} positions"
            )
        return tuple(lines)


def round_sequentially(
    proto: ModelLike,
    plan: Plan,
    samples: Iterable[Feeds],
    *,
    others: Sequence[Feeds] = (),
    options: RoundingOptions = RoundingOptions(),
    crew: Crew | None = None,
    progress: Progress,
) -> SequentialRounding:
    """A plan whose weights carry `values` (and scales to match), and biases corrected.

    proto: the prepared float model; plan: calibrated for it. samples: 8 to 16 are enough; all are held, with the
    tensors alive between two nodes, and nothing else. others: more of them for the second moments of operators that see
    few positions, number k made from sample k modulo their count. crew: runs the samples, and keeps operators that are
    finished. The same input gives the same bytes, whatever the crew. Raises ModelError and DataError from the runs.
    """
    prepared = proto
    proto = ensure_opset(prepared, plan.opset)
    index = get_index(proto)
    crew = crew or Crew()
    operators = list_operators(index, plan)
    if options.nodes is not None:
        operators = [operator for operator in operators if operator.node.name in options.nodes]
    feeds, others = (
        list(add_own_choices(proto, some)) if operators else [] for some in (samples, others)
    )
    largest = max((operator.weight.size for operator in operators), default=0)
    small = largest < _MANY_THREADS or count_cores() <= _FEW_CORES
    work = SharedWork(crew, one_thread=small) if crew.workers.count > 1 and operators else None
    # The operators that are rounded are in the chain of keys.
    dependencies = repr((replace(options, nodes=None), small))
    journal = crew.workers.journal if operators else None
    key = "" if journal is None else hash_rounding(proto, plan, feeds, others, dependencies)
    finished = FinishedOperators(journal, key)
    try:
        walk = _Walk(plan, index, proto, feeds, others, options, work, finished, small=small)
        with progress("rounding", len(operators)) as task, use_blas_threads(one=small):
            for operator in operators:
                visit = walk.visit_operator(operator)
                if visit is not None:
                    posed = visit.posed
                    # From here, so that no layer stands between this loop and the algorithm.
                    rounded = None if posed is None else posed.strategy.round(posed.problem)
                    walk.accept_rounding(visit, rounded)
                # Constants lie in files where the model is large.
                keys = ((operator.node.name, k) for k in range(len(operator.node.inputs)))
                release_pages(
                    operator.weight, *(walk.changes[key] for key in keys if key in walk.changes)
                )
                task.advance()
        return walk.make_result(prepared)
    finally:
        if work is not None:
            work.close()


@dataclass(frozen=True, eq=False)
class _Visit:
    """An operator whose weight is to be rounded. posed: None: to nearest, as calibrated, for want of second moments."""

    operator: Operator
    statistics: OperatorStatistics
    outcome: OperatorNumbers
    posed: PosedWeight | None


class _Walk:
    """Both models on their way through the graph, and the numbers found so far."""

    def __init__(
        self,
        plan: Plan,
        index: GraphIndex,
        proto: ModelLike,
        feeds: Sequence[Feeds],
        others: Sequence[Feeds],
        options: RoundingOptions,
        work: SharedWork | None,
        finished: FinishedOperators,
        *,
        small: bool,
    ) -> None:
        self.plan, self.index, self.work = plan, index, work
        self.finished = finished
        self.options = options
        # Of large operators the products themselves take all cores.
        self.threads = 0 if small else 1
        # Of activations alone: weights come as changes, as they are rounded.
        pairs = [] if options.alone else [site for site in plan.sites if site.role in MEASURED]
        paired = emit_pairs(proto, plan.with_sites(pairs))
        self.paired = GraphIndex(paired)
        # Of a large model its rounded constants are as large as itself.
        self.spool = Spool() if is_large_model(proto) else None
        self.changes: Changes = {}
        for edge, value in () if options.alone else _list_rounded(plan, self.index):
            self._change(edge, value)
        # Both on the same choices, as the plan is judged: behind one, rows in other places would teach nothing.
        take_choices = find_selections(proto).take_choices
        both = [(take_choices(proto), {}), (take_choices(paired), self.changes)]
        self.samples, self.others = (
            PairedRunner(some, *make_runners(both, some, work)) for some in (feeds, others)
        )
        self.sites = {site.site: site for site in plan.all_sites}
        self.biases = list(plan.biases)
        self.done: list[OperatorRounding] = []
        self.skipped: list[str] = []
        self.thin: list[str] = []
        # The latest, without statistics where an earlier run had them.
        self.request: MomentsRequest | None = None
        self.statistics: OperatorStatistics | None = None

    def visit_operator(self, operator: Operator) -> _Visit | None:
        """Statistics of the operator's input and the problem of its weight; None where an earlier run solved it, or
        where the operator is left as it is."""
        finished = self.finished.read_next(operator.node.name)
        pool = self._find_pool(operator)
        request = self._make_request(operator, pool)
        if finished is not None:
            # The models are to stand where `_gather` would have left them.
            if self.request != request:
                self.samples.pass_by(request)
                if finished.scarce:
                    self.others.pass_by(request)
                self.request, self.statistics = request, None
            self._write_numbers(operator, finished)
            return None
        statistics = self._gather(request)
        moments = statistics.moments
        outcome = OperatorNumbers(moments.count, statistics.scarce)
        if self._find_left(operator, outcome) is not None:
            self.finished.write_numbers(outcome)
            self._write_numbers(operator, outcome)
            return None
        target = operator.to_rows(operator.weight)
        # In front of a pooling there is no re-fit: the pooling takes the mean of the noise too.
        if statistics.halves and pool is None:
            ridge = choose_ridge(target, *statistics.halves)
            if ridge is not None:
                target = refit_weight(target, moments, ridge=ridge)
                outcome = replace(outcome, refitted=True)
        if not moments.h.size:
            return _Visit(operator, statistics, outcome, None)
        bias_site = operator.bias_site
        derived = None if bias_site is None else bias_site.derived
        posed = pose_weight(
            operator,
            self.sites[operator.site.site],
            None if derived is None else self.sites[derived[0]].qparams,
            target,
            statistics,
            DAMPING if pool is None else POOLED_DAMPING,
            refitted=outcome.refitted,
            thorough=self.options.thorough,
        )
        return _Visit(operator, statistics, outcome, posed)

    def accept_rounding(self, visit: _Visit, rounded: RoundedWeight | None) -> None:
        """Write the rounded weight and the bias that makes up for its mean error. rounded: None: to nearest."""
        operator = visit.operator
        outcome = visit.outcome
        site = self.sites[operator.site.site]
        if visit.posed is not None and rounded is not None:
            site = visit.posed.make_site(rounded)
            outcome = replace(outcome, qparams=site.qparams, values=site.values)
        final = dequantize_constant(site, operator.weight)
        if operator.bias_edge is not None and self.options.biases:
            weight = operator.to_rows(operator.weight)
            bias = operator.bias.reshape(weight.shape[:2])
            moments = visit.statistics.moments
            corrected = correct_bias(bias, weight, operator.to_rows(final), moments)
            outcome = replace(outcome, bias=corrected.ravel())
        self.finished.write_numbers(outcome)
        self._write_numbers(operator, outcome, final)

    def _write_numbers(
        self, operator: Operator, outcome: OperatorNumbers, final: Array | None = None
    ) -> None:
        """Let the plan and the nodes still ahead have the outcome. final: the weight once quantized, if known."""
        left = self._find_left(operator, outcome)
        if left is not None:
            left.append(operator.node.name)
            return
        site = self.sites[operator.site.site]
        if outcome.values is not None:
            site = replace(site, qparams=outcome.qparams, values=outcome.values)
        self.sites[site.site] = site
        final = dequantize_constant(site, operator.weight) if final is None else final
        for edge in site.named_consumers:
            self._change(edge, final)
        if outcome.bias is not None:
            self._write_bias(operator, site, outcome.bias)
        self.done.append(
            OperatorRounding(
                node=operator.node.name,
                kind=operator.kind,
                rounded=outcome.values is not None,
                refitted=outcome.refitted,
                bias=outcome.bias is not None,
            )
        )

    def _find_left(self, operator: Operator, outcome: OperatorNumbers) -> list[str] | None:
        """The list of those left as they are that an operator belongs to; None where it is treated."""
        if not outcome.count:
            return self.skipped
        # Weights of few bits gain by any second moments.
        thin = outcome.count < FEWEST_POSITIONS and operator.site.spec.bits > NARROW_BITS
        return self.thin if thin else None

    def _find_pool(self, operator: Operator) -> tuple[NodeRef, TensorId] | None:
        """The pooling to look in front of, where both models are not past it, and the tensor it reads."""
        if not searches_scales(operator, self.sites[operator.site.site]):
            return None
        pool = find_pooling(self.index, operator)
        if pool is None:
            return None
        node, real = pool
        quantized = self.paired.find_input(self.paired.find_node(node.name))
        runs = [both for both in (self.samples, self.others) if both.feeds]
        return pool if all(both.has_tensors(real, quantized, node.name) for both in runs) else None

    def _make_request(
        self, operator: Operator, pool: tuple[NodeRef, TensorId] | None
    ) -> MomentsRequest:
        """The statistics that an operator needs. pool: look in front of it."""
        reader = operator.node
        data = operator.data
        geometry = operator.geometry
        if pool is not None:
            reader, data = pool
            geometry = POINTWISE
        node = self.paired.find_node(reader.name)
        site = self.sites[operator.site.site]
        groups, _, size = operator.to_rows(operator.weight).shape
        return MomentsRequest(
            reader=reader.name,
            data=data,
            paired=self.paired.find_input(node),
            geometry=geometry,
            shape=(groups, size),
            # Second moments are of one operator's input, and serve no weight that others read as well.
            second=operator.alone and not site.spec.is_float and not site.group,
            halves=searches_scales(operator, site),
        )

    def _gather(self, request: MomentsRequest) -> OperatorStatistics:
        """Statistics of all samples; operators that read the same tensors share it."""
        if self.request != request or self.statistics is None:
            # Let go of the old ones first: two of the largest at a time would be a GiB.
            self.statistics = None
            self.statistics = gather_statistics(
                self.samples, self.others, request, self.work, threads=self.threads
            )
            self.request = request
        return self.statistics

    def _write_bias(self, operator: Operator, site: SitePlan, bias: Array) -> None:
        """Put the bias where it belongs: int32 values of its site, or a float in its place."""
        edge = operator.bias_edge
        bias_site = operator.bias_site
        if edge is None:
            return
        values = as_float32(bias.reshape(operator.bias_shape))
        if bias_site is not None and bias_site.derived is not None:
            x = self.sites[bias_site.derived[0]].qparams
            if x is None or site.qparams is None:
                return
            qparams = bias_qparams(x, site.qparams, bias.size)
            codes = quantize(values.ravel(), qparams, bias_site.spec)
            self.sites[bias_site.site] = replace(bias_site, qparams=qparams, values=codes)
            # The nodes ahead read the bias as the file will hold it.
            values = dequantize(codes, qparams, bias_site.spec)
        else:
            self.biases = [old for old in self.biases if old.edge != edge]
            self.biases.append(BiasPlan(edge=edge, values=values))
        self._change(edge, values)

    def _change(self, edge: Edge, values: Array) -> None:
        """Let the nodes still ahead see it."""
        if not self.options.alone:
            values = values if self.spool is None else self.spool.keep_array(values)
            self.changes[edge.node, edge.index] = values

    def make_result(self, prepared: ModelLike) -> SequentialRounding:
        """The plan as far as it is rounded. prepared: the model in its own opset, which the plan is applied to."""
        sites = [self.sites[site.site] for site in self.plan.sites]
        looped = {
            site.quantized_tensor: site
            for site in sites
            if site.values is not None and self.index.is_looped(site.site.scope)
        }
        for k, site in enumerate(sites):
            # The step in front of a loop, see `list_operators`.
            twin = looped.get(site.quantized_tensor, site)
            alike = (twin.spec, twin.sum_orders) == (site.spec, site.sum_orders)
            if site.role.is_weight and site.values is None and alike:
                sites[k] = replace(site, qparams=twin.qparams, values=twin.values)
        # By these a plan finds the operators in another export, which may name them otherwise.
        ids = compute_structural_ids(prepared) if self.biases else {}
        nodes = dict(self.plan.nodes)
        for bias in self.biases:
            node = self.index.find_node(bias.edge.node)
            nodes.setdefault(node.name, ids.get(node.result, ""))
        plan = replace(self.plan, sites=tuple(sites), biases=tuple(self.biases), nodes=nodes)
        return SequentialRounding(plan, tuple(self.done), tuple(self.skipped), tuple(self.thin))


def _list_rounded(plan: Plan, index: GraphIndex) -> Iterator[tuple[Edge, Array]]:
    """Every quantized constant as the plan has it so far, and each input that reads it."""
    yield from ((bias.edge, bias.values) for bias in plan.biases)
    for site in plan.sites:
        if site.role not in (Role.WEIGHT, Role.BIAS) or site.qparams is None:
            continue
        for edge in site.named_consumers:
            value = read_constant(index, edge)
            if value is not None:
                shaped = value.ravel() if site.role.is_bias else value
                yield edge, dequantize_constant(site, shaped)
                release_pages(value)


# Operators that an earlier run has rounded, from which an interrupted one goes on.
# The key of each is chained to those of the operators before it, whose rounding its own depends on.


@register_packed
@dataclass(frozen=True, eq=False)
class OperatorNumbers:
    """The numbers that rounding found for one operator.

    count: positions seen. scarce: other samples were looked at too. refitted: the weight was. qparams, values: of its
    site; None: as they were. bias: float64 [outputs]; None: there is no place for one.
    """

    count: int
    scarce: bool
    refitted: bool = False
    qparams: QParams | None = None
    values: Array | None = None
    bias: Array | None = None


class FinishedOperators:
    """The journal's entries of one rounding. journal: None: there are none, and nothing is written. key: of all that
    the rounding depends on.
    """

    def __init__(self, journal: Journal | None, key: str) -> None:
        self._journal, self._key = journal, key

    def read_next(self, node: str) -> OperatorNumbers | None:
        """The numbers of the next operator; None where it is not finished."""
        if self._journal is None:
            return None
        self._key = hash_parts(self._key, node)
        numbers = self._journal.read(self._key)
        return numbers if isinstance(numbers, OperatorNumbers) else None

    def write_numbers(self, numbers: OperatorNumbers) -> None:
        """Keep the numbers of the operator that `read_next` was asked for last."""
        if self._journal is not None:
            self._journal.write(self._key, numbers)


def hash_rounding(
    proto: ModelLike, plan: Plan, samples: Sequence[Feeds], others: Sequence[Feeds], options: str
) -> str:
    """The key of a rounding. options: all else that its result depends on, in a text."""
    # Without names of files and figures for people, which change nothing.
    bare = replace(
        plan,
        model="",
        data="",
        placement=None,
        attention=None,
        contents=None,
        refusals=(),
        left_float=(),
        warnings=(),
    )
    digests = [" ".join(map(hash_feeds, some)) for some in (samples, others)]
    return hash_run("rounding", hash_model(proto), to_json(bare), *digests, options)
