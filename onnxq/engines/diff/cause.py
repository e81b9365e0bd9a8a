"""Does saturation explain that ONNX Runtime computes something else with optimizations on than with them off?

The saturating model says what the file gives on a CPU without VNNI. Where a run is much nearer to that than to the
exact answer, the 16-bit sums are the cause, whichever CPU it ran on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.annotate import WeightSums, find_saturating
from onnxq.engines.diff.matching import Place
from onnxq.engines.prove.judge import judge_sums
from onnxq.engines.prove.ort_kernels import read_optimized
from onnxq.engines.saturation.emulate import emulate
from onnxq.engines.saturation.measure import SaturatingRun
from onnxq.errors import OnnxqError
from onnxq.graph import GraphIndex
from onnxq.runtime import optimized_graph
from onnxq.sites import TensorId

Array = NDArray[Any]
# Emulation must leave at most this share of the noise: 6 dB. An unrelated fault is as far from one as from the other.
_EXPLAINED = 0.25


def find_cause(
    index: GraphIndex, place: Place, feeds: Mapping[str, Array], run: Callable[[], Array | None], *, threads: int = 0
) -> tuple[WeightSums, ...]:
    """The weights whose sums saturate on this sample on the way to a place; () where they do not explain the run.

    run: the place's real values in the run that parts; asked only if a weight can saturate.
    """
    tensor = place.tensor
    if not any(one.rows for one in find_saturating(index)):
        return ()
    try:
        kernels = read_optimized(index.proto, optimized_graph(index.proto, layout=False))
        weights = {one.node: one for one in judge_sums(index, kernels) if one.saturates}
        emulation = emulate(index.proto, frozenset(weights))
        plain = SaturatingRun(emulation, exact=True, tensor=tensor, threads=threads)
        session = SaturatingRun(emulation, tensor=tensor, threads=threads)
        exact, saturating, value = place.read(plain.run(feeds)), place.read(session.run(feeds)), run()
    except OnnxqError:
        return ()
    if value is None or exact is None or saturating is None or not exact.shape == saturating.shape == value.shape:
        return ()
    if not _noise(value, saturating) <= _EXPLAINED * _noise(value, exact):
        return ()
    behind = _ancestors(index, tensor)
    seen = [
        weights[one.node] for one in session.nodes() if one.saturated and one.node in behind and one.node in weights
    ]
    return _nearest(index, tensor, seen)


def _noise(value: Array, other: Array) -> float:
    real = np.isfinite(other)
    return float(np.square(value[real].astype(np.float64) - other[real].astype(np.float64)).sum())


def _ancestors(index: GraphIndex, tensor: str) -> set[str]:
    """Nodes that a tensor is computed by; those of bodies with the node that holds them."""
    found: set[str] = set()
    stack: list[TensorId] = [TensorId(tensor)]
    while stack:
        node = index.producer(stack.pop())
        if node is None or node.name in found:
            continue
        found.add(node.name)
        scopes = [scope for _, scope in index.bodies(node.name)]
        inner = [one for one in index.nodes if any(one.scope == s or one.scope.startswith(s + "/") for s in scopes)]
        found.update(one.name for one in inner)
        for reader in (node, *inner):
            read = (index.resolve(name, reader.scope) for name in reader.inputs)
            stack.extend(one for one in read if one is not None)
    return found


def _nearest(index: GraphIndex, tensor: str, seen: list[WeightSums]) -> tuple[WeightSums, ...]:
    """The one weight that a tensor is computed from directly, if there is one; else all."""
    node = index.producer(TensorId(tensor))
    while (
        node is not None and node.name not in {one.node for one in seen} and len(node.inputs) and node.op_type in _THIN
    ):
        held = index.resolve(node.inputs[0], node.scope)
        node = None if held is None else index.producer(held)
    direct = tuple(one for one in seen if node is not None and one.node == node.name)
    return direct or tuple(seen)


# What stands between a product and the tensor that its kernel gives.
_THIN = frozenset({"Add", "Relu", "Clip", "QuantizeLinear", "DequantizeLinear", "Reshape", "Transpose", "LeakyRelu"})
