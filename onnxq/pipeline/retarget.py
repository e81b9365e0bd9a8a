"""A quantized file for another engine: its float model, its own numbers where the engine's pairs stand, the rest said.

The float model is the file with every pair taken out and every stored weight dequantized. The engine's planner places
pairs in it; each gets the numbers that the file has for its tensor. A weight keeps its scales wherever its integers
come out as they were; an activation keeps scale and zero point where its type stays, and its range where that changes.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from onnxq.arrays import Array, as_float32, as_int32, list_other_axes
from onnxq.config import Config
from onnxq.errors import ConfigError, ModelError
from onnxq.evaluation.accumulator import compute_sqnr
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.trials import TrialModel, measure_models
from onnxq.graph import ModelLike, add_libraries, attach_weights, emulate_types, load_model
from onnxq.numerics import align_qparams, clip_bounds, fake_quant, qparams_from_range, quantize
from onnxq.numerics.rounding import shape_scales
from onnxq.passes.assembly import build_file
from onnxq.passes.base import SampledContext, run_pass
from onnxq.passes.mixed_precision.candidates import Ways, list_quantized_ops
from onnxq.passes.mixed_precision.float_parts import FLOAT_TYPES
from onnxq.pipeline import check
from onnxq.pipeline.finalize import Result, finalize_run
from onnxq.pipeline.quantize_model import draft_placement, open_context, prepare_run
from onnxq.pipeline.quantized_source import QuantizedSource
from onnxq.plan import Plan, SitePlan
from onnxq.planner import state_placement
from onnxq.planner.sums import read_constant
from onnxq.progress import Progress
from onnxq.sites import Caution, Cautions, Refusal, Unquantized
from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec
from onnxq.wording import format_counts, join_names

_ORIGIN = "the file's own"
# Names that a warning lists.
_SHOWN = 4
_FLOAT_REASON = "it is float in the file that it came from"


class Kept(str, Enum):
    """How the numbers of a site came from the file."""

    NUMBERS = "numbers kept"
    RANGE = "range kept, in another type"
    SAMPLES = "range of the samples"
    DYNAMIC = "computed at each run"
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


MovedSites = tuple[MovedSite, ...]


@dataclass(frozen=True, eq=False)
class Answers:
    """SQNR in dB of the worst output, on so many samples.

    before, after: of the old file and of the new one against the network in float that the old one's weights make.
    agreement: of one against the other.
    """

    before: float
    after: float
    agreement: float
    samples: int


@dataclass(frozen=True, eq=False)
class Retargeted:
    """A file for another engine. answers: None where nothing was run."""

    result: Result
    sites: MovedSites
    answers: Answers | None


@dataclass(eq=False)
class _Filling:
    """Gives a plan without numbers those of the file, and notes how."""

    source: QuantizedSource
    ways: Ways
    how: dict[str, MovedSite] = field(default_factory=dict)

    def fill_site(self, site: SitePlan) -> SitePlan:
        """The site with the file's numbers where it has some."""
        if site.derived is not None:
            return self._note(site, Kept.DERIVED, site.qparams)
        if site.role.is_weight:
            return self._fill_weight(site)
        if site.spec.dynamic:
            return self._note(site, Kept.DYNAMIC, None)
        known = self._find_pair(site)
        if known is None or known.qparams is None:
            return self._note(site, Kept.SAMPLES, None)
        # Bit for bit, so that a file for the same engine has the same integers.
        if _have_same_type(known.spec, site.spec):
            return self._note(site, Kept.NUMBERS, known.qparams)
        # The ends of its levels are the range that the file clips to.
        low, high = map(float, clip_bounds(known.qparams, known.spec))
        qparams = qparams_from_range(low, high, site.spec, origin=_ORIGIN, bound=site.bound)
        return self._note(site, Kept.RANGE, qparams)

    def _find_pair(self, site: SitePlan) -> SitePlan | None:
        existing = self.source.existing
        edges = site.find_readers(self.ways.problem.ops.index)
        by_edge = map(existing.by_edge.get, edges)
        return existing.by_tensor.get(site.quantized_tensor) or next(filter(None, by_edge), None)

    def _fill_weight(self, site: SitePlan) -> SitePlan:
        readers = site.named_consumers
        known = next(filter(None, map(self.source.existing.by_reader.get, readers)), None)
        value = read_constant(self.ways.problem.index, site.site)
        if known is None or known.qparams is None or value is None:
            return self._note(site, Kept.ROUNDED, None)
        signed = self.ways.problem.engine.signed_scales and site.spec.has_blocks
        qparams = _fit_scale(known.qparams, known.spec, site.spec, value, signed=signed)
        if qparams is not None and np.array_equal(fake_quant(value, qparams, site.spec), value):
            return self._note(site, Kept.INTEGERS, qparams)
        # Rewrites scale channels, as where a BatchNormalization or a factor goes into the weight.
        codes = next(
            (self.source.codes[edge] for edge in readers if edge in self.source.codes), None
        )
        if qparams is not None and codes is not None:
            qparams = _scale_again(qparams, site.spec, known, codes, value)
            if qparams is not None:
                return self._note(site, Kept.INTEGERS, qparams)
        return self._note(site, Kept.ROUNDED, None)

    def _note(self, site: SitePlan, how: Kept, qparams: QParams | None) -> SitePlan:
        # Integers that stay are not fitted to sums of 16 bits; the report says which can overflow them.
        site = replace(site, sum_orders=()) if how is Kept.INTEGERS else site
        self.how[site.name] = MovedSite(site=site.name, role=str(site.role), how=how)
        return replace(site, qparams=qparams)

    def list_moved(self, plan: Plan) -> MovedSites:
        """How the numbers of each site of the finished plan came about."""
        moved = []
        for site in plan.sites:
            note = self.how[site.name]
            value = (
                read_constant(self.ways.problem.index, site.site)
                if note.how is Kept.ROUNDED
                else None
            )
            if value is not None and site.qparams is not None:
                error = fake_quant(value, site.qparams, site.spec) - value
                power = float(np.square(value).sum())
                noise = float(np.square(error).sum())
                note = replace(note, error_db=compute_sqnr(power, noise))
            moved.append(note)
        return tuple(moved)


