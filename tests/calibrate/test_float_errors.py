"""Ranges of tensors, and the errors that a narrow float type would make of them, in every scope."""

import numpy as np
import pytest

from onnxq.calibrate import measure_float_errors
from onnxq.graph import infer_shapes
from onnxq.sites import TensorId
from onnxq.spec import FloatType
from tests.passes.kit import in_branch, parse

TEXT = """g (float[2,8] x) => (float[2,8] y) {
    m = ReduceMean <axes=[1]> (x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean <axes=[1]> (s) e = Add(v, epsilon)
    r = Sqrt(e) y = Div(d, r)
}"""
NET = infer_shapes(parse(TEXT, opset=17, epsilon=1e-12))


def samples(factor: float = 1.0, shift: float = 0.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": (factor * rng.standard_normal((2, 8)) + shift).astype(np.float32)} for _ in range(4)]


def test_ranges_are_those_of_all_samples() -> None:
    found = measure_float_errors(NET, FloatType.FLOAT16, samples())
    whole = np.concatenate([one["x"] for one in samples()])
    assert found[TensorId("x")].low == whole.min()
    assert found[TensorId("x")].high == whole.max()
    assert set(found) == {TensorId(name) for name in "xmdsverey" if name != "_"}
    assert found[TensorId("m")].count == 8


@pytest.mark.parametrize(("kind", "db"), [(FloatType.FLOAT16, 73.7), (FloatType.BFLOAT16, 55.6)])
def test_rounding_costs_what_the_type_has_digits(kind: FloatType, db: float) -> None:
    found = measure_float_errors(NET, kind, samples())
    assert found[TensorId("d")].own_db == pytest.approx(db, abs=1.5)
    assert min(one.inputs_db for one in found.values()) > db - 15


def test_what_overflows_cancels_or_vanishes_shows_at_its_node() -> None:
    loud = measure_float_errors(NET, FloatType.FLOAT16, samples(1000.0))
    assert loud[TensorId("s")].own_db == -np.inf
    assert loud[TensorId("d")].own_db > 60
    shifted = measure_float_errors(NET, FloatType.FLOAT16, samples(1.0, 2000.0))
    assert shifted[TensorId("d")].inputs_db < 20, "a small difference of large numbers"
    assert shifted[TensorId("x")].own_db > 60
    quiet = measure_float_errors(NET, FloatType.FLOAT16, samples(1e-6))
    assert quiet[TensorId("y")].inputs_db < 40, "a deviation of 1e-6 has few digits"


def test_branches_are_measured_where_they_run() -> None:
    inside = infer_shapes(in_branch(parse(TEXT, opset=17, epsilon=1e-12)))
    flag = next(value.name for value in inside.graph.input if value.name != "x")
    runs = [{**one, flag: np.array(True)} for one in samples()]
    scopes = {tensor.scope for tensor in measure_float_errors(inside, FloatType.FLOAT16, runs)}
    assert "" in scopes
    assert any(scope.endswith("then_branch") for scope in scopes)
    never = measure_float_errors(inside, FloatType.FLOAT16, [{**one, flag: np.array(False)} for one in samples()])
    assert not any(tensor.scope.endswith("then_branch") for tensor in never)


def test_tensors_that_are_empty_in_some_samples_count_in_the_others() -> None:
    text = "g (float[N,4] past, float[M,4] x) => (float[P,4] y) { y = Concat <axis = 0> (past, x) }"
    model = infer_shapes(parse(text))
    one, none = np.full((1, 4), 3, np.float32), np.zeros((0, 4), np.float32)
    found = measure_float_errors(model, FloatType.FLOAT16, [{"past": none, "x": one}, {"past": one, "x": one}])
    assert (found[TensorId("past")].low, found[TensorId("past")].high) == (3, 3)
    assert TensorId("past") not in measure_float_errors(model, FloatType.FLOAT16, [{"past": none, "x": one}])


def test_operators_of_onnx_runtime_have_errors_too() -> None:
    text = "g (float[2,8] x) => (float[2,8] y) { y = com.microsoft.QuickGelu (x) }"
    found = measure_float_errors(infer_shapes(parse(text)), FloatType.FLOAT16, samples())
    assert 60 < found[TensorId("y")].inputs_db < 90


def test_what_is_read_may_have_any_type() -> None:
    """A sequence, and bfloat16, of which ONNX Runtime has no Size."""
    text = """g (float[2,8] x) => (float[2,8] y) {
        s = SequenceConstruct(x, x) a = SequenceAt(s, first) n = Cast <to=16> (a) y = Cast <to=1> (n) }"""
    net = infer_shapes(parse(text, opset=17, first=np.array(1)))
    assert {TensorId("a"), TensorId("y")} <= set(measure_float_errors(net, FloatType.FLOAT16, samples()))


@pytest.mark.parametrize("body", [
    "y = Resize(x, , scales)",
    "n = ReduceSum<keepdims=0>(x) y = Range(zero, n, step)",
    "y = Unique<sorted=1>(x)",
], ids=["scales of a Resize", "the step of a Range", "what a Unique counts"])  # fmt: skip
def test_sizes_do_not_follow_from_rounded_numbers(body: str) -> None:
    """1.3 and 1/3 are less in float16: 10 times 1.3 is 12.99, and 46 steps of 1/3 begin in front of 15."""
    values = {name: np.float32(value) for name, value in {"scales": [1, 1.3], "zero": 0, "step": 1 / 3}.items()}
    net = infer_shapes(parse(f"g (float[2,10] x) => (float y) {{ {body} }}", opset=17, **values))
    x = np.float32([[1], [0.5]]) - np.arange(10, dtype=np.float32) / 2**23
    assert TensorId("y") in measure_float_errors(net, FloatType.FLOAT16, [{"x": x}])
