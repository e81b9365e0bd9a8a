"""Saturation as the cause of a difference between ONNX Runtime with optimizations on and with them off.

The saturating model computes the file's answer on a CPU without VNNI. Where a run is much nearer to that than to the
exact answer, the 16-bit sums are the cause, whichever CPU it ran on.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

from onnxq.annotate import find_saturating
from onnxq.annotate.operators import SaturatingWeights
from onnxq.arrays import Array, Arrays
from onnxq.backends import find_reference
from onnxq.engines.diff.layers import Counterpart
from onnxq.engines.diff.runs import Reference
from onnxq.engines.prove.judge import judge_sums
from onnxq.engines.saturation import SaturatingRun, emulate_saturation
from onnxq.errors import OnnxqError
from onnxq.evaluation.accumulator import measure_error
from onnxq.graph import GraphIndex, NodeRef, walk_from
from onnxq.sites import TensorId

# dB that a run must be nearer to the emulation than to the exact answer: a quarter of the noise. An unrelated fault is
# as far from one as from the other.
_EXPLAINED_DB = 6.0


def find_saturating_weights(
    index: GraphIndex,
    counterpart: Counterpart,
    feeds: Arrays,
    run: Callable[[], Array | None],
    *,
    threads: int,
) -> SaturatingWeights:
    """The weights whose sums saturate on this sample on the way to a tensor; () where they do not explain the run.

    run: gives the tensor's real values in the run that diverges; called only if a weight can saturate.
    """
    tensor = counterpart.tensor
    if not any(one.rows for one in find_saturating(index)):
        return ()
    try:
        engine = find_reference().engines[0]
        kernels = engine.list_kernels(index.model)
        weights = {
            one.node: one for one in judge_sums(index, kernels, engine.words) if one.saturates
        }
        emulation = emulate_saturation(index.model, frozenset(weights))
        plain = Reference(GraphIndex(emulation.exact), feeds, threads=threads)
        session = SaturatingRun(emulation, tensor=tensor, threads=threads)
        exact = counterpart.read(plain([tensor]))
        saturating = counterpart.read(session.run(feeds))
        value = run()
    except OnnxqError:
        return ()
    if (
        value is None
        or exact is None
        or saturating is None
        or not exact.shape == saturating.shape == value.shape
    ):
        return ()
    near, far = (measure_error(value, other).sqnr_db for other in (saturating, exact))
    if near == -math.inf or near < far + _EXPLAINED_DB:
        return ()
    behind = _find_ancestors(index, tensor)
    counted = (one.node for one in session.list_nodes() if one.saturated)
    saturated = {node: weights[node] for node in counted if node in behind and node in weights}
    # The one weight that the tensor is computed from directly, if there is one; else all.
    node = index.find_producer(TensorId(tensor))
    while node is not None and node.name not in saturated and node.op_type in _THIN:
        node = index.maker(node)
    if node is not None and node.name in saturated:
        return (saturated[node.name],)
    return tuple(saturated.values())


def _find_ancestors(index: GraphIndex, tensor: str) -> set[str]:
    """Names of the nodes that a tensor is computed by, with those of their bodies."""
    by_scope = defaultdict(list)
    for node in index.nodes:
        by_scope[node.scope].append(node)

    def list_behind(node: NodeRef) -> Iterator[NodeRef]:
        for _, scope in index.subgraphs(node.name):
            yield from by_scope[scope]
        yield from index.makers(node)

    maker = index.find_producer(TensorId(tensor))
    return {node.name for node in walk_from([] if maker is None else [maker], list_behind)}


# Operators between a product and the tensor that its kernel gives.
_THIN = (
    "Add",
    "Relu",
    "Clip",
    "QuantizeLinear",
    "DequantizeLinear",
    "Reshape",
    "Transpose",
    "LeakyRelu",
)
