"""Two models side by side: the same node, the same samples, each with its own values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxq.passes.rounding.im2col import Geometry
from onnxq.passes.rounding.layerwise import LayerwiseRunner, PairedRunner
from onnxq.passes.rounding.statistics import MomentsRequest
from onnxq.runtime import Feeds
from onnxq.sites import TensorId
from tests.passes.kit import parse

MODEL = parse("g (float[N,4] x) => (float[N,4] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Add(c, b) }",
              w=np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32))  # fmt: skip
FIRST, SECOND, LAST = (node.name for node in MODEL.graph.node if node.op_type in ("MatMul", "Add"))
FEEDS = [{"x": np.random.default_rng(k).standard_normal((k + 1, 4)).astype(np.float32)} for k in range(3)]
B = TensorId("b")


def runners(feeds: Sequence[Feeds] = FEEDS) -> PairedRunner:
    """The second model multiplies by the identity first."""
    changed = LayerwiseRunner(MODEL, feeds, {(FIRST, 1): np.eye(4)})
    return PairedRunner(feeds, LayerwiseRunner(MODEL, feeds, {}), changed)


def request(reader: str, paired: TensorId | None = B) -> MomentsRequest:
    geometry = Geometry()
    return MomentsRequest(
        reader=reader, data=B, paired=paired, geometry=geometry, shape=(1, 4), second=True, halves=False
    )


def test_both_are_at_the_same_node_with_their_own_values():
    weight = next(iter(MODEL.graph.initializer))
    w = np.frombuffer(weight.raw_data, np.float32).reshape(4, 4)
    found = list(runners().iterate_tensors(request(SECOND)))
    assert [feeds["x"].shape[0] for feeds, _, _ in found] == [1, 2, 3]
    for feeds, real, quantized in found:
        np.testing.assert_allclose(real, np.maximum(feeds["x"] @ w, 0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(quantized, np.maximum(feeds["x"], 0), rtol=1e-6)


def test_a_tensor_is_held_where_both_still_have_it():
    both = runners()
    assert both.has_tensors(B, B, SECOND)
    assert not both.has_tensors(B, None, SECOND)
    list(both.iterate_tensors(request(LAST)))
    assert both.has_tensors(B, B, LAST)
    # Both have gone past the node that reads a.
    assert not both.has_tensors(TensorId("a"), B, FIRST)
    assert not both.has_tensors(B, TensorId("a"), FIRST)


def test_without_a_partner_the_float_model_alone_goes_on():
    both = runners()
    assert list(both.iterate_tensors(request(SECOND, None))) == []
    assert both.real.holds(B, FIRST)
    assert not both.real.holds(TensorId("x"), FIRST)
    assert both.quantized.holds(TensorId("x"), FIRST)


def test_without_samples_nothing_runs():
    assert list(runners([]).iterate_tensors(request(SECOND))) == []
