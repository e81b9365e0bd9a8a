"""Shapes that tensors have in a run: of which tensors, and of which feeds they are known without one."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.graph import get_index, strip_weights
from onnxq.runtime import Session, ShapeProbe, Shapes, observe_shapes
from onnxq.runtime.tap import list_float_tensors
from onnxq.sites import TensorId
from tests.networks import parse_text


def model(text: str) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(parse_text(text), data_prop=True)


CHAIN = model(
    """g (float[N,4] x, int64 count) => (float[M,4] y) <float[4] w = {1,2,3,4}> {
        [c] k = Constant<value = float[4] {1, 2, 3, 4}>() [m] m = Mul(x, k) [h] h = Cast<to=10>(m) [s] dims = Shape(x)
        [b] b = Cast<to=1>(h) [t] y = Concat<axis=0>(b, x) }"""
)
BRANCHES = model(
    """g (bool c, float[N,4] x) => (float[N,4] y) {
        [p] p = Relu(x)
        [i] y = If (c) <then_branch = t () => (float[N,4] a) { [n] a = Neg(p) },
                        else_branch = e () => (float[N,4] b) { [l] b = Loop (trips, go, p) <
                            body = q (int64 k, bool on, float[N,4] v) => (bool off, float[N,4] o) {
                                [u] off = Identity(on) [v] o = Abs(v) }> }>
    }"""
)
BRANCHES.graph.initializer.extend(
    [numpy_helper.from_array(np.array(2), "trips"), numpy_helper.from_array(np.array(True), "go")]
)
FEEDS = {"x": np.ones((3, 4), np.float32), "count": np.array(1)}


def test_which_tensors_have_a_shape_to_be_told() -> None:
    """Floats of every width that are computed: no constants, no integers, nothing inside a loop."""
    assert [str(t) for t in list_float_tensors(get_index(CHAIN))] == ["x", "m", "h", "b", "y"]
    found = [str(t) for t in list_float_tensors(get_index(BRANCHES))]
    assert sorted(found) == ["i.else_branch::b", "i.then_branch::a", "p", "x", "y"]


def test_a_probe_tells_the_shapes_it_was_asked_for() -> None:
    probe = ShapeProbe(CHAIN, [TensorId("m"), TensorId("y")])
    assert probe.shapes(FEEDS) == {TensorId("m"): (3, 4), TensorId("y"): (6, 4)}
    assert probe.shapes({**FEEDS, "x": np.ones((1, 4), np.float32)})[TensorId("y")] == (2, 4)
    assert ShapeProbe(CHAIN, []).shapes(FEEDS) == {}


def test_of_several_samples_the_first_that_made_a_tensor_counts() -> None:
    samples = [{"c": np.array(c), "x": np.ones((n, 4), np.float32)} for c, n in ((True, 1), (True, 2), (False, 3))]
    found = {str(tensor): shape for tensor, shape in observe_shapes(BRANCHES, samples).items()}
    assert found == {"x": (1, 4), "p": (1, 4), "y": (1, 4), "i.then_branch::a": (1, 4), "i.else_branch::b": (3, 4)}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    real = Session.run
    monkeypatch.setattr(Session, "run", lambda self, *args: counts.append(1) or real(self, *args))
    return counts


def test_a_light_model_remembers_shapes_for_feeds_alike(sessions: list[int]) -> None:
    light, asked = strip_weights(CHAIN), [TensorId("m"), TensorId("y")]
    first = Shapes(light, asked).of(FEEDS)
    assert len(sessions) == 1
    # Of another look at the same graph, for other values and fewer tensors.
    assert Shapes(light, asked[:1]).of({**FEEDS, "x": np.zeros((3, 4), np.float32)}) == {asked[0]: first[asked[0]]}
    assert len(sessions) == 1
    assert Shapes(light, asked).of({**FEEDS, "x": np.ones((5, 4), np.float32)})[asked[1]] == (10, 4)
    assert len(sessions) == 2
    assert Shapes(light, [TensorId("b")]).of(FEEDS) == {TensorId("b"): (3, 4)}
    assert len(sessions) == 3


@pytest.mark.parametrize("light", [False, True])
def test_where_values_decide_which_branch_runs_every_sample_is_run(light: bool, sessions: list[int]) -> None:
    model = strip_weights(BRANCHES) if light else BRANCHES
    shapes = Shapes(model, [TensorId("a", "i.then_branch"), TensorId("p")])
    x = np.ones((2, 4), np.float32)
    assert set(shapes.of({"c": np.array(True), "x": x})) == {TensorId("a", "i.then_branch"), TensorId("p")}
    assert set(shapes.of({"c": np.array(False), "x": x})) == {TensorId("p")}
    assert len(sessions) == 2
