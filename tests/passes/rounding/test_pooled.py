"""Classifiers behind a pooling are rounded by what stands in front of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

import onnxq
from onnxq.calibrate import calibrate
from onnxq.config import Config, Rule, TensorConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.assembly.model import build_quantized
from onnxq.passes.rounding import sequential as sweeping
from onnxq.passes.rounding.operators import find_pooling, list_operators
from onnxq.passes.rounding.sequential import RoundingOptions, round_sequentially
from onnxq.passes.view import View
from onnxq.pipeline.prepared import load_state
from onnxq.progress import silent
from onnxq.runtime import Session

Array = NDArray[Any]
FOUR = Config(
    rules=(Rule(op="*", set={"quantize": True}),),  # type: ignore[arg-type]
    skip=("cross_layer_equalization", "bias_absorption", "smoothquant"),
    weights=TensorConfig(granularity="channel", bits=4, narrow_range=True),
)
HEAD = "Gemm <transB=1>(f, v, b)"


def network(head: str, weight: tuple[int, ...] = (10, 48)) -> onnx.ModelProto:
    made = "N,10" if len(weight) == 2 else "N,10,H,W"
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]>\ng (float[N,3,20,20] x) => (float[{made}] y) '
        f"{{ c = Conv <strides=[2,2]>(x, w) \n r = Relu(c) \n {head} }}"
    )
    rng = np.random.default_rng(1)
    shapes = {"w": (48, 3, 4, 4), "v": weight, "b": (10,)}
    for name, shape in shapes.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, 48]), "flat"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([2, 3]), "spatial"))
    return proto


def pictures(count: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((count, 3, 5, 5)).astype(np.float32)
    fine = rng.standard_normal((count, 3, 20, 20)).astype(np.float32)
    return {"x": coarse.repeat(4, 2).repeat(4, 3) + 0.3 * fine}


def planned(proto: onnx.ModelProto, feeds: dict[str, Array]) -> tuple[Any, Any, list[dict[str, Array]]]:
    prepared = load_state(proto)
    data = load_data(feeds, GraphIndex(prepared.model).inputs)
    plan = calibrate(prepared.model, onnxq.make_plan(proto, feeds, FOUR), data)
    return prepared, plan, list(data.samples())


@pytest.mark.parametrize(
    ("head", "weight", "found"),
    [
        (f"p = GlobalAveragePool(r) \n f = Flatten(p) \n y = {HEAD}", (10, 48), True),
        (f"p = GlobalAveragePool(r) \n f = Reshape(p, flat) \n y = {HEAD}", (10, 48), True),
        (f"f = ReduceMean <keepdims=0>(r, spatial) \n y = {HEAD}", (10, 48), True),
        ("p = GlobalAveragePool(r) \n y = Conv(p, v, b)", (10, 48, 1, 1), True),
        (f"p = GlobalMaxPool(r) \n f = Flatten(p) \n y = {HEAD}", (10, 48), False),
        ("p = AveragePool <kernel_shape=[2,2]>(r) \n y = Conv(p, v, b)", (10, 48, 1, 1), False),
        ("y = Conv(r, v, b)", (10, 48, 1, 1), False),
    ],
)
def test_what_is_behind_a_pooling(head: str, weight: tuple[int, ...], found: bool) -> None:
    prepared, plan, _ = planned(network(head, weight), pictures(12))
    view = View(prepared.model)
    last = list_operators(view.index, plan)[-1]
    pool = find_pooling(view, last)
    assert (pool is not None) == found
    assert pool is None or pool[0].op_type in ("GlobalAveragePool", "ReduceMean")


def test_fewer_answers_are_lost_on_new_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = network(f"p = GlobalAveragePool(r) \n f = Flatten(p) \n y = {HEAD}")
    prepared, plan, samples = planned(proto, pictures(12))
    fresh = pictures(200, seed=5)
    wanted = Session(proto, optimize=False).run(fresh)["y"]

    def lost() -> float:
        head = frozenset(one.node.name for one in list_operators(GraphIndex(prepared.model), plan)[-1:])
        swept = round_sequentially(
            prepared.model, plan, samples, options=RoundingOptions(head, alone=True), progress=silent
        )
        assert len(swept.done) == 1
        got = Session(build_quantized(prepared, swept.plan), optimize=False).run(fresh)["y"]
        return float(((got - wanted).std(axis=0) ** 2).sum())

    before_the_pool = lost()
    monkeypatch.setattr(sweeping, "find_pooling", lambda view, one: None)
    assert before_the_pool < 0.9 * lost()
