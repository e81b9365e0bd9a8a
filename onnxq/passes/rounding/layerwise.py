"""A model run in pieces on a few samples at a time: from one node of the main graph to the next.

Between two pieces only the tensors that later nodes still read are kept, so all pieces together cost one run of the
model, and decisions at one node show in the values of the next. Where the workers of a crew run the samples, these
tensors are in files.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from onnxq.arrays import Array, Arrays, RunValues
from onnxq.config import Config
from onnxq.data import Dataset, augment_sample
from onnxq.errors import ModelError
from onnxq.graph import ModelLike, bare_proto, infer_shapes
from onnxq.graph.scopes import iterate_subgraphs, list_reads, walk_nodes
from onnxq.graph.subgraph import Cutter, declare_input
from onnxq.numerics.machine import map_in_threads, share_cores
from onnxq.passes.judging import has_few_bits
from onnxq.passes.rounding.operators import Geometry
from onnxq.passes.rounding.shared_work import (
    SharedWork,
    Tensor,
    TensorFile,
    read_tensor,
    write_tensor,
)
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan
from onnxq.runtime import Feeds, Session, tap_tensors
from onnxq.runtime.crew import SharedModel, open_model
from onnxq.sites import MaybeTensor, Names, TensorId

R = TypeVar("R")
# Of a name between two pieces: a tensor, or those of a sequence.
Value = Tensor | list[Tensor]
Sample = Arrays | Mapping[str, TensorFile]
# Outputs of a piece, sample by sample.
PieceOutputs = Iterable[Mapping[str, Value]]
# (node, input index) -> what it reads instead of its own constant.
Changes = dict[tuple[str, int], Array]


class LayerwiseRunner:
    """`advance` to a node, then `values` of the tensors that it, or a node in one of its bodies, reads.

    proto: nodes named, functions inlined. feeds: the samples. changes: constants to use in place of the model's,
    read when a piece is built; callers may add to them for nodes still ahead.
    Raises ModelError where a value between two pieces is neither a tensor nor a sequence of tensors.
    """

    def __init__(self, proto: ModelLike, feeds: Sequence[Sample], changes: Changes) -> None:
        self.changes = changes
        # Several samples at a time: nodes of one piece are too small to be shared out among all cores.
        self._threads = share_cores(len(feeds))
        self._cutter = Cutter(proto)
        self._nodes = list(self._cutter.nodes.values())
        nodes = list(enumerate(self._nodes))
        self._places = {inner.name: k for k, node in nodes for inner in _list_nodes(node)}
        # Of tensors: the node that makes each, and the last that reads it.
        self._made = {name: -1 for sample in feeds[:1] for name in sample}
        self._made |= {name: k for k, node in nodes for name in node.output}
        self._last = {name: k for k, node in nodes for name in list_reads(node)}
        # Where questions are answered, and where the values are.
        self._at = self._ran = 0
        # Places passed by, to run to when a value is asked for: the pieces are the same then as without passing by.
        self._ahead: list[int] = []
        self._live: list[dict[str, Value]] = [
            {
                name: value if isinstance(value, TensorFile) else np.asarray(value)
                for name, value in sample.items()
            }
            for sample in feeds
        ]

    def place(self, node: str) -> int:
        """Position in the main graph of a node, or of the node whose body holds it."""
        return self._places[node]

    def holds(self, tensor: TensorId, node: str) -> bool:
        """True where the tensor, which the node of the main graph reads, is at hand or still to be made."""
        return bool(self._live) and (self._is_live(tensor.name) or self.place(node) >= self._at)

    def reach(self, tensor: TensorId, node: str, *, later: bool = False) -> None:
        """Go as far as `values` of a tensor that the node reads need: not at all where it is at hand already.

        later: run nothing before another value is asked for.
        """
        if tensor.scope or not self._live or not self._is_live(tensor.name):
            self._ahead.append(self.place(node))
            self._at = max(self._at, self._ahead[-1])
        if not later:
            self.advance(self._at)

    def advance(self, place: int) -> None:
        """Run everything before the main graph's node number `place`."""
        for stop in (*self._ahead, place):
            self._run_until(stop)
        self._ahead = []
        self._at = self._ran

    def values(self, tensor: TensorId) -> Iterator[Tensor]:
        """The tensor's value for each sample, here; empty arrays where its branch did not run or nobody can look."""
        name = tensor.name
        results: PieceOutputs = self._live
        if tensor.scope:
            # Inside a body nothing can be kept between two pieces, so the node that holds it runs whole, with a tap.
            node = self._nodes[self._at]
            whole = infer_shapes(self._cut_piece([node], list(filter(None, node.output))))
            tapped = tap_tensors(whole, [tensor], only=True)
            if tensor in tapped.outputs:
                name = tapped.outputs[tensor]
                results = self._evaluate_piece(tapped.proto, [name])
            else:
                # A branch in a loop runs in some iterations only.
                results = repeat({name: np.zeros(0, np.float32)}, len(self._live))
        for outputs in results:
            value = outputs[name]
            assert not isinstance(value, list)
            yield value

    def _run_until(self, place: int) -> None:
        """Run from where the values are to a place."""
        part = self._nodes[self._ran : place]
        names = [
            name
            for node in part
            for name in node.output
            if name and self._last.get(name, -1) >= place
        ]
        outputs: PieceOutputs = repeat({}, len(self._live))
        if names:
            outputs = self._evaluate_piece(self._cut_piece(part, names), names)
        self._ran = max(self._ran, place)
        # Only so many tensors are held as are alive between two nodes. Sample by sample: else all samples' inputs of
        # the piece would be held beside all its outputs.
        for live, values in zip(self._live, outputs, strict=True):
            live.update(values)
            for name in [name for name in live if self._last.get(name, -1) < self._ran]:
                value = live.pop(name)
                # The samples themselves are the caller's.
                if self._made[name] >= 0:
                    self._release_value(value)

    def _is_live(self, name: str) -> bool:
        """True for a tensor that is made before this place and read behind it."""
        return self._made.get(name, self._at) < self._at <= self._last.get(name, -1)

    def _release_value(self, value: Value) -> None:
        """Let go of a value that no node ahead reads."""

    def _evaluate_piece(self, piece: ModelLike, names: Sequence[str]) -> PieceOutputs:
        """These outputs of a piece for each sample."""
        # Outputs lie in the buffers of the session: with an arena none of them is free before the last.
        session = Session(piece, fuse_pairs=False, threads=self._threads, arena=False)
        return map_in_threads(lambda live: _run_piece(session, live, names), self._live)

    def _cut_piece(self, part: Sequence[onnx.NodeProto], wanted: Sequence[str]) -> ModelLike:
        """Some nodes of the main graph as a model of their own."""
        names = [node.name for node in part]
        changed = {}
        tensors: dict[str, onnx.TensorProto] = {}
        # Copies: the cutter's own are those of the model.
        for node in part if self.changes else ():
            changed[node.name] = onnx.NodeProto.FromString(node.SerializeToString())
            for inner in _list_nodes(changed[node.name]):
                self._change_node(inner, tensors)
        read = [name for name in self._cutter.list_inputs(names) if name in self._live[0]]
        inputs = [declare_input(name, [live[name] for live in self._live]) for name in read]
        outputs = [onnx.ValueInfoProto(name=name) for name in wanted]
        return self._cutter.cut(names, inputs, outputs, changed=changed, tensors=tensors)

    def _change_node(self, node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> None:
        """Let the node read the changed constants."""
        # To 3, the inputs of a Conv or Gemm, as a bias may be new.
        for k in range(max(len(node.input), 3)):
            value = self.changes.get((node.name, k))
            if value is not None:
                name = f"{node.name}/in{k}/changed"
                tensors[name] = onnx.numpy_helper.from_array(
                    np.ascontiguousarray(value, np.float32), name
                )
                while len(node.input) <= k:
                    node.input.append("")
                node.input[k] = name


def _list_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """A node, and all in its bodies."""
    yield node
    for _, body in iterate_subgraphs(node):
        yield from walk_nodes(body)


def _run_piece(session: Session, live: Mapping[str, Value], names: Sequence[str]) -> RunValues:
    """These outputs of a piece for one sample. Raises ModelError for one that holds other than tensors."""
    feeds: dict[str, Any] = {v.name: _map_value(read_tensor, live[v.name]) for v in session.inputs}
    values: RunValues = session.run(feeds, names)
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, np.ndarray) for part in parts):
            raise ModelError(
                name, "is no tensor, and cannot be handed from one piece of the model to the next"
            )
    return values


