"""A quantized file for another engine: its float model, its own numbers where the engine's pairs stand, the rest said.

The float model is the file with every pair taken out and every stored weight dequantized. The engine's planner places
pairs in it; each gets the numbers that the file has for its tensor. A weight keeps its scales wherever its integers
come out as they were; an activation keeps scale and zero point where its type stays, and its range where that changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper

from onnxq.annotate import find_existing, read_model
from onnxq.arrays import Array
from onnxq.calibrate import calibrate
from onnxq.config import Config
from onnxq.emit import leave_out_notes
from onnxq.errors import ModelError
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.trials import TrialModel, measure_models
from onnxq.graph import GraphIndex, ModelLike, attach_weights, get_index, inline_functions, name_nodes
from onnxq.graph.base import LAYOUT_OPS
from onnxq.graph.integer_products import dequantize_weights
from onnxq.graph.light import bare_proto, copy_proto, rebuild
from onnxq.graph.scopes import replace_items, walk_graphs
from onnxq.numerics import clip_bounds, fake_quant, qparams_from_range
from onnxq.passes.assembly import build_file
from onnxq.passes.base import SampledContext
from onnxq.passes.mixed_precision.candidates import Ways, list_quantized_ops
from onnxq.pipeline.configuration import ModelSource
from onnxq.pipeline.finalize import Result, finalize_run
from onnxq.pipeline.quantize_model import draft_placement, open_context, prepare_run
from onnxq.plan import Plan, SitePlan
from onnxq.planner import Existing
from onnxq.planner.sums import read_constant
from onnxq.progress import Progress, silent
from onnxq.sites import Edge, Refusal, Role, TensorId, Unquantized
from onnxq.spec import PerChannel, QParams, QuantSpec

_ORIGIN = "the file's own"
_FLOAT_REASON = "it is float in the file that it came from"


class Kept(str, Enum):
    """How the numbers of a site came from the file."""

    NUMBERS = "numbers kept"
    RANGE = "range kept, in another type"
    SAMPLES = "range of the samples"
    INTEGERS = "integers kept"
    ROUNDED = "rounded anew"
    DERIVED = "made of its input's and its weight's"


@dataclass(frozen=True, kw_only=True)
class MovedSite:
    """A site of the new file. error_db: of a weight that was rounded anew, against the file's; None of others."""

    site: str
    role: str
    how: Kept
    error_db: float | None = None


@dataclass(frozen=True, eq=False)
class Retargeted:
    """A file for another engine. agreement_db: of its worst output against the file that it came from."""

    result: Result
    sites: tuple[MovedSite, ...]
    agreement_db: float
    samples: int


@dataclass(frozen=True, eq=False)
class QuantizedSource:
    """A quantized file as it was read. floats: the same network in float. constants: its weights, by who reads them."""

    proto: ModelLike
    floats: ModelLike
    existing: Existing

    @cached_property
    def constants(self) -> dict[Edge, SitePlan]:
        """The stored weights by the inputs that read them."""
        return {edge: site for site in self.existing.constants for edge in site.consumers or ()}


def read_quantized(source: ModelSource) -> QuantizedSource:
    """Read a file with Q/DQ pairs, and make its float model. Raises ModelError for one without pairs."""
    proto = name_nodes(read_model(source).proto)
    proto = name_nodes(inline_functions(proto)) if proto.functions else proto
    existing = find_existing(proto)
    if existing.view is None:
        name = source if isinstance(source, str) else "model"
        raise ModelError(str(name), "has no quantize/dequantize pair", "quantize it: `onnxq quantize`", code="Q125")
    # Names stay, by which numbers are found again; the plan and the bits of the old file do not.
    plain = dequantize_weights(leave_out_notes(proto, "names"))
    # Without constants among them, the pairs that are left are those of activations.
    pairs = find_existing(plain)
    floats = plain if pairs.view is None else _make_runnable(plain, pairs)
    return QuantizedSource(proto, floats, existing)


# Upper bounds of the activations that exporters write as Clip: hard sigmoid, ReLU6.
_CLIPPED = (1.0, 6.0)
# Their values are not below zero.
_POSITIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Sqrt", "Softplus"})
_PASSING = LAYOUT_OPS | {
    "QuantizeLinear",
    "DequantizeLinear",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Concat",
    "Clip",
    "Identity",
}


