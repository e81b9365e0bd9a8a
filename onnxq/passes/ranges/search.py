"""Ranges of activations, site by site: the one whose pair disturbs the outputs of the operators behind it least.

Each Conv, ConvTranspose, Gemm and MatMul that reads a site is run alone, on the float model's tensors, with every
candidate in front of it; anything else that reads it counts as an error of the tensor itself. Candidates come from some
samples, errors from others, a dozen of the same and the two that reach furthest: rare values cost most, and few
samples do not show it (a ViT for TensorRT, 64 samples: 34.5 dB as calibrated, 27.1 without these two, 32.7 with). Sites
whose scale several share keep theirs. The numbers: `ranges.core`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx

from onnxq.arrays import Array
from onnxq.calibrate import calibrate
from onnxq.calibrate.constants import find_tensor
from onnxq.data import read_mask
from onnxq.evaluation.layer_noise import relative_noise, sum_squares
from onnxq.graph import GraphIndex, ModelLike, NodeRef, ensure_opset, get_index
from onnxq.graph.subgraph import assemble_model
from onnxq.numerics import fake_quant
from onnxq.numerics.threads import map_in_threads
from onnxq.passes.ranges.core import WORTH, RangeCandidates, choose_candidate
from onnxq.passes.rounding.gptq_core import FEWEST_POSITIONS
from onnxq.passes.rounding.layerwise import LayerwiseRunner
from onnxq.passes.rounding.shared_work import read_tensor
from onnxq.plan import Plan, SitePlan
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew
from onnxq.sites import Role, Site
from onnxq.spec import PerTensor, QParams

# Operators that are run with each candidate in front: their sums tell which values matter.
_RUN = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_PRESENT = "as calibrated"
# Of the samples that candidates are made of, those that errors come from as well.
_AGAIN = 12
Runner = Callable[[int, Array], Array]


@dataclass(frozen=True, eq=False)
class ChosenRanges:
    """The plan with the ranges chosen. taken: by site, the name of the candidate, for those that changed."""

    plan: Plan
    taken: Mapping[Site, str]

    def describe_taken(self) -> str:
        """For people: how many sites took each candidate."""
        counts = Counter(self.taken.values())
        return ", ".join(
            f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        )


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
    Deterministic.
    Raises CalibrationError on NaN and inf, ModelError and DataError from the runs.
    """
    proto = ensure_opset(proto, plan.opset)
    index = get_index(proto)
    readers = _map_readers(index, plan, settled)
    fitted, others = list(samples), list(judges)
    errors = _RangeErrors(index, LayerwiseRunner(proto, [*fitted, *others], {}), [*fitted, *others], len(fitted))
    left = Counter(site.site for read in readers.values() for _, site in read)
    with progress("choosing ranges", len(readers)) as task:
        for node in index.nodes:
            if node.name in readers:
                # A tensor's last reader is told so: behind it the errors of its candidates are complete.
                for k, site in readers[node.name]:
                    left[site.site] -= 1
                    errors.add_reader(node, k, site, last=not left[site.site])
                task.advance()
    chosen = {site: choose_candidate(noises, _PRESENT) for site, noises in errors.errors.items()}
    taken = {site: name for site, name in chosen.items() if name != _PRESENT}
    qparams = {site: errors.candidates[site][name] for site, name in taken.items()}
    qparams = {site: replace(numbers, origin=f"{numbers.origin}, chosen") for site, numbers in qparams.items()}
    return ChosenRanges(replace_ranges(proto, plan, qparams, crew), taken)


def replace_ranges(proto: ModelLike, plan: Plan, taken: Mapping[Site, QParams], crew: Crew | None) -> Plan:
    """The plan with these numbers, and those that follow from them made anew."""
    if not taken:
        return plan
    sites = []
    for site in plan.sites:
        if site.site in taken:
            site = replace(site, qparams=taken[site.site])
        elif site.derived is not None and site.derived[0] in taken:
            site = replace(site, qparams=None)
        sites.append(site)
    # A weight's scale may have been raised for its bias, whose scale is another now.
    weights = {site.derived[1] for site in sites if site.derived is not None and site.qparams is None}
    sites = [replace(site, qparams=None) if site.site in weights else site for site in sites]
    return calibrate(proto, replace(plan, sites=tuple(sites)), crew=crew)


def _map_readers(index: GraphIndex, plan: Plan, settled: Collection[Site]) -> dict[str, list[tuple[int, SitePlan]]]:
    """Readers of each site that has a scale of its own: (input, site) by node."""
    readers: dict[str, list[tuple[int, SitePlan]]] = {}
    for site in plan.sites:
        if (
            site.role not in (Role.ACTIVATION, Role.OUTPUT)
            or site.group
            or site.qparams is None
            or site.site in settled
        ):
            continue
        if site.spec.is_float or not isinstance(site.spec.granularity, PerTensor):
            continue
        tensor = find_tensor(index, site.site)
        if index.is_constant(tensor):
            continue
        for edge in site.find_readers(index):
            readers.setdefault(edge.node, []).append((edge.index, site))
    return readers


