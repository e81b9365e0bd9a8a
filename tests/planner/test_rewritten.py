"""A plan is carried out on a float file whose weights were turned, merged and renamed, and whose nodes were fused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.errors import PlanError
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import TensorId
from onnxq.spec import PerChannel
from tests.planner.kit import FORCE, network

HEAD = "g (float[4,16] x) => (float[2,2,16] y)"
TEXT = f"""{HEAD} <int64[3] up = {{2, 2, 16}}> {{
    a = MatMul(x, w) b = Add(a, c) r = Relu(b) t = Reshape(r, up) m = MatMul(t, v) y = Add(m, c)
}}"""
# As tools write it: a Gemm that reads its weight turned, other names, one constant for two, the Reshape elsewhere.
GEMM = f"""{HEAD} <int64[3] up = {{2, 2, 16}}> {{
    t1 = Gemm <transB = 1> (x, c0, c1) t2 = Relu(t1) t3 = Gemm <transB = 1> (t2, c0, c1) y = Reshape(t3, up)
}}"""
FLAT = f"""{HEAD} <int64[3] up = {{2, 2, 16}}> {{
    a = MatMul(x, w) b = Add(a, c) r = Relu(b) m = MatMul(r, v) n = Add(m, c) y = Reshape(n, up)
}}"""


def weight() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)


def make(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    proto = network(text)
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return proto


def make_float(text: str = TEXT, w: np.ndarray | None = None) -> onnx.ModelProto:
    bias = np.linspace(-1, 1, 16, dtype=np.float32)
    return make(text, w=weight() if w is None else w, v=weight() if w is None else w, c=bias)


@lru_cache(maxsize=1)
def quantize() -> onnxq.Result:
    config = {"rules": [FORCE], "weights": {"granularity": "channel"}}
    batches = [{"x": np.random.default_rng(k).standard_normal((4, 16)).astype(np.float32)} for k in range(4)]
    return onnxq.quantize(make_float(), batches, "ort-int8", overrides={**config, "latency": False, "effort": "fast"})


def run(model: onnx.ModelProto) -> np.ndarray:
    x = np.random.default_rng(9).standard_normal((4, 16)).astype(np.float32)
    return Session(model, optimize=False).run({"x": x})["y"]


def test_turned_merged_and_renamed() -> None:
    first = quantize()
    gemm = make(GEMM, c0=weight().T.copy(), c1=np.linspace(-1, 1, 16, dtype=np.float32))
    again = onnxq.apply(gemm, from_json(to_json(first.plan)))
    np.testing.assert_allclose(run(again.model), run(first.model), rtol=1e-5, atol=1e-6)
    found = again.plan.site(TensorId("c0"))
    assert found.spec.granularity == PerChannel(0)
    weights = [site for site in again.plan.sites if site.role == "weight"]
    assert len(weights) == 2
    # The plan of the result is of the rewritten file.
    assert onnxq.apply(gemm, again.plan).model == again.model


def test_nodes_that_only_moved_values_are_gone() -> None:
    first, again = quantize(), onnxq.apply(make_float(FLAT), quantize().plan)
    np.testing.assert_allclose(run(again.model), run(first.model), rtol=1e-5, atol=1e-6)
    # The pair stood behind the Reshape.
    names = [{str(site.site) for site in done.plan.sites} for done in (first, again)]
    assert names == [{"x", "w", "t", "v"}, {"x", "w", "r", "v"}]


def test_what_is_not_there_is_named_with_what_is_near() -> None:
    trained = weight()
    trained[0, 0] += 0.5
    with pytest.raises(PlanError, match="w: is in the plan but not in this model") as caught:
        onnxq.apply(make_float(FLAT, trained), quantize().plan)
    assert caught.value.code == "Q404"
    assert "'w' (off by 0.0043 of its size)" in caught.value.fix
    assert "new_weights=True" in caught.value.fix
