"""Ranges of activations: of several candidates the best by the error behind each, wider ones for few values.

No observer is best everywhere: a MobileNetV2 has 27 dB with minmax and 32 with mse, six layers of BERT lose 10 dB if
the whole range is not kept, and accuracy can drop suddenly with a percentile (ViT-B/32: 76 to 7 % from 99.999 to 99.9).
So all of them are candidates, and the error behind the operator that reads the tensor decides.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx
from onnx import helper, parser
from onnx.numpy_helper import from_array

from onnxq.arrays import Array, Interval, Shape, as_float32, as_int32
from onnxq.calibrate import calibrate
from onnxq.calibrate.constants import Numbers, find_tensor
from onnxq.data import read_mask
from onnxq.evaluation.accumulator import relative_noise
from onnxq.graph import LAYOUT_OPS, GraphIndex, ModelLike, NodeRef, ensure_opset, get_index
from onnxq.graph.storage import TENSOR_TYPES
from onnxq.graph.subgraph import assemble_model
from onnxq.numerics import clip_bounds, qparams_from_range
from onnxq.numerics.machine import count_cores, map_in_threads, share_cores
from onnxq.observers.histogram import WHOLE, find_candidates
from onnxq.passes.base import Pass, SampledContext, has_real_samples
from onnxq.passes.journal import MEASURED, PassReport, list_replaced, report_changes
from onnxq.passes.judging import THRESHOLDS, Trial, ignore_rounding
from onnxq.passes.patterns import find_logits
from onnxq.passes.rounding.gptq_core import FEWEST_POSITIONS
from onnxq.passes.rounding.layerwise import LayerwiseRunner, take_enough
from onnxq.passes.rounding.shared_work import read_tensor
from onnxq.passes.state import FloatState, PlacedState, PlacedStep
from onnxq.plan import Plan, SitePlan
from onnxq.planner.place import intersect_bounds
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew
from onnxq.sites import Site
from onnxq.spec import FIXED, RULED, QParams, QuantSpec

# Largest error of a candidate relative to that of the present range: one decibel less. Smaller differences are noise of
# few samples (MobileNetV2, uint8: 39.2 dB as calibrated, 36.6 at 0.97 on four samples, 38.4 at 0.8 on sixteen).
WORTH = 0.8


def choose_candidate(errors: dict[str, float], present: str) -> str:
    """The candidate with the least error if that is below `WORTH` times the present one's, else `present`."""
    # Of equal errors the first by name, so that no order of dictionaries decides.
    best = min(errors, key=lambda name: (errors[name], name))
    # A small gain on few samples is chance, and other numbers cost trust in the file.
    return best if errors[best] < WORTH * errors[present] else present


def has_observed_range(site: SitePlan) -> bool:
    """True for an activation that has a range from samples."""
    qparams = site.qparams
    return site.role in MEASURED and qparams is not None and qparams.origin not in (FIXED, RULED)


def is_observed(site: SitePlan) -> bool:
    """True for an activation in integers that has a range from samples."""
    return has_observed_range(site) and not site.spec.is_float


def read_range(site: SitePlan) -> Interval:
    """Lowest and highest value that a calibrated site can hold."""
    assert site.qparams is not None
    low, high = clip_bounds(site.qparams, site.spec)
    return float(low), float(high)


def set_range(site: SitePlan, low: float, high: float, note: str = "") -> QParams:
    """Scale and zero point of a calibrated site for another range. note: goes with the origin of its numbers."""
    assert site.qparams is not None
    origin = site.qparams.origin + note
    return qparams_from_range(low, high, site.spec, origin=origin, bound=site.bound)


def scale_range(site: SitePlan, factor: float, note: str = "") -> QParams:
    """Scale and zero point for a range that reaches so many times as far."""
    low, high = read_range(site)
    return set_range(site, factor * low, factor * high, note)


# Ranges of activations, site by site: the one whose pair disturbs the outputs of the operators behind it least.
# Each Conv, ConvTranspose, Gemm and MatMul that reads a site is run alone, on the float model's tensors, with every
# candidate in front of it; anything else that reads it counts as an error of the tensor itself. Candidates come from
# some samples, errors from others, a dozen of the same and the two that reach furthest: rare values cost most, and
# few samples do not show it (a ViT for TensorRT, 64 samples: 34.5 dB as calibrated, 27.1 without these two, 32.7
# with). Sites whose scale several share keep theirs, and so do logits.