def _make_runnable(plain: ModelLike, pairs: Existing) -> ModelLike:
    """The view of a model without its pairs, to be run: an Identity has one input, and what cut values off does so.

    Tools drop a Relu, or a Clip, in front of a QuantizeLinear whose range begins at zero, which then computes it.
    """
    index = get_index(plain)
    copy = copy_proto(bare_proto(pairs.view or plain))
    cut: dict[TensorId, float] = {}
    for node in index.nodes:
        site = pairs.by_tensor.get(node.result) if node.outputs else None
        if site is None or site.qparams is None or (site.qparams.zero_point != site.spec.qmin).any():
            continue
        if not _is_positive(index, node.result, cut):
            # A bound of Clip that the range ends at; where it ends elsewhere, no value went further.
            high, step = float(clip_bounds(site.qparams, site.spec)[1]), float(site.qparams.scale)
            cut[node.result] = next((bound for bound in _CLIPPED if abs(high - bound) < step), math.inf)
    highs = {tensor.name: high for tensor, high in cut.items()}
    for _, graph in walk_graphs(copy.graph):
        nodes = []
        for node in graph.node:
            if node.op_type == "Identity":
                del node.input[1:]
            nodes.append(node)
            for k, name in enumerate(node.output):
                if name in highs:
                    # Readers of the pair read this name, as the others in the view do.
                    node.output[k] = f"{name}/linear"
                    nodes += _make_activation(graph, node.output[k], name, highs[name])
        replace_items(graph.node, nodes)
    return rebuild(pairs.view or plain, copy)


def _make_activation(graph: GraphProto, source: str, name: str, high: float) -> Iterator[NodeProto]:
    """A Relu, or a Clip that begins at zero."""
    if math.isinf(high):
        yield helper.make_node("Relu", [source], [name], f"{name}/Relu")
        return
    bounds = {f"{name}/low": 0.0, f"{name}/high": high}
    for bound, value in bounds.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), bound))
    yield helper.make_node("Clip", [source, *bounds], [name], f"{name}/Clip")


def _is_positive(index: GraphIndex, tensor: TensorId, cut: Collection[TensorId]) -> bool:
    """True where the network itself makes no value below zero. cut: tensors behind a Relu that is put in."""
    maker = index.find_producer(tensor)
    while maker is not None and maker.op_type in _PASSING:
        bound = index.input_value(maker, 1) if maker.op_type == "Clip" else None
        if index.find_input(maker, 0) in cut or (bound is not None and bound.min() >= 0):
            return True
        maker = index.maker(maker)
    return maker is None or maker.op_type in _POSITIVE


@dataclass(eq=False)
class _Filling:
    """Gives a plan without numbers those of the file, and notes how."""

    source: QuantizedSource
    ways: Ways
    how: dict[str, MovedSite] = field(default_factory=dict)

    def fill_plan(self, plan: Plan) -> Plan:
        """The plan with the file's numbers where it has some."""
        self.how.clear()
        return plan.with_sites(tuple(map(self._fill_site, plan.sites)))

    def _fill_site(self, site: SitePlan) -> SitePlan:
        if site.derived is not None:
            return self._note(site, Kept.DERIVED, site.qparams)
        if site.role is Role.WEIGHT:
            return self._fill_weight(site)
        known = self._find_pair(site)
        if known is None or known.qparams is None or site.spec.dynamic:
            return self._note(site, Kept.SAMPLES, None)
        # Bit for bit, so that a file for the same engine has the same integers.
        if _have_same_type(known.spec, site.spec):
            return self._note(site, Kept.NUMBERS, known.qparams)
        low, high = map(float, clip_bounds(known.qparams, known.spec))
        qparams = qparams_from_range(low, high, site.spec, origin=_ORIGIN, bound=site.bound)
        return self._note(site, Kept.RANGE, qparams)

    def _find_pair(self, site: SitePlan) -> SitePlan | None:
        existing = self.source.existing
        edges = site.find_readers(self.ways.problem.ops.index)
        by_edge = (existing.by_edge.get(edge) for edge in edges)
        return existing.by_tensor.get(site.quantized_tensor) or next(filter(None, by_edge), None)

    def _fill_weight(self, site: SitePlan) -> SitePlan:
        known = next(filter(None, (self.source.constants.get(edge) for edge in site.consumers or ())), None)
        value = read_constant(self.ways.problem.index, site.site)
        if known is None or known.qparams is None or value is None:
            return self._note(site, Kept.ROUNDED, None)
        qparams = _fit_scale(known.qparams, site.spec, value)
        if qparams is not None and np.array_equal(fake_quant(value, qparams, site.spec), value):
            return self._note(site, Kept.INTEGERS, qparams)
        return self._note(site, Kept.ROUNDED, None)

    def _note(self, site: SitePlan, how: Kept, qparams: QParams | None) -> SitePlan:
        # Integers that stay are not fitted to sums of 16 bits; the report says which can overflow them.
        site = replace(site, sum_orders=()) if how is Kept.INTEGERS else site
        self.how[str(site.site)] = MovedSite(site=str(site.site), role=str(site.role), how=how)
        return replace(site, qparams=qparams)

    def list_moved(self, plan: Plan) -> tuple[MovedSite, ...]:
        """How the numbers of each site of the finished plan came about."""
        moved = []
        for site in plan.sites:
            note = self.how[str(site.site)]
            value = read_constant(self.ways.problem.index, site.site) if note.how is Kept.ROUNDED else None
            if value is not None and site.qparams is not None:
                error = fake_quant(value, site.qparams, site.spec) - value
                power, noise = float(np.square(value).sum()), float(np.square(error).sum())
                note = replace(note, error_db=10 * math.log10(power / noise) if noise and power else math.inf)
            moved.append(note)
        return tuple(moved)