def _count_positions(node: NodeRef, value: Array) -> int:
    """How many times the channels of a tensor are seen: pixels, tokens."""
    axis = 1 if node.op_type in ("Conv", "ConvTranspose") else -1
    return value.size // value.shape[axis] if value.ndim > 1 and value.size else value.size


class _RangeErrors:
    """The float model on its way through the graph; errors of every candidate so far."""

    def __init__(self, index: GraphIndex, runner: LayerwiseRunner, feeds: Sequence[Feeds], fitted: int) -> None:
        self.index, self.runner, self.feeds, self.fitted = index, runner, feeds, fitted
        again = {int(j) for j in np.linspace(0, fitted - 1, min(_AGAIN, fitted))}
        self.judges = [*sorted(again), *range(fitted, len(feeds))]
        self.candidates: dict[Site, dict[str, QParams]] = {}
        self.errors: dict[Site, dict[str, float]] = {}

    def add_reader(self, node: NodeRef, k: int, site: SitePlan, *, last: bool) -> None:
        """Add the error of each candidate at this reader of the site. last: no other reader will follow."""
        tensor = self.index.input(node, k)
        if tensor is None or site.qparams is None:
            return
        self.runner.advance(self.runner.place(node.name))
        values = [read_tensor(value) for value in self.runner.values(tensor)]
        if site.site not in self.candidates:
            # Of few positions the range is chance, and so is what a narrower one clips.
            positions = sum(_count_positions(node, value) for value in values[: self.fitted])
            others = self._make_candidates(values, site, site.qparams) if positions >= FEWEST_POSITIONS else {}
            self.candidates[site.site] = {_PRESENT: site.qparams, **others}
            self.errors[site.site] = dict.fromkeys(self.candidates[site.site], 0.0)
        candidates, errors = self.candidates[site.site], self.errors[site.site]
        if len(candidates) < 2:
            return
        judged = self._list_judges(values)
        run = self._isolate_node(node, k) if node.op_type in _RUN and not node.domain else None

        def respond(j: int, qparams: QParams | None = None) -> Array:
            """The reader's output for a sample, or for its values through the pair."""
            value = values[j] if qparams is None else np.asarray(fake_quant(values[j], qparams, site.spec), np.float32)
            return self._drop_padding(j, run(j, value) if run else value)

        exact = list(map_in_threads(respond, judged))
        signal, most = sum(sum_squares(values_of_output) for values_of_output in exact), np.inf
        for name, qparams in candidates.items():
            got = map_in_threads(partial(respond, qparams=qparams), judged)
            errors[name] += relative_noise(exact, got, signal, most - errors[name])
            if last:
                # Whoever passes this cannot win any more: the present one comes first, and has to be beaten by far.
                most = min(most, errors[name] * (WORTH if name == _PRESENT else 1.0))

    def _list_judges(self, values: Sequence[Array]) -> list[int]:
        """Samples that errors come from, those that reach the ends of the range among them: there clipping costs.

        Extremes are rare and seldom held back, and without them every clipped range looks good.
        """
        fitted = [j for j in range(self.fitted) if values[j].size]
        lowest = min(fitted, key=lambda j: values[j].min(), default=0)
        highest = max(fitted, key=lambda j: values[j].max(), default=0)
        return [j for j in sorted({lowest, highest, *self.judges}) if values[j].size]

    def _make_candidates(self, values: Sequence[Array], site: SitePlan, present: QParams) -> dict[str, QParams]:
        ranges = RangeCandidates(site.spec)
        for j in range(self.fitted):
            ranges.add_sample(self._drop_padding(j, values[j]))
        return ranges.list_qparams(site.bound, present)

    def _drop_padding(self, sample: int, value: Array) -> Array:
        """Without positions of padding."""
        meant = read_mask(self.feeds[sample], value.shape)
        return value if meant is None else value[meant]

    def _isolate_node(self, node: NodeRef, k: int) -> Runner:
        """The node as a model of its own: its output for a sample with another value at input k."""
        others: dict[str, list[Array]] = {}
        tensors = [self.index.input(node, at) for at in range(len(node.inputs))]
        names = ["" if tensor is None else f"in{at}" for at, tensor in enumerate(tensors)]
        inputs, stored = [], {}
        for at, tensor in enumerate(tensors):
            if tensor is None:
                continue
            constant = self.index.constant(tensor) if at != k else None
            if constant is not None:
                stored[names[at]] = onnx.numpy_helper.from_array(constant, names[at])
                continue
            inputs.append(onnx.helper.make_tensor_value_info(names[at], onnx.TensorProto.FLOAT, None))
            if at != k:
                others[names[at]] = [read_tensor(value) for value in self.runner.values(tensor)]
        alone = onnx.helper.make_node(node.op_type, names, ["out"], **node.attrs)
        part = assemble_model(self.index.proto, [alone], inputs, [onnx.ValueInfoProto(name="out")], stored)
        session = Session(part, optimize=False, threads=1)

        def run(sample: int, value: Array) -> Array:
            feeds = {names[k]: value, **{name: every[sample] for name, every in others.items()}}
            return np.asarray(session.run(feeds)["out"])

        return run
