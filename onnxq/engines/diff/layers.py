"""Every matching tensor inside, engine by engine: errors over samples, as many tensors at a time as memory allows.

Runs are read without changing any: marking a tensor as an output would keep ONNX Runtime from fusing over it. So the
run with all optimizations is read in the graph that ONNX Runtime has already made: its fusions are done, and it
computes the tensors that survived them. A tensor inside a fused kernel is compared at its quantizer's output, which
survives, as real numbers.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from onnxq.arrays import Array, Arrays, Interval, RunValues, part_by_size
from onnxq.backends.engine import Runner, SessionRunner
from onnxq.data import Dataset
from onnxq.engines.diff.measure import Level, Tallies, Tally, diverges, find_level
from onnxq.engines.diff.model import FLOAT, OFF, ON, Divergence, Error, LayerDiff, label_run
from onnxq.engines.diff.runs import Reference
from onnxq.errors import OnnxqError
from onnxq.graph import FLOAT_TENSORS, GraphIndex, ModelLike, NodeRef, add_libraries, name_nodes
from onnxq.graph.base import DEQUANTIZE, DYNAMIC, QUANTIZE
from onnxq.graph.light import list_libraries
from onnxq.plan.names import is_clipped_part
from onnxq.progress import Progress, Tick
from onnxq.runtime import Feeds, Session, Shapes, optimize_graph, tap_tensors
from onnxq.sites import Lines, Names, NameSet, Refusal, Refusals, TensorId, drop_repeats

_FLOATS = FLOAT_TENSORS | {0}
# Types that numpy and ORT exchange; sub-byte and float8 tensors stay inside.
_INTEGERS = {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, 0}
# Better than this is as good as exact: drops are counted from here.
_EXACT_DB = 60.0


@dataclass(frozen=True)
class Counterpart:
    """A tensor of the quantized file that stands for a matched one: by name, with its level if it may hold integers."""

    tensor: str
    level: Level | None = None

    def read(self, values: Arrays, level: Level | None = None) -> Array | None:
        """Its real values in a run; None when the run lacks it. level: of its integers there, where it is another."""
        value = values.get(self.tensor)
        if value is None or value.dtype.kind not in "fiu":
            return None
        if value.dtype.kind == "f":
            return value
        known = level or self.level
        return None if known is None else known.to_real(value)


@dataclass(frozen=True)
class MatchedTensor:
    """A tensor of the quantized file's main graph."""

    name: str
    node: NodeRef
    # The float model's name for it, "" when it has none.
    reference: str
    # Itself, then its quantizers' outputs: these survive when a fused kernel swallows the tensor.
    counterparts: tuple[Counterpart, ...]

    @property
    def step(self) -> float:
        """One quantization step of the tensor's first quantizer, 0 without one."""
        return next((one.level.scale for one in self.counterparts if one.level is not None), 0.0)


def match_tensors(float_index: GraphIndex, index: GraphIndex) -> tuple[MatchedTensor, ...]:
    """Every float tensor that a node of the quantized main graph makes, in the order of the network.

    Tensors computed from weights alone are left out, and the results of DequantizeLinear: they are their source again.
    """
    values = (*index.proto.graph.output, *index.proto.graph.value_info)
    # Sequences, maps and optionals have neither one shape nor a type of elements.
    containers = {
        value.name
        for value in values
        if value.type.WhichOneof("value") not in (None, "tensor_type")
    }
    known = {name for node in float_index.nodes if not node.scope for name in node.outputs}
    quantizers = defaultdict(list)
    for node in index.nodes:
        if node.op_type == QUANTIZE and not node.scope:
            quantizers[find_source(index, node.inputs[0])].append(node)
    found = []
    live = _find_data_nodes(index)
    for node in index.nodes:
        if node.op_type in (QUANTIZE, DEQUANTIZE, "Constant") or node.name not in live:
            continue
        if _is_quantizer_clip(index, node):
            continue
        for tensor in node.results:
            name = tensor.name
            if (
                name in containers
                or index.find_dtype(tensor) not in _FLOATS
                or index.is_constant(tensor)
            ):
                continue
            makers = quantizers.get(name, [])
            stored = [q.outputs[0] for q in makers if index.find_dtype(q.result) in _INTEGERS]
            levels = [Counterpart(one, find_level(index, one)) for one in stored]
            # An exporter that quantizes an output gives the dequantized tensor the float one's name.
            readers = (node for q in makers for node in index.readers(q.result))
            names = [name, *(node.outputs[0] for node in readers if node.op_type == DEQUANTIZE)]
            reference = next((one for one in names if one in known), "")
            # Where a tool took out a Relu or Clip, which the range of the quantizer behind does as well, the node in
            # front makes the tensor of its name, which has the float model's values only when quantized.
            maker = float_index.find_producer(TensorId(reference))
            cut = (
                maker is not None
                and maker.op_type in ("Relu", "Clip")
                and node.op_type != maker.op_type
            )
            own = [] if levels and cut else [Counterpart(name)]
            found.append(MatchedTensor(name, node, reference, (*own, *levels)))
    return tuple(found)