def _have_same_type(spec: QuantSpec, other: QuantSpec) -> bool:
    """True where scale and zero point mean the same in both."""
    kinds = ((one.bits, one.signed, one.storage, one.symmetric or other.symmetric) for one in (spec, other))
    same = len(set(kinds)) == 1
    return same and (spec.symmetric or not other.symmetric)


def _fit_scale(qparams: QParams, spec: QuantSpec, value: Array) -> QParams | None:
    """The scales of a stored weight for a spec: of one for all, one for each channel. None where they do not fit."""
    # Blocks have no scale for each channel, and stay pairs of the file.
    grain = spec.granularity
    count = value.shape[grain.axis] if isinstance(grain, PerChannel) else 1
    scale = np.asarray(qparams.scale, np.float32)
    if scale.size == 1 and isinstance(grain, PerChannel):
        scale = np.full(count, scale.reshape(()), np.float32)
    elif scale.size != count:
        return None
    # Unsigned symmetric integers lie around the middle of their type.
    zero = 0 if spec.symmetric and spec.signed else spec.qmax // 2 + 1 if spec.symmetric else None
    zeros = qparams.zero_point if zero is None else np.full(scale.shape, zero, np.int32)
    return QParams(scale, np.broadcast_to(zeros, scale.shape).astype(np.int32), _ORIGIN)


def _place_pairs(source: QuantizedSource, ways: Ways, *, sampled: bool) -> tuple[Plan, _Filling]:
    """The plan of the engine with the file's numbers; float where the file is, and where it has no range.

    sampled: ranges that are missing come from samples.
    """
    index, existing = ways.problem.ops.index, source.existing
    left: set[str] = set()
    for name in list_quantized_ops(ways.problem, ways.plan):
        op = ways.problem.ops.by_name[name]
        paired = any(edge in existing.by_edge or tensor in existing.by_tensor for edge, tensor in op.data)
        # A weight that was not worth integers is not rounded now.
        if not (any(edge in source.constants for edge in op.weights) if op.weights else paired):
            left.add(name)
    reasons: dict[str, Unquantized] = {}
    # Operators that become float may move pairs to tensors that lack a range, too.
    while True:
        filling = _Filling(source, replace(ways, refusals=reasons))
        plan = filling.fill_plan(filling.ways.promote_keys(frozenset(left)))
        missing = [s for s in plan.sites if not s.complete and s.derived is None and s.role is not Role.WEIGHT]
        if sampled or not missing:
            return plan, filling
        for site in missing:
            text = f"the file has no range for {site.quantized_tensor}"
            for name in filling.ways.list_operators(site):
                reasons.setdefault(name, Refusal(name, text, "give samples: `data=…`", "no-scale", "R106"))
        if left.issuperset(reasons):
            readers = {edge.node for site in missing for edge in site.find_readers(index)}
            raise ModelError(
                sorted(readers)[0], "has no range and cannot be left float", "give samples: `data=…`", code="Q502"
            )
        left |= set(reasons)


def retarget(model: ModelSource, data: object, config: Config, *, progress: Progress = silent) -> Retargeted:
    """Make the file for the target of the configuration; see `onnxq.convert`."""
    with progress("reading the quantized model"):
        source = read_quantized(model)
    with open_context(model, data, config, progress) as ctx:
        ctx, state, obstacle = prepare_run(attach_weights(source.floats), data, ctx)
        if not isinstance(ctx, SampledContext) or obstacle is not None:
            fix = "give the library of its operators"
            raise ModelError("model", "cannot be run, which placing its pairs needs", fix, code="Q125")
        with ctx.timers.run("plan", "planning"):
            problem = draft_placement(state, ctx.data, config, "", progress=progress)
            ways = Ways(problem, problem.default(), reason=_FLOAT_REASON)
            plan, filling = _place_pairs(source, ways, sampled=data is not None)
        with ctx.timers.run("calibrate", "calibrating"):
            samples = None if data is None else ctx.data.calibration
            plan = calibrate(state.model, plan, samples, batch=config.data.batch, memory_limit=ctx.memory_limit)
        placed = state.add_placement(filling.ways.problem, replace(plan, data=_describe_numbers(filling.how)))
        with ctx.timers.run("emit", "making the quantized model"):
            quantized = build_file(placed, placed.planned, progress)
        result = finalize_run(ctx, placed, quantized, source=model)
        # On those that the ranges were not made of, where there are any.
        samples = ctx.data.test
        with progress("comparing both files", len(samples)) as task:
            reference = FloatOutputs(source.proto, samples, threads=config.verify.threads)
            (errors,) = measure_models([TrialModel(quantized)], reference, ctx.crew, task)
        return Retargeted(result, filling.list_moved(plan), errors.worst_db(), len(samples))


def _describe_numbers(how: Mapping[str, MovedSite]) -> str:
    counts = Counter(note.how.value for note in how.values())
    return "of the quantized file: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