def _have_same_type(spec: QuantSpec, other: QuantSpec) -> bool:
    """True where scale and zero point of the one mean the same in the other."""
    kind, other_kind = ((one.bits, one.signed, one.storage) for one in (spec, other))
    # A symmetric scale is an asymmetric one with its zero point in the middle, not the other way round.
    return kind == other_kind and (spec.symmetric or not other.symmetric)


def _fit_scale(
    qparams: QParams, old: QuantSpec, spec: QuantSpec, value: Array, *, signed: bool
) -> QParams | None:
    """The numbers of a stored weight in another spec: of one scale for all, of each channel, of each block.

    None where they do not fit: scales are repeated, and never joined. signed: they may be negative.
    """
    grain = spec.granularity
    shape = shape_scales(value.shape, grain)
    other = old.granularity

    def spread(numbers: Array) -> Array:
        if isinstance(other, PerBlock) and isinstance(grain, PerBlock):
            # Blocks of the file, cut where those of the engine are smaller; the last may be short.
            numbers = np.repeat(numbers, other.size // grain.size, grain.axis)[
                tuple(map(slice, shape))
            ]
        elif isinstance(other, PerChannel) and isinstance(grain, PerBlock):
            numbers = np.expand_dims(numbers, grain.axis)
        return np.array(
            np.broadcast_to(numbers if numbers.size > 1 else numbers.reshape(()), shape)
        )

    if isinstance(other, PerBlock) and not (
        isinstance(grain, PerBlock) and other.size % grain.size == 0 and other.axis == grain.axis
    ):
        return None
    try:
        scale = spread(qparams.scale)
        zero = spread(qparams.zero_point)
    except ValueError:
        return None
    # Unsigned symmetric integers lie around the middle of their type.
    middle = 0 if spec.signed else spec.qmax // 2 + 1
    zero = np.full(shape, middle) if spec.symmetric else zero + spec.qmin - old.qmin
    # Some tools give a block a negative scale, with which its lowest integer is the furthest from zero; or 0.
    scale = np.where(scale == 0, 1, scale if signed else abs(scale))
    return QParams(as_float32(scale), as_int32(zero), _ORIGIN)


# Of a step, that values scaled in float32 may lie beside it.
_NEAR = 1e-3


def _scale_again(
    qparams: QParams, spec: QuantSpec, known: SitePlan, codes: Array, value: Array
) -> QParams | None:
    """Other scales, with which a weight whose channels were scaled has the file's integers; None where it has not."""
    levels = as_float32(codes)
    if codes.shape != value.shape or spec.has_blocks or known.qparams is None:
        return None
    _, zero = align_qparams(known.qparams, known.spec, codes.shape, np.float32)
    levels -= zero
    grain = spec.granularity
    axes = list_other_axes(value, grain.axis) if isinstance(grain, PerChannel) else None
    squares = np.square(levels).sum(axes)
    # A channel of zeros keeps its scale.
    # By least squares: Σ q·w / Σ q².
    fitted = (levels * value).sum(axes) / np.maximum(squares, 1)
    scale = np.where(squares > 0, fitted, qparams.scale)
    scaled = replace(qparams, scale=as_float32(scale))
    steps, own = align_qparams(scaled, spec, value.shape, np.float32)
    exact = (scale > 0).all() and (abs(value / steps - levels) < _NEAR).all()
    return scaled if exact and np.array_equal(quantize(value, scaled, spec) - own, levels) else None