def _find_data_nodes(index: GraphIndex) -> set[str]:
    """The main graph's nodes that depend on an input; the rest is weights, whatever is computed from them first."""
    tensors = index.input_names
    found = set()
    for node in index.nodes:
        if not node.scope and (index.subgraphs(node.name) or tensors.intersection(node.inputs)):
            found.add(node.name)
            tensors.update(node.outputs)
    return found


def find_source(index: GraphIndex, tensor: str) -> str:
    """The float tensor behind one: through a pair and the Clip or Max that narrows its range."""
    while (node := index.find_producer(TensorId(tensor))) is not None:
        if node.op_type not in (QUANTIZE, DEQUANTIZE) and not _is_quantizer_clip(index, node):
            break
        tensor = node.inputs[0]
    return tensor


def _is_quantizer_clip(index: GraphIndex, node: NodeRef) -> bool:
    """A Clip or Max that narrows a quantizer's range, known by its name: nothing else reads it."""
    if node.op_type not in ("Clip", "Max") or node.scope or index.is_output(node.result):
        return False
    readers = {reader.op_type for reader in index.readers(node.result)}
    return readers in ({QUANTIZE}, {DYNAMIC}, {DEQUANTIZE}) and is_clipped_part(node.outputs[0])


def find_losses(
    index: GraphIndex, made: Iterable[MatchedTensor], sqnr: Mapping[str, float]
) -> dict[str, Interval]:
    """By tensor: (SQNR of the worst tensor its node reads, its own), from tensors with one; within 60 dB of zero.

    A tensor without an SQNR has that of its worst input; model inputs and constants are exact.
    """
    found: dict[str, Interval] = {}
    for row in made:
        inputs = (found.get(find_source(index, name)) for name in row.node.inputs if name)
        before = min((one[1] for one in inputs if one is not None), default=_EXACT_DB)
        own = sqnr.get(row.name, math.nan)
        found[row.name] = (
            before,
            before if math.isnan(own) else min(max(own, -_EXACT_DB), _EXACT_DB),
        )
    return found


# As good as equal: float32 sums in another order.
_EQUAL_DB = 80.0


@dataclass(frozen=True)
class DivergencePoint:
    """Where an engine first diverges, for bisection."""

    divergence: Divergence
    counterpart: Counterpart
    # Of the tensor's quantizer, 0 without one.
    step: float
    # The worst one: bisection runs a single sample.
    sample: int


@dataclass(frozen=True)
class LayerResults:
    """Layers in the order of the network."""

    layers: tuple[LayerDiff, ...] = ()
    # Their names by SQNR drop, the largest first.
    worst: Names = ()
    points: tuple[DivergencePoint, ...] = ()
    skipped: Refusals = ()
    notes: Lines = ()


@dataclass(eq=False)
class Inner:
    """The models whose inner tensors are read."""

    float_index: GraphIndex
    index: GraphIndex
    # ORT's graph of the quantized one; None when it is not read.
    fused: GraphIndex | None
    notes: list[str] = field(default_factory=list)
    skipped: list[Refusal] = field(default_factory=list)

    @property
    def survivors(self) -> NameSet:
        """Tensors ORT still computes after all its fusions."""
        if self.fused is None:
            return frozenset()
        return frozenset(
            name for node in self.fused.nodes if not node.scope for name in node.outputs if name
        )


def open_inner(
    float_index: GraphIndex, index: GraphIndex, feeds: Feeds, *, fused: bool, threads: int
) -> Inner:
    """Have ORT fuse the quantized model, and compare the fused graph with ORT's own run."""
    inner = Inner(float_index, index, None)
    if not fused:
        return inner
    try:
        # NOTE: the last optimization level only lays tensors out anew, under other names and with other axes.
        made = add_libraries(
            name_nodes(optimize_graph(index.model, layout=False)), list_libraries(index.model)
        )
        inner.notes.extend(_find_layout_notes(index.model, made, feeds, threads))
        inner.fused = GraphIndex(made)
    except (OnnxqError, OSError, ValueError) as error:
        fix = "the outputs are compared all the same"
        reason = f"the graph ORT makes cannot be read back ({error})"
        inner.skipped.append(Refusal(f"layers {label_run(ON)}", reason, fix, code="R111"))
    return inner