def _map_value(function: Callable[[Any], R], value: Value) -> R | list[R]:
    """The function's result for a tensor, or for each of a sequence."""
    return [function(part) for part in value] if isinstance(value, list) else function(value)


class SharedRunner(LayerwiseRunner):
    """A runner whose samples the workers of a crew run, from the files of one piece to those of the next.

    A file is written whole, under a name of its own, and only removed when the piece that reads it is done for all
    samples, so that a sample may be run again anywhere. feeds: as `SharedWork.put_sample` returns them.
    """

    def __init__(
        self, proto: ModelLike, feeds: Sequence[Sample], changes: Changes, work: SharedWork
    ) -> None:
        self._work = work
        self._tapped: list[Tensor] = []
        super().__init__(proto, feeds, changes)

    def _release_value(self, value: Value) -> None:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, TensorFile):
                Path(part.path).unlink(missing_ok=True)

    def values(self, tensor: TensorId) -> Iterator[Tensor]:
        """The files of the tensor's values. Those from inside a body go with the next ones."""
        files = list(super().values(tensor))
        if tensor.scope:
            for old in self._tapped:
                self._release_value(old)
            self._tapped = files
        yield from files

    def _evaluate_piece(self, piece: ModelLike, names: Sequence[str]) -> PieceOutputs:
        model = self._work.crew.share_model(piece)
        inputs = [value.name for value in bare_proto(piece).graph.input]
        tasks = [
            RunTask(
                model,
                {name: live[name] for name in inputs},
                tuple(names),
                self._work.make_path(),
                self._threads,
            )
            for live in self._live
        ]
        # All of them now: a crew does one thing at a time.
        return list(self._work.map(f"rounding: {names[0]}", run_sample, tasks))


