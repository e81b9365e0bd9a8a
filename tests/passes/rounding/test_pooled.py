"""Classifiers behind a pooling are rounded by what stands in front of it."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxq.graph import get_index
from onnxq.passes.assembly import build_quantized
from onnxq.passes.rounding import sequential as sweeping
from onnxq.passes.rounding.operators import find_pooling, list_operators
from onnxq.passes.rounding.sequential import RoundingOptions, round_sequentially
from onnxq.progress import silent
from onnxq.runtime import Session
from tests.passes.kit import parse
from tests.passes.rounding.kit import FOUR, calibrated

Array = NDArray[Any]
# At the default effort, and without the pass of biases either.
POOLED = FOUR.model_copy(update={"effort": None, "skip": (*FOUR.skip, "bias_absorption")})
HEAD = "y = Gemm <transB=1>(f, v, b)"


def network(head: str) -> onnx.ModelProto:
    pixels = "y = Conv" in head
    rng = np.random.default_rng(1)
    shapes = {"w": (48, 3, 4, 4), "v": (10, 48, 1, 1) if pixels else (10, 48), "b": (10,)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    text = f"g (float[N,3,20,20] x) => (float[N,10{',H,W' if pixels else ''}] y) {{ c = Conv <strides=[2,2]>(x, w) "
    text += f"r = Relu(c) {head} }}"
    return parse(text, opset=18, **weights, flat=np.array([-1, 48]), spatial=np.array([2, 3]))


def pictures(count: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((count, 3, 5, 5)).astype(np.float32)
    fine = rng.standard_normal((count, 3, 20, 20)).astype(np.float32)
    return {"x": coarse.repeat(4, 2).repeat(4, 3) + 0.3 * fine}


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (f"p = GlobalAveragePool(r) f = Flatten(p) {HEAD}", True),
        (f"p = GlobalAveragePool(r) f = Reshape(p, flat) {HEAD}", True),
        (f"f = ReduceMean <keepdims=0>(r, spatial) {HEAD}", True),
        ("p = GlobalAveragePool(r) y = Conv(p, v, b)", True),
        (f"p = GlobalMaxPool(r) f = Flatten(p) {HEAD}", False),
        ("p = AveragePool <kernel_shape=[2,2]>(r) y = Conv(p, v, b)", False),
        ("y = Conv(r, v, b)", False),
    ],
)
def test_what_is_behind_a_pooling(head: str, found: bool) -> None:
    prepared, plan, _ = calibrated(network(head), pictures(12), POOLED)
    index = get_index(prepared.model)
    pool = find_pooling(index, list_operators(index, plan)[-1])
    assert (pool is not None) == found
    assert pool is None or pool[0].op_type in ("GlobalAveragePool", "ReduceMean")


def test_fewer_answers_are_lost_on_new_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = network(f"p = GlobalAveragePool(r) f = Flatten(p) {HEAD}")
    prepared, plan, samples = calibrated(proto, pictures(12), POOLED)
    fresh = pictures(200, seed=5)
    wanted = Session(proto, optimize=False).run(fresh)["y"]

    def lost() -> float:
        head = frozenset(one.node.name for one in list_operators(get_index(prepared.model), plan)[-1:])
        swept = round_sequentially(
            prepared.model, plan, samples, options=RoundingOptions(head, alone=True), progress=silent
        )
        assert len(swept.done) == 1
        got = Session(build_quantized(prepared, swept.plan), optimize=False).run(fresh)["y"]
        return float(((got - wanted).std(axis=0) ** 2).sum())

    before_the_pool = lost()
    monkeypatch.setattr(sweeping, "find_pooling", lambda index, one: None)
    assert before_the_pool < 0.9 * lost()
