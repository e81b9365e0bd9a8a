from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec

TYPES = {
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
}
Outputs = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@cache
def _session(kind: int, storage: str, axis: int, block: int, ranks: tuple[int, int], clipped: bool) -> Any:
    """x -> [Clip ->] QuantizeLinear -> DequantizeLinear; scale, zero point and bounds are inputs, so one session
    serves every example. The zero point comes as int32: numpy has no 4-bit type to feed."""
    attrs = {"axis": axis, **({"block_size": block} if block else {})}
    nodes = [helper.make_node("Cast", ["zero"], ["z"], to=TYPES[storage])]
    if clipped:
        nodes.append(helper.make_node("Clip", ["x", "lo", "hi"], ["inside"]))
    nodes += [
        helper.make_node("QuantizeLinear", ["inside" if clipped else "x", "s", "z"], ["stored"], **attrs),
        helper.make_node("DequantizeLinear", ["stored", "s", "z"], ["y"], **attrs),
        helper.make_node("Cast", ["stored"], ["q"], to=TensorProto.INT32),
    ]
    rank, grain = ranks
    inputs = [("x", kind, rank), ("s", kind, grain), ("zero", TensorProto.INT32, grain)]
    inputs += [("lo", kind, 0), ("hi", kind, 0)] if clipped else []
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info(n, t, [None] * r) for n, t, r in inputs],
        [helper.make_tensor_value_info(n, t, [None] * rank) for n, t in (("q", TensorProto.INT32), ("y", kind))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(x: Any, qparams: QParams, spec: QuantSpec, bounds: Any = None) -> Outputs:
    grain = spec.granularity
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[x.dtype.name]
    many = isinstance(grain, (PerChannel, PerBlock))
    axis, block = (grain.axis if many else 1), (grain.size if isinstance(grain, PerBlock) else 0)
    session = _session(kind, spec.storage, axis, block, (x.ndim, np.ndim(qparams.scale)), bounds is not None)
    feeds = {"x": x, "s": qparams.scale.astype(x.dtype), "zero": qparams.zero_point}
    if bounds is not None:
        feeds |= {"lo": np.asarray(bounds[0]), "hi": np.asarray(bounds[1])}
    q, y = session.run(["q", "y"], feeds)
    return q, y


@pytest.fixture(scope="session")
def engine() -> Callable[..., Outputs]:
    """(x, qparams, spec, clip bounds) -> integers and floats as ONNX Runtime, optimizations off, computes them."""
    return _run