@dataclass(frozen=True)
class RunTask:
    """One sample to run through a piece. path: of the files of its outputs, to be followed by their numbers.

    threads: of the session.
    """

    model: SharedModel
    feeds: Mapping[str, Value]
    names: Names
    path: str
    threads: int


def run_sample(task: RunTask) -> dict[str, Value]:
    """The files of the outputs of one sample."""
    values = _run_piece(_open_session(task.model, task.threads), task.feeds, task.names)
    paths = (f"{task.path}-{k}" for k in count())
    return {
        name: _map_value(lambda part: write_tensor(next(paths), part), values[name])
        for name in task.names
    }


# A worker has the float and the quantized piece in turn.
@lru_cache(maxsize=2)
def _open_session(model: SharedModel, threads: int) -> Session:
    return Session(open_model(model), fuse_pairs=False, threads=threads)


# Largest H and C: two of 2**25 float64 are half a GiB. Operators beyond keep nearest rounding.
_MATRIX = 1 << 25


@dataclass(frozen=True)
class MomentsRequest:
    """Request for the moments of one tensor.

    reader: a node that reads the tensors. shape: (groups, K). second: of H and C too; halves: those of each half of the
    samples in any case, not only where a re-fit is possible.
    """

    reader: str = field(compare=False)
    data: TensorId
    paired: MaybeTensor
    geometry: Geometry
    shape: tuple[int, int]
    second: bool
    halves: bool

    @property
    def rounded(self) -> bool:
        """True where H is wanted and not too large."""
        return self.second and self.volume <= _MATRIX

    @property
    def volume(self) -> int:
        """Values of H."""
        return self.shape[0] * self.shape[1] ** 2


