"""The shapes tensors really have, without holding a single one of them: only their Shape comes out of the run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from onnx import TensorProto

from onnxq.arrays import Shape
from onnxq.graph import GraphIndex, LightModel, ModelLike, get_index, hash_graph
from onnxq.runtime.session import Feeds, Session
from onnxq.runtime.tap import Probe, Tapped, tap_tensors
from onnxq.sites import TensorId

ShapeMap = dict[TensorId, Shape]

# No tensor has the shape [-1]: it says that the branch did not run.
_SHAPE = Probe(op_type="Shape", dtype=TensorProto.INT64, absent=(-1,), loops=False)
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


class ShapeProbe:
    """A session that tells the shapes of some tensors for given feeds."""

    def __init__(self, proto: ModelLike, tensors: Iterable[TensorId]) -> None:
        tapped: Tapped = tap_tensors(proto, tensors, only=True, probe=_SHAPE)
        self._outputs = tapped.outputs
        self._session: Session | None = None
        if tapped.outputs:
            self._session = Session(tapped.proto, optimize=False, arena=False, shapes_first=True)

    def shapes(self, feeds: Feeds) -> ShapeMap:
        """Shapes of the tensors that came to be."""
        if self._session is None:
            return {}
        values = self._session.run(feeds, list(self._outputs.values()))
        shapes = {tensor: tuple(map(int, values[name])) for tensor, name in self._outputs.items()}
        return {tensor: shape for tensor, shape in shapes.items() if shape != (-1,)}


def observe_shapes(proto: ModelLike, samples: Iterable[Feeds]) -> ShapeMap:
    """Shapes of all float tensors of the main graph and of the If subgraphs that ran, constants left out.

    Each tensor's shape is of the first sample that made it. A tensor missing from the result lies in a branch no sample
    reached, or in the subgraph of a Loop or Scan.
    """
    probe = Shapes(proto, list_float_tensors(get_index(proto)))
    shapes: ShapeMap = {}
    for sample in samples:
        shapes = probe.of(sample) | shapes
    return shapes


class Shapes:
    """Shapes of some tensors for given feeds; of a light model those seen before of the same graph, for feeds alike.

    Alike: of the same shapes. Where subgraphs may run or not every sample is run.
    """

    def __init__(self, proto: ModelLike, tensors: Iterable[TensorId]) -> None:
        self._proto, self._tensors = proto, tuple(tensors)
        self._probe: ShapeProbe | None = None
        # With several scopes, values decide which of them run: shapes of one sample say nothing of another.
        self._known: dict[Hashable, ShapeMap] | None = None
        self._graph = ""
        if isinstance(proto, LightModel) and len(get_index(proto).scopes) == 1:
            self._known, self._graph = proto.weights.observed, hash_graph(proto)

    def of(self, feeds: Feeds) -> ShapeMap:
        """Shapes of the tensors that came to be."""
        key = (self._graph, tuple((name, value.shape) for name, value in sorted(feeds.items())))
        known = None if self._known is None else self._known.setdefault(key, {})
        if known is not None and all(tensor in known for tensor in self._tensors):
            return {tensor: known[tensor] for tensor in self._tensors}
        if self._probe is None:
            self._probe = ShapeProbe(self._proto, self._tensors)
        shapes = self._probe.shapes(feeds)
        if known is not None:
            known.update(shapes)
        return shapes


def list_float_tensors(index: GraphIndex) -> list[TensorId]:
    """Graph inputs and node outputs of a float type that are not constants and not inside a Loop or Scan."""
    ids = [TensorId(value.name) for value in index.inputs]
    for node in index.nodes:
        if not _is_looped(index, node.scope):
            ids.extend(TensorId(name, node.scope) for name in node.outputs if name)
    return [tensor for tensor in ids if index.dtype(tensor) in _FLOATS and not index.is_constant(tensor)]


def _is_looped(index: GraphIndex, scope: str) -> bool:
    parents = map(index.parent, index.list_outwards(scope))
    return any(node is not None and node.op_type != "If" for node in parents)