def _find_layout_notes(
    quantized: ModelLike, fused: ModelLike, feeds: Feeds, threads: int
) -> Iterator[str]:
    # Proof that the graph read back stands for ORT's own run: its outputs must be those of that run.
    actual: RunValues = Session(quantized, threads=threads).run(feeds)
    read = Session(fused, optimize=False, threads=threads).run(feeds)
    for name, value in actual.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or name not in read:
            continue
        tally = Tally(name)
        tally.update(value, read[name])
        found = tally.error(ON, ON).sqnr_db
        if found < _EQUAL_DB:
            yield (
                f"layers {label_run(ON)} are read after ORT's fusions, before it lays tensors out anew; that last step "
                f"(float kernels that sum in another order) alone moves output {name} by {found:.1f} dB"
            )


def compare_layers(
    inner: Inner,
    dataset: Dataset,
    others: Sequence[Runner],
    *,
    threads: int,
    memory_limit: int,
    progress: Progress,
) -> LayerResults:
    """Run float and quantized model (and `others`, active runners that give inner tensors by name) over the samples.

    memory_limit: bytes of tensors held of one sample, all runs together; all samples are read again for more tensors.
    """
    made = match_tensors(inner.float_index, inner.index)
    if not made:
        return LayerResults(skipped=tuple(inner.skipped), notes=tuple(inner.notes))
    work = _LayerWork(inner)
    names = {runner.name for runner in others}
    # Three runs of ORT (float, without and with optimizations) hold tensors beside those of the others.
    share = memory_limit // (3 + len(names))
    groups = group_by_size(inner.index.model, made, dataset[0], share)
    with progress("comparing layers", len(groups) * len(dataset)) as task:
        for group in groups:
            work.read_group(group, dataset, others, threads, task.advance)
    return work.sum_up(made, [*((ON,) if inner.fused is not None else ()), *sorted(names)])


def group_by_size(
    proto: ModelLike, made: Sequence[MatchedTensor], feeds: Feeds, limit: int
) -> list[Sequence[MatchedTensor]]:
    """The tensors in groups that, of the size they have in this sample, stay within the limit."""
    tensors = [TensorId(one.tensor) for row in made for one in row.counterparts]
    shapes = Shapes(proto, tensors).of(feeds)
    # An estimate: four bytes, as most of them are float32.
    sizes = [
        sum(4 * math.prod(shapes.get(TensorId(one.tensor), ())) for one in row.counterparts)
        for row in made
    ]
    return [made[part] for part in part_by_size(sizes, limit)]


def read_optimized_tensor(
    inner: Inner | None, index: GraphIndex, counterpart: Counterpart, feeds: Feeds
) -> Array | None:
    """Real values of one tensor of the quantized model as ORT computes it with its optimizations; None if it is gone.

    An output comes from a run, another tensor from the graph that the fusions left.
    """
    if counterpart.tensor in index.output_names:
        return counterpart.read(Session(index.model).run(feeds))
    if inner is None or inner.fused is None or counterpart.tensor not in inner.survivors:
        return None
    values = Reference(inner.fused, feeds)([counterpart.tensor])
    return counterpart.read(values, find_level(inner.fused, counterpart.tensor))


def _open_runner(name: str, proto: ModelLike, tensors: Sequence[str], threads: int) -> Runner:
    tapped = tap_tensors(proto, [TensorId(tensor) for tensor in tensors], only=True)
    # Buffers go back as soon as they are free, as the limit on memory expects.
    session = Session(tapped.proto, optimize=False, threads=threads, arena=False)
    return SessionRunner(name, session, list(tapped.outputs.values()))


