"""Two models compared a segment at a time, for models that no session should hold whole.

The reference is cut where few tensors are alive. Each segment of it runs on what the one before gave. The segment of
the other model between the same tensors runs on the same values, so that each shows its own error and no other's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ValueInfoProto, helper

from onnxq.arrays import Array, Arrays
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.selections import name_own
from onnxq.graph import GraphIndex, ModelLike, bare_proto, get_index, infer_shapes
from onnxq.graph.scopes import collect_names, list_reads, walk_from
from onnxq.graph.storage import count_tensor_bytes
from onnxq.graph.subgraph import Cutter, declare_input
from onnxq.progress import Progress, silent
from onnxq.runtime import Session
from onnxq.sites import Names, TensorId

Values = dict[str, Array]


@dataclass(frozen=True)
class Segment:
    """Nodes of the main graph, and the tensors that they make and later ones, or the caller, read."""

    nodes: Names
    outputs: Names


@dataclass(frozen=True, eq=False)
class SegmentErrors:
    """The errors of a segment's outputs: against the reference without and with optimizations, and between the two."""

    segment: Segment
    off: ModelErrors
    on: ModelErrors
    agree: ModelErrors


def cut_segments(model: ModelLike, limit: int, shared: Iterable[str]) -> list[Segment]:
    """Segments with at most `limit` bytes of weights each, unless one node alone has more.

    shared: tensors that a cut may leave alive.
    """
    cutter = Cutter(model, computed=True)
    nodes = [name for name in cutter.nodes if name not in cutter.constants]
    sizes = {
        tensor.name: count_tensor_bytes(tensor) for tensor in bare_proto(model).graph.initializer
    }
    allowed = set(shared)
    results = collect_names(model.graph.output)
    # Behind its last reader nobody holds a tensor any more.
    last = {tensor: k for k, name in enumerate(nodes) for tensor in list_reads(cutter.nodes[name])}
    segments = []
    start = 0
    while start < len(nodes):
        read = set()
        alive = set()
        best = 0
        fewest = 0
        stop = len(nodes)
        for k in range(start, len(nodes)):
            node = cutter.nodes[nodes[k]]
            # Those behind nodes on constants too.
            constants = filter(cutter.is_constant, list_reads(node))
            read |= walk_from(constants, cutter.list_constant_reads)
            # Without a place to cut in front of here, the segment grows beyond the limit.
            if best and sum(sizes.get(tensor, 0) for tensor in read) > limit:
                stop = best
                break
            alive.update(node.output)
            alive = {tensor for tensor in alive if last.get(tensor, -1) > k or tensor in results}
            inner = alive - results
            # Where as few are alive, the later: fewer segments.
            if inner <= allowed and (not best or len(inner) <= fewest):
                best = k + 1
                fewest = len(inner)
        part = nodes[start:stop]
        outputs = [
            t
            for name in part
            for t in cutter.nodes[name].output
            if last.get(t, -1) >= stop or t in results
        ]
        segments.append(Segment(tuple(part), tuple(outputs)))
        start = stop
    return segments


def compare_segments(
    before: ModelLike,
    after: ModelLike,
    samples: Sequence[Arrays],
    *,
    limit: int,
    agreement: AgreementSums,
    threads: int = 0,
    progress: Progress = silent,
) -> list[SegmentErrors]:
    """The errors of `after` against `before`, segment by segment. limit: bytes of weights of one segment.

    agreement: gets the choices of `before`, whose selections it has, and those of `after`.
    All tensors alive between two segments are held, of every sample. Raises ModelError where ORT cannot run a segment.
    """
    choices = {name for selection in agreement.selections.nodes for name, _ in selection.choices}
    before = agreement.selections.expose_choices(before)
    after = agreement.selections.take_choices(after)
    reference = _PartRunner(before, threads)
    other = _PartRunner(after, threads, get_index(infer_shapes(after)))
    errors = []
    alive = [{name: np.asarray(value) for name, value in sample.items()} for sample in samples]
    shared = set(other.list_tensors())
    segments = cut_segments(before, limit, shared)
    last = {
        tensor: k
        for k, segment in enumerate(segments)
        for tensor in reference.list_inputs(segment.nodes)
    }
    with progress("comparing float and quantized model", len(segments)) as task:
        for k, segment in enumerate(segments):
            wanted = [reference.run_part(segment.nodes, segment.outputs, alive)]
            names = (name_own(name) if name in choices else name for name in segment.outputs)
            outputs = [name for name in names if name in shared]
            # Choices, as of TopK, are those of the reference: two boxes that change places are no error.
            fed = [
                {**values, **{name: exact[name] for name in choices.intersection(exact)}}
                for values, exact in zip(alive, wanted[0], strict=True)
            ]
            inner = other.list_between(outputs, fed[0])
            for optimize in (False, True):
                wanted.append(other.run_part(inner, outputs, fed, optimize=optimize))
            errors.append(_sum_errors(segment, samples, wanted, agreement))
            # The next segment of both reads the reference's values: its errors are its own alone.
            for values, new in zip(alive, wanted[0], strict=True):
                values.update(new)
                for name in [
                    name for name in values if last.get(name, -1) <= k and name not in samples[0]
                ]:
                    del values[name]
            task.advance()
    return errors


class _PartRunner(Cutter[ModelLike]):
    """Runs parts of a model. types: of the model, where they are not those of the values that it is fed."""

    def __init__(self, model: ModelLike, threads: int, types: GraphIndex | None = None) -> None:
        super().__init__(model, computed=True)
        self._threads = threads
        self._typed = types

    def run_part(
        self,
        nodes: Sequence[str],
        outputs: Sequence[str],
        alive: Sequence[Values],
        *,
        optimize: bool = False,
    ) -> list[Values]:
        """The outputs of some nodes for each sample."""
        types = self._typed
        kinds = {
            name: 0 if types is None else types.find_dtype(TensorId(name))
            for name in self.list_inputs(nodes)
        }
        inputs = [
            declare_input(name, [values[name] for values in alive], kind)
            for name, kind in kinds.items()
        ]
        part = self.cut(nodes, inputs, [ValueInfoProto(name=name) for name in outputs])
        # A segment runs once a sample: an arena would keep the memory of each.
        session = Session(part, optimize=optimize, threads=self._threads, arena=False)
        return [
            session.run({name: _convert(values[name], kind) for name, kind in kinds.items()})
            for values in alive
        ]


def _convert(value: Array, kind: int) -> Array:
    """The value in an ONNX type; as it is for 0, and in sequences."""
    return value.astype(helper.tensor_dtype_to_np_dtype(kind), copy=False) if kind else value


def _sum_errors(
    segment: Segment,
    samples: Sequence[Arrays],
    runs: Sequence[Sequence[Values]],
    agreement: AgreementSums,
) -> SegmentErrors:
    """The errors over all samples. runs: of the reference, of the other without and with optimizations."""
    off = ModelErrors()
    on = ModelErrors()
    agree = ModelErrors()
    for feeds, exact, plain, fast in zip(samples, *runs, strict=True):
        agreement.update(exact, plain)
        off.update(feeds, exact, plain)
        on.update(feeds, exact, fast)
        agree.update(feeds, plain, fast)
    return SegmentErrors(segment, off, on, agree)