def _place_pairs(
    source: QuantizedSource, ways: Ways, *, sampled: bool, complete: bool
) -> tuple[Plan, _Filling]:
    """The plan of the engine with the file's numbers; float where the file is, and where it has no range.

    sampled: ranges that are missing come from samples. complete: what is float in the file need not be.
    """
    index = ways.problem.ops.index
    existing = source.existing
    left = set()
    for name in () if complete else list_quantized_ops(ways.problem, ways.plan):
        op = ways.problem.ops.by_name[name]
        paired = any(
            edge in existing.by_edge or tensor in existing.by_tensor for edge, tensor in op.data
        )
        # A weight that was not worth integers is not rounded now.
        if not (any(edge in existing.by_reader for edge in op.weights) if op.weights else paired):
            left.add(name)
    reasons: dict[str, Unquantized] = {}
    # Operators that become float may move pairs to tensors that lack a range, too.
    while True:
        filling = _Filling(source, replace(ways, refusals=reasons))
        plan = filling.ways.promote_keys(frozenset(left))
        plan = plan.with_sites(map(filling.fill_site, plan.sites))
        missing = [
            s for s in plan.sites if not s.complete and s.derived is None and not s.role.is_weight
        ]
        if sampled or not missing:
            return plan, filling
        for site in missing:
            text = f"the file has no range for {site.quantized_tensor}"
            for name in filling.ways.list_operators(site):
                reasons.setdefault(
                    name, Refusal(name, text, "give samples: `data=…`", "no-scale", "R106")
                )
        if left.issuperset(reasons):
            readers = {edge.node for site in missing for edge in site.find_readers(index)}
            raise ModelError(
                min(readers),
                "has no range and cannot be left float",
                "give samples: `data=…`",
                code="Q502",
            )
        left.update(reasons)


def retarget(
    source: QuantizedSource, data: object, config: Config, *, progress: Progress
) -> Retargeted:
    """Make the file for the target of the configuration; see `onnxq.convert`."""
    model = attach_weights(source.floats)
    if config.convert.complete and data is None:
        cause = "what the file has in float gets ranges of samples, and there are none"
        raise ConfigError("convert.complete", cause, "give samples: `data=…`", code="Q308")
    with open_context(model, data, config, progress) as ctx:
        ctx, state, _ = prepare_run(model, data, ctx, computes=source.types.computes)
        # Its floats come in float32, so that no weight is rounded to a type of the file again.
        typed = (
            load_model(attach_weights(source.restore_types()))
            if source.types.interface
            else state.source
        )
        state = replace(state, source=typed, types=source.types)
        # Weights alone of a large model, or of one with operators that nothing here runs, need no samples.
        run = ctx if isinstance(ctx, SampledContext) else None
        with ctx.timers.run("plan", "planning"):
            if run is None:
                problem = state_placement(
                    state.model, config, before=state.before, prepare=state.rewrites
                )
            else:
                problem = draft_placement(state, run.data, config, progress=progress)
            ways = Ways(problem, problem.default(), reason=_FLOAT_REASON)
            plan, filling = _place_pairs(
                source, ways, sampled=data is not None, complete=config.convert.complete
            )
        with ctx.timers.run("calibrate", "calibrating"):
            samples = None if data is None or run is None else run.data.calibration
            plan = ctx.calibrate(state.model, plan, samples)
        counts = Counter(note.how.value for note in filling.how.values())
        plan = replace(plan, data=f"of the quantized file: {format_counts(counts)}")
        placed = state.add_placement(filling.ways.problem, plan)
        placed = placed if run is None else run_pass(FLOAT_TYPES, run, placed)
        with ctx.timers.run("emit", "making the quantized model"):
            quantized = build_file(placed, placed.plan, progress)
        result = finalize_run(ctx, placed, quantized, source=source.origin)
        cautions = (*warn_integers(source), *result.report.warnings)
        # Made-up inputs gave shapes and answers, and no range.
        result = result.change_report(warnings=cautions, synthetic=False)
        answers = None
        if run is not None:
            made = emulate_types(quantized) if check.is_narrow(placed) else quantized
            answers = _compare(run, source, made)
        return Retargeted(result, filling.list_moved(plan), answers)


def _compare(ctx: SampledContext, source: QuantizedSource, made: ModelLike) -> Answers:
    """The answers of both files, on samples that ranges were not made of, where there are any."""
    samples = ctx.data.test
    host = ctx.config.runtime
    own, floats = (
        add_libraries(model, host.libraries, host.provider)
        for model in (source.proto, source.floats)
    )
    with ctx.progress("comparing both files", 3 * len(samples)) as task:
        before, after, both = (
            measure_models(
                [TrialModel(model)],
                FloatOutputs(exact, samples, threads=ctx.config.verify.threads),
                ctx.crew,
                task,
            )[0]
            for model, exact in ((own, floats), (made, floats), (made, own))
        )
    return Answers(before.worst_db(), after.worst_db(), both.worst_db(), len(samples))


def warn_integers(source: QuantizedSource) -> Cautions:
    """A warning of operators that go on computing on integers."""
    if not source.integers:
        return ()
    names = [f"{operator.node} ({operator.op})" for operator in source.integers]
    text = f"{join_names(names, _SHOWN)}: computed on integers without pairs, left as it was"
    return (Caution("W140", text),)
