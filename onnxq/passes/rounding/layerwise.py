"""A model run in pieces: from one node of the main graph to the next, on a few samples at a time.

Between two pieces only the tensors that later nodes still read are kept, so all pieces together cost one run of the
model, and decisions at one node show in the values of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.errors import ModelError
from onnxq.graph import ModelLike, infer_shapes
from onnxq.graph.scopes import iterate_subgraphs, list_reads
from onnxq.graph.subgraph import Cutter
from onnxq.runtime import Feeds, Session, tap_tensors
from onnxq.sites import TensorId

Array = NDArray[Any]
# (node, input index) -> what it reads instead of its own constant.
Changes = dict[tuple[str, int], Array]


class LayerwiseRunner:
    """`advance` to a node, then `values` of the tensors that it, or a node in one of its bodies, reads.

    proto: nodes named, functions inlined. feeds: the samples. changes: constants to use in place of the model's,
    read when a piece is built; callers may add to them for nodes still ahead.
    Raises ModelError where a tensor between two pieces is no array (a sequence).
    """

    def __init__(self, proto: ModelLike, feeds: Sequence[Feeds], changes: Changes) -> None:
        self.changes = changes
        self._cutter = Cutter(proto)
        self._nodes = list(self._cutter.nodes.values())
        self._places: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for k, node in enumerate(self._nodes):
            for name in _list_names(node):
                self._places[name] = k
            for name in list_reads(node):
                self._last[name] = k
        self._at = 0
        self._live = [{name: np.asarray(value) for name, value in sample.items()} for sample in feeds]

    def place(self, node: str) -> int:
        """Position in the main graph of a node, or of the node whose body holds it."""
        return self._places[node]

    def holds(self, tensor: TensorId, node: str) -> bool:
        """True where the tensor, which the node of the main graph reads, is at hand or still to be made."""
        return bool(self._live) and (tensor.name in self._live[0] or self.place(node) >= self._at)

    def reach(self, tensor: TensorId, node: str) -> None:
        """Go as far as `values` of a tensor that the node reads need: not at all where it is at hand already."""
        if tensor.scope or not self._live or tensor.name not in self._live[0]:
            self.advance(self.place(node))

    def advance(self, place: int) -> None:
        """Run everything before the main graph's node number `place`."""
        if place > self._at:
            part = self._nodes[self._at : place]
            made = [name for node in part for name in node.output if name and self._last.get(name, -1) >= place]
            if made:
                session = Session(self._piece(part, made), optimize=False)
                for live in self._live:
                    live.update(_check_arrays(session.run({v.name: live[v.name] for v in session.inputs}, made)))
            self._at = place
        # Tensors that no node ahead reads: only so many are held as are alive between two nodes.
        for live in self._live:
            for name in [name for name in live if self._last.get(name, -1) < self._at]:
                del live[name]

    def values(self, tensor: TensorId) -> Iterator[Array]:
        """The tensor's value for each sample, here; empty arrays where its branch did not run."""
        if not tensor.scope:
            for live in self._live:
                yield live[tensor.name]
            return
        # Inside a body nothing can be kept between two pieces, so the node that holds it runs whole, with a tap.
        whole = infer_shapes(self._piece([self._nodes[self._at]], [n for n in self._nodes[self._at].output if n]))
        tapped = tap_tensors(whole, [tensor], only=True)
        if tensor not in tapped.outputs:
            raise ModelError(str(tensor), tapped.refusals[0].reason)
        session = Session(tapped.proto, optimize=False)
        name = tapped.outputs[tensor]
        for live in self._live:
            yield session.run({v.name: live[v.name] for v in session.inputs}, [name])[name]

    def _piece(self, part: Sequence[onnx.NodeProto], wanted: Sequence[str]) -> ModelLike:
        """Some nodes of the main graph as a model of their own."""
        names = [node.name for node in part]
        changed: dict[str, onnx.NodeProto] = {}
        tensors: dict[str, onnx.TensorProto] = {}
        # Copies: the cutter's own are those of the model.
        for node in part if self.changes else ():
            changed[node.name] = onnx.NodeProto.FromString(node.SerializeToString())
            self._change(changed[node.name], tensors)
        live = [(name, self._live[0][name]) for name in self._cutter.list_inputs(names) if name in self._live[0]]
        # Without shapes, which differ from sample to sample.
        kinds = ((name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype)) for name, value in live)
        inputs = [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in kinds]
        outputs = [onnx.ValueInfoProto(name=name) for name in wanted]
        return self._cutter.cut(names, inputs, outputs, changed=changed, tensors=tensors)

    def _change(self, node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> None:
        """Let the node, and those in its bodies, read the changed constants."""
        # To 3, the inputs of a Conv or Gemm, as a bias may be new.
        for k in range(max(len(node.input), 3)):
            value = self.changes.get((node.name, k))
            if value is not None:
                name = f"{node.name}/in{k}/changed"
                tensors[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name)
                while len(node.input) <= k:
                    node.input.append("")
                node.input[k] = name
        for _, body in iterate_subgraphs(node):
            for inner in body.node:
                self._change(inner, tensors)


def _list_names(node: onnx.NodeProto) -> Iterator[str]:
    yield node.name
    for _, body in iterate_subgraphs(node):
        for inner in body.node:
            yield from _list_names(inner)


def _check_arrays(values: Mapping[str, Any]) -> Mapping[str, Array]:
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            raise ModelError(name, "is a sequence, which cannot be handed from one piece of the model to the next")
    return values