@dataclass(frozen=True, eq=False)
class PairedRunner:
    """The float and the quantized model on their way through the graph, side by side on the same samples.

    feeds: the samples that both are run on.
    """

    feeds: Sequence[Feeds]
    real: LayerwiseRunner
    quantized: LayerwiseRunner

    def iterate_tensors(self, wanted: MomentsRequest) -> Iterator[tuple[Feeds, Tensor, Tensor]]:
        """Each sample with the operator's input in both models. Both advance to it at the first one."""
        self.pass_by(wanted, later=False)
        if not self.feeds or wanted.paired is None:
            return
        yield from zip(
            self.feeds,
            self.real.values(wanted.data),
            self.quantized.values(wanted.paired),
            strict=True,
        )

    def pass_by(self, wanted: MomentsRequest, *, later: bool = True) -> None:
        """Let both stand as after `iterate_tensors`. later: without running anything yet."""
        if self.feeds:
            self.real.reach(wanted.data, wanted.reader, later=later)
            if wanted.paired is not None:
                self.quantized.reach(wanted.paired, wanted.reader, later=later)

    def has_tensors(self, real: TensorId, quantized: MaybeTensor, node: str) -> bool:
        """True where these tensors, which the node reads, can still be had."""
        return (
            quantized is not None
            and self.real.holds(real, node)
            and self.quantized.holds(quantized, node)
        )


def make_runners(
    models: Iterable[tuple[ModelLike, Changes]], feeds: Sequence[Feeds], work: SharedWork | None
) -> list[LayerwiseRunner]:
    """A runner of each model."""
    if work is None:
        return [LayerwiseRunner(model, feeds, changes) for model, changes in models]
    put = [work.put_sample(sample) for sample in feeds]
    return [SharedRunner(model, put, changes, work) for model, changes in models]


AUGMENTED = "augmented_samples"
_SAMPLES = {"balanced": 32, "high": 64}
# Small samples give few positions and cost little: as many as make up so many input values, up to 128. Large ones give
# many and cost memory: no more than make up so many, and at least 8.
_VALUES = 1 << 18
_MOST = 128
_TOO_MANY = 9 << 18
_TOO_MANY_NARROW = 1 << 23
_FEWEST = 8
# Values between two nodes, of all samples: rounding holds them of the float and of the quantized model, 2 GiB together.
_MOST_ALIVE = 1 << 28
# Input values with the augmented samples, which are held as well, but not in the first layers.
_MOST_AUGMENTED = 1 << 25


def take_enough(
    calibration: Dataset, plan: Plan, config: Config, state: PlacedState | None = None
) -> Dataset:
    """Samples to go through the network with, all held at once: more where they are small, fewer where large.

    Weights of few bits, for which everything hangs on their rounding, get more of the large ones. state: of which a
    `LayerwiseRunner` is to hold the samples' tensors, too.
    """
    size = max(sum(value.size for value in calibration[0].values()), 1)
    wanted = max(_SAMPLES[config.effort], min(_VALUES // size, _MOST))
    most = (_TOO_MANY_NARROW if has_few_bits(plan) else _TOO_MANY) // size
    if state is not None:
        most = min(most, _MOST_ALIVE // max(_count_alive_values(state), 1))
    return calibration.take(max(min(wanted, most), _FEWEST), config.data.seed)


def _count_alive_values(state: PlacedState) -> int:
    """The most values that a runner holds of one sample where it stops: in front of a product.

    Of tensors whose shapes are known. What no node reads, such as logits, is never held.
    """
    ops = state.problem.ops
    nodes = bare_proto(state.model).graph.node
    last = {name: k for k, node in enumerate(nodes) for name in list_reads(node)}
    stops = {op.name for op in ops if op.rule.compute}
    # In front of each node.
    alive = np.zeros(len(nodes), np.int64)
    for k, node in enumerate(nodes):
        for name in node.output:
            alive[k + 1 : last.get(name, k) + 1] += np.prod(
                ops.shapes.get(TensorId(name), ()), dtype=np.int64
            )
    return max((int(alive[k]) for k, node in enumerate(nodes) if node.name in stops), default=0)


def augment_samples(samples: Sequence[Feeds], plan: Plan, skip: Collection[str]) -> list[Feeds]:
    """Other views of the samples for second moments, of all alike often; none but for weights of few bits.

    See `onnxq.data.augment_sample`.
    """
    if AUGMENTED in skip or not samples or not has_few_bits(plan):
        return []
    # As many of each sample, so that no sample weighs more than the others.
    each = [augment_sample(sample) for sample in samples]
    size = max(sum(np.asarray(value).size for value in samples[0].values()), 1)
    rounds = min(_MOST_AUGMENTED // (size * len(samples)) - 1, *map(len, each))
    return [one[k] for k in range(rounds) for one in each]