@dataclass(eq=False)
class _LayerWork:
    """Errors of the tensors, and the counterpart that each run of a tensor was read at."""

    inner: Inner
    tallies: Tallies = field(default_factory=Tallies)
    counterparts: dict[tuple[str, str], Counterpart] = field(default_factory=dict)

    def read_group(
        self,
        group: Sequence[MatchedTensor],
        dataset: Dataset,
        others: Sequence[Runner],
        threads: int,
        tick: Tick,
    ) -> None:
        """Run all models over the samples, and compare these tensors."""
        inner = self.inner
        tensors = drop_repeats(one.tensor for row in group for one in row.counterparts)
        references = drop_repeats(row.reference for row in group if row.reference)
        sources = [(FLOAT, inner.float_index, references), (OFF, inner.index, tensors)]
        levels = {}
        if inner.fused is not None:
            survivors = inner.survivors
            levels = {name: find_level(inner.fused, name) for name in tensors if name in survivors}
            sources.append((ON, inner.fused, tuple(levels)))
        runners = [
            _open_runner(name, index.model, wanted, threads)
            for name, index, wanted in sources
            if wanted
        ]
        for feeds in dataset.samples():
            values = {runner.name: runner.infer(feeds) for runner in (*runners, *others)}
            for row in group:
                self._compare_tensor(row, feeds, values, levels)
            tick()

    def _compare_tensor(
        self,
        row: MatchedTensor,
        feeds: Feeds,
        values: Mapping[str, Arrays],
        levels: Mapping[str, Level | None],
    ) -> None:
        reference = values.get(FLOAT, {}).get(row.reference) if row.reference else None
        reads = ((one, one.read(values.get(OFF, {}))) for one in row.counterparts)
        plain = {one: value for one, value in reads if value is not None}
        # The file's own run is read where the engines were, so that their errors against float can be set side by
        # side.
        at = None
        for run, found in values.items():
            if run in (FLOAT, OFF):
                continue
            for counterpart, own in plain.items():
                level = levels.get(counterpart.tensor) if run == ON else None
                value = counterpart.read(found, level)
                if value is None:
                    continue
                self.counterparts[row.name, run] = counterpart
                at = at or counterpart
                self.tallies.add(row.name, run, OFF, own, value, row.step, feeds)
                if reference is not None:
                    self.tallies.add(row.name, run, FLOAT, reference, value, row.step, feeds)
                # The first that the run holds: the tensor itself before its quantizers' outputs.
                break
        at = at or next(iter(plain), None)
        if at is None or reference is None:
            return
        self.counterparts.setdefault((row.name, OFF), at)
        if reference.dtype.kind == "f":
            self.tallies.add(row.name, OFF, FLOAT, reference, plain[at], row.step, feeds)

    def sum_up(self, made: Sequence[MatchedTensor], runs: Sequence[str]) -> LayerResults:
        """The errors of all tensors, and where each of the runs diverges first."""
        tallies = self.tallies
        plain = {
            row.name: error.sqnr_db
            for row in made
            for error in tallies.list_errors(row.name, [OFF], FLOAT)
        }
        losses = find_losses(self.inner.index, made, plain)
        layers = []
        points = {}
        for row in made:
            tensor = row.name
            accuracy = tallies.list_errors(tensor, (OFF, *runs), FLOAT)
            engines = tallies.list_errors(tensor, runs, OFF)
            if not accuracy and not engines:
                continue
            before, own = losses[tensor]
            for error in engines:
                # The first in the order of the network: those behind it go on with its error.
                if error.run not in points and diverges(error, own):
                    worst = tallies.find_worst_sample(tensor, error.run)
                    points[error.run] = mark_divergence(
                        row, self.counterparts[tensor, error.run], error, worst
                    )
            at = self.counterparts.get((tensor, ON), self.counterparts.get((tensor, OFF)))
            name = row.reference or tensor
            layers.append(
                LayerDiff(
                    name=name,
                    node=row.node.name,
                    op=row.node.op_type,
                    accuracy=accuracy,
                    engines=engines,
                    at="" if at is None or at.tensor == name else at.tensor,
                    drop_db=before - own if tensor in plain else math.nan,
                )
            )
        fallen = sorted(
            (layer for layer in layers if layer.drop_db > 0), key=lambda layer: -layer.drop_db
        )
        worst_first = tuple(layer.name for layer in fallen)
        return LayerResults(
            tuple(layers),
            worst_first,
            tuple(points.values()),
            tuple(self.inner.skipped),
            tuple(self.inner.notes),
        )


def mark_divergence(
    row: MatchedTensor, counterpart: Counterpart, error: Error, sample: int
) -> DivergencePoint:
    """The point of an error at a tensor, read at a counterpart on the sample of this number."""
    return make_point(error, row.reference or row.name, row.node, counterpart, row.step, sample)


def make_point(
    error: Error,
    tensor: str,
    node: NodeRef | None,
    counterpart: Counterpart,
    step: float,
    sample: int,
) -> DivergencePoint:
    """The point of an error at a tensor of this name. node: that makes it, None for an input of the model."""
    name, op = (node.name, node.op_type) if node is not None else ("", "")
    divergence = Divergence(
        run=error.run,
        against=error.against,
        tensor=tensor,
        node=name,
        op=op,
        sqnr_db=error.sqnr_db,
        levels=error.levels,
    )
    return DivergencePoint(divergence, counterpart, step, sample)