# Operators that are run with each candidate in front: their sums tell which values matter.
_RUN = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_PRESENT = "as calibrated"
# Of the samples that candidates are made of, those that errors come from as well.
_AGAIN = 12
# Of larger maps a band of so many positions is judged: of 20 samples most see it all.
_POSITIONS = 1 << 12
# By sample: the values that an error is measured on, and how many times they count.
JudgedValues = dict[int, tuple[Array, float]]
# Readers whose errors are measured at a time: the values that they are measured on are held.
_AT_A_TIME = 4
NoiseMeasure = Callable[[QParams, int], float]
# The run that returns a site, and the error of each of its candidates behind a reader.
ErrorsRun = Callable[[], tuple[Site, dict[str, float]]]
# Everything is 0 in such steps.
_COARSEST = QParams(as_float32(2.0**100), as_int32(0))


@dataclass(frozen=True, eq=False)
class ChosenRanges:
    """The plan with the ranges chosen. taken: by site, the name of the candidate, for those that changed."""

    plan: Plan
    taken: Mapping[Site, str]

    def describe_taken(self) -> str:
        """For people: how many sites took each candidate."""
        # Of equal numbers the first by name: `most_common` keeps the order that they come in.
        counts = Counter(sorted(self.taken.values())).most_common()
        return ", ".join(f"{count} {name}" for name, count in counts)


def choose_ranges(
    proto: ModelLike,
    plan: Plan,
    samples: Iterable[Feeds],
    judges: Iterable[Feeds],
    *,
    progress: Progress,
    crew: Crew | None = None,
    settled: Collection[Site] = (),
) -> ChosenRanges:
    """The plan with the best of several ranges at every activation that has a scale to itself.

    proto: the prepared float model; plan: calibrated for it. samples: candidates are made of them; judges: samples
    they are judged on. All are held, with the tensors alive between two nodes. crew: searches weights anew.
    settled: sites that keep their ranges.
    Deterministic. Raises CalibrationError on NaN and inf, ModelError and DataError from the runs.
    """
    proto = ensure_opset(proto, plan.opset)
    index = get_index(proto)
    settled = {*settled, *find_logits(index, "Sigmoid", "Softmax")}
    # Readers of each site that has a scale of its own: (input, site) by node.
    readers = defaultdict[str, list[tuple[int, SitePlan]]](list)
    for site in plan.sites:
        apart = not site.group and site.site not in settled and site.spec.has_one_scale
        if not apart or not is_observed(site) or index.is_constant(find_tensor(index, site.site)):
            continue
        for edge in site.find_readers(index):
            readers[edge.node].append((edge.index, site))
    search = _RangeSearch(index, list(samples), list(judges))
    reads = [(node, *read) for node in index.nodes for read in readers.get(node.name, ())]
    counts = Counter(site.site for *_, site in reads)

    def open_readers() -> Iterator[ErrorsRun]:
        with progress("choosing ranges", len(reads)) as task:
            for node, k, site in reads:
                yield from search.open_reader(node, k, site, only=counts[site.site] == 1)
                task.advance()

    errors: dict[Site, dict[str, float]] = {}
    # Beside the runs of some readers the model goes on to the next, and candidates are made of what they read.
    threads = min(count_cores(), _AT_A_TIME)
    for key, noises in map_in_threads(lambda run: run(), open_readers(), threads=threads):
        earlier = errors.get(key, {})
        errors[key] = {name: noises[name] + earlier.get(name, 0.0) for name in noises}
    chosen = {site: choose_candidate(noises, _PRESENT) for site, noises in errors.items()}
    taken = {site: name for site, name in chosen.items() if name != _PRESENT}
    qparams = {
        site: replace(search.candidates[site][name], origin=f"{name}, chosen")
        for site, name in taken.items()
    }
    return ChosenRanges(replace_ranges(proto, plan, qparams, crew), taken)


def replace_ranges(proto: ModelLike, plan: Plan, taken: Numbers, crew: Crew | None) -> Plan:
    """The plan with these numbers, and those that follow from them made anew."""
    if not taken:
        return plan
    changed = plan.list_scaled_for(taken.keys()).union(taken)
    sites = {
        site.site: replace(site, qparams=taken.get(site.site))
        for site in plan.sites
        if site.site in changed
    }
    return calibrate(proto, plan.replace_sites(sites), crew=crew)


def _count_positions(node: NodeRef, value: Array) -> int:
    """How many times the channels of a tensor are seen: pixels, tokens."""
    axis = 1 if node.op_type in ("Conv", "ConvTranspose") else -1
    return value.size // value.shape[axis] if value.ndim > 1 and value.size else value.size


def _take_band(node: NodeRef, value: Array, place: float) -> tuple[Array, float]:
    """Rows of a large map that a node reads, at a place from 0 to 1, and how many of its rows each stands for."""
    convolved = node.op_type == "Conv"
    axis = 2 if convolved else value.ndim - 2
    rows = value.shape[axis]
    kernel = node.attrs.get("kernel_shape", [rows if convolved else 1])[0]
    reach = kernel * node.attrs.get("dilations", [1])[0]
    taken = min(rows, max(rows * _POSITIONS // _count_positions(node, value), reach))
    start = int((rows - taken) * place)
    band = np.split(value, [start, start + taken], axis)[1]
    return np.ascontiguousarray(band), rows / taken


def _drop_padding(feeds: Feeds, values: Array, shape: Shape) -> Array:
    """Values at the positions of a tensor of this shape that are not padding."""
    meant = read_mask(feeds, shape)
    return values if meant is None else values[meant]


class _RangeSearch:
    """The float model on its way through the graph; candidates of every site so far."""

    def __init__(self, index: GraphIndex, fitted: list[Feeds], judges: list[Feeds]) -> None:
        self.index = index
        self.feeds = fitted + judges
        self.runner = LayerwiseRunner(index.model, self.feeds, {})
        # The first samples make candidates.
        self.fitted = len(fitted)
        again = {int(j) for j in np.linspace(0, self.fitted - 1, min(_AGAIN, self.fitted))}
        self.judges = [*sorted(again), *range(self.fitted, len(self.feeds))]
        self.candidates: dict[Site, dict[str, QParams]] = {}

    def open_reader(
        self, node: NodeRef, k: int, site: SitePlan, *, only: bool
    ) -> Iterator[ErrorsRun]:
        """The run for input k of a node, which reads the site; none where there is no choice. only: no other does."""
        tensor = self.index.find_input(node, k)
        if tensor is None or site.qparams is None:
            return
        self.runner.advance(self.runner.place(node.name))
        values = [read_tensor(value) for value in self.runner.values(tensor)]
        if node.op_type == "Gemm":
            # In a loop a value is of all its steps, one behind the other.
            values = [value.reshape(-1, *value.shape[-1:]) for value in values]
        if site.site not in self.candidates:
            # Of few positions the range is chance, and so is what a narrower one clips.
            positions = sum(_count_positions(node, value) for value in values[: self.fitted])
            ranges = {_PRESENT: site.qparams}
            # A vector has an axis for its channels and none for positions.
            if positions >= FEWEST_POSITIONS and values[0].ndim > 1:
                # Without positions of padding.
                meant = (
                    _drop_padding(feeds, value, value.shape)
                    for feeds, value in zip(self.feeds[: self.fitted], values, strict=False)
                )
                step = float(site.qparams.scale)
                ranges |= find_candidates(meant, site.spec, site.bound, step)
            self.candidates[site.site] = ranges
        if len(self.candidates[site.site]) > 1:
            judged = self._choose_values(node, k, values)
            measure_noise = self._make_measure(node, k, site.spec, judged)
            yield partial(self._measure_errors, site.site, measure_noise, list(judged), only=only)

    def _measure_errors(
        self, site: Site, measure_noise: NoiseMeasure, samples: Sequence[int], *, only: bool
    ) -> tuple[Site, dict[str, float]]:
        # With the coarsest step nothing is left of a tensor.
        signal = sum(measure_noise(_COARSEST, sample) for sample in samples)
        most = np.inf
        errors = {}
        for name, qparams in self.candidates[site].items():
            noises = (measure_noise(qparams, sample) for sample in samples)
            errors[name] = relative_noise(noises, signal, most)
            if only:
                # Whoever passes this cannot win any more: the present one comes first, and has to be beaten by far.
                most = min(most, errors[name] * (WORTH if name == _PRESENT else 1.0))
        return site, errors

    def _choose_values(self, node: NodeRef, k: int, values: Sequence[Array]) -> JudgedValues:
        """The values that errors come from: all of the samples that reach the ends of the range, for there clipping
        costs and extremes are seldom held back; of large maps of others a band.
        """
        fitted = [j for j in range(self.fitted) if values[j].size]
        lowest = min(fitted, key=lambda j: values[j].min(), default=0)
        highest = max(fitted, key=lambda j: values[j].max(), default=0)
        judged = [j for j in sorted({lowest, highest, *self.judges}) if values[j].size]
        chosen = {}
        for place, j in enumerate(judged):
            value = values[j]
            whole = k or value.ndim < 3 or node.op_type == "ConvTranspose" or j in (lowest, highest)
            whole = whole or read_mask(self.feeds[j], value.shape) is not None
            chosen[j] = (value, 1.0) if whole else _take_band(node, value, place / len(judged))
        return chosen

    def _make_measure(
        self, node: NodeRef, k: int, spec: QuantSpec, judged: JudgedValues
    ) -> NoiseMeasure:
        """The function that measures a pair at input k of a node: squares of what it changes a sample's output by.

        All of it is one run of ONNX Runtime, beside which another thread computes; between sums of numpy, threads wait
        for the interpreter longer than they compute.
        """
        others = []
        stored = {"last": from_array(np.array([-1]), "last")}
        source = "clipped" if spec.is_narrow else "value"
        texts = ["clipped = Clip(value, low, high)"] if spec.is_narrow else []
        texts += [
            f"codes = QuantizeLinear({source}, scale, zero)",
            "rounded = DequantizeLinear(codes, scale, zero)",
            "error = Sub(rounded, value)",
        ]
        nodes = [*map(parser.parse_node, texts)]
        error = "error"
        operand = self.index.find_input(node, 1 - k) if node.op_type in _RUN and k < 2 else None
        if operand is not None and not node.domain:
            constant = self.index.find_constant(operand)
            if constant is None:
                others = [read_tensor(value) for value in self.runner.values(operand)]
            else:
                stored["other"] = from_array(constant, "other")
            # Of the difference of two sums a bias says nothing.
            names = ("error", "other")[:: -1 if k else 1]
            nodes.append(helper.make_node(node.op_type, names, ["output"], **node.attrs))
            error = "output"
        nodes.append(parser.parse_node(f"squares = Mul({error}, {error})"))
        nodes.append(parser.parse_node("noise = ReduceSum <keepdims = 0> (squares, last)"))
        bounds = ("low", "high") if spec.is_narrow else ()
        floats = ("value", "scale", *bounds, *(("other",) if others else ()))
        types = dict.fromkeys(floats, TENSOR_TYPES["float"]) | {"zero": TENSOR_TYPES[spec.storage]}
        inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
        # ORT infers its type, and its sizes differ from sample to sample.
        outputs = [onnx.ValueInfoProto(name="noise")]
        part = assemble_model(self.index.proto, nodes, inputs, outputs, stored)
        session = Session(part, fuse_pairs=False, threads=share_cores(len(self.judges)))

        def measure_noise(qparams: QParams, sample: int) -> float:
            value, weight = judged[sample]
            feeds = {"value": value, "scale": as_float32(qparams.scale)}
            feeds["zero"] = np.asarray(qparams.zero_point, spec.code_type)
            if others:
                feeds["other"] = others[sample]
            feeds |= zip(bounds, clip_bounds(qparams, spec), strict=False)
            rows = session.run(feeds)["noise"]
            # A mask is of positions, and tensors that it fits have an axis of channels behind them.
            meant = _drop_padding(self.feeds[sample], rows, (*rows.shape, 1))
            return weight * float(meant.sum(dtype=np.float64))

        return measure_noise


# An average pool leaves one vector of an image. Of 28 images the largest value is chance, and of new ones some reach
# further: a ResNet had 38.7 dB on its samples and 35.7 on 1,000 others, of which nearly all noise was clipping there.

# Ranges reach so many times as far as the samples. On five nets and 18 draws of 32 samples, new samples gain 1.1 dB in
# the mean by 1.1, 1.4 by 1.2, 1.5 by 1.3 and 1.2 by 1.5 (0.3 less at the worst, 4.5 more at the best).
_ROOM = 1.25
# Operators that new samples take no further.
_BOUNDED = ("Clip", "HardSigmoid", "Sigmoid", "Softmax", "Tanh")
# Each value of theirs is of one value that they read: samples show as many of them.
_ACTIVATIONS = (
    "Elu",
    "Gelu",
    "HardSwish",
    "LeakyRelu",
    "Mish",
    "Neg",
    "PRelu",
    "Relu",
    "Softplus",
    "Swish",
)
_VALUE_BY_VALUE = LAYOUT_OPS.union(_ACTIVATIONS)


def widen_scarce_ranges(ctx: SampledContext, state: PlacedState) -> PlacedState:
    """The state with wider ranges of the activations of `find_scarce_sites`."""
    scarce = find_scarce_sites(ctx, state)
    widened = {
        site.site: scale_range(site, _ROOM, ", widened")
        for site in state.plan.sites
        if site.site in scarce
    }
    return replace(state, plan=replace_ranges(state.model, state.plan, widened, ctx.crew))


def find_scarce_sites(ctx: SampledContext, state: PlacedState) -> frozenset[Site]:
    """The activations that have fewer than `FEWEST_POSITIONS` positions in all samples.

    Not where ranges are to be those of the samples: at effort `fast`, and where the search for better ones is left out;
    unless an SQNR of new samples was asked for. Ranges that clip values by intention stay, as do tensors that share a
    scale with others of more positions.
    """
    as_seen = ctx.config.effort == "fast" or NAME in ctx.skip
    if (as_seen and ctx.request.min_sqnr is None) or ctx.data.synthetic or ctx.config.scale.ranges:
        return frozenset()
    index = state.index
    plan = state.plan
    # Shapes are those of one sample.
    enough = FEWEST_POSITIONS / max(len(ctx.data.ranges), 1)
    scarce = {
        site.site: site.group
        for site in plan.sites
        # The range is that of all values.
        if is_observed(site) and site.spec.has_one_scale and site.observer.name == WHOLE
        if 0 < _count_channel_positions(state, index, site) < enough
    }
    shared = {site.group for site in plan.all_sites if site.site not in scarce} - {""}
    return frozenset(site for site, group in scarce.items() if group not in shared)


def _count_channel_positions(state: PlacedState, index: GraphIndex, site: SitePlan) -> int:
    """How many times a sample shows the channels of a tensor that a node makes; 0 where that is not known."""
    tensor = find_tensor(index, site.site)
    tensor = index.find_origin(tensor, _VALUE_BY_VALUE) or tensor
    producer = index.find_producer(tensor)
    shape = state.problem.ops.shapes.get(tensor, ())
    if producer is None or producer.op_type in _BOUNDED or len(shape) < 2 or 0 in shape:
        return 0
    readers = index.readers(tensor)
    convolved = any(reader.op_type in ("Conv", "ConvTranspose") for reader in readers)
    return math.prod(shape) // shape[1 if convolved or len(shape) == 4 else -1]


NAME = "ranges"
# Errors of layers are judged on few samples: they have many positions each.
_JUDGES = 4
_WHY = "less noise behind the operators that read these; `skip: [ranges]` keeps the observer's"


def improve_ranges(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The range of each activation that disturbs the operators behind it least."""
    plan = state.plan
    fitted = take_enough(ctx.data.calibration, plan, ctx.config, state)
    # Others than those that candidates are made of: a range fits the values that it was made from.
    judges = ctx.data.validation.take(_JUDGES, ctx.config.data.seed)
    shared = fix_scales(ctx, state, plan)
    chosen = choose_ranges(
        state.model,
        shared,
        fitted.samples(),
        judges.samples(),
        progress=ctx.progress,
        crew=ctx.crew,
        settled=find_scarce_sites(ctx, state),
    )
    if not chosen.taken:
        return state, report_changes(NAME)
    line = f"{chosen.describe_taken()} {list_replaced(shared, chosen.plan, MEASURED, _WHY)}"
    return replace(state, plan=_keep_dynamic(plan, chosen)), PassReport(NAME, (line,))


def _keep_dynamic(plan: Plan, done: ChosenRanges) -> Plan:
    """The plan with the numbers chosen; a site on scales of each run clips to the range that was chosen for it."""
    chosen = done.plan.by_site
    sites = []
    for site in plan.sites:
        better = chosen[site.site]
        if not site.spec.dynamic:
            site = better
        elif better.qparams is not None and done.taken.get(site.site, WHOLE) != WHOLE:
            site = replace(site, clip=read_range(better))
        sites.append(site)
    return done.plan.with_sites(sites)


RANGES: tuple[Pass[SampledContext, PlacedState], ...] = (
    Pass(
        NAME,
        improve_ranges,
        "choosing ranges",
        0.3,
        applies=has_real_samples,
        trial=Trial(
            lambda ctx, state: ctx.data.judges.score(
                state, ignore_rounding(state.plan), progress=ctx.progress
            ),
            THRESHOLDS[NAME],
        ),
    ),
)


def fix_scales(ctx: SampledContext, state: FloatState, plan: Plan) -> Plan:
    """The plan with scales that all samples share, as in one batch, in place of those of each run.

    For passes that choose where outliers spoil a batch: samples that run one by one hide the tensor that does it
    (MiniLM, in batches of 20, 19.6 dB with it).
    """
    if not any(site.spec.dynamic for site in plan.sites):
        return plan
    sites = []
    for site in plan.sites:
        if site.spec.dynamic:
            spec = replace(site.spec, dynamic=False)
            bound = intersect_bounds((site.bound, site.clip))
            site = replace(site, spec=spec, bound=bound, clip=(None, None))
        sites.append(site)
    return ctx.calibrate(state.model, plan.with_sites(sites), ctx.data.ranges)
